"""OPT001, OPT002, OPT005, OPT006: each fault with its id and place, and the healthy twins that look like it."""

import shutil

import pytest

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.invariants.optimizer_owners import state_belongs_to_parameters
from auditor.invariants.optimizer_state import KeptState
from auditor.model.catalog import File, Role
from auditor.model.dtype import BFLOAT16, FLOAT32
from auditor.model.finding import Severity
from auditor.model.mesh import EVERYWHERE, NO_MESH
from auditor.model.observation import unobserved
from auditor.model.region import whole
from auditor.model.run import StepEvidence
from auditor.settings import Level
from tests.faults import catalog_of
from tests.paths import HEALTHY as BLOOM
from tests.paths import TP2_PP2, TP4
from tests.rewriting import (
    DDP,
    HEAD_BIAS,
    HEAD_WEIGHT,
    HIDDEN_WEIGHT,
    MEGATRON,
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


def outcomes(run, identifier, **settings):
    judged = [step.judgements[identifier] for step in audited(run, **settings).steps]
    return judged[-1]


# Healthy runs


@pytest.mark.parametrize(
    "folder",
    [DDP, DDP.parent / "faulty", DDP.parent / "own_buffers", *(MEGATRON / x for x in ("tp2", "tp2_llama", "tp2_pp2")),
     TP4, TP2_PP2, BLOOM],
    ids=lambda folder: folder.name,
)  # fmt: skip
def test_runs_of_real_writers_are_judged_and_silent(folder):
    run = audited(folder)
    assert not [finding for finding in run.findings if finding.id.startswith("OPT")]
    for identifier in ("OPT001", "OPT002", "OPT005"):
        judged = run.steps[-1].judgements[identifier]
        assert judged.num_holds
        assert not judged.undetermined


class Lion(torch.optim.Optimizer):
    """The update rule of Lion: one moment, the sign of its mixture with the gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter -= group["lr"] * moment.lerp(parameter.grad, 1 - group["betas"][0]).sign()
                moment.lerp_(parameter.grad, 1 - group["betas"][1])


class EightBit(torch.optim.Optimizer):
    """State as 8-bit optimizers keep it: quantised with block maxima, small parameters in full."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, large = self.state[parameter], parameter.numel() >= 32
                kind = torch.uint8 if large else torch.float32
                state["step"] = state.get("step", 0) + 1
                state |= {f"state{at}": torch.ones_like(parameter, dtype=kind) for at in (1, 2)}
                if large:
                    state |= {f"qmap{at}": torch.zeros(256) for at in (1, 2)} | {
                        f"absmax{at}": torch.ones(1) for at in (1, 2)
                    }


class Unheard(Lion):
    """An optimizer that keeps what no known one does."""

    def step(self):
        super().step()
        for kept in self.state.values():
            kept["preconditioner"] = torch.eye(3)


def two_groups(model):
    named = [*model.named_parameters()]
    return [
        {"params": [p for name, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for name, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 1e-4},
    ]


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "groups that differ": lambda m: torch.optim.AdamW(two_groups(m), lr=1e-3),
    "named": lambda m: torch.optim.AdamW([*m.named_parameters()][::-1], lr=1e-3),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True),
    "rate as a tensor": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3)),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, nesterov=True),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
    "lion": lambda m: Lion(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-3),
    "eight bit": lambda m: EightBit(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-3),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=1e-3),
    "unheard of": lambda m: Unheard(m.parameters()),
}
UNKNOWN = "unheard of"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_optimizers_keep_is_known_or_said_not_to_be(tmp_path, name):
    run = trained(tmp_path, OPTIMIZERS[name])
    assert not audited(run, Level.VALUES).findings
    judged = outcomes(run, "OPT001")
    assert bool(judged.undetermined) == (name == UNKNOWN)
    assert judged.num_holds == (0 if name in (UNKNOWN, "plain") else 7)
    assert bool(judged.not_applicable) == (name == "plain")


def test_groups_are_recorded_with_names_settings_and_steps():
    (group, other) = catalog_of(DDP, 6).groups
    assert group.hyperparameters["betas"] == (0.9, 0.999)
    assert group.hyperparameters["lr"] == 0.01
    assert not {"params", "foreach", "fused"} & group.hyperparameters.keys()
    assert group.parameters[0] == "stem.weight"
    assert len(group.parameters) == 7
    assert (group.file, other.file) == ("step_6/rank_0.pt", "step_6/rank_1.pt")
    catalog = catalog_of(MEGATRON / "tp2_pp2", 4)
    assert {group.optimizer for group in catalog.groups} == {"adam"}
    assert [group.hyperparameters["wd_mult"] for group in catalog.groups[:2]] == [1.0, 0.0]
    assert "decoder.layers.1.mlp.linear_fc1.weight" in {name for group in catalog.groups for name in group.parameters}
    assert {scalar.value for scalar in catalog.scalars if scalar.name == "scheduler.num_steps"} == {8.0}
    steps = [scalar for scalar in catalog.scalars if scalar.name == "optimizer_step"]
    assert {(scalar.value, scalar.dtype) for scalar in steps} == {(4.0, FLOAT32)}
    catalog = catalog_of(TP2_PP2, 6)
    assert {group.step for group in catalog.groups} == {6.0}
    known = {tensor.name for tensor in catalog.tensors if tensor.role is Role.MASTER}
    assert {name for group in catalog.groups for name in group.parameters} == known


# OPT001, OPT006: moments


def test_one_of_two_moments_is_lost(ddp):
    change(ranks(ddp), lambda content: content["optimizer"]["state"][HIDDEN_WEIGHT].pop("exp_avg_sq"))
    finding = only(ddp)
    assert (finding.id, finding.severity) == ("OPT001", Severity.ERROR)
    assert places(finding) == {(6, "hidden.weight", Role.SECOND_MOMENT, "step_6/rank_0.pt")}
    assert finding.intervals[0].last_good == 4


def test_all_second_moments_are_lost(ddp):
    change(ranks(ddp), lambda content: [kept.pop("exp_avg_sq") for kept in content["optimizer"]["state"].values()])
    assert len(only(ddp).locations) == 7


def test_one_rank_lost_moments(ddp):
    change(ranks(ddp, rank=1), lambda content: content["optimizer"]["state"].pop(HEAD_WEIGHT))
    finding = only(ddp)
    assert (finding.id, finding.severity) == ("OPT001", Severity.ERROR)
    assert {location.file for location in finding.locations} == {"step_6/rank_1.pt"}
    assert {location.tensor for location in finding.locations} == {"head.weight"}


def test_one_ranks_part_was_saved_as_the_whole(ddp):
    def slice_(content):
        kept = content["optimizer"]["state"][HIDDEN_WEIGHT]
        kept |= {key: kept[key][:4].clone() for key in ("exp_avg", "exp_avg_sq")}

    change(ranks(ddp), slice_)
    finding = only(ddp)
    assert finding.id == "OPT001"
    assert "[4, 16]" in finding.message
    assert "[8, 16]" in finding.message


def test_state_of_two_parameters_is_exchanged(ddp):
    def swap(content):
        state = content["optimizer"]["state"]
        state[HIDDEN_WEIGHT], state[HEAD_WEIGHT] = state[HEAD_WEIGHT], state[HIDDEN_WEIGHT]

    change(ranks(ddp), swap)
    finding = only(ddp)
    assert finding.id == "OPT001"
    assert {location.tensor for location in finding.locations} == {"hidden.weight", "head.weight"}


def test_another_order_of_parameters_is_no_exchange(tmp_path):
    """Handed over back to front: which parameter a number stands for is not known, and said so."""
    run = trained(tmp_path, lambda model: torch.optim.AdamW([*model.parameters()][::-1], lr=1e-3))
    assert ids(run) == []
    (reason,) = outcomes(run, "OPT001").undetermined
    assert "no known order" in reason


def test_no_state_at_all(ddp):
    late = ddp / "step_1000"
    (ddp / "step_6").rename(late)
    change(ranks(ddp, 1000), lambda content: content["optimizer"]["state"].clear() or content.update(step=1000))
    finding = only(ddp)
    assert (finding.id, len(finding.locations)) == ("OPT001", 7)


def test_no_state_while_gradients_are_accumulated(tmp_path):
    """The step that is saved counts batches: the optimizer takes one in four."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 6):
        model(torch.randn(5, 4)).square().mean().backward()
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        store(tmp_path, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    run = audited(tmp_path)
    assert "OPT001" not in {finding.id for finding in run.findings}
    judged = [step.judgements["OPT001"] for step in run.steps]
    assert all("none was taken yet" in reason for reason in judged[0].undetermined)
    assert judged[0].undetermined
    assert judged[3].num_holds == 2


def test_state_that_each_rank_holds_for_its_own_parameters(tmp_path):
    """ZeRO-1 by hand: all optimizers have all parameters, each gets the gradients of its own alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    for step in range(1, 3):
        gradients = torch.autograd.grad(model(torch.randn(5, 4)).square().mean(), [*model.parameters()])
        for rank, optimizer in enumerate(optimizers):
            for number, (parameter, gradient) in enumerate(zip(model.parameters(), gradients, strict=True)):
                parameter.grad = gradient if number % 2 == rank else None
            optimizer.step()
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            (tmp_path / f"step_{step}").mkdir(exist_ok=True)
            torch.save({**content, "rank": rank, "world_size": 2}, tmp_path / f"step_{step}/rank_{rank}.pt")
    assert "OPT001" not in ids(tmp_path)
    (reason,) = outcomes(tmp_path, "OPT001").undetermined
    assert "split over ranks" in reason
    change(ranks(tmp_path, 2, 0), lambda content: content["optimizer"]["state"][0].pop("exp_avg_sq"))
    assert only(tmp_path).id == "OPT001"


def test_no_state_before_the_first_step(ddp):
    for step in (2, 4):
        shutil.rmtree(ddp / f"step_{step}")

    def begin(content):
        content["optimizer"]["state"].clear()
        content["step"] = 0

    change(ranks(ddp), begin)
    (ddp / "step_6").rename(ddp / "step_0")
    assert ids(ddp) == []
    assert outcomes(ddp, "OPT001").not_applicable == {"the optimizer has not taken a step": 1}


def test_no_state_while_the_loss_scale_is_sought(ddp):
    def skip(content):
        content["optimizer"]["state"].clear()
        content["scaler"] = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 0}

    change(ranks(ddp), skip)
    assert ids(ddp) == []
    (reason,) = outcomes(ddp, "OPT001").undetermined
    assert "skipped" in reason


def test_parameters_without_any_moments_are_a_note(ddp):
    def lose(content):
        for number in (HEAD_WEIGHT, HEAD_BIAS):
            del content["optimizer"]["state"][number]

    change(ranks(ddp), lose)
    finding = only(ddp)
    assert (finding.id, finding.severity) == ("OPT006", Severity.NOTE)
    assert {location.tensor for location in finding.locations} == {"head.weight", "head.bias"}


def test_frozen_parameters_that_were_handed_over_are_no_error(tmp_path):
    def freeze(step, model):
        model[0].requires_grad_(False)

    run = trained(tmp_path, lambda model: torch.optim.AdamW(model.parameters()), before=freeze)
    assert {finding.severity for finding in audited(run).findings} == {Severity.NOTE}


def test_frozen_parameters_that_were_not_handed_over_are_silent(tmp_path):
    named = lambda model: [item for item in model.named_parameters() if not item[0].startswith("0.")]  # noqa: E731
    run = trained(tmp_path, lambda model: torch.optim.AdamW(named(model)))
    assert ids(run) == []
    assert outcomes(run, "OPT001").num_holds == 5


def test_a_parameter_with_a_master_can_not_be_without_moments(megatron):
    files = [*megatron.glob("iter_0000004/*/*.pt")]
    change(files, lambda content: content["optimizer"]["optimizer"]["state"].pop(3))
    finding = only(megatron)
    assert (finding.id, finding.severity) == ("OPT001", Severity.ERROR)
    assert len(finding.locations) == 1


def test_a_flat_group_without_its_second_moment(tmp_path, deepspeed):
    shutil.copytree(TP4, tmp_path / "run")
    files = tmp_path.glob("run/global_step6/*optim_states.pt")
    change(files, lambda c: c["optimizer_state_dict"]["base_optimizer_state"]["state"][1].pop("exp_avg_sq"))
    finding = only(tmp_path / "run")
    assert finding.id == "OPT001"
    assert "3.input_layernorm.weight" in {location.tensor for location in finding.locations}
    assert {location.role for location in finding.locations} == {Role.SECOND_MOMENT}


def test_amsgrad_lost_its_maximum(tmp_path):
    run = trained(tmp_path, OPTIMIZERS["amsgrad"])
    change(ranks(run, 3), lambda content: content["optimizer"]["state"][2].pop("max_exp_avg_sq"))
    assert only(run).id == "OPT001"


def test_chosen_tensors_lack_nothing(tmp_path):
    run = trained(tmp_path, OPTIMIZERS["adafactor"])
    assert ids(run, tensors="1.weight") == []
    assert ids(DDP, tensors="head.*") == []
    run = trained(tmp_path / "largest", OPTIMIZERS["amsgrad"])
    assert ids(run, tensors="*1.weight") == []
    assert outcomes(run, "OPT001", tensors="*1.weight").num_holds == 1
    change(ranks(run, 3), lambda content: content["optimizer"]["state"][2].pop("max_exp_avg_sq"))
    assert ids(run, tensors="*1.weight") == ["OPT001"]


# OPT002: orphans


def test_state_of_a_number_that_no_group_has(ddp):
    def add(content):
        state = content["optimizer"]["state"]
        state[9] = {key: value.clone() for key, value in state[HEAD_BIAS].items()}

    change(ranks(ddp), add)
    finding = only(ddp)
    assert finding.id == "OPT002"
    assert {location.tensor for location in finding.locations} == {"optimizer.state.9"}


def test_megatron_state_of_a_number_that_no_group_has(megatron):
    def add(content):
        state = content["optimizer"]["optimizer"]["state"]
        state[99] = {key: value.clone() for key, value in state[3].items()}

    change(megatron.glob("iter_0000004/*/*.pt"), add)
    assert set(ids(megatron)) == {"OPT002"}


def hand_made(*tensors):
    builder = CatalogBuilder()
    builder.file(File("f"))
    for name, role, dtype, shape in tensors:
        number = builder.tensor(name, role, dtype, shape, 0)
        builder.piece(number, 0, 0, whole(shape), EVERYWHERE)
    return builder.build(1, "", "hand", NO_MESH, {}, ())


def test_master_of_another_shape_and_of_nothing():
    catalog = hand_made(
        ("a", Role.PARAMETER, BFLOAT16, (4, 2)), ("a", Role.MASTER, FLOAT32, (4, 2)),
        ("b", Role.PARAMETER, BFLOAT16, (4,)), ("b", Role.MASTER, FLOAT32, (2,)),
        ("c", Role.MASTER, FLOAT32, (4,)), ("a@pp=1", Role.MASTER, FLOAT32, (4, 2)),
        ("a.exp_inf", Role.MOMENT, FLOAT32, (4, 2)), ("d.exp_inf", Role.MOMENT, FLOAT32, (4, 2)),
    )  # fmt: skip
    judged = state_belongs_to_parameters(StepEvidence(catalog, unobserved(catalog)))
    assert [violation.subject for violation in judged.violations] == ["b", "c", "d.exp_inf"]
    assert judged.num_holds == 3


def test_an_optimizer_saved_by_itself_is_undetermined():
    catalog = hand_made(("a", Role.FIRST_MOMENT, FLOAT32, (4,)), ("a", Role.MASTER, FLOAT32, (4,)))
    judged = state_belongs_to_parameters(StepEvidence(catalog, unobserved(catalog)))
    assert (judged.violations, judged.num_holds) == ((), 0)
    assert judged.undetermined == {"no model was read in this step": ("a", "a")}


def test_parts_of_ranks_are_told_by_their_place():
    catalog = hand_made(("a", Role.PARAMETER, FLOAT32, (2,)), ("a@dp=0,tp=1", Role.FIRST_MOMENT, FLOAT32, (2,)))
    assert KeptState(catalog).state["a"]["exp_avg"] == [1]


# OPT005: hyperparameters


def test_one_data_parallel_rank_has_another_learning_rate(ddp):
    change(ranks(ddp, rank=1), lambda content: content["optimizer"]["param_groups"][0].update(lr=0.02))
    finding = only(ddp)
    assert (finding.id, finding.severity) == ("OPT005", Severity.ERROR)
    assert finding.message == "rank_1.pt: parameter group 0 has lr 0.02, on other ranks 0.01"
    assert places(finding) == {(6, "", None, "step_6/rank_1.pt")}


def test_one_tensor_parallel_rank_decays_otherwise(megatron):
    def by(content):
        content["optimizer"]["optimizer"]["param_groups"][0]["betas"] = [0.9, 0.999]

    change(megatron.glob("iter_0000004/mp_rank_01/*.pt"), by)
    assert ids(megatron) == ["OPT005"]


def test_one_zero_rank_has_another_epsilon(tmp_path, deepspeed):
    shutil.copytree(TP4, tmp_path / "run")

    def by(content):
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["eps"] = 1e-6

    change(tmp_path.glob("run/global_step6/*mp_rank_02_optim_states.pt"), by)
    finding = only(tmp_path / "run")
    assert finding.id == "OPT005"
    assert str(finding.minority[0]) == "pp=0,dp=0,tp=2"


def test_pipeline_stages_may_be_set_differently(tmp_path):
    shutil.copytree(MEGATRON / "tp2_pp2", tmp_path / "run")

    def by(content):
        for group in content["optimizer"]["optimizer"]["param_groups"]:
            group["lr"] = 0.005

    change(tmp_path.glob("run/iter_0000004/mp_rank_*_001/*.pt"), by)
    assert ids(tmp_path / "run") == []


def test_ranks_with_another_number_of_groups(ddp):
    def split(content):
        (group,) = content["optimizer"]["param_groups"]
        numbers = group["params"]
        content["optimizer"]["param_groups"] = [{**group, "params": numbers[:3]}, {**group, "params": numbers[3:]}]

    change(ranks(ddp, rank=1), split)
    assert "OPT005" in ids(ddp)
