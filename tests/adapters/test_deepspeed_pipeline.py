"""The adapter of BLOOM's layout, on what DeepSpeed wrote."""

import io
import shutil

import pytest

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.deepspeed.pipeline import DeepSpeedPipeline
from auditor.audit import audit
from auditor.model.catalog import FileState, ProblemKind, Role
from auditor.model.finding import Severity
from auditor.model.mesh import Coordinate, Replicate, Shard
from auditor.model.region import coverage
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from tests.paths import HEALTHY, TP2_PP2, TP4, load_expect

ADAPTER = DeepSpeedPipeline()


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (HEALTHY / "global_step10", TP2_PP2 / "global_step6", TP4 / "global_step6")

    def framework_arrays(self, path):
        """torch's own loader and concatenation; everything that is whole on one rank, and all that is replicated."""
        torch = pytest.importorskip("torch")
        expect = load_expect()
        arrays = {}
        if "tp2_pp2" not in str(path):
            for role, tensors in expect.flat_states(path, 0).items():
                for name, tensor in tensors.items():
                    if expect.REPLICATED.search(name):
                        arrays[role, name] = tensor.detach().numpy().tobytes()
        for name, tensor in expect.parameters(path, 0).items():
            if expect.REPLICATED.search(name):
                arrays["parameter", name] = tensor.view(torch.uint16).numpy().tobytes()
        return arrays


def read(store, path="", **options):
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


def read_step(folder, step, **options):
    return read(LocalStore(folder / f"global_step{step}"), **options)


def in_memory(folder, step):
    return {path.name: path.read_bytes() for path in (folder / f"global_step{step}").iterdir()}


@pytest.mark.parametrize(
    ("folder", "step", "axes"),
    [
        (HEALTHY, 10, {"pp": 1, "dp": 2, "tp": 2}),
        (TP2_PP2, 6, {"pp": 2, "dp": 1, "tp": 2}),
        (TP4, 6, {"pp": 1, "dp": 1, "tp": 4}),
    ],
)
def test_mesh_and_tiling(folder, step, axes):
    catalog = read_step(folder, step)
    assert dict(catalog.mesh.axes) == axes
    assert catalog.step == step
    assert not catalog.problems
    assert not catalog.unclaimed
    assert all(file.state is FileState.PRESENT for file in catalog.files)
    for tensor, what in enumerate(catalog.tensors):
        for replica in range(len(catalog.replicas[tensor])):
            regions = [catalog.pieces.region(int(row)) for row in catalog.rows_of(tensor, replica)]
            assert coverage(regions, what.shape).exact, what


def test_global_ranks_follow_deepspeed_topology():
    mesh = read_step(TP2_PP2, 6).mesh
    assert mesh.global_ranks(Coordinate.of(pp=1, dp=0, tp=0)) == (2,)
    assert read_step(HEALTHY, 10).mesh.global_ranks(Coordinate.of(tp=1)) == (1, 3)


def test_a_parameter_is_cut_by_a_partition_border():
    catalog = read_step(HEALTHY, 10)
    cut = [
        catalog.tensors[tensor].name
        for tensor, rows in catalog.rows_by_tensor.items()
        if catalog.tensors[tensor].role is Role.MASTER
        and len({catalog.pieces[int(row)].coordinate.as_dict()["dp"] for row in rows}) == 2
    ]
    assert cut


def test_replicated_by_formula_never_by_equal_shapes():
    catalog = read_step(TP4, 6)
    by_name = {tensor.name: tensor for tensor in catalog.tensors if tensor.role is Role.PARAMETER}
    norm, bias = by_name["3.input_layernorm.bias"], by_name["3.mlp.dense_h_to_4h.bias"]
    rows = catalog.rows_by_tensor
    stored = {n: {catalog.pieces[int(r)].shape for r in rows[catalog.tensors.index(by_name[n])]} for n in by_name}
    assert stored["3.input_layernorm.bias"] == stored["3.mlp.dense_h_to_4h.bias"] == {(16,)}
    assert norm.replica_axes == ("tp",)
    assert norm.shape == (16,)
    assert bias.replica_axes == ()
    assert bias.shape == (64,)


def test_only_the_tied_weight_is_a_replica_over_stages():
    catalog = read_step(TP2_PP2, 6)
    masters = {tensor.name: tensor for tensor in catalog.tensors if tensor.role is Role.MASTER}
    tied = "tied_modules.embed.word_embeddings"
    assert masters[f"{tied}.weight"].replica_axes == ("pp",)
    assert masters[f"{tied}.norm.weight"].replica_axes == ("tp",)
    assert masters[f"{tied}.norm.weight@pp=1"].replica_axes == ("tp",)


def test_unknown_name_is_undetermined_and_may_be_stated(monkeypatch):
    import auditor.adapters.megatron_names as names

    rules = tuple(rule for rule in names.RULES if "input_layernorm" not in rule.suffix)
    monkeypatch.setattr(names, "RULES", rules)
    catalog = read_step(HEALTHY, 10)
    odd = [tensor for tensor in catalog.tensors if tensor.undetermined]
    assert {tensor.name for tensor in odd if tensor.name.startswith("3.")} == {
        f"3.input_layernorm.{part}@tp={tp}" for part in ("weight", "bias") for tp in (0, 1)
    }
    assert all("auditor.toml" in tensor.undetermined for tensor in odd)
    stated = read_step(HEALTHY, 10, placement={"tp": [("*.input_layernorm.*", Replicate())]})
    assert not any(tensor.undetermined for tensor in stated.tensors)
    cut = read_step(HEALTHY, 10, placement={"tp": [("*.input_layernorm.*", Shard(0))]})
    (tensor,) = [t for t in cut.tensors if t.name == "3.input_layernorm.weight" and t.role is Role.PARAMETER]
    assert tensor.shape == (32,)


def test_rng_states_are_no_tensors():
    assert not any("rng" in tensor.name for tensor in read_step(HEALTHY, 10).tensors)


def test_extras_are_listed_and_harmless():
    objects = in_memory(HEALTHY, 10) | {"notes.txt": b"hello", "zero_to_fp32.py": b"print()"}
    catalog = read(MemoryStore(objects))
    assert set(catalog.unclaimed) == {"notes.txt", "zero_to_fp32.py"}
    assert not catalog.problems


def test_missing_files_are_known_from_recorded_sizes():
    for name in (
        "layer_03-model_01-model_states.pt", "mp_rank_01_model_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt",
    ):  # fmt: skip
        objects = in_memory(HEALTHY, 10)
        del objects[name]
        catalog = read(MemoryStore(objects))
        assert [file.name for file in catalog.files if file.state is FileState.MISSING] == [name]


def test_a_whole_missing_layer_is_known_from_parameter_names():
    objects = {name: c for name, c in in_memory(HEALTHY, 10).items() if not name.startswith("layer_04")}
    missing = {f.name for f in read(MemoryStore(objects)).files if f.state is FileState.MISSING}
    assert missing == {"layer_04-model_00-model_states.pt", "layer_04-model_01-model_states.pt"}


def test_files_of_a_larger_mesh_are_leftovers():
    objects = in_memory(HEALTHY, 10)
    objects["layer_03-model_02-model_states.pt"] = objects["layer_03-model_01-model_states.pt"]
    objects["bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"] = b""
    objects["zero_pp_rank_0_mp_rank_00_optim_states.pt"] = b""
    problems = read(MemoryStore(objects)).problems
    assert {problem.kind for problem in problems} == {ProblemKind.LEFTOVER}
    assert len(problems) == 3


def deeper(objects, *layers):
    """A save over one of a deeper model: what that one called ``layers`` is still there, as layer 4's content."""
    for layer in layers:
        for tp in (0, 1):
            name = f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"
            objects[name] = objects[f"layer_04-model_{tp:02d}-model_states.pt"]
    return objects


@pytest.mark.parametrize("layer", [5, 7, 12])
def test_layers_left_over_from_a_deeper_model(layer):
    """Also one in the number of a module of this model that has no parameters (5)."""
    catalog = read(MemoryStore(deeper(in_memory(HEALTHY, 10), layer)))
    left = [problem for problem in catalog.problems if problem.kind is ProblemKind.LEFTOVER]
    assert [problem.file for problem in left] == [f"layer_{layer:02d}-model_0{tp}-model_states.pt" for tp in (0, 1)]
    assert all(problem.ignored for problem in left)
    assert {tensor.name for tensor in catalog.tensors} == {tensor.name for tensor in read_step(HEALTHY, 10).tensors}


def test_final_norm_of_a_deeper_model_is_left_over_too():
    objects = in_memory(HEALTHY, 10)
    objects["layer_09-model_00-model_states.pt"] = objects["layer_06-model_00-model_states.pt"]
    (problem,) = [p for p in read(MemoryStore(objects)).problems if p.kind is ProblemKind.LEFTOVER]
    assert problem.file == "layer_09-model_00-model_states.pt"


def test_left_over_layers_are_a_warning_and_the_step_stays_good():
    report = audit(MemoryStore(deeper(in_memory(HEALTHY, 10), 7)), Settings(level=Level.HEADERS))
    (finding,) = [finding for finding in report.runs[0].findings if finding.id == "INT009"]
    assert finding.severity is Severity.WARNING
    assert "deeper model" in finding.message
    assert report.runs[0].last_good.step == 10
    strict = audit(MemoryStore(deeper(in_memory(HEALTHY, 10), 7)), Settings(fail_on=Severity.WARNING))
    assert strict.runs[0].last_good is None


def test_layers_of_which_nothing_is_recorded_stay_this_models():
    """What a frozen layer holds is in no ``param_shapes``; a layer of a kind that this model has once may be frozen."""
    torch = pytest.importorskip("torch")
    frozen = io.BytesIO()
    torch.save({"lm_head.weight": torch.zeros(4, 4)}, frozen)
    objects = in_memory(HEALTHY, 10)
    for tp in (0, 1):
        objects[f"layer_07-model_{tp:02d}-model_states.pt"] = frozen.getvalue()
    assert "7.lm_head.weight" in {tensor.name.split("@")[0] for tensor in read(MemoryStore(objects)).tensors}
    # Without the recorded depth, a block more may be a frozen one.
    unrecorded = deeper(in_memory(HEALTHY, 10), 7)
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):
        assert b"num_layers" in unrecorded[name]
        unrecorded[name] = unrecorded[name].replace(b"num_layers", b"not_layers")
    assert not [p for p in read(MemoryStore(unrecorded)).problems if p.kind is ProblemKind.LEFTOVER]


def test_declines_with_reason_and_nearness():
    for objects, at_least in (
        ({"a.txt": b""}, 0.0), ({"mp_rank_00_model_states.pt": b""}, 0.5),
        ({"zero_pp_rank_0_mp_rank_00_optim_states.pt": b""}, 0.3),
    ):  # fmt: skip
        store = MemoryStore(objects)
        verdict = ADAPTER.recognise(store, Folder.read(store, ""))
        assert isinstance(verdict, Declined)
        assert verdict.reason
        assert verdict.nearness >= at_least


def test_pointer_may_not_lead_out_of_the_run(tmp_path):
    shutil.copytree(HEALTHY / "global_step10", tmp_path / "global_step10")
    store = LocalStore(tmp_path)
    for text in ("../elsewhere", "/etc", "..", "a/b", ""):
        (tmp_path / "latest").write_text(text)
        assert ADAPTER.pointer(store, Folder.read(store, "")).target == ""
    (tmp_path / "latest").write_text("global_step10")
    assert ADAPTER.pointer(store, Folder.read(store, "")).target == "global_step10"
