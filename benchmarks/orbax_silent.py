"""Faults that Orbax's own restore accepts in silence, and what the auditor says of them.

    python benchmarks/orbax_silent.py make FOLDER        copies of the committed checkpoints, one fault in each
    python benchmarks/orbax_silent.py restore FOLDER     with jax and orbax installed: which of them Orbax restores
    python benchmarks/orbax_silent.py audit FOLDER       which of them the auditor reports; joins both into one table

Values are changed in the step that is stored uncompressed; the last two digits of a name tell faults of one kind apart.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "orbax"
sys.path.insert(0, str(ROOT))


def put(at, value):
    def change(values):
        values[at] = value

    return change


def flip(at, bit):
    def change(values):
        values.view(np.uint32)[at] ^= np.uint32(1 << bit)

    return change


def in_values():
    """Name to (role, change of the first stored chunk of the embedding)."""
    faults = {
        "nan in a parameter": ("parameter", put(3, np.nan)),
        "infinity in a parameter": ("parameter", put(3, np.inf)),
        "nan shard of a parameter": ("parameter", lambda values: values.fill(np.nan)),
        "parameter zeroed": ("parameter", lambda values: values.fill(0)),
        "nan in a first moment": ("first_moment", put(3, np.nan)),
        "first moment scaled by 1000": ("first_moment", lambda values: np.multiply(values, 1000, out=values)),
        "second moment zeroed": ("second_moment", lambda values: values.fill(0)),
        "second moment below zero": ("second_moment", put(9, -1e-8)),
        "second moment scaled by 1e-6": ("second_moment", lambda values: np.multiply(values, 1e-6, out=values)),
    }
    for number, (role, bit) in enumerate(
        [(role, bit) for role in ("parameter", "first_moment", "second_moment") for bit in (30, 29, 26, 24)]
    ):
        faults[f"bit {bit} flipped in a {role} {number:02}"] = role, flip(11, bit)
    return faults


def make(out):
    from tests.adapters.test_orbax_faults import Plain

    def write(name, objects):
        for path, content in objects.items():
            target = out / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    for name, (role, change) in in_values().items():
        plain = Plain()
        plain.change(next(plain.chunks("embed", role)), change)
        write(name, plain.objects)
    plain = Plain()
    one, other = list(plain.chunks("embed", "second_moment"))[:2]
    raw = plain.objects[one[0]]
    held = [raw[chunk[1] : chunk[1] + chunk[2]] for chunk in (one, other)]
    plain.change(one, lambda values: np.copyto(values, np.frombuffer(held[1], np.float32)))
    plain.change(other, lambda values: np.copyto(values, np.frombuffer(held[0], np.float32)))
    write("chunks of a second moment swapped", plain.objects)
    shutil.copytree(FIXTURES / "collision", out / "two paths under one name")
    shutil.copytree(FIXTURES / "deep_odd", out / "a replica with other gradients")
    cut = shutil.copytree(FIXTURES / "files_zarr3", out / "a chunk that is missing")
    next(cut.glob("*/params.kernel/c/3/0")).unlink()
    broken = shutil.copytree(FIXTURES / "files_zarr2", out / "a frame that is broken")
    chunk = next(broken.glob("*/params.kernel/3.0"))
    chunk.write_bytes(chunk.read_bytes()[:6] + b"\xff\xff\xff" + chunk.read_bytes()[9:])


def restore(out):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    import orbax.checkpoint as ocp

    said = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for run in sorted(out.iterdir()):
            if run.is_dir():
                (step,) = [path for path in run.iterdir() if path.is_dir()]
                try:
                    checkpointer.restore(step)
                    said[run.name] = ""
                except Exception as error:  # Orbax itself raises nothing more precise.
                    said[run.name] = f"{type(error).__name__}: {str(error)[:60]}"
    (out / "orbax.json").write_text(json.dumps(said))
    print(f"Orbax restores {sum(not text for text in said.values())} of {len(said)} without an error")


def report(out):
    from auditor.audit import audit
    from auditor.settings import Level, Settings
    from auditor.storage.local import LocalStore

    known = json.loads((out / "orbax.json").read_text()) if (out / "orbax.json").exists() else {}
    silent = found = 0
    for run in sorted(path for path in out.iterdir() if path.is_dir()):
        (made,) = audit(LocalStore(run), Settings(level=Level.VALUES)).runs
        ids = ", ".join(sorted({finding.id for finding in made.findings})) or "-"
        silent += known.get(run.name) == ""
        found += known.get(run.name) == "" and ids != "-"
        print(f"{run.name:42} {known.get(run.name) or 'restored':28.28} {ids}")
    print(f"{silent} restored in silence, {found} of them reported")


if __name__ == "__main__":
    {"make": make, "restore": restore, "audit": report}[sys.argv[1]](Path(sys.argv[2]).resolve())
