"""The command line in a process of its own, without the seconds that every new interpreter takes.

One process imports everything once, and forks for every command: what a command does to its process stays in it.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.paths import ROOT

_server = None


def run(arguments, cwd=None, environment=None):
    """Run ``auditor`` with these arguments; a `subprocess.CompletedProcess` with bytes."""
    global _server
    if _server is None or _server.poll() is not None:
        command = [sys.executable, "-m", "tests.command"]
        _server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(_server.kill)
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd or Path.cwd()),
            "environment": {**os.environ, **(environment or {})},
            "folder": folder,
        }
        _server.stdin.write(json.dumps(request).encode() + b"\n")
        _server.stdin.flush()
        code = json.loads(_server.stdout.readline())
        output, errors = ((Path(folder) / name).read_bytes() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, code, output, errors)


def _serve():
    import auditor.audit
    import auditor.cli
    import auditor.report.json_report
    import auditor.report.text_report

    assert auditor.audit
    for line in sys.stdin.buffer:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _command(request)
        _, status = os.waitpid(child, 0)
        sys.stdout.buffer.write(json.dumps(os.waitstatus_to_exitcode(status)).encode() + b"\n")
        sys.stdout.buffer.flush()


def _command(request):
    import auditor.cli

    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{request['folder']}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["auditor", *request["arguments"]]
    code = 70
    try:
        auditor.cli.main()
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else 1
    finally:
        sys.stdout and sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
