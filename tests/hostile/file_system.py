"""Folders that do harm by what lies in them, and files that change while they are read."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.hostile.making import (
    LAYER,
    SAFETENSORS,
    Input,
    pipeline_step,
    rank_step,
    safetensors_folder,
    torch_folder,
)

Change = Callable[[Path], object]
STEP = "deepspeed-pipeline"


def beside(name: str, lie: str, change: Change, code: int = 0, says: str = "holds", **more) -> Input:
    """Something odd in a healthy step."""
    return Input(f"beside: {name}", lie, STEP, lambda folder: change(pipeline_step(folder)), code, says, **more)


def instead(name: str, lie: str, make: Change, code: int = 1, says: str = "INT001", **more) -> Input:
    """Something odd in place of a layer's file."""

    def build(folder: Path) -> None:
        path = pipeline_step(folder) / LAYER
        path.unlink()
        make(path)

    return Input(f"instead of a file: {name}", lie, STEP, build, code, says, LAYER, **more)


def folders(name: str, lie: str, build: Change, code: int, says: str = "", **more) -> Input:
    return Input(f"folders: {name}", lie, "any", build, code, says, **more)


def bound(path: Path) -> None:
    """A socket; its address may be no longer than about a hundred bytes."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def nested(folder: Path, depth: int) -> Path:
    """Folders within each other, deeper than one path may be long."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 20, dir_fd=here)
        here, left = os.open("d" * 20, os.O_RDONLY, dir_fd=here), here
        os.close(left)
    os.close(here)
    return folder


def links(folder: Path, count: int, target: str) -> None:
    for number in range(count):
        (folder / f"link{number}").symlink_to(target)


def mode(path: Path, bits: int) -> None:
    path.chmod(bits)


ODD = [
    beside(
        "links to itself, parent and nowhere",
        "what the folder holds",
        lambda step: (
            (step / "self").symlink_to("self"),
            (step / "parent").symlink_to(".."),
            (step / "here").symlink_to("."),
            (step / "nowhere").symlink_to("nothing"),
        ),
    ),
    beside(
        "named pipe, socket, devices",
        "what the folder holds",
        lambda step: (
            os.mkfifo(step / "pipe"),
            (step / "zero").symlink_to("/dev/zero"),
            (step / "tty").symlink_to("/dev/tty"),
            bound(step.parent / "s"),
        ),
    ),
    beside(
        "10,000 empty files",
        "number of files",
        lambda step: [(step / f"empty{number}").touch() for number in range(10_000)],
    ),
    beside("name of 255 bytes", "length of a name", lambda step: (step / ("n" * 255)).touch()),
    beside(
        "name that is no UTF-8",
        "a name that can't be printed",
        lambda step: Path(os.fsdecode(os.fsencode(step) + b"/layer_\xff\xfe-model_00-model_states.pt")).touch(),
    ),
    beside(
        "name with escapes",
        "a name that acts on terminals",
        lambda step: (step / "a\x1b[2J\x1b]0;owned\x07\r\n\u202e.pt").touch(),
    ),
    beside(
        "name with newline and report in it",
        "a name that poses as a finding",
        lambda step: (step.parent / "global_step6\nholds · last good step 7").mkdir(),
    ),
    beside(
        "step folder that is no UTF-8",
        "a name that can't be printed",
        lambda step: Path(os.fsdecode(os.fsencode(step.parent) + b"/global_step\xff9")).mkdir(),
        0,
    ),
    beside(
        "link to the step", "two steps of one number", lambda step: (step.parent / "global_step7").symlink_to(step.name)
    ),
    beside(
        "step linked to the run",
        "a step without end",
        lambda step: (step.parent / "global_step8").symlink_to("."),
        3,
        "",
    ),
    instead("folder", "a file is a folder", Path.mkdir),
    instead("link to nowhere", "a file is not there", lambda path: path.symlink_to("nowhere")),
    instead("link to itself", "a file without end", lambda path: path.symlink_to(path.name), 3, "oo many levels"),
    instead(
        "link to /dev/zero", "a file without end", lambda path: path.symlink_to("/dev/zero"), 3, "not a regular file"
    ),
    instead("named pipe", "a file that is never written", os.mkfifo, 3, "not a regular file"),
    instead("link to its folder", "a file is a folder", lambda path: path.symlink_to("."), 1, "INT001"),
    instead(
        "file of mode 000",
        "a file that may not be read",
        lambda path: (shutil.copy(path.with_name(LAYER.replace("01", "00")), path), mode(path, 0)),
        3,
        "ermission denied",
        unprivileged=True,
    ),
    Input(
        "instead of a file: safetensors as a folder",
        "a file is a folder",
        "safetensors",
        lambda folder: (lambda path: (path.unlink(), path.mkdir()))(safetensors_folder(folder)),
        4,
        "",
    ),
    Input(
        "instead of a file: safetensors as a named pipe",
        "a file is never written",
        "safetensors",
        lambda folder: (lambda path: (path.unlink(), os.mkfifo(path)))(safetensors_folder(folder)),
        3,
        "not a regular file",
        SAFETENSORS,
    ),
    Input(
        "instead of a file: config.json as a named pipe",
        "a file is never written",
        "safetensors",
        lambda folder: (lambda path: (path.unlink(), os.mkfifo(path)))(
            safetensors_folder(folder).with_name("config.json")
        ),
        3,
        "not a regular file",
        "config.json",
    ),
    folders("500 deep", "nesting", lambda folder: nested(folder, 500), 4, "no checkpoint found", settled=False),
    folders(
        "a cycle of two",
        "folders that hold each other",
        lambda folder: (
            (folder / "a").mkdir(),
            (folder / "b").mkdir(),
            (folder / "a" / "b").symlink_to("../b"),
            (folder / "b" / "a").symlink_to("../a"),
        ),
        4,
        "no checkpoint found",
    ),
    folders(
        "100 links to their own folder",
        "folders that hold themselves a hundred times over",
        lambda folder: links(folder, 100, "."),
        4,
        "no checkpoint found",
    ),
    folders(
        "300 links to one folder of 300",
        "number of folders",
        lambda folder: (
            (folder / "held").mkdir(),
            [(folder / "held" / f"f{number}").mkdir() for number in range(300)],
            links(folder, 300, "held"),
        ),
        4,
        "no checkpoint found",
    ),
    folders(
        "3,000 empty folders",
        "number of folders",
        lambda folder: [(folder / f"f{number}").mkdir() for number in range(3_000)],
        4,
        "no checkpoint found",
    ),
    folders(
        "path linked to itself",
        "the path that is asked for",
        lambda folder: (folder.rmdir(), folder.symlink_to(folder.name)),
        3,
        "oo many levels",
        settled=False,
    ),
    folders(
        "root of mode 000",
        "a folder that may not be read",
        lambda folder: mode(folder, 0),
        3,
        "ermission denied",
        unprivileged=True,
    ),
    folders(
        "step of mode 000",
        "a folder that may not be read",
        lambda folder: mode(pipeline_step(folder), 0),
        3,
        "ermission denied",
        unprivileged=True,
    ),
    folders(
        "step of mode 444",
        "a folder that may be listed and not entered",
        lambda folder: mode(pipeline_step(folder), 0o444),
        3,
        "",
        unprivileged=True,
    ),
    Input(
        "inspect: 10,000 empty files",
        "number of files",
        STEP,
        lambda folder: (lambda step: [(step / f"empty{number}").touch() for number in range(10_000)])(
            pipeline_step(folder)
        ),
        0,
        "tp 4",
        command="inspect",
    ),
]


def changing(name: str, build: Change, pattern: str, how: str, at: int, code: int, says: str = "") -> Input:
    return Input(
        f"changing: {name}",
        f"a file at its opening number {at}: {how}",
        "any",
        build,
        code,
        says,
        pattern.strip("*"),
        interfere=(pattern, how, at),
    )


ADAPTER, WEIGHTS = 1, 2
"""When a file is opened first, for what it says of itself; and when its weights are read."""

CHANGING = [
    changing("vanishes before it is read", pipeline_step, f"*{LAYER}", "vanish", ADAPTER, 6, "changed"),
    changing("vanishes before its weights are read", pipeline_step, f"*{LAYER}", "vanish", WEIGHTS, 6, "changed"),
    changing("shrinks before it is read", pipeline_step, f"*{LAYER}", "shrink", ADAPTER, 6, "changed"),
    changing("shrinks before its weights are read", pipeline_step, f"*{LAYER}", "shrink", WEIGHTS, 6, "changed"),
    changing("shrinks while open", pipeline_step, f"*{LAYER}", "shrink while open", ADAPTER, 6, "changed"),
    changing(
        "shrinks while its weights are open", pipeline_step, f"*{LAYER}", "shrink while open", WEIGHTS, 6, "changed"
    ),
    changing("grows before it is read", pipeline_step, f"*{LAYER}", "grow", ADAPTER, 6, "changed"),
    changing("grows before its weights are read", pipeline_step, f"*{LAYER}", "grow", WEIGHTS, 6, "changed"),
    changing("grows while its weights are open", pipeline_step, f"*{LAYER}", "grow while open", WEIGHTS, 6, "changed"),
    changing("becomes a folder", pipeline_step, f"*{LAYER}", "folder", WEIGHTS, 6, "changed"),
    changing("safetensors shrinks", safetensors_folder, f"*{SAFETENSORS}", "shrink", 3, 6, "changed"),
    changing("torch file grows", torch_folder, "*pytorch_model.bin", "grow", 3, 6, "changed"),
    changing("rank file vanishes", rank_step, "*rank_1.pt", "vanish", ADAPTER, 6, "changed"),
    changing(
        "step is moved away", pipeline_step, "*mp_rank_00_optim_states.pt", "folder vanishes", ADAPTER, 6, "changed"
    ),
    changing("step is moved away late", pipeline_step, f"*{LAYER}", "folder vanishes", WEIGHTS, 6, "changed"),
]

FILE_SYSTEM = (*ODD, *CHANGING)
