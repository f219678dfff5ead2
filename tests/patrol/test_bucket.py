"""A patrol of a real bucket, by the command line: ledger, lock, webhook, secrets, and what it reads."""

import http.server
import json
import threading
from typing import ClassVar

import pytest

from tests import s3
from tests.command import run
from tests.paths import HEALTHY, RUN


@pytest.fixture(scope="module")
def bucket():
    s3.endpoint()
    name = s3.new_bucket()
    for step in (40, 50):
        s3.upload(RUN / f"global_step{step}", f"s3://{name}/ckpt/team/drifted/global_step{step}")
    s3.put(f"s3://{name}/ckpt/team/drifted/latest", b"global_step50")
    s3.upload(HEALTHY / "global_step10", f"s3://{name}/ckpt/healthy/global_step10")
    s3.put(f"s3://{name}/ckpt/healthy/latest", b"global_step10")
    return name


def patrol(bucket, *options, ledger="audit", environment=None):
    done = run(
        ["patrol", f"s3://{bucket}/ckpt", "--ledger", f"s3://{bucket}/{ledger}", "--level", "values", *options],
        environment={**s3.environment(), **(environment or {})},
    )
    for value in (s3.KEYS["AWS_SECRET_ACCESS_KEY"], "hook-secret"):
        assert value.encode() not in done.stdout + done.stderr
    return done


class Hook(http.server.BaseHTTPRequestHandler):
    received: ClassVar[list] = []
    answers: ClassVar[list] = []

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        Hook.received.append(json.loads(self.rfile.read(length)))
        self.send_response(Hook.answers.pop(0) if Hook.answers else 200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hook():
    Hook.received, Hook.answers = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook-secret"
        server.shutdown()


def test_rounds_of_a_bucket(bucket):
    first = patrol(bucket, "--format", "json")
    assert first.returncode == 1, first.stderr
    document = json.loads(first.stdout)
    assert document["num_bytes_read"] > 0
    runs = {found["path"]: found for found in document["runs"]}
    assert set(runs) == {"team/drifted", "healthy"}
    assert runs["team/drifted"]["findings"][0]["id"] == "REP001"
    assert runs["team/drifted"]["reports"][0]["last_good_step"] == 40
    second = json.loads(patrol(bucket, "--format", "json").stdout)
    assert second["num_bytes_read"] == 0, "nothing unchanged is read twice"
    assert {found["status"] for found in second["runs"]} == {"unchanged"}
    assert second["exit_code"] == 1
    lines = patrol(bucket, "--format", "jsonl").stdout.decode().splitlines()
    assert {json.loads(line)["run"] for line in lines} == {"team/drifted"}
    assert second["num_keys"] == document["num_keys"] > 0
    text = patrol(bucket).stdout.decode()
    assert "healthy: unchanged, exit code 0, last good step 10" in text


def test_the_webhook_hears_of_a_finding_once_and_of_its_end(bucket, hook):
    environment = {"AUDITOR_WEBHOOK": hook}
    Hook.answers = [500, 500, 500]
    failed = patrol(bucket, ledger="hooked", environment=environment)
    assert b"the webhook answers 500; it is told again" in failed.stdout
    patrol(bucket, ledger="hooked", environment=environment)
    assert Hook.received[-1]["new"], "told again after the failure"
    assert {found["run"] for found in Hook.received[-1]["new"]} == {"team/drifted"}
    told = len(Hook.received)
    patrol(bucket, ledger="hooked", environment=environment)
    assert len(Hook.received) == told, "nothing is told twice"


def test_a_held_lock_is_code_11(bucket):
    assert patrol(bucket, ledger="locked").returncode == 1
    content = json.dumps({"owner": "node7 pid 1", "expires": 4e9}).encode()
    s3.put(f"s3://{bucket}/locked/patrol/locks/1-of-1/000000007", content)
    done = patrol(bucket, ledger="locked")
    assert (done.returncode, b"node7 pid 1 holds the lock" in done.stderr) == (11, True), done.stderr
    s3.put(f"s3://{bucket}/locked/patrol/locks/1-of-1/000000007", b'{"owner": "dead", "expires": 1.0}')
    assert patrol(bucket, ledger="locked").returncode == 1


@pytest.mark.parametrize(
    ("root", "ledger", "code", "says"),
    [
        ("s3://no-such-bucket/x", "s3://{bucket}/audit2", 3, "NoSuchBucket"),
        ("s3://{bucket}/ckpt", "s3://no-such-bucket/x", 3, "NoSuchBucket"),
        ("s3://{bucket}", "s3://{bucket}/audit", 2, "lie in each other"),
        ("s3://{bucket}/nothing", "s3://{bucket}/audit3", 4, "0 keys"),
    ],
)
def test_wrong_places(bucket, root, ledger, code, says):
    words = [text.format(bucket=bucket) for text in ("patrol", root, "--ledger", ledger)]
    done = run(words, environment=s3.environment())
    assert (done.returncode, says in (done.stdout + done.stderr).decode()) == (code, True), done.stdout + done.stderr


def test_check_reads_and_writes_a_ledger_in_a_bucket(bucket):
    words = ["check", f"s3://{bucket}/ckpt/healthy", "--ledger", f"s3://{bucket}/other", "--format", "json"]
    first, second = (json.loads(run(words, environment=s3.environment()).stdout) for _ in range(2))
    assert first["coverage"]["num_bytes_read"] > 0 == second["coverage"]["num_bytes_read"]
