"""A real S3-compatible server (moto) in a process of its own; one for all tests of a process."""

import atexit
import contextlib
import itertools
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "AKIANOTREAL", "AWS_SECRET_ACCESS_KEY": "not-a-real-secret", "AWS_REGION": "us-east-1"}
_running = {}
_numbers = itertools.count(1)


def endpoint():
    """The address of the server, which is started by the first who asks."""
    pytest.importorskip("moto", reason="needs moto[server,s3], which the extra `test` installs")
    pytest.importorskip("obstore", reason="needs obstore, which the extra `test` installs")
    if "server" not in _running:
        port = free_port()
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        _running["server"] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(_running["server"].kill)
        _running["endpoint"] = f"http://127.0.0.1:{port}"
        wait_for(_running["endpoint"])
    return _running["endpoint"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(address, seconds=60):
    """Until somebody answers there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"{address} does not answer")


def environment(address=None):
    """What a process must know to find the server."""
    return {**KEYS, "AWS_ENDPOINT_URL": address or endpoint()}


def use(monkeypatch, address=None):
    """Let this process find the server."""
    for name, value in environment(address).items():
        monkeypatch.setenv(name, value)


def request(method, path, content=b"", headers=None):
    """One request to the server, unsigned (it checks nothing)."""
    made = urllib.request.Request(endpoint() + path, content or None, headers or {}, method=method)
    with urllib.request.urlopen(made, timeout=60) as answer:
        return answer.read()


def new_bucket():
    """The name of an empty bucket."""
    name = f"bucket-{next(_numbers)}"
    with contextlib.suppress(urllib.error.HTTPError):
        request("PUT", f"/{name}")
    return name


def put(url, content):
    """Write one object, as the job that saves checkpoints does."""
    import obstore
    from obstore.store import S3Store

    bucket, _, key = url.removeprefix("s3://").partition("/")
    options = {"allow_http": True}
    store = S3Store(bucket, endpoint=endpoint(), client_options=options, **{k.lower(): v for k, v in KEYS.items()})
    obstore.put(store, key, content)


def upload(folder, url):
    """Every file of a local folder under a URL."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            put(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())
