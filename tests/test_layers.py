"""Imports point one way, heavy packages stay lazy, nothing opens files outside `storage`."""

import ast
import subprocess
import sys

import pytest

from tests.paths import ROOT

ALLOWED = {
    "errors": set(),
    "model": set(),
    "storage": {"errors", "model"},
    "containers": {"errors", "model", "storage"},
    "adapters": {"errors", "model", "storage", "containers"},
    "observe": {"errors", "model", "storage", "containers"},
    "view": {"errors", "model", "storage", "containers", "observe"},
    "ledger": {"errors", "model", "storage", "containers"},
    "invariants": {"model"},
    "timeline": {"model", "invariants"},
}
"""Layer to the layers that it may import besides itself; layers that aren't named may import all of these."""

NEVER = {"torch", "jax", "deepspeed", "pickle"}
LAZY = {
    "zarr": {"view/zarr_store.py"},
    "rich": {"report"},
    "numba": {"observe/compiled_"},
    "llvmlite": {"observe/compiled_"},
    "distributed": {"observe/executors.py"},
    "obstore": {"storage/object_"},
}


def sources():
    files = sorted((ROOT / "auditor").rglob("*.py")) + sorted((ROOT / "adapters").rglob("*.py"))
    found = [path for path in files if "adapters" not in path.relative_to(ROOT).parts[1:-1]]
    assert len(found) > 40
    return found


def layer(path):
    parts = path.relative_to(ROOT).parts
    return "adapters" if parts[0] == "adapters" else parts[1].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def _is_hook_of(path, package):
    """Each hook is imported by those alone who have its framework."""
    return layer(path) == "hooks" and path.name.startswith(f"{package}_")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = layer(path)
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] not in NEVER or own == "testing" or _is_hook_of(path, parts[0]), f"{path} imports {name}"
        assert parts[:2] != ["auditor", "hooks"] or own in ("hooks", "patrol", "cli"), f"{path} imports a hook"
        assert parts[:2] != ["auditor", "testing"] or own == "testing", f"{path} imports what is for tests alone"
        if parts[0] == "auditor" and len(parts) > 1 and own in ALLOWED:
            assert parts[1] == own or parts[1] in ALLOWED[own], f"{own} must not import {name}"
        for package, places in LAZY.items():
            if parts[0] == package:
                where = str(path.relative_to(ROOT / "auditor")) if own != "adapters" else ""
                inside = any(where.startswith(place) for place in places)
                assert inside or own == "cli" or path.name == "__init__.py", f"{path} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_storage_opens_files_and_only_the_command_line_prints(path):
    own = layer(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open" or own == "storage", f"{path}:{node.lineno} opens a file"
            assert node.func.id != "print" or own == "cli", f"{path}:{node.lineno} prints"
    if own not in ("storage", "cli", "cli_options", "configuration", "testing", "hooks"):
        assert not {"pathlib", "os", "io"} & set(imports(path)) or path.name == "means.py", path


WRITES = "auditor/storage/writer.py"
"""The one module that opens files for writing: those of an export."""


def test_nothing_else_opens_for_writing():
    assert "O_CREAT" in (ROOT / WRITES).read_text()
    for path in sources():
        text = path.read_text() if path != ROOT / WRITES else ""
        for forbidden in ("O_WRONLY", "O_RDWR", "O_CREAT", '"wb"', '"w"', "unlink", "os.remove", "write_bytes"):
            assert forbidden not in text, f"{path} holds {forbidden}"


HEAVY = {"zarr", "numba", "torch", "jax", "obstore"}


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["-m", "auditor.cli", "--help"], {"numpy", *HEAVY}),
        (["-m", "auditor.cli", "check", str(ROOT / "samples/bloom_drift/healthy")], HEAVY),
    ],
)
def test_heavy_packages_stay_lazy(arguments, forbidden):
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    lines = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line]
    assert len(lines) > 50
    assert not forbidden & {name.split(".")[0] for name in lines}


def test_functions_and_files_stay_small():
    lengths = []
    for path in sources():
        text = path.read_text()
        assert text.count("\n") < 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert length <= 42, f"{path}:{node.lineno} {node.name} has {length} lines"
                lengths.append(length)
    lengths.sort()
    assert lengths[int(len(lengths) * 0.9)] <= 25
