"""Checkpoints by torch.distributed.checkpoint in memory: read, audited, changed, saved anew."""

import pickle
import warnings

import pytest

from auditor.adapters.adapter import Folder, Options
from auditor.adapters.dcp.adapter import TorchDcp
from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "dcp"
PLAIN = FIXTURES / "fsdp2_2"
ADAPTER = TorchDcp()
DATA = ("__0_0.distcp", "__1_0.distcp")


def objects_of(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def audited(objects, level=Level.FULL, **settings):
    (run,) = audit(MemoryStore(objects), Settings(level=level, **settings), now=1e9).runs
    return run


def only(objects, level=Level.FULL, **settings):
    (finding,) = audited(objects, level, **settings).findings
    return finding


def files(finding):
    return {location.file for location in finding.locations}


def read(objects, path="", **options):
    store = MemoryStore(objects)
    folder = Folder.read(store, path)
    return ADAPTER.read(store, folder, ADAPTER.recognise(store, folder), Options(**options))


def changed(objects, name, by):
    """The checkpoint with its index changed by ``by`` and pickled again."""
    pytest.importorskip("torch.distributed.checkpoint")
    metadata = pickle.loads(objects[name])
    by(metadata)
    return {**objects, name: pickle.dumps(metadata)}


def saved(tmp_path, state, name="step-7", **options):
    """What torch itself writes of ``state`` in one process."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / name, **options), no_dist=True)
    return objects_of(tmp_path)
