"""Series of torch files in one folder: some that lie or can't be read among sound ones, or more than honest ones."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from tests.hostile.making import FIXTURES, Input

NUMBERED, APART = FIXTURES / "torch_file" / "numbered", FIXTURES / "torch_file" / "apart"
NEWEST = "model_6.pt"
_RECORD = 22 + 20 + 56
"""Bytes of the end record, of the locator before it and of the zip64 record before that."""
Change = Callable[[Path], object]


def series(
    name: str, lie: str, change: Change, code: int = 1, says: str = "INT002", file: str = NEWEST, **more
) -> Input:
    """Three saves, the newest of which is changed."""

    def build(folder: Path) -> None:
        for step in (2, 4, 6):
            shutil.copy(NUMBERED / f"model_{step}.pt", folder)
        change(folder / NEWEST)

    return Input(f"series: {name}", lie, "torch-file", build, code, says, file, **more)


def pair(
    name: str, lie: str, change: Change, code: int = 1, says: str = "INT002", file: str = "optimizer_6.pt", **more
):
    """A model and its optimizer's state, which is changed."""

    def build(folder: Path) -> None:
        shutil.copytree(APART, folder, dirs_exist_ok=True)
        change(folder / "optimizer_6.pt")

    return Input(f"pair: {name}", lie, "torch-file", build, code, says, file, **more)


def end_record(at: int, layout: str, value: int) -> Change:
    """Change a field of the zip64 record, which tells where the directory lies; ``at``: before the end of the file."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        struct.pack_into(layout, content, len(content) - at, value)
        path.write_bytes(content)

    return change


def instead(make: Change) -> Change:
    return lambda path: (path.unlink(), make(path))


def many(count: int, *patterns: str) -> Change:
    """Beside the saves as many empty files of each name."""
    return lambda path: [
        (path.parent / pattern.format(number)).touch() for number in range(10, 10 + count) for pattern in patterns
    ]


SERIES = (
    series("cut in its directory", "its end", lambda path: path.write_bytes(path.read_bytes()[:-30])),
    series("cut in its weights", "its end", lambda path: path.write_bytes(path.read_bytes()[:3000])),
    series("one member fewer", "the directory's count", end_record(_RECORD - 32, "<Q", 3)),
    series("no members", "the directory's count", end_record(_RECORD - 32, "<Q", 0)),
    series("directory of exabytes", "the directory's length", end_record(_RECORD - 40, "<Q", 1 << 62)),
    series("directory at the end of the world", "the directory's place", end_record(_RECORD - 48, "<Q", (1 << 64) - 2)),
    series("directory over the weights", "the directory's place", end_record(_RECORD - 48, "<Q", 64)),
    series("a comment that isn't there", "the comment's length", end_record(2, "<H", 0xFFFF)),
    series(
        "link to itself", "a file without end", instead(lambda path: path.symlink_to(path.name)), 3, "oo many levels"
    ),
    series(
        "links in a circle",
        "files that are each other",
        instead(lambda path: (path.symlink_to("model_8.pt"), path.with_name("model_8.pt").symlink_to(path.name))),
        3,
        "oo many levels",
    ),
    series("link to nowhere", "a file that isn't there", instead(lambda path: path.symlink_to("nowhere")), 1, "INT004"),
    series("named pipe", "a file that is never written", instead(os.mkfifo), 3, "not a regular file"),
    series(
        "mode 000", "a file that may not be read", lambda path: path.chmod(0), 3, "ermission denied", unprivileged=True
    ),
    series("folder of that name", "a file is a folder", instead(Path.mkdir), 1, "INT004"),
    series("a hundred empty saves", "number of files", many(100, "model_{}.pt"), 1, "INT002", "model_10.pt"),
    series(
        "numbers of 200 digits",
        "the step",
        lambda path: path.rename(path.with_name(f"model_{'9' * 200}.pt")),
        0,
        "holds",
        "",
    ),
    series(
        "forty series",
        "number of runs",
        lambda path: [(path.parent / f"model_{'x' * (1 + n // 26)}{chr(97 + n % 26)}_1.pt").touch() for n in range(40)],
        1,
        "INT002",
        "",
    ),
    series(
        "a name with escapes beside it",
        "a name that acts on terminals",
        lambda path: shutil.copy(path, path.with_name("optim\x1b[2J\u202e_6.pt")),
        0,
        "holds",
        "",
    ),
    pair("cut", "its end", lambda path: path.write_bytes(path.read_bytes()[:2000])),
    pair("empty", "that it holds anything", lambda path: path.write_bytes(b"")),
    pair(
        "link to the model",
        "which of the two it is",
        instead(lambda path: path.symlink_to("model_6.pt")),
        0,
        "holds",
        "",
    ),
    pair(
        "mode 000", "a file that may not be read", lambda path: path.chmod(0), 3, "ermission denied", unprivileged=True
    ),
    pair("named pipe", "a file that is never written", instead(os.mkfifo), 3, "not a regular file"),
    pair("200 states beside it", "number of files", many(200, "opt_a{}_6.pt"), 0, "holds", ""),
)
"""All hostile inputs of such folders."""
