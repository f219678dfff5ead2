#!/usr/bin/env bash
# Ceph's object gateway over one monitor and one store in memory, for tests/test_services.py: radosgw.sh FOLDER PORT
#
# Stays until it is killed, and takes all of it along. Needs the programs of Debian's packages radosgw, ceph-mon, ceph-osd
# and ceph-common in PATH. The user's keys are those of tests/s3.py. Nothing is reached from other machines.
set -euo pipefail
folder=$(realpath -m "$1") port=$2 monitor=$((port + 1))
mkdir -p "$folder/mon" "$folder/osd" "$folder/run"
cat >"$folder/ceph.conf" <<CONF
[global]
fsid = 7a1e63c2-0f8e-4a3b-9a3f-1a1df0a5c001
mon host = v1:127.0.0.1:$monitor
public addr = 127.0.0.1
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
mon data = $folder/mon
osd data = $folder/osd
run dir = $folder/run
log file = $folder/\$name.log
admin socket = $folder/run/\$name.asok
pid file = $folder/run/\$name.pid
keyring = $folder/keyring
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 1073741824
osd erasure code plugins =
rgw frontends = beast endpoint=127.0.0.1:$port
rgw enable usage log = false
CONF
export CEPH_CONF=$folder/ceph.conf
touch "$folder/keyring"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT INT TERM
monmaptool --create --clobber --addv a "[v1:127.0.0.1:$monitor]" --fsid 7a1e63c2-0f8e-4a3b-9a3f-1a1df0a5c001 "$folder/monmap" >/dev/null
ceph-mon --mkfs -i a --monmap "$folder/monmap"
ceph-mon -f -i a &
uuid=7a1e63c2-0f8e-4a3b-9a3f-1a1df0a5c002
ceph --connect-timeout 60 osd new $uuid >/dev/null
ceph-osd --mkfs -i 0 --osd-uuid $uuid
ceph-osd -f -i 0 &
until ceph osd stat | grep -q "1 up"; do sleep 0.2; done
radosgw-admin user create --uid=auditor --display-name=auditor \
    --access-key="$AWS_ACCESS_KEY_ID" --secret-key="$AWS_SECRET_ACCESS_KEY" >/dev/null
radosgw -f -n client.rgw &
wait
