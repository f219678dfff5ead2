"""What trainers leave beside the weights: real folders of the Trainer, accelerate and peft, and their known faults."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest

from auditor.adapters.adapter import Folder, Match, Options
from auditor.adapters.hugging_face.adapted import by_layers
from auditor.adapters.hugging_face.adapter import HuggingFace
from auditor.adapters.hugging_face.config import implied
from auditor.adapters.optimizer_index import IndexedState
from auditor.audit import audit
from auditor.model.catalog import Role
from auditor.model.finding import Outcome, Severity
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.testing.adapter_contract import AdapterContract
from tests.adapters.test_dcp import digests
from tests.faults import float32_bits, poke
from tests.paths import ROOT
from tests.rewriting import change

FIXTURES = ROOT / "tests" / "fixtures" / "hugging_face"
ORDERS = json.loads((FIXTURES / "parameter_orders.json").read_text())
ADAPTER = HuggingFace()
ROLES = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "counter"}
RUNS = ("trainer", "trainer_ddp", "accelerate_bin", "accelerate_safetensors", "lora_trainer", "lora_fresh")
FIRST = "model.layers.0.self_attn.q_proj.weight"


def handed_over(kind):
    """Names as the Trainer's optimizer was handed them, by the model itself."""
    found = ORDERS[kind]["parameters"]
    return [name for name, _, decayed in found if decayed] + [name for name, _, decayed in found if not decayed]


NAMES = {
    "trainer": handed_over("LlamaForCausalLM"), "trainer_ddp": handed_over("Qwen2ForCausalLM"),
    "accelerate_bin": [name for name, _, _ in ORDERS["GPT2LMHeadModel"]["parameters"]],
}  # fmt: skip


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (FIXTURES / "trainer" / "checkpoint-6", FIXTURES / "trainer_ddp" / "checkpoint-4",
                   FIXTURES / "accelerate_bin" / "step_4")  # fmt: skip

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        file = next(path / name for name in ("optimizer.pt", "optimizer.bin") if (path / name).exists())
        state = torch.load(file, weights_only=True)["state"]
        return {
            (ROLES[key], NAMES[path.parent.name][number]): tensor.numpy().tobytes()
            for number, kept in state.items()
            for key, tensor in kept.items()
        }


def catalog_of(path):
    store = LocalStore(path)
    folder = Folder.read(store, "")
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match)
    return ADAPTER.read(store, folder, match, Options())


def copied(tmp_path, name):
    shutil.copytree(FIXTURES / name, tmp_path / name)
    return tmp_path / name


def run_of(path, level=Level.VALUES):
    (run,) = audit(LocalStore(path), Settings(level=level), now=1e11).runs
    return run


def found(path):
    """Finding id to the files and details of its places."""
    return {
        finding.id: [(place.file, place.tensor, place.detail) for place in finding.locations]
        for finding in run_of(path).findings
    }


@pytest.fixture
def ddp(tmp_path):
    return copied(tmp_path, "trainer_ddp")


# Healthy


@pytest.mark.parametrize("name", RUNS)
def test_healthy_runs_are_silent(name):
    run = run_of(FIXTURES / name)
    assert not run.findings
    assert run.last_good


def test_optimizer_state_is_judged_by_name_and_replicas_are_stored_once():
    run = run_of(FIXTURES / "trainer_ddp")
    for identifier in ("OPT001", "OPT003", "OPT011", "AUX002", "AUX003"):
        assert run.counts(identifier)[Outcome.HOLDS] > 0, identifier
    assert dict(run.undetermined()).keys() == {
        ("REP001", "stored once along dp: other replicas are not on disk (auditor.hooks witnesses them)"),
        # The Trainer seeds all ranks alike.
        ("AUX004", "several ranks have one random state, as where all were seeded alike or share a part of the model"),
    }
    catalog = catalog_of(FIXTURES / "trainer_ddp" / "checkpoint-4")
    assert str(catalog.mesh) == "dp 2"
    assert catalog.ranks_counted
    assert [group.hyperparameters["weight_decay"] for group in catalog.groups] == [0.1, 0.0]
    assert all(name.endswith(("bias", "norm.weight")) for name in catalog.groups[1].parameters)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_trainers_state_has_one_digest_in_other_layouts(tmp_path):
    """Its weights and optimizer saved by torch once more: a file a rank, as FSDP gathers them, as parts of an index."""
    torch, load = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch").load_file
    path, names = FIXTURES / "trainer_ddp" / "checkpoint-4", NAMES["trainer_ddp"]
    model, saved = load(path / "model.safetensors"), torch.load(path / "optimizer.pt")
    optimizer = {
        "state": {names[number]: kept for number, kept in saved["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]
        ],
    }  # fmt: skip
    for folder in ("ranks/step_4", "gathered/step_4"):
        (tmp_path / folder).mkdir(parents=True)
    for rank in range(2):
        torch.save({"model": model, "optimizer": optimizer}, tmp_path / f"ranks/step_4/rank_{rank}.pt")
    torch.save(model, tmp_path / "gathered/step_4/pytorch_model_fsdp.bin")
    torch.save(optimizer, tmp_path / "gathered/step_4/optimizer.bin")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "index/step_4", no_dist=True)
    first = digests(path)
    assert len(first) == 4 * len(names)
    for layout in ("ranks", "gathered", "index"):
        assert {key: what for key, what in digests(tmp_path / layout / "step_4").items() if key in first} == first, (
            layout
        )


@pytest.mark.parametrize("kind", ORDERS)
def test_the_order_of_parameters_is_that_of_the_model(kind):
    names = [name for name, _, _ in ORDERS[kind]["parameters"]]
    order = [name for name in implied(ORDERS[kind]["config"], names).order if name in names]
    assert order == names


def test_where_no_order_is_known_nothing_is_claimed():
    path = FIXTURES / "accelerate_safetensors"
    catalog = catalog_of(path / "step_4")
    moments = [tensor for tensor in catalog.tensors if tensor.role is not Role.PARAMETER]
    assert moments
    assert all(tensor.undetermined for tensor in moments)
    assert all(group.parameters is None for group in catalog.groups)
    reasons = [reason for identifier, reason in run_of(path).undetermined() if identifier == "OPT001"]
    assert any("keep no order" in reason for reason in reasons)


@pytest.mark.parametrize("rows", [(8, 4, 12), (8, 8, 12)])
def test_adapted_modules_are_told_by_the_shapes_of_their_state(rows):
    """PEFT hands them over as they lie in the model, files keep names by the alphabet; alike ones are not told."""
    modules = [(f"m.layers.{n}.{name}", count) for n in (0, 1, 10) for name, count in zip("qvu", rows, strict=True)]
    factors = {"A": lambda _: (2, 16), "B": lambda count: (count, 2)}
    names = {f"{at}.lora_{part}.weight": shape(count) for at, count in modules for part, shape in factors.items()}
    kept = {number: {"exp_avg": SimpleNamespace(shape=shape)} for number, shape in enumerate(names.values())}
    state = IndexedState(({}, {}), (tuple(range(18)), ()), kept)
    order = by_layers(dict(sorted(names.items())), state)
    assert order == (None if rows[0] == rows[1] else (tuple(names), ()))


EMBEDDING = "model.embed_tokens.weight"


def weights(path, by):
    """Let ``by`` change the weights of one save."""
    numpy = pytest.importorskip("safetensors.numpy")
    file = path / "model.safetensors"
    held = {name: array.copy() for name, array in numpy.load_file(file).items()}
    by(held)
    numpy.save_file(held, file, {"format": "pt"})


def weights_of(path):
    return pytest.importorskip("safetensors.numpy").load_file(path / "model.safetensors")


def test_the_end_of_a_schedule_hides_no_weight_that_stands_still(tmp_path):
    """The rate that is recorded there is zero, that of the save before is of the next step."""
    run = copied(tmp_path, "trainer")
    assert {group.hyperparameters["lr"] for group in catalog_of(run / "checkpoint-6").groups} == {0.0}
    old = weights_of(run / "checkpoint-3")
    weights(run / "checkpoint-6", lambda held: held.update({EMBEDDING: old[EMBEDDING]}))
    (finding,) = run_of(run).findings
    assert (finding.id, {place.tensor for place in finding.locations}) == ("MOT001", {EMBEDDING})
    weights(run / "checkpoint-6", lambda held: held.update(old))
    assert [item.id for item in run_of(run).findings] == ["MOT004"]


def test_rates_that_only_fell_bound_what_a_weight_may_have_moved(tmp_path):
    run = copied(tmp_path, "trainer")
    weights(run / "checkpoint-6", lambda held: held[EMBEDDING][3].fill(0))
    finding = run_of(run).findings[0]
    assert (finding.id, finding.severity) == ("MOT010", Severity.WARNING)
    assert "if the learning rate was never above 2.5e-05" in finding.message
    assert {place.first_index[0] for place in finding.locations} == {3}


@pytest.mark.parametrize(("of", "to"), [(3, 6), (6, 3)])
def test_the_state_file_of_another_step_is_one_finding_that_names_it(tmp_path, of, to):
    """By the folder's name and the schedule it is step 3; it was listed as a second step 6, and three files accused."""
    run = copied(tmp_path, "trainer")
    shutil.copy(run / f"checkpoint-{of}" / "trainer_state.json", run / f"checkpoint-{to}")
    assert found(run) == {"INT005": [(f"checkpoint-{to}/trainer_state.json", "", ANY)]}
    assert run_of(run).last_good.step == of


def test_rates_that_were_not_logged_or_rose_bound_nothing(tmp_path):
    rising, single = ([{"step": step, "learning_rate": step * 1e-5} for step in range(1, last)] for last in (7, 2))
    for name, history in (("rising", rising), ("single", single), ("none", None)):
        run = copied(tmp_path / name, "trainer")
        state = run / "checkpoint-6" / "trainer_state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "log_history": history}))
        assert not {s.name for s in catalog_of(run / "checkpoint-6").scalars} & {"rates_fall_since"}
        assert not run_of(run).findings


def without_state(content):
    """The embedding lost its state."""
    del content["state"][0]


def not_handed_over(content):
    """The optimizer does not have the embedding."""
    without_state(content)
    content["param_groups"][0]["params"].remove(0)


def at_rest(ddp):
    """Both saves hold one embedding."""
    weights(ddp / "checkpoint-4", lambda held: held.update({EMBEDDING: weights_of(ddp / "checkpoint-2")[EMBEDDING]}))


@pytest.mark.parametrize("lose", [not_handed_over, without_state])
def test_what_is_frozen_has_no_state_and_all_else_is_judged(ddp, lose):
    at_rest(ddp)
    change(ddp.glob("*/optimizer.pt"), lose)
    run = run_of(ddp)
    assert {item.id for item in run.findings} == ({"OPT006"} if lose is without_state else set())
    for identifier in ("OPT001", "OPT002", "OPT013", "MOT001", "MOT009"):
        assert run.counts(identifier)[Outcome.HOLDS] >= 13, identifier
        assert not run.counts(identifier)[Outcome.UNDETERMINED], identifier


@pytest.mark.parametrize("lose", [not_handed_over, without_state])
def test_what_lost_its_state_and_moves_is_no_frozen_parameter(ddp, lose):
    change([ddp / "checkpoint-4" / "optimizer.pt"], lose)
    (finding,) = run_of(ddp).findings
    assert (finding.id, finding.severity) == ("OPT001", Severity.ERROR)
    assert {(place.step, place.tensor) for place in finding.locations} == {(4, EMBEDDING)}
    assert "which it had in step 2, though it moved" in finding.message


def test_what_moves_and_never_had_state_is_a_warning_where_it_was_handed_over(ddp):
    change(ddp.glob("*/optimizer.pt"), without_state)
    finding, note = run_of(ddp).findings
    assert (finding.id, finding.severity, note.id) == ("OPT001", Severity.WARNING, "OPT006")
    assert [place.step for place in finding.locations] == [4]


def test_which_of_several_of_one_shape_are_trained_stays_undetermined(ddp):
    def frozen(content):
        # One of a layer's two norms: the bias after them has their shape as well.
        content["param_groups"][1]["params"].remove(19)
        del content["state"][19]

    change(ddp.glob("*/optimizer.pt"), frozen)
    assert not found(ddp)
    run = run_of(ddp)
    (open_questions,) = [count for (item, reason), count in run.undetermined().items() if item == "MOT010"]
    assert open_questions == 2
    assert run.counts("MOT010")[Outcome.HOLDS] == 24
    # What needs no name is judged of it, too.
    assert run.counts("MOT009")[Outcome.HOLDS] == 26


def test_skipped_steps_are_no_fault_where_gradients_are_scaled(ddp):
    torch = pytest.importorskip("torch")
    for step in (2, 4):
        torch.save({"scale": 65536.0, "growth_tracker": 1}, ddp / f"checkpoint-{step}" / "scaler.pt")

    def behind(content):
        for kept in content["state"].values():
            kept["step"] -= 1

    change(ddp.glob("*/optimizer.pt"), behind)
    change(ddp.glob("*/scheduler.pt"), lambda content: content.update(last_epoch=content["last_epoch"] - 1))
    assert not found(ddp)


def test_a_schedule_of_another_pace_is_not_judged(ddp):
    change(ddp.glob("*/scheduler.pt"), lambda content: content.update(last_epoch=0, num_bad_epochs=0))
    assert not found(ddp)
    assert run_of(ddp).counts("AUX002")[Outcome.HOLDS] == 0


# Faults


def test_a_schedule_stepped_twice(ddp):
    change([ddp / "checkpoint-4" / "scheduler.pt"], lambda content: content.update(last_epoch=8))
    (place,) = found(ddp).pop("AUX002")
    assert place == ("checkpoint-4/scheduler.pt", "",
                     "has its schedule at step 8, the optimizer's state is of step 4")  # fmt: skip
    assert list(found(ddp)) == ["AUX002"]


def test_a_schedule_that_began_anew(ddp):
    change([ddp / "checkpoint-4" / "scheduler.pt"], lambda content: content.update(last_epoch=0))
    assert list(found(ddp)) == ["AUX002"]


def test_an_optimizer_that_began_anew(ddp):
    def anew(content):
        for kept in content["state"].values():
            kept["step"].fill_(1)

    change([ddp / "checkpoint-4" / "optimizer.pt"], anew)
    assert found(ddp)["AUX003"][0][0] == "checkpoint-4/optimizer.pt"


def test_the_optimizers_file_of_another_step(ddp):
    shutil.copy(ddp / "checkpoint-2" / "optimizer.pt", ddp / "checkpoint-4" / "optimizer.pt")
    run = run_of(ddp)
    told = {identifier for finding in run.findings for identifier in (finding.id, *finding.consequences)}
    assert "AUX003" in told
    assert run.last_good.step == 2
    assert "checkpoint-4/optimizer.pt" in {place.file for one in run.findings for place in one.locations}


def test_moments_of_two_parameters_exchanged(ddp):
    """Shapes differ, so it shows: fairscale#380."""

    def exchange(content):
        state = content["state"]
        state[0], state[1] = state[1], state[0]

    change([ddp / "checkpoint-4" / "optimizer.pt"], exchange)
    run = run_of(ddp)
    reasons = {reason for identifier, reason in run.undetermined() if identifier == "OPT001"}
    # Two groups: another order could explain it, so nothing is claimed of any parameter.
    assert "shapes of the optimizer's state fit no known order of the model's parameters" in reasons


def test_no_moments_at_all(ddp):
    """huggingface/transformers#23034: weights are there, the optimizer's state is not."""
    change(ddp.glob("*/optimizer.pt"), lambda content: content["state"].clear())
    assert {tensor for _, tensor, _ in found(ddp)["OPT001"]} == set(NAMES["trainer_ddp"])


def test_an_optimizer_that_has_not_taken_a_step_has_no_moments(ddp):
    """Gradients overflowed so far: the twin of the one above."""
    torch = pytest.importorskip("torch")
    for step in (2, 4):
        torch.save({"scale": 1024.0, "growth_tracker": 0}, ddp / f"checkpoint-{step}" / "scaler.pt")
    change(ddp.glob("*/optimizer.pt"), lambda content: content["state"].clear())
    change(ddp.glob("*/scheduler.pt"), lambda content: content.update(last_epoch=0))
    assert not found(ddp)


def test_moments_of_some_parameters_lost(ddp):
    def lose(content):
        for number in (3, 4, 5):
            del content["state"][number]["exp_avg_sq"]

    change([ddp / "checkpoint-4" / "optimizer.pt"], lose)
    names = {tensor for _, tensor, _ in found(ddp)["OPT001"]}
    assert names == set(NAMES["trainer_ddp"][3:6])


def test_nan_in_a_moment_is_told_by_its_parameter(ddp):
    poke(ddp, 4, FIRST, "second_moment", value=float32_bits(np.nan))
    ((file, tensor, _),) = found(ddp)["NUM001"]
    assert (file, tensor) == ("checkpoint-4/optimizer.pt", FIRST)


def test_one_ranks_random_state_copied_over_anothers(ddp):
    folder = ddp / "checkpoint-4"
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    ((file, _, detail),) = found(ddp)["INT006"]
    assert file == "checkpoint-4/rng_state_1.pth"
    assert "rng_state_0" in detail


@pytest.mark.parametrize(("streams", "outcome", "files"), [
    ((0, 1, 2, 3), Outcome.HOLDS, set()),
    ((0, 1, 2, 1), Outcome.VIOLATED, {"checkpoint-4/rng_state_3.pth"}),
    # All seeded alike; tensor-parallel ranks that draw the same; a first rank that logs.
    ((0, 0, 0, 0), Outcome.UNDETERMINED, set()),
    ((0, 0, 1, 1), Outcome.UNDETERMINED, set()),
    ((0, 1, 1, 1), Outcome.UNDETERMINED, set()),
])  # fmt: skip
def test_random_states_that_ranks_share(ddp, streams, outcome, files):
    torch = pytest.importorskip("torch")
    shutil.rmtree(ddp / "checkpoint-2")
    state = torch.load(ddp / "checkpoint-4" / "rng_state_0.pth", weights_only=False)
    for rank, stream in enumerate(streams):
        state["cpu"] = torch.full_like(state["cpu"], stream)
        torch.save(state, ddp / "checkpoint-4" / f"rng_state_{rank}.pth")
    run = run_of(ddp, Level.HEADERS)
    assert run.counts("AUX004")[outcome]
    assert {place.file for finding in run.findings for place in finding.locations} == files
    assert {(finding.id, finding.severity) for finding in run.findings} <= {("AUX004", Severity.WARNING)}
    assert run.last_good


@pytest.mark.parametrize("name", ["rng_state_0.pth", "scheduler.pt", "optimizer.pt"])
def test_a_file_that_is_not_there(ddp, name):
    (ddp / "checkpoint-4" / name).unlink()
    run = run_of(ddp)
    assert {place.file for one in run.findings for place in one.locations} == {f"checkpoint-4/{name}"}
    assert run.last_good.step == 2


def test_the_last_ranks_random_state_is_not_there(ddp):
    (ddp / "checkpoint-4" / "rng_state_1.pth").unlink()
    assert list(found(ddp)) == ["INT013"]


def test_a_random_state_of_an_older_save_by_one_process(ddp):
    shutil.copy(FIXTURES / "trainer" / "checkpoint-6" / "rng_state.pth", ddp / "checkpoint-4")
    run = run_of(ddp)
    (finding,) = run.findings
    assert (finding.id, finding.severity) == ("INT009", Severity.WARNING)


def test_killed_while_saving(ddp):
    """huggingface/transformers#35782: the newest folder has the weights, and not what is written last."""
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"):
        (ddp / "checkpoint-4" / name).unlink()
    run = run_of(ddp)
    assert [place.file for one in run.findings for place in one.locations] == ["checkpoint-4/trainer_state.json"]
    assert run.last_good.step == 2
    # Alone, it may as well be an export.
    assert not run_of(ddp / "checkpoint-4").findings


@pytest.mark.parametrize("keep", [0.0, 0.98])
def test_the_optimizers_file_cut_short(ddp, keep):
    file = ddp / "checkpoint-4" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    run = run_of(ddp)
    assert {place.file for one in run.findings for place in one.locations} == {"checkpoint-4/optimizer.pt"}
    assert run.last_good.step == 2


def test_no_optimizer_in_the_optimizers_file(ddp):
    torch = pytest.importorskip("torch")
    torch.save([1], ddp / "checkpoint-4" / "optimizer.pt")
    assert found(ddp)["MET002"][0][0] == "checkpoint-4/optimizer.pt"


def test_a_rank_number_beyond_all_others_costs_nothing(ddp):
    torch = pytest.importorskip("torch")
    torch.save({}, ddp / "checkpoint-4" / "rng_state_999999.pth")
    assert "MET002" in found(ddp)
