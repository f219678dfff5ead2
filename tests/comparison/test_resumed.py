"""Save, load, save: what is recorded beside tensors is compared value by value, and what can't be is said."""

import copy
import json

import pytest

import auditor
from tests.comparison.test_exact import code, compared
from tests.comparison.tree import write_step
from tests.paths import ROOT

torch = pytest.importorskip("torch")


def saved():
    """What a script saves: two groups, a schedule, random states, its own counts."""
    drawn = torch.Generator().manual_seed(1)
    model = {name: torch.rand(8, 4, generator=drawn) for name in ("up.weight", "down.weight")}
    kept = {n: {"step": torch.tensor(5.0), "exp_avg": w / 3, "exp_avg_sq": w / 5} for n, w in enumerate(model.values())}
    groups = [{"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": wd, "params": [n]}
              for n, (lr, wd) in enumerate(((1e-3, 0.1), (1e-4, 0.0)))]  # fmt: skip
    return {
        "model": model, "optimizer": {"state": kept, "param_groups": groups}, "step": 5, "epoch": 3,
        "scheduler": {"last_epoch": 5, "_last_lr": [1e-3, 1e-4]}, "rng_state": drawn.get_state(),
        "python": (3, (17, 29), None), "best": float("nan"), "saved_time": 17.5, "output_dir": "/a/run",
    }  # fmt: skip


def swapped(key):
    """Of two groups, the other's."""

    def change(tree):
        one, other = tree["optimizer"]["param_groups"]
        one[key], other[key] = other[key], one[key]

    return change


def test_what_is_no_state_may_differ(tmp_path):
    tree, again = saved(), saved()
    again |= {"saved_time": 99.5, "output_dir": "/another/run"}
    for side, content in (("one", tree), ("two", again)):
        (tmp_path / side).mkdir()
        torch.save(content, tmp_path / side / "model_5.pt")
    found = compared(tmp_path / "one", tmp_path / "two", resume=True)
    assert (code(found), found.steps[0].recorded, found.steps[0].uncompared) == (0, (), ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped("lr"), "lr 0.001 against 0.0001 (for up.weight)"),
        (swapped("weight_decay"), "weight_decay 0.1 against 0.0 (for up.weight)"),
        (lambda tree: [group.pop("lr") for group in tree["optimizer"]["param_groups"]], "lr is recorded by the"),
        (lambda tree: tree["optimizer"]["param_groups"][1].pop("betas"), "param_groups.1.betas is recorded by the"),
        (lambda tree: tree.pop("scheduler"), "scheduler is recorded by the reference alone"),
        (lambda tree: tree["scheduler"].update(last_epoch=0), "scheduler.last_epoch 5 against 0"),
        (lambda tree: tree.pop("rng_state"), "rng_state is recorded by the reference alone"),
        (lambda tree: tree.update(rng_state=torch.Generator().manual_seed(2).get_state()), "rng_state differs"),
        (lambda tree: tree.update(python=(3, (17, 30), None)), "python.1.1 29 against 30"),
        (lambda tree: tree.update(epoch=0), "epoch 3 against 0"),
        (lambda tree: tree.pop("best"), "best is recorded by the reference alone"),
    ],
)  # fmt: skip
def test_what_is_recorded_otherwise_or_lost_is_told_by_its_place(tmp_path, change, said):
    tree = saved()
    again = copy.deepcopy(tree)
    change(again)
    for side, content in (("one", tree), ("two", again)):
        (tmp_path / side).mkdir()
        torch.save(content, tmp_path / side / "model_5.pt")
    found = compared(tmp_path / "one", tmp_path / "two", resume=True)
    assert code(found) == 1
    assert any(said in text for text in found.steps[0].recorded), found.steps[0].recorded
    assert code(auditor.compare(str(tmp_path / "one"), str(tmp_path / "two"))) == 0


def test_files_of_a_trainer_that_are_gone_or_others(tmp_path):
    shared = ROOT / "tests" / "fixtures" / "hugging_face" / "llama_sharded"
    sides = []
    for side in ("one", "two", "three"):
        sides.append(tmp_path / side / "checkpoint-3")
        sides[-1].mkdir(parents=True)
        for file in shared.iterdir():
            (sides[-1] / file.name).write_bytes(file.read_bytes())
        (sides[-1] / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 1.5}))
        torch.save({"cpu": torch.arange(9, dtype=torch.uint8)}, sides[-1] / "rng_state.pth")
    assert code(compared(sides[0], sides[1], resume=True)) == 0
    (sides[1] / "rng_state.pth").unlink()
    found = compared(sides[0], sides[1], resume=True)
    assert code(found) == 1
    assert "rng_state.pth is there in the reference alone" in found.steps[0].recorded[0]
    (sides[2] / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 0}))
    found = compared(sides[0], sides[2], resume=True)
    assert (code(found), found.steps[0].recorded) == (1, ("epoch 1.5 against 0, in trainer_state.json",))


def test_what_can_not_be_compared_is_said_and_is_not_equal(tmp_path):
    tree = saved()
    (tmp_path / "one").mkdir()
    torch.save(tree, tmp_path / "one" / "model_5.pt")
    weights = {name: values.numpy() for name, values in tree["model"].items()}
    other = write_step(tmp_path / "two", 5, weights)
    found = compared(tmp_path / "one", other, only=["*.weight"], resume=True)
    assert "torch-file and zarr-tree keep each in another way" in found.steps[0].uncompared[0]
    auditor.check(str(other), ledger=str(tmp_path / "ledger"))
    found = compared(tmp_path / "ledger", other, resume=True)
    assert (code(found), len(found.steps[0].uncompared)) == (3, 1)
