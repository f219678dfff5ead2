"""A service that refuses, breaks off, lies or changes its mind: never a finding about the checkpoint."""

import pytest

import auditor
from auditor.report.json_report import to_json
from auditor.storage import object_clients
from auditor.storage.roots import store_at
from auditor.storage.store import TransientReadError, read_bytes
from auditor.verdict import exit_code
from tests import s3
from tests.paths import HEALTHY
from tests.proxy import Misbehaviour, Proxy

CONTENT = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def url():
    s3.endpoint()
    found = f"s3://{s3.new_bucket()}/run"
    s3.upload(HEALTHY / "global_step10", f"{found}/global_step10")
    s3.put(f"{found}/latest", b"global_step10")
    s3.put(f"{found}.bin", CONTENT)
    return found


@pytest.fixture
def through(monkeypatch):
    """Reads pass a proxy with the given trouble."""
    proxies = []

    def make(**trouble):
        proxy = Proxy(s3.endpoint(), Misbehaviour(**trouble)).__enter__()
        proxies.append(proxy)
        s3.use(monkeypatch, proxy.address)
        return proxy.trouble

    yield make
    for proxy in proxies:
        proxy.__exit__()


def said(report):
    return to_json(report)


@pytest.fixture(scope="module")
def undisturbed(url):
    with pytest.MonkeyPatch.context() as patch:
        s3.use(patch)
        return said(auditor.check(url, level="values", kernels="numpy"))


@pytest.mark.parametrize(
    "trouble",
    [{"refuse": 6}, {"reset": 6}, {"truncate": 6}, {"other_range": 6}, {"refuse": 2, "reset": 2, "truncate": 2}],
    ids=lambda trouble: "-".join(trouble),
)
def test_what_passes_is_not_noticed(url, undisturbed, through, trouble):
    found = through(**trouble)
    report = auditor.check(url, level="values", kernels="numpy")
    assert not any(getattr(found, kind) for kind in trouble), "the trouble has happened"
    assert said(report) == undisturbed
    assert int(exit_code(report)) == 0


def test_slow_answers_are_waited_for(url, undisturbed, through):
    through(seconds=0.05)
    assert said(auditor.check(url, level="values", kernels="numpy")) == undisturbed


def test_what_does_not_pass_is_incomplete_and_no_finding(url, through, monkeypatch):
    monkeypatch.setitem(object_clients.RETRIES, "max_retries", 0)
    monkeypatch.setattr("auditor.storage.retrying.time.sleep", lambda seconds: None)
    through(refuse=10_000, concerns=lambda method, path, headers: "bf16_zero" in path)
    report = auditor.check(url, level="values", kernels="numpy")
    assert report.runs[0].findings == []
    assert int(exit_code(report)) == 3
    assert "503 SlowDown" in said(report)


@pytest.mark.parametrize("kind", ["truncate", "other_range"])
def test_a_wrong_body_is_never_handed_out(url, through, kind):
    through(**{kind: 1000}, concerns=lambda method, path, headers: not headers["range"].startswith("bytes=0-"))
    with store_at(f"{url}.bin".rpartition("/")[0]).open("run.bin") as handle:
        for length in (100, 100_000):
            with pytest.raises((TransientReadError, OSError)):
                read_bytes(handle, 500_000, length)


def test_an_object_replaced_while_it_is_audited_is_code_6(url, through, monkeypatch):
    copy = f"s3://{s3.new_bucket()}/run"
    s3.upload(HEALTHY / "global_step10", f"{copy}/global_step10")
    name = next((HEALTHY / "global_step10").glob("layer_03*")).name
    content = bytearray((HEALTHY / "global_step10" / name).read_bytes())
    content[-5000] ^= 1
    listed = []

    def replace(number):
        # Right before the object is read for the first time, when it has been listed.
        if listed and listed[-1] == "now":
            listed.append("done")
            s3.put(f"{copy}/global_step10/{name}", bytes(content))

    def concerns(method, path, headers):
        if name in path and method == "GET" and "done" not in listed:
            listed.append("now")
        return False

    monkeypatch.setattr("auditor.storage.object_store.START_BYTES", 16)
    through(before=replace, concerns=concerns)
    report = auditor.check(copy, level="values", kernels="numpy", threads=1)
    assert "done" in listed
    assert int(exit_code(report)) == 6
    assert report.runs[0].findings == []


@pytest.mark.parametrize("environment", [{}, {"AWS_SESSION_TOKEN": "very-secret-token"}])
def test_secrets_are_in_no_report_and_no_traceback(url, monkeypatch, environment):
    from tests.command import run

    monkeypatch.setitem(object_clients.RETRIES, "max_retries", 0)
    trouble = Misbehaviour(refuse=10_000, concerns=lambda method, path, headers: "bf16_zero" in path)
    with Proxy(s3.endpoint(), trouble) as proxy:
        surroundings = {**s3.environment(proxy.address), **environment, "AUDITOR_TRACEBACK": "1"}
        quick = {"AUDITOR_LEVEL": "names"}
        for path in (url, f"{url}-no", "s3://no-such-bucket/x", f"s3://{s3.KEYS['AWS_ACCESS_KEY_ID']}:pw-in-url@b/x"):
            done = run(["check", path], environment={**surroundings, **quick})
            printed = done.stdout + done.stderr
            for secret in (s3.KEYS["AWS_SECRET_ACCESS_KEY"], "very-secret-token", "pw-in-url", "Authorization"):
                assert secret.encode() not in printed, printed
