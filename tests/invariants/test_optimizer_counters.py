"""OPT003, OPT004, OPT007, and INT011 by the way: each fault, and the healthy twins that look like it."""

import shutil
from dataclasses import replace

import pytest

from auditor.invariants.optimizer import counters_can_count
from auditor.model.catalog import Role
from auditor.model.dtype import BFLOAT16, FLOAT16, FLOAT32, INT64
from auditor.model.finding import Severity
from auditor.model.observation import unobserved
from auditor.model.run import StepEvidence
from auditor.settings import Level
from auditor.storage.local import LocalStore
from tests.faults import catalog_of
from tests.paths import TP4
from tests.rewriting import (
    HEAD_WEIGHT,
    audited,
    change,
    ddp,
    deepspeed,
    ids,
    megatron,
    only,
    places,
    ranks,
    store,
    trained,
)  # fmt: skip

torch = pytest.importorskip("torch")
assert all((ddp, deepspeed, megatron))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def set_step(number, value, dtype=torch.float32):
    def by(content):
        optimizer = content["optimizer"].get("optimizer", content["optimizer"])
        numbers = [*optimizer["state"]] if number is None else [number]
        for at in numbers:
            optimizer["state"][at]["step"] = torch.tensor(value, dtype=dtype)

    return by


def test_one_rank_counted_otherwise(ddp):
    change(ranks(ddp, rank=1), set_step(HEAD_WEIGHT, 5.0))
    finding = only(ddp)
    assert (finding.id, finding.severity, finding.consequences) == ("OPT003", Severity.ERROR, ("OPT007",))
    assert places(finding) == {(6, "head.weight", Role.COUNTER, "step_6/rank_1.pt")}


def test_one_tensor_parallel_rank_counted_otherwise(megatron):
    change(megatron.glob("iter_0000004/mp_rank_01/*.pt"), set_step(3, 3.0))
    assert ids(megatron) == ["OPT003"]
    finding = only(megatron, level=Level.REPLICAS)
    assert (finding.id, finding.consequences) == ("REP001", ("OPT003", "OPT007"))


def test_a_parameter_without_counter(ddp):
    change(ranks(ddp), lambda content: content["optimizer"]["state"][HEAD_WEIGHT].pop("step"))
    finding = only(ddp)
    assert (finding.id, finding.severity) == ("OPT003", Severity.ERROR)
    assert {location.tensor for location in finding.locations} == {"head.weight"}


def test_a_parameter_that_counts_less_on_all_ranks_is_a_note(ddp):
    change(ranks(ddp), set_step(HEAD_WEIGHT, 2.0))
    finding = only(ddp)
    assert (finding.id, finding.severity) == ("OPT007", Severity.NOTE)
    assert {location.tensor for location in finding.locations} == {"head.weight"}


def test_parameters_unfrozen_later_are_no_error(tmp_path):
    def thaw(step, model):
        model[0].requires_grad_(step > 2)

    run = trained(tmp_path, lambda model: torch.optim.AdamW(model.parameters()), steps=4, before=thaw)
    assert {finding.severity for finding in audited(run).findings} == {Severity.NOTE}
    assert any("was updated once, most" in finding.message for finding in audited(run).findings)


def test_a_stale_file_is_one_finding(ddp):
    shutil.copy(ddp / "step_4" / "rank_1.pt", ddp / "step_6" / "rank_1.pt")
    assert ids(ddp) == ["INT005"]


def test_stale_optimizers_of_a_whole_step_show_by_their_counters(megatron):
    for path in sorted(megatron.glob("iter_0000004/*/*.pt")):
        content, old = (torch.load(p, weights_only=False) for p in (path, str(path).replace("0000004", "0000002")))
        torch.save({**content, "optimizer": old["optimizer"]}, path)
    assert (only(megatron).id, only(megatron).severity) == ("INT011", Severity.WARNING)
    run = audited(megatron, Level.VALUES)
    assert ("INT011", Severity.ERROR) in {(finding.id, finding.severity) for finding in run.findings}
    assert run.last_good.step == 2


@pytest.mark.parametrize(
    ("dtype", "stuck", "name"), [(torch.bfloat16, 256.0, "bfloat16"), (torch.float16, 2048.0, "float16")]
)
def test_counters_stop_where_their_dtype_can_not_go_on(tmp_path, dtype, stuck, name):
    run = trained(tmp_path, adamw, steps=1)
    content = torch.load(run / "step_1/rank_0.pt")
    shutil.rmtree(run / "step_1")
    for step in (100, 3000, 6000):
        set_step(None, min(stuck, float(step)), dtype)(content)
        store(run, step, content)
    finding = only(run)
    assert (finding.id, finding.severity) == ("OPT004", Severity.ERROR)
    assert (finding.intervals[0].last_good, finding.intervals[0].first_bad) == (100, 3000)
    assert f"{name} and reads {stuck:g}" in finding.message


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 256), (torch.float32, 300), (torch.int64, 70000)])
def test_counters_that_fit_their_dtype(tmp_path, dtype, step):
    run = trained(tmp_path, adamw, steps=1)
    content = torch.load(run / "step_1/rank_0.pt")
    shutil.rmtree(run / "step_1")
    set_step(None, step, dtype)(content)
    store(run, step, content)
    assert ids(run) == []


def test_largest_count():
    assert [kind.largest_count for kind in (BFLOAT16, FLOAT16, FLOAT32)] == [256, 2048, 1 << 24]
    assert INT64.largest_count > 1 << 62
    for kind in (torch.bfloat16, torch.float16):
        limit = torch.tensor({torch.bfloat16: 256, torch.float16: 2048}[kind], dtype=kind)
        assert limit + 1 == limit
        assert limit - 1 + 1 == limit


def test_saturated_counter_of_a_flat_group(tmp_path, deepspeed):
    shutil.copytree(TP4, tmp_path / "run")

    def by(content):
        for kept in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            kept["step"] = torch.tensor(256.0, dtype=torch.bfloat16)

    change(tmp_path.glob("run/global_step6/*optim_states.pt"), by)
    catalog = catalog_of(tmp_path / "run", 6)
    for step, num_bad in ((600, 4), (256, 0)):
        later = replace(catalog, step=step)
        judged = counters_can_count(StepEvidence(later, unobserved(later)))
        assert (len(judged.violations), judged.num_holds) == (num_bad, 8 - 2 * num_bad)


@pytest.mark.parametrize(("steps", "expected"), [((0, 6), []), ((6, 6), []), ((3, 6), ["OPT007"])])
def test_counts_that_groups_keep(ddp, steps, expected):
    """Fused optimizers count in groups; one whose counter is never updated says 0."""

    def by(content):
        group = content["optimizer"]["param_groups"][0]
        numbers = group["params"]
        groups = [
            {**group, "params": numbers[:3], "step": steps[0]},
            {**group, "params": numbers[3:], "step": steps[1]},
        ]
        content["optimizer"]["param_groups"] = groups
        for kept in content["optimizer"]["state"].values():
            del kept["step"]

    for step in (2, 4):
        shutil.rmtree(ddp / f"step_{step}")
    change(ranks(ddp), by)
    assert ids(ddp) == expected


def test_a_group_whose_count_no_longer_fits_its_parameters(ddp):
    change(ranks(ddp), lambda content: content["optimizer"]["param_groups"][0].update(step=1000))
    assert ids(ddp) == ["OPT007"]


def test_counters_are_read_with_one_opening_and_not_without_bound(tmp_path):
    from auditor.adapters.counters import MAX_COUNTERS, read_numbers
    from auditor.containers.torch_zip import read_torch_file

    torch.save([torch.tensor(float(at)) for at in range(3000)], tmp_path / "x.pt")

    class Counting(LocalStore):
        opened = 0

        def open(self, name):
            self.opened += 1
            return super().open(name)

    store = Counting(tmp_path)
    with store.open("x.pt") as handle:
        tensors = dict(enumerate(read_torch_file(handle).tree))
    store.opened = 0
    found = read_numbers(store, "x.pt", tensors)
    assert store.opened == 1
    assert MAX_COUNTERS * 0.9 < len(found) <= MAX_COUNTERS
    assert all(number == value for number, value in found.items())
    assert read_numbers(store, "absent.pt", tensors) == {}
