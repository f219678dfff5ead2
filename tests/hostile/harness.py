"""Builds an input, hands it to the command line, and says what came of it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.making import Input, settle
from tests.paths import ROOT


@dataclass(frozen=True)
class Outcome:
    """What the command line said of an input, and at what cost."""

    code: int
    """-N where signal N ended it."""
    stdout: str
    stderr: str
    peak_mib: float
    seconds: float

    @property
    def report(self) -> dict:
        """Where the JSON report was asked for."""
        return json.loads(self.stdout)


class Harness:
    """A process that waits for inputs, and a folder for them that everybody may enter."""

    def __init__(self, folder: Path, server: subprocess.Popen) -> None:
        self.folder, self.server, self.number = folder, server, 0

    def build(self, item: Input) -> Path:
        """Make the input; the path that is to be audited."""
        self.number += 1
        place = self.folder / f"input{self.number}"
        place.mkdir()
        item.build(place)
        if item.settled:
            settle(place)
        return place

    def run(self, item: Input, place: Path, *options: str) -> Outcome:
        answer = {name: self.folder / f"{self.number}.{name}" for name in ("stdout", "stderr", "answer")}
        for path in answer.values():
            path.write_bytes(b"")
            path.chmod(0o666)
        request = {name: str(path) for name, path in answer.items()} | {
            "arguments": [
                os.fsencode(text).hex()
                for text in (item.command, *(str(place / path) for path in item.paths), *item.options, *options)
            ],
            "unprivileged": item.unprivileged,
            "interfere": item.interfere,
        }
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        ended = json.loads(self.server.stdout.readline())
        said = answer["answer"].read_text()
        told = json.loads(said) if said else {"code": -ended["signal"] or 70, "seconds": -1, "peak_bytes": 0}
        # Bytes that are no UTF-8 would be a fault of ours: they are kept to be seen.
        streams = [answer[name].read_bytes().decode("utf-8", "surrogateescape") for name in ("stdout", "stderr")]
        return Outcome(told["code"], *streams, told["peak_bytes"] / 2**20, told["seconds"])

    def remove(self, place: Path) -> None:
        """Everything of an input, whatever its modes."""
        subprocess.run(["chmod", "-R", "u+rwx", place], check=False, capture_output=True)
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def harness() -> Iterator[Harness]:
    """A harness, gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o755)
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.child"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=environment,
    )  # fmt: skip
    try:
        yield Harness(folder, server)
    finally:
        server.stdin.close()
        server.wait(timeout=60)
        server.stdout.close()
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
