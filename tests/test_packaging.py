"""What is built is what is in the tree, and it installs under the right names."""

import subprocess
import sys
import zipfile

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    assert built.name.startswith("ckpt_auditor-")
    return zipfile.ZipFile(built)


def test_wheel_holds_every_source_file_and_nothing_else(wheel):
    kinds = {".py", ".json", ".typed"}
    tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "auditor").rglob("*")
        if path.suffix in kinds and path.is_file() and "adapters" not in path.relative_to(ROOT).parts
    } | {
        f"auditor/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "adapters").rglob("*")
        if path.suffix in kinds
    }
    built = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert tree == built
    assert "auditor/py.typed" in built


def test_wheel_states_its_entry_points_and_licence(wheel):
    names = wheel.namelist()
    (points,) = [name for name in names if name.endswith("entry_points.txt")]
    text = wheel.read(points).decode()
    assert "auditor = auditor.cli:main" in text
    assert "[auditor.adapters]" in text
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_core_needs_neither_torch_nor_jax_nor_numba(wheel):
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    needed = [line for line in wheel.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    core = [line for line in needed if "extra ==" not in line]
    assert len(core) == 5
    assert not any(word in line for line in core for word in ("torch", "jax", "numba"))


def test_readme_commands_are_those_that_ci_runs():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    commands = [line for line in readme.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert any("pytest" in command and command in script for command in commands)
