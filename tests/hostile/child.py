"""Runs inputs through the command line, each in a process of its own that is forked from this one, which has imported
everything: what is measured is the work on the input.

One request a line on standard input, JSON; one answer a line on standard output.
"""

import contextlib
import io
import json
import os
import re
import resource
import signal
import sys
import time
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from auditor.cli import main
from auditor.storage import local
from tests.paths import RUN

NOBODY = 65534
MAX_BYTES = 3 << 30
"""Of address space; more is no bounded memory."""
MAX_SECONDS = 60
"""Guard against hanging, no measure."""


def interfere(pattern: str, how: str, num_opens: int) -> None:
    """Let something happen to the files of a name when one of them is opened the ``num_opens``-th time."""
    seen = {}
    original = local.LocalStore.open

    @contextmanager
    def opened(self, name):
        if fnmatch(name, pattern):
            seen[name] = seen.get(name, 0) + 1
            if seen[name] == num_opens:
                happen(Path(self._path(name)), how)
        with original(self, name) as handle:
            if fnmatch(name, pattern) and seen[name] == num_opens and how.endswith("open"):
                happen(Path(self._path(name)), how.removesuffix(" while open"))
            yield handle

    local.LocalStore.open = opened


def happen(path: Path, how: str) -> None:
    if how == "vanish":
        path.unlink()
    elif how == "shrink":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "grow":
        with path.open("ab") as file:
            file.write(bytes(1000))
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "folder vanishes":
        path.parent.rename(path.parent.with_name("elsewhere"))


def peak_bytes() -> int:
    """Of this process alone: what the kernel adds up for children includes their parents."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def run(request: dict) -> None:
    """The command line, in this process."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    answer = os.open(request["answer"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    signal.alarm(MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    if request["unprivileged"] and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if request["interfere"]:
        interfere(*request["interfere"])
    sys.argv = ["auditor", *map(os.fsdecode, map(bytes.fromhex, request["arguments"]))]
    begun, code = time.monotonic(), 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        seconds = time.monotonic() - begun
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(answer, json.dumps({"code": code, "seconds": seconds, "peak_bytes": peak_bytes()}).encode())
    os._exit(0)


def warm_up() -> None:
    """Import what commands import on first use: a user without rights may not be able to read it."""
    for arguments in (["check", RUN], ["check", RUN, "--format", "json"], ["inspect", RUN], ["check", RUN / "latest"]):
        sys.argv = ["auditor", *map(str, arguments)]
        nowhere = io.StringIO()
        quiet = contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)
        with quiet[0], quiet[1], contextlib.suppress(SystemExit):
            main()


def serve() -> None:
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            try:
                run(request)
            finally:
                os._exit(70)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps({"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
