# ruff: noqa: E501
"""Faults that people met with DeepSpeed's checkpoints, each with its healthy twin, on what DeepSpeed wrote.

``python -m tests.adapters.test_deepspeed_faults`` prints the list: public case, what is found, where.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import auditor
from auditor.audit import audit
from auditor.errors import NothingToAuditError
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.union import UnionStore
from tests.paths import ROOT
from tests.rewriting import change, deepspeed, stand_in_for_deepspeed  # noqa: F401

torch = pytest.importorskip("torch")

FIXTURES = ROOT / "tests" / "fixtures" / "deepspeed"
pytestmark = pytest.mark.usefixtures("deepspeed")


def run_of(tmp_path, name):
    shutil.copytree(FIXTURES / name, tmp_path / "run")
    return tmp_path / "run"


def found(run, **settings):
    """(id, severity) of every finding that is more than a note, with the names and files of its places."""
    chosen = Settings(settle_seconds=0, **settings)
    report = audit(LocalStore(run) if isinstance(run, Path) else run, chosen).runs[0]
    return {
        finding.id: {(location.tensor, location.file.rpartition("/")[2]) for location in finding.locations}
        for finding in report.findings
        if finding.severity.name != "NOTE"
    }


def torch_bytes(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def rewritten(path, by):
    """Save a file again as torch saves to its path; ``by`` changes what it holds."""
    change([path], by)


def exported(run, by):
    """The 16-bit weights in a Trainer's folder, changed."""
    from safetensors.torch import load_file, save_file

    path = run / "checkpoint-4" / "model.safetensors"
    weights = load_file(path)
    by(weights)
    save_file(weights, path, {"format": "pt"})


WEIGHT, OTHER = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


def emptied(weights):
    for name in weights:
        if "norm" not in name:
            weights[name] = torch.empty(0, dtype=torch.bfloat16)


def in_module_order(weights):
    """Flat buffers cut by another order of parameters: all values are there, elsewhere."""
    names = [name for name in weights if "norm" not in name]
    flat = torch.cat([weights[name].flatten() for name in reversed(names)])
    at = 0
    for name in names:
        count = weights[name].numel()
        weights[name] = flat[at : at + count].reshape(weights[name].shape).clone()
        at += count


def dropped(weights):
    """Taken for tied, since they were views of one flat buffer; a norm of which one rank's half was saved."""
    for layer in (0, 1):
        del weights[f"model.layers.{layer}.mlp.down_proj.weight"]
    weights[NORM] = weights[NORM][:8].clone()


def zeros(run, step=6):
    return sorted((run / f"global_step{step}").glob("*optim_states.pt"))


def of_another_model(run):
    """Weights were loaded, the optimizer kept the masters that it was made with."""

    def fresh(content):
        state = content["optimizer_state_dict"]
        for flat in state["single_partition_of_fp32_groups"]:
            flat.data.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(3)))

    for path in zeros(run):
        rewritten(path, fresh)


def renumbered(run, old, new):
    """The step is called another: few steps say little of counters and of what must be there."""
    change((run / f"global_step{old}").glob("*model_states.pt"), lambda content: content.update(global_steps=new))
    (run / f"global_step{old}").rename(run / f"global_step{new}")
    (run / "latest").write_text(f"global_step{new}")


def without_state(run):
    path = run / "global_step2" / "mp_rank_00_model_states.pt"
    rewritten(path, lambda content: content["optimizer"]["optimizer_state_dict"].update(state={}))
    renumbered(run, 2, 2000)


def saturated(run):
    def narrow(content):
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = torch.tensor(256.0, dtype=torch.bfloat16)

    for path in zeros(run):
        rewritten(path, narrow)
    shutil.rmtree(run / "global_step3")
    renumbered(run, 6, 300)


def reordered_universal(run):
    """Rank files joined in the order of text, as with more than ten ranks: blocks change places."""

    def swap(content):
        flat = content["param"].flatten()
        content["param"] = torch.cat([flat[120:240], flat[:120], flat[240:]]).reshape(content["param"].shape)

    rewritten(run / "global_step2_universal" / "zero" / "embed.wte.weight" / "fp32.pt", swap)


def universal(tmp_path):
    run = run_of(tmp_path, "same_zero2_dp3")
    shutil.copytree(FIXTURES / "same_universal_from_zero2", run, dirs_exist_ok=True)
    return run


def with_export(tmp_path):
    run = run_of(tmp_path, "zero2_bf16")
    shutil.copytree(FIXTURES / "exported", run / "fp32")
    return run


def of_export(run, by):
    rewritten(run / "fp32" / "pytorch_model.bin", by)


def experts_of_half(run):
    """Each expert-parallel rank counted its experts from 0, so that later files were written over earlier ones."""
    for expert in (2, 3):
        (run / "global_step2" / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt").unlink()


def cut_flat(run):
    """A partition that lacks elements: every later parameter would be another's."""

    def shorter(content):
        flats = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flats[0] = flats[0].detach()[:-8].clone()

    rewritten(zeros(run)[0], shorter)


def other_schedule(run):
    path = run / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    rewritten(path, lambda content: content["lr_scheduler"].update(last_epoch=1))


def stepped_twice(run):
    """Its schedule is stepped by the engine and once more by the script."""
    for path in run.glob("global_step*/mp_rank_00_model_states.pt"):
        rewritten(path, lambda content: content["lr_scheduler"].update(last_epoch=2 * content["global_steps"]))


def optimizer_at(run, step):
    """The optimizer counts another step than engine and Trainer."""

    def counted(content):
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = torch.tensor(float(step))

    for path in run.rglob("*optim_states.pt"):
        if "global_step3" not in str(path):
            rewritten(path, counted)


def of_the_trainer(run, **values):
    path = run / "checkpoint-4" / "scheduler.pt"
    rewritten(path, lambda content: content.update(values))


def engine_at(run, step):
    rewritten(run / "checkpoint-4" / "global_step4" / MP, lambda content: content.update(global_steps=step))


def copy(run, source, target):
    shutil.copy(run / source, run / target)


MP = "mp_rank_00_model_states.pt"
ZERO = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
CASES = {
    # name: (public case, fixture, damage, id, some of the places)
    "an export of empty shells": ("transformers#20082", "trainer_zero3", lambda run: exported(run, emptied), "COV002", {(WEIGHT, "model.safetensors")}),
    "an export in another order": ("DeepSpeed#1165", "trainer_zero3", lambda run: exported(run, in_module_order), "REF001", {(f"{WEIGHT}@model.safetensors", "model.safetensors")}),
    "an export in another order, beside stage 2": ("DeepSpeed#1165", "trainer_zero2", lambda run: exported(run, in_module_order), "REF001", {(f"{WEIGHT}@model.safetensors", "model.safetensors")}),
    "an export of zeros": ("DeepSpeed#1240", "trainer_zero3", lambda run: exported(run, lambda w: w[WEIGHT].zero_()), "REF001", {(f"{WEIGHT}@model.safetensors", "model.safetensors")}),
    "an export that lacks what shared a buffer": ("transformers#28630", "trainer_zero3", lambda run: exported(run, dropped), "COV003", {("model.layers.0.mlp.down_proj.weight", "model.safetensors")}),
    "half a norm in an export": ("transformers#27293", "trainer_zero3", lambda run: exported(run, dropped), "MET003", {(NORM, "model.safetensors")}),
    "masters of another model": ("DeepSpeed#762", "zero2_bf16", of_another_model, "CST001", {("embed.wte.weight", MP)}),
    "no moments without ZeRO": ("DeepSpeed#7786", "zero0_bf16", without_state, "OPT001", {("embed.wte.weight", MP)}),
    "a schedule that is stepped twice": ("slime#1547", "zero2_bf16", stepped_twice, "AUX002", {("", MP)}),
    "a Trainer's schedule that is stepped twice": ("slime#1547", "trainer_zero2", lambda run: of_the_trainer(run, last_epoch=8), "AUX002", {("", "scheduler.pt")}),
    "an optimizer that began anew under the Trainer": ("DeepSpeed#6691", "trainer_zero2", lambda run: optimizer_at(run, 1), "AUX003", {("", ZERO.format(0))}),
    "an optimizer that began anew": ("DeepSpeed#5289", "zero2_bf16", lambda run: optimizer_at(run, 1), "MOT006", {("", ZERO.format(0))}),
    "an optimizer of another step than the engine": ("DeepSpeed#5289", "zero1_bf16", lambda run: optimizer_at(run, 1), "AUX003", {("", ZERO.format(0))}),
    "an engine that counts otherwise than its Trainer": ("DeepSpeed#5289", "trainer_zero2", lambda run: engine_at(run, 2), "INT005", {("", MP)}),
    "a counter that can't count on": ("DeepSpeed#8496", "zero2_bf16", saturated, "OPT004", set()),
    "experts of half of the ranks": ("DeepSpeed#5157", "zero1_moe", experts_of_half, "INT001", {("", "layer_0_expert_2_mp_rank_00_model_states.pt")}),
    "a partition cut short": ("DeepSpeed#1380", "zero2_bf16", cut_flat, "MET002", {("", ZERO.format(0))}),
    "an empty model file": ("metaseq#53", "zero2_bf16", lambda run: (run / "global_step6" / MP).write_bytes(b""), "INT002", {("", MP)}),
    "a partition missing": ("transformers#35782", "zero3_bf16", lambda run: (run / "global_step6" / ZERO.format(1)).unlink(), "INT001", {("", ZERO.format(1))}),
    "a partition of another step": ("DeepSpeed#5289", "zero2_bf16", lambda run: copy(run, f"global_step3/{ZERO.format(1)}", f"global_step6/{ZERO.format(1)}"), "INT005", {("", ZERO.format(1))}),
    "a partition of another rank": ("DeepSpeed#5342", "zero3_bf16", lambda run: copy(run, f"global_step6/{ZERO.format(0)}", f"global_step6/{ZERO.format(1)}"), "INT006", {("", ZERO.format(1))}),
    "a partition of more ranks than there are": ("diffusers#14769", "zero2_bf16", lambda run: copy(run, f"global_step6/{ZERO.format(1)}", f"global_step6/{ZERO.format(2)}"), "INT009", {("", ZERO.format(2))}),
    "a model file of another step": ("DeepSpeed#6691", "zero3_bf16", lambda run: copy(run, "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt", "global_step6/zero_pp_rank_1_mp_rank_00_model_states.pt"), "INT005", {("", "zero_pp_rank_1_mp_rank_00_model_states.pt")}),
    "a pointer to nothing": ("KempnerForge#102", "zero2_bf16", lambda run: (run / "latest").write_text("global_step9"), "INT003", {("", "latest")}),
    "a Trainer's pointer to nothing": ("transformers#35782", "trainer_zero2", lambda run: shutil.rmtree(run / "checkpoint-4" / "global_step4"), "INT004", {("", MP)}),
    "a Trainer that counts otherwise": ("DeepSpeed#5289", "trainer_zero2", lambda run: (run / "checkpoint-4" / "trainer_state.json").write_text(json.dumps({"global_step": 3})), "INT005", {("", "trainer_state.json")}),
    "random states of one rank alone": ("transformers#35782", "trainer_zero2", lambda run: (run / "checkpoint-4" / "rng_state_1.pth").unlink(), "INT004", {("", "rng_state_1.pth")}),
    "a schedule that is another rank's": (
        "DeepSpeed#5289", "zero3_subgroups", other_schedule, "MET002", {("", "zero_pp_rank_1_mp_rank_00_model_states.pt")},
    ),
    "a pipeline's layer missing": (
        "DeepSpeed#3588", "pipeline_zero1_fp16",
        lambda run: (run / "global_step2" / "layer_02-model_states.pt").unlink(), "INT001",
        {("", "layer_02-model_states.pt")},
    ),
    "a pipeline's stage missing": (
        "transformers#35782", "pipeline_zero1_fp16",
        lambda run: (run / "global_step2" / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink(), "INT001",
        {("", "zero_pp_rank_1_mp_rank_01_optim_states.pt")},
    ),
    "a pipeline's layer of another one": (
        "transformers#24381", "pipeline_zero1_fp16",
        lambda run: copy(run, "global_step2/layer_01-model_states.pt", "global_step2/layer_02-model_states.pt"), "INT006",
        {("", "layer_02-model_states.pt")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_public_case_is_found_in_its_place(tmp_path, name):
    _, fixture, damage, expected, places = CASES[name]
    run = run_of(tmp_path, fixture)
    before = found(run)
    damage(run)
    after = found(run)
    assert before == {}
    assert expected in after, after
    assert places <= after[expected], after[expected]


def test_universal_blocks_in_the_order_of_text(tmp_path):
    """DeepSpeed#5342; its twin is the universal checkpoint as DeepSpeed made it, beside its source."""
    run = universal(tmp_path)
    assert found(run) == {}
    reordered_universal(run)
    assert found(run)["REF001"] == {("embed.wte.weight", "fp32.pt")}


def test_universal_that_lacks_layers(tmp_path):
    """DeepSpeed#3588: the converter knew fewer layers than the model has."""
    run = universal(tmp_path)
    for name in ("blocks.1.rise.weight", "blocks.1.fall.weight"):
        shutil.rmtree(run / "global_step2_universal" / "zero" / name)
    lost = found(run)["INT001"]
    assert {("", name) for name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt")} == lost


def test_an_export_without_its_tied_head(tmp_path):
    """DeepSpeed#1896; with a configuration that ties the two it may lack it."""
    run = with_export(tmp_path)
    assert found(run) == {}
    of_export(run, lambda content: content.pop("head.weight"))
    assert found(run) == {"REF001": {("head.weight", "pytorch_model.bin")}}
    (run / "fp32" / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "model_type": "mine"}))
    assert found(run) == {}


def test_an_export_whose_parameters_changed_places(tmp_path):
    """DeepSpeed#1317: of equal shapes, which no loader sees."""
    run = with_export(tmp_path)

    def swap(content):
        one, other = "blocks.0.rise.weight", "blocks.1.rise.weight"
        content[one], content[other] = content[other].clone(), content[one].clone()

    of_export(run, swap)
    names = {f"blocks.{layer}.rise.weight@pytorch_model.bin" for layer in (0, 1)}
    assert found(run) == {"REF001": {(name, "pytorch_model.bin") for name in names}}


def test_an_export_of_an_earlier_step_is_none_of_this_one(tmp_path):
    """Training went on after it was made: nothing is wrong."""
    run = with_export(tmp_path)
    (run / "latest").write_text("global_step3")
    assert "REF001" not in found(run)


def test_identical_experts(tmp_path):
    """DeepSpeed#6589: both halves of the experts are those of the first rank; their twin has its own."""
    run = run_of(tmp_path, "zero1_moe")
    assert found(run) == {}
    step = run / "global_step2"
    for expert in (2, 3):
        other = torch.load(step / f"layer_0_expert_{expert - 2}_mp_rank_00_model_states.pt")

        def of_other(content, expert=expert, other=other):
            for name in content:
                content[name] = other[name.replace(f"experts.{expert}.", f"experts.{expert - 2}.")].clone()

        rewritten(step / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt", of_other)
    assert found(run).keys() == {"CST001"}
    for rank in (1, 3):
        other = torch.load(step / ZERO.format(rank - 1), weights_only=False)["optimizer_state_dict"]

        def of_neighbour(content, other=other):
            mine = content["optimizer_state_dict"]
            mine["single_partition_of_fp32_groups"][1] = other["single_partition_of_fp32_groups"][1].detach().clone()
            mine["base_optimizer_state"]["state"][1] = other["base_optimizer_state"]["state"][1]

        rewritten(step / ZERO.format(rank), of_neighbour)
    assert found(run).keys() == {"OPT013"}


def test_nodes_that_point_to_different_steps(tmp_path):
    """LlamaFactory#655: local disks, of which one kept its pointer."""
    roots = []
    for node, files in enumerate(((0,), (1,))):
        root = tmp_path / f"node{node}"
        for step in (3, 6):
            (root / f"global_step{step}").mkdir(parents=True)
            for path in (FIXTURES / "zero3_bf16" / f"global_step{step}").iterdir():
                if any(f"pp_rank_{rank}_" in path.name for rank in files):
                    shutil.copy(path, root / f"global_step{step}")
        (root / "latest").write_text("global_step6")
        roots.append(root)
    assert found(UnionStore([LocalStore(root) for root in roots])) == {}
    (roots[1] / "latest").write_text("global_step3")
    (report,) = audit(UnionStore([LocalStore(root) for root in roots])).runs
    assert [finding.id for finding in report.findings] == ["INT016"]
    assert report.last_good.step == 6


def test_a_single_file_lacks_nothing():
    """What belongs to it is not known: its weights are judged, nothing else is missed."""
    for path, count in (
        (FIXTURES / "zero2_bf16" / "global_step6" / MP, 20),
        (FIXTURES / "zero0_bf16" / "global_step2" / MP, 92),
    ):
        (report,) = auditor.check(str(path)).runs
        assert report.findings == []
        assert report.coverage.num_tensors == count


# Records that lie

LIES = {
    "dp_world_size": (1 << 19, 0, -1, "many", 3),
    "mp_world_size": (1 << 19, 7),
    "global_steps": (-1, 1 << 60, "six", None),
    "param_shapes": (
        None,
        [],
        [{}],
        [{"embed.wte.weight": torch.Size([1 << 30, 1 << 30])}],
        {"a": torch.Size([3])},
        [[1]],
    ),
    "frozen_param_shapes": ([1], {"embed.wpe.weight": torch.Size([8, 12])}),
    "buffer_names": (7, [None, 3]),
    "shared_params": ([1], {1: 2}),
    "num_experts": ([1 << 15] * 40, [-1], "four", [5], [1]),
    "module": ({}, {"embed.wte.weight": torch.zeros(0)}),
    "optimizer": (3, {"state": {0: 1}, "param_groups": [{"params": [0] * 9}]}, {"optimizer_state_dict": []}),
}


@pytest.mark.parametrize("fixture", ["zero2_bf16", "zero3_frozen", "zero1_moe", "zero0_moe"])
@pytest.mark.parametrize("key", LIES)
def test_a_lie_is_judged_and_never_raised(tmp_path, fixture, key):
    run = run_of(tmp_path, fixture)
    step = max(int(path.name.removeprefix("global_step")) for path in run.glob("global_step*"))
    path = min((run / f"global_step{step}").glob("*mp_rank_00_model_states.pt"))
    whole = path.read_bytes()
    for lie in LIES[key]:
        rewritten(path, lambda content, lie=lie: content.update({key: lie}))
        with contextlib.suppress(NothingToAuditError):  # A single file that records no step is no checkpoint.
            audit(LocalStore(run), Settings(level=Level.HEADERS, settle_seconds=0))
        path.write_bytes(whole)


@pytest.mark.parametrize("fixture", ["zero2_bf16", "zero3_bf16", "zero1_moe"])
def test_lies_of_a_zero_file(tmp_path, fixture):
    run = run_of(tmp_path, fixture)
    path = max((run / "global_step2").glob("*optim_states.pt"), default=None) or max(zeros(run))
    whole = path.read_bytes()
    for key, lie in (
        ("partition_count", [0, -3]), ("partition_count", 1 << 40), ("param_alignment_paddings", [[1 << 50]]),
        ("param_alignment_paddings", [[1] * 6, [1] * 12]), ("single_partition_of_fp32_groups", [torch.zeros(3, 3)]),
        ("fp32_flat_groups", [torch.zeros(1 << 10)] * 99), ("base_optimizer_state", []), ("loss_scaler", 7),
        ("optimizer_state_dict", {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": 4}), ("group_paddings", 1),
        ("param_slice_mappings", [{"x": 1}]),
    ):  # fmt: skip
        rewritten(path, lambda content, key=key, lie=lie: content["optimizer_state_dict"].update({key: lie}))
        audit(LocalStore(run), Settings(level=Level.HEADERS, settle_seconds=0))
        path.write_bytes(whole)


# What users met that is no fault


def test_padding_may_hold_anything(tmp_path):
    """NVIDIA/Megatron-LM#6743: it is not initialised."""
    run = run_of(tmp_path, "zero3_bf16")

    def poison(content):
        state = content["optimizer_state_dict"]
        for group, flat in enumerate(state["fp32_flat_groups"]):
            kept = state["optimizer_state_dict"]["state"][group]
            if group == 1:  # The second group has parameters of one element, of which rank 1 has none but padding.
                for one in (flat.data, kept["exp_avg"], kept["exp_avg_sq"]):
                    one[12] = float("nan")

    rewritten(run / "global_step6" / ZERO.format(1), poison)
    assert found(run) == {}


@pytest.mark.parametrize("shape", [(0,), (1,)])
def test_placeholders_of_stage_3_are_legal(tmp_path, shape):
    """DeepSpeed#1394, #4295: older ones have one element."""
    run = run_of(tmp_path, "zero3_bf16")

    def shells(content):
        for name in content["module"]:
            if name not in content["buffer_names"] and "gain" not in name:
                content["module"][name] = torch.ones(shape, dtype=torch.bfloat16)

    change((run / "global_step6").glob("*model_states.pt"), shells)
    assert found(run) == {}


@pytest.mark.parametrize(("setting", "reason"), [
    ({"mics_shard_size": 1}, "mics_shard_size"), ({"offload_optimizer": {"device": "nvme"}}, "offloaded to NVMe"),
])  # fmt: skip
def test_state_that_lies_elsewhere_is_undetermined(tmp_path, setting, reason):
    """By DeepSpeed's sources: MiCS and NVMe run on no CPU."""
    run = run_of(tmp_path, "zero3_bf16")
    change(run.rglob("*model_states.pt"), lambda content: content["ds_config"]["zero_optimization"].update(setting))
    if "offload_optimizer" in setting:
        change(run.rglob("*optim_states.pt"), lambda content: content["optimizer_state_dict"].update(
            fp32_flat_groups=[], optimizer_state_dict={"state": {}, "param_groups": []}
        ))  # fmt: skip
    (report,) = audit(LocalStore(run), Settings()).runs
    assert report.findings == []
    assert any(reason in told for _, told in report.undetermined())


def test_an_optimizer_that_counts_sub_groups_is_no_fault(tmp_path):
    """As the fused Adam of older versions did in stage 3."""
    run = run_of(tmp_path, "zero1_bf16")
    optimizer_at(run, 6)
    assert not {"AUX002", "AUX003"} & found(run).keys()


def test_a_tied_head_may_be_absent_from_the_export(tmp_path):
    """google-deepmind/gemma#8."""
    from safetensors import safe_open

    with safe_open(FIXTURES / "trainer_zero3" / "checkpoint-4" / "model.safetensors", "np") as opened:
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118
    assert found(run_of(tmp_path, "trainer_zero3")) == {}


def test_equal_biases_of_experts_are_no_fault(tmp_path):
    """Control of DeepSpeed#6589: biases begin as zeros."""
    run = run_of(tmp_path, "zero0_moe")
    assert found(run) == {}


def test_lightnings_folder_is_a_step(tmp_path):
    """Made by hand from DeepSpeed's own files: Lightning's strategy refuses a CPU."""
    for step in (3, 6):
        folder = tmp_path / "run" / f"epoch={step}.ckpt"
        shutil.copytree(FIXTURES / "zero2_bf16" / f"global_step{step}", folder / "checkpoint")
        (folder / "latest").write_text("checkpoint")
    (report,) = audit(LocalStore(tmp_path / "run")).runs
    assert [step.state.step for step in report.steps] == [3, 6]
    assert report.findings == []
    (tmp_path / "run" / "epoch=6.ckpt" / "checkpoint" / ZERO.format(1)).unlink()
    assert found(tmp_path / "run").keys() == {"INT004"}


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("name", ["zero2_bf16", "zero3_bf16", "zero1_moe", "trainer_zero3", "zero0_bf16"])
def test_healthy_twins_are_silent_at_every_level(name, level):
    assert found(FIXTURES / name, level=level) == {}


def table():
    """Markdown rows: public case, fault, expected id, whether it was found, whether in its place."""
    yield "| public case | fault | id | found | place right |"
    yield "|---|---|---|---|---|"
    for name, (case, fixture, damage, expected, places) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(Path(folder), fixture)
            damage(run)
            after = found(run)
        right = "yes" if places <= after.get(expected, set()) else "no"
        yield f"| {case} | {name} | {expected} | {', '.join(after)} | {right} |"


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_deepspeed(patch)
        sys.stdout.write("\n".join(table()) + "\n")


# Tensor parallelism without a pipeline


@pytest.mark.parametrize("name", ["zero0_tp2", "zero2_tp2"])
def test_tensor_parallel_ranks_without_a_pipeline_hold_parts_and_replicas(tmp_path, name):
    run = run_of(tmp_path, name)
    assert not found(run)
    lost = next(run.glob("global_step2/*mp_rank_01_*model_states.pt"))
    # As BLOOM's drift: a norm that tensor-parallel ranks have in common is another on one of them.
    key = "layers.1.input_layernorm.weight"
    rewritten(lost, lambda content: content["module"][key].mul_(1.5))
    (first, *_) = audit(LocalStore(run), Settings(), now=1e10).runs[0].findings
    assert first.id == "REP001"
    assert {place.tensor for place in first.locations} == {key}
    lost.unlink()
    (gone,) = audit(LocalStore(run), Settings(level=Level.NAMES), now=1e10).runs[0].findings
    assert (gone.id, {place.file for place in gone.locations}) == ("INT001", {f"global_step2/{lost.name}"})


def test_ranks_that_clip_otherwise_drift_apart_under_zero_1():
    """DeepSpeed#1801, trained so: tensor-parallel rank 1 does not clip from step 3 on."""
    (report,) = audit(LocalStore(FIXTURES / "zero1_tp2_drift"), Settings()).runs
    (finding,) = report.findings
    (interval,) = finding.intervals
    assert (finding.id, interval.last_good, interval.first_bad) == ("REP001", 2, 4)
    assert {place.role.value for place in finding.locations} == {"parameter", "master", "first_moment", "second_moment"}
    assert {str(place.coordinate) for place in finding.locations if place.role.value == "parameter"} == {"tp=1"}
    assert report.last_good.step == 2
