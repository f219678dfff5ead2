"""What may go wrong while a witness is left: it is logged, training goes on, and nothing half is left behind."""

import errno
import logging
import os
import time

import pytest

torch = pytest.importorskip("torch")

from auditor.hooks.torch_exchange import torch_exchange  # noqa: E402
from auditor.hooks.torch_hook import TorchHook  # noqa: E402
from auditor.storage.local import LocalStore  # noqa: E402
from auditor.storage.writer import Draft, WriteError  # noqa: E402
from auditor.witnesses import read_witness, witness_folder  # noqa: E402

STATE = {"model": {"weight": torch.arange(12.0).reshape(3, 4)}, "step": 3}


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_or_read_only_disk_is_logged_and_leaves_nothing(tmp_path, monkeypatch, caplog, number):
    def full(self, content):
        raise WriteError("it can't be written") from OSError(number, os.strerror(number))

    monkeypatch.setattr(Draft, "append", full)
    with caplog.at_level(logging.WARNING, "auditor"):
        assert TorchHook().witness(3, STATE, tmp_path / "run" / "step-3") is None
    assert "training goes on" in caplog.text
    assert files(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_logged(tmp_path, caplog):
    (tmp_path / "run").mkdir(mode=0o500)
    with caplog.at_level(logging.WARNING, "auditor"):
        assert TorchHook().witness(3, STATE, tmp_path / "run" / "step-3") is None
    assert "training goes on" in caplog.text


def test_a_folder_that_can_not_be_made_is_logged(tmp_path, caplog):
    (tmp_path / "run").write_text("a file where the run should be")
    with caplog.at_level(logging.WARNING, "auditor"):
        assert TorchHook().witness(3, STATE, tmp_path / "run" / "step-3") is None
    assert "training goes on" in caplog.text


def test_what_fails_is_raised_where_that_is_asked_for(tmp_path):
    (tmp_path / "run").write_text("a file where the run should be")
    with pytest.raises(WriteError):
        TorchHook(raising=True).witness(3, STATE, tmp_path / "run" / "step-3")


def test_a_tensor_that_can_not_be_read_stops_nothing(tmp_path, caplog):
    class Odd(torch.Tensor):
        @property
        def is_meta(self):
            raise AttributeError("odd")

    state = {"odd": torch.ones(3).as_subclass(Odd)}
    with caplog.at_level(logging.WARNING, "auditor"):
        assert TorchHook().witness(3, state, tmp_path / "run" / "step-3") is None
    assert "training goes on" in caplog.text


def test_a_step_saved_again_leaves_the_newer_attempt(tmp_path):
    hook = TorchHook()
    hook.witness(3, STATE, tmp_path / "run" / "step-3")
    first = read_witness(LocalStore(tmp_path / "run"), witness_folder("step-3"), 3)
    hook.witness(3, {"model": {"weight": torch.ones(3, 4)}}, tmp_path / "run" / "step-3")
    again = read_witness(LocalStore(tmp_path / "run"), witness_folder("step-3"), 3)
    assert (first.parts[0].attempt, again.parts[0].attempt) == (0, 1)
    assert files(tmp_path) == ["run/.auditor/witness/step-3/rank-00000.witness"]


def test_links_in_the_folder_of_witnesses_are_not_followed(tmp_path, caplog):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run" / ".auditor" / "witness").mkdir(parents=True)
    (tmp_path / "run" / ".auditor" / "witness" / "step-3").symlink_to(outside)
    with caplog.at_level(logging.WARNING, "auditor"):
        assert TorchHook().witness(3, STATE, tmp_path / "run" / "step-3") is None
    assert files(outside) == []


def test_an_unchanged_state_is_left_alone(tmp_path):
    before = STATE["model"]["weight"].clone()
    TorchHook(raising=True).witness(3, STATE, tmp_path / "run" / "step-3")
    assert torch.equal(before, STATE["model"]["weight"])


@pytest.mark.parametrize("kind", ["HashStore", "FileStore"])
def test_parts_reach_rank_0_through_the_store_and_a_dead_rank_holds_nobody_up(tmp_path, kind, caplog):
    """Three ranks with a disk each; the third dies before its witness."""
    dist = torch.distributed
    store = dist.HashStore() if kind == "HashStore" else dist.FileStore(str(tmp_path / "store"), 3)

    def hook(rank):
        exchange = torch_exchange(store, seconds=0.3)
        return TorchHook(rank=rank, num_ranks=3, raising=True, exchange=exchange)

    hooks = [hook(0), hook(1)]
    for step in (1, 2):
        paths = [tmp_path / f"disk{number}" / f"step-{step}" for number in (0, 1)]
        for path, one in zip(paths, hooks, strict=True):
            path.mkdir(parents=True)
            one.witness(step, STATE, path)
        begun = time.monotonic()
        with caplog.at_level(logging.WARNING, "auditor"):
            hooks[0].committed(step, paths[0])
        assert time.monotonic() - begun < 5
        witness = read_witness(LocalStore(tmp_path / "disk0"), witness_folder(f"step-{step}"), step)
        assert [part.rank for part in witness.parts] == [0, 1]
        assert witness.lacks == "1 of 3 ranks left no witness: 2"
    assert "rank 2 handed over no witness" in caplog.text
