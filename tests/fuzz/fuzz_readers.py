"""Coverage-guided fuzzing of the readers of files from strangers.

    pip install atheris
    python tests/fuzz/fuzz_readers.py zip|pickle|torch|safetensors|dcp [-max_total_time=600] [CORPUS]

A reader may return, or raise DamagedError, LimitError or UnsupportedError; anything else is a crash. Seeds are made
from the committed fixtures. Inputs that crashed once are kept in ``crashes/`` and replayed by
``test_fuzz_regressions.py``.
"""

import struct
import sys
import tempfile
from pathlib import Path

READERS = ("zip", "pickle", "torch", "safetensors", "dcp")
HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"


def read(kind: str, data: bytes) -> None:
    """Give ``data`` to one reader; returns whatever is allowed to happen."""
    from auditor.containers.damage import DamagedError, UnsupportedError
    from auditor.containers.torch_zip import read_torch_file
    from auditor.containers.zip_directory import read_directory
    from auditor.storage.memory import MemoryStore

    try:
        if kind == "pickle":
            read_pickle(data)
            return
        with MemoryStore({"f": data}).open("f") as handle:
            if kind == "zip":
                read_directory(handle)
            elif kind == "torch":
                read_torch_file(handle)
            elif kind == "dcp":
                from auditor.containers.dcp_metadata import read_dcp_metadata

                read_dcp_metadata(handle)
            else:
                from auditor.containers.safetensors_file import read_safetensors

                read_safetensors(handle)
    except (DamagedError, UnsupportedError):
        pass


def read_pickle(data: bytes) -> None:
    """Read a pickle; what the first pass let through must not surprise the second."""
    from auditor.containers.damage import DamagedError
    from auditor.containers.pickle_machine import Limits, PickleMachine

    machine = PickleMachine({}, lambda persistent: persistent, Limits(num_opcodes=200_000))
    try:
        machine.load(data)
    except DamagedError as error:
        if machine.num_memory and isinstance(error.__cause__, (IndexError, KeyError, struct.error)):
            raise AssertionError(f"the passes disagree: {error}") from error
        raise


def seeds(kind: str) -> list[bytes]:
    """Small real inputs to begin with."""
    import pickle
    import zipfile

    if kind == "safetensors":
        return [path.read_bytes()[:4096] for path in sorted(FIXTURES.rglob("*.safetensors"))]
    if kind == "dcp":
        return [path.read_bytes() for path in sorted(FIXTURES.rglob(".metadata"))]
    files = sorted(FIXTURES.rglob("*.pt"), key=lambda path: path.stat().st_size)[:12]
    if kind in ("zip", "torch"):
        return [path.read_bytes() for path in files]
    plain = [pickle.dumps({"a": [1, 2.5, "x", b"y", None, True, (1, 2), {3}]}, protocol) for protocol in range(6)]
    for path in files:
        with zipfile.ZipFile(path) as archive:
            plain += [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    return plain


def main() -> None:
    import atheris

    kind = sys.argv.pop(1)
    assert kind in READERS, __doc__
    corpus = Path(tempfile.mkdtemp())
    (HERE / "crashes").mkdir(exist_ok=True)
    for number, seed in enumerate(seeds(kind)):
        (corpus / f"seed{number}").write_bytes(seed)
    with atheris.instrument_imports(include=["auditor.containers", "auditor.storage"]):
        read(kind, b"")
    atheris.Setup([*sys.argv, str(corpus), f"-artifact_prefix={HERE}/crashes/{kind}-"], lambda data: read(kind, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
