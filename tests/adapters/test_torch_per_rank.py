"""The adapter of one torch file a rank, on what DistributedDataParallel trained."""

import io
from argparse import Namespace
from dataclasses import replace

import pytest

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.optimizer_index import IndexedState, attach, consecutive, indexed_state, split_by_decay
from auditor.adapters.registry import recognise
from auditor.adapters.torch_per_rank.adapter import TorchPerRank
from auditor.audit import audit
from auditor.containers.torch_zip import StoredTensor
from auditor.model.catalog import FileState, ProblemKind, Role
from auditor.model.dtype import FLOAT32
from auditor.model.finding import Severity
from auditor.model.mesh import Coordinate, Replicate, Shard
from auditor.model.observation import DifferenceClass
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from tests.paths import HEALTHY as DEEPSPEED
from tests.paths import ROOT, TP2_PP2

FIXTURES = ROOT / "tests" / "fixtures" / "torch_per_rank"
HEALTHY, FAULTY, OWN_BUFFERS = (FIXTURES / name for name in ("healthy", "faulty", "own_buffers"))
MEGATRON = ROOT / "tests" / "fixtures" / "megatron_legacy" / "tp2"
ADAPTER = TorchPerRank()


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = (HEALTHY / "step_2", HEALTHY / "step_6")
    foreign = (DEEPSPEED / "global_step10", TP2_PP2 / "global_step6", MEGATRON, MEGATRON / "iter_0000004")

    def framework_arrays(self, path):
        torch = pytest.importorskip("torch")
        file = torch.load(path / "rank_1.pt")
        arrays = {}
        for key, tensor in file["model"].items():
            role = "buffer" if "running" in key or "tracked" in key else "parameter"
            arrays[role, key.removeprefix("module.")] = tensor
        names = [name for role, name in arrays if role == "parameter"]
        roles = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "counter"}
        for number, state in file["optimizer"]["state"].items():
            arrays |= {(roles[key], names[number]): tensor for key, tensor in state.items()}
        return {key: tensor.numpy().tobytes() for key, tensor in arrays.items()}


# What the tests below share


def read(store, path="", **options):
    folder = Folder.read(store, path)
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


def verdict_on(objects, path=""):
    store = MemoryStore(objects)
    return ADAPTER.recognise(store, Folder.read(store, path))


def objects_of(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def findings_of(objects, **settings):
    (run,) = audit(MemoryStore(objects), replace(Settings(), **settings), now=1e9).runs
    return run


def saved(content):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def ranks(content, count=2, pattern="rank_{}.pt"):
    """A step in which every rank saved ``content``, or what it makes of the rank."""
    return {pattern.format(n): saved(content(n) if callable(content) else content) for n in range(count)}


def weights(**more):
    torch = pytest.importorskip("torch")
    return {"layer.weight": torch.ones(3, 2), "layer.bias": torch.ones(3), **more}


def by_name(catalog, role=Role.PARAMETER):
    return {tensor.name: tensor for tensor in catalog.tensors if tensor.role is role}


# Healthy checkpoints


@pytest.mark.parametrize("level", list(Level))
def test_a_healthy_run_is_silent_at_every_level(level):
    (run,) = audit(LocalStore(HEALTHY), Settings(level=level)).runs
    assert not run.findings
    assert level is Level.NAMES or run.last_good.step == 6
    assert [step.state.step for step in run.steps] == [2, 4, 6]
    assert not [reason for identifier, reason in run.undetermined() if identifier == "REP001" and "level" not in reason]


def test_every_tensor_is_a_replica_and_the_wrappers_prefix_stays_in_the_key():
    catalog = read(LocalStore(HEALTHY / "step_2"))
    assert all(tensor.replica_axes == ("dp",) for tensor in catalog.tensors)
    assert dict(catalog.mesh.axes) == {"dp": 2}
    assert set(by_name(catalog)) == {
        "stem.weight", "norm.weight", "norm.bias", "hidden.weight", "hidden.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert set(by_name(catalog, Role.BUFFER)) == {f"norm.{x}" for x in
                                                  ("running_mean", "running_var", "num_batches_tracked")}  # fmt: skip
    keys = {piece.key for piece in catalog.pieces}
    assert {"model.module.head.bias", "optimizer.state.6.exp_avg"} <= keys


def test_optimizer_numbers_skip_buffers():
    catalog = read(LocalStore(HEALTHY / "step_2"))
    named = {piece.key: catalog.tensors[piece.tensor].name for piece in catalog.pieces}
    assert named["optimizer.state.2.exp_avg"] == "norm.bias"
    assert named["optimizer.state.3.exp_avg_sq"] == "hidden.weight"
    assert named["optimizer.state.6.step"] == "head.bias"


# Faults


def test_gradients_that_are_not_synchronised_are_found_with_onset_and_coordinate():
    (run,) = audit(LocalStore(FAULTY)).runs
    (finding,) = run.findings
    assert (finding.id, finding.severity) == ("REP001", Severity.ERROR)
    (interval,) = finding.intervals
    assert (interval.last_good, interval.first_bad) == (2, 4)
    assert {location.tensor for location in finding.locations} == {"head.weight", "head.bias"}
    assert {location.coordinate for location in finding.locations} == {Coordinate.of(dp=1)}
    assert {location.role for location in finding.locations} == {
        Role.PARAMETER, Role.FIRST_MOMENT, Role.SECOND_MOMENT,
    }  # fmt: skip


def test_running_statistics_of_their_own_are_a_warning():
    (run,) = audit(LocalStore(OWN_BUFFERS)).runs
    (finding,) = run.findings
    assert (finding.difference_class, finding.severity) == (DifferenceClass.BUFFERS, Severity.WARNING)
    assert {location.tensor for location in finding.locations} == {"norm.running_mean", "norm.running_var"}
    assert run.last_good.step == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_file(rank):
    for level in (Level.NAMES, Level.VALUES):
        # Nothing commits the newest step but its own files: without one of them it was not finished.
        for step, identifier in ((4, "INT001"), (6, "INT004")):
            objects = objects_of(HEALTHY)
            del objects[f"step_{step}/rank_{rank}.pt"]
            (finding,) = findings_of(objects, level=level).findings
            assert finding.id == identifier
            assert {location.file for location in finding.locations} == {f"step_{step}/rank_{rank}.pt"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file(rank, share):
    objects = objects_of(HEALTHY)
    name = f"step_6/rank_{rank}.pt"
    objects[name] = objects[name][: int(share * len(objects[name]))]
    (finding,) = findings_of(objects).findings
    assert finding.id == "INT002"
    assert [location.file for location in finding.locations] == [name]


def test_another_ranks_file():
    objects = objects_of(HEALTHY)
    objects["step_6/rank_1.pt"] = objects["step_6/rank_0.pt"]
    (finding,) = findings_of(objects).findings
    assert finding.id == "INT006"
    assert [location.file for location in finding.locations] == ["step_6/rank_1.pt"]


def test_files_that_record_another_rank():
    found = read(MemoryStore(ranks(lambda n: {"model": weights(), "rank": 1 - n})))
    assert [problem.kind for problem in found.problems] == [ProblemKind.OTHER_RANK] * 2
    # All files saved by one process, or under a temporary name: no sign of anything.
    assert not read(MemoryStore(ranks({"model": weights(), "rank": 0}))).problems


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stale_file(rank):
    objects = objects_of(HEALTHY)
    objects[f"step_6/rank_{rank}.pt"] = objects[f"step_4/rank_{rank}.pt"]
    run = findings_of(objects)
    assert run.findings[0].id == "INT005"
    assert [location.file for location in run.findings[0].locations] == [f"step_6/rank_{rank}.pt"]
    assert run.last_good.step == 4


# Which files belong together


@pytest.mark.parametrize(
    ("pattern", "tensors"),
    [("rank_{}.pt", 2), ("rank{}.pth", 2), ("checkpoint_rank0{}.pth", 2), ("model-rank-{}.bin", 2),
     ("ckpt.rank_{}.step5.pt", 2), ("dp_rank_{}.pt", 2)],
)  # fmt: skip
def test_names_that_differ_in_the_rank_alone(pattern, tensors):
    catalog = read(MemoryStore(ranks({"model": weights()}, 2, pattern)))
    assert len(catalog.tensors) == tensors
    assert dict(catalog.mesh.axes) == {"dp": 2}


@pytest.mark.parametrize(
    "pattern",
    ["mp_rank_0{}_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "tp_rank_{}.pt", "frank{}.pt",
     "model_{}.pt", "pp-rank-{}.pt", "rng_state_{}.pth", "rank_{}.txt"],
)  # fmt: skip
def test_names_of_other_axes_and_formats_are_declined(pattern):
    verdict = verdict_on(ranks({"model": weights()}, 2, pattern))
    assert isinstance(verdict, Declined)
    assert verdict.reason


def test_one_rank_file_is_a_step_and_says_which_others_lack():
    for content in ({"model": weights()}, {"model": weights(), "world_size": 1}):
        assert dict(read(MemoryStore(ranks(content, 1))).mesh.axes) == {"dp": 1}
    catalog = read(MemoryStore(ranks({"model": weights(), "world_size": 3}, 1)))
    assert [f.name for f in catalog.files if f.state is FileState.MISSING] == ["rank_1.pt", "rank_2.pt"]


def test_holes_and_numbers_beyond_the_world_size():
    objects = ranks({"model": weights()}, 12, "rank_{:02d}.pt")
    del objects["rank_05.pt"]
    missing = [file.name for file in read(MemoryStore(objects)).files if file.state is FileState.MISSING]
    assert missing == ["rank_05.pt"]
    catalog = read(MemoryStore(ranks({"model": weights(), "world_size": 2}, 3)))
    assert [(problem.kind, problem.file) for problem in catalog.problems] == [(ProblemKind.LEFTOVER, "rank_2.pt")]


def test_a_world_size_that_others_do_not_record():
    content = ranks(lambda n: {"model": weights(), "world_size": 4 if n == 1 else 3}, 3)
    (problem,) = read(MemoryStore(content)).problems
    assert (problem.kind, problem.file) == (ProblemKind.METADATA, "rank_1.pt")


def test_several_steps_in_one_folder_are_declined():
    verdict = verdict_on(
        ranks({"model": weights()}, 2, "s1_rank{}.pt") | ranks({"model": weights()}, 2, "s2_rank{}.pt")
    )
    assert isinstance(verdict, Declined)
    assert "several series" in verdict.reason


def test_files_beside_the_model_are_unclaimed():
    objects = ranks({"model": weights()}) | ranks({"epoch": 3}, 2, "extra_rank{}.pt") | {"notes.txt": b"hello"}
    catalog = read(MemoryStore(objects))
    assert set(catalog.unclaimed) == {"extra_rank0.pt", "extra_rank1.pt", "notes.txt"}


def test_no_other_adapter_takes_it_and_it_takes_no_others():
    for path, name in (
        (HEALTHY / "step_2", "torch-per-rank"), (DEEPSPEED / "global_step10", "deepspeed-pipeline"),
        (MEGATRON / "iter_0000004", "megatron-legacy"),
    ):  # fmt: skip
        store = LocalStore(path)
        found = recognise(store, Folder.read(store, ""))
        assert isinstance(found, tuple)
        assert found[0].name == name


# Steps and state dicts


@pytest.mark.parametrize(("recorded", "folder", "step"), [
    ({"step": 5}, "epoch_5", 5), ({"iteration": 7}, "x", 7), ({"global_step": 7}, "step_9", 7), ({}, "step_9", 9),
    ({}, "final", 0), ({"step": True}, "step_9", 9), ({"step": -1}, "final", 0),
])  # fmt: skip
def test_the_step_is_recorded_or_the_folders_number_or_none(recorded, folder, step):
    objects = {f"{folder}/{name}": c for name, c in ranks({"model": weights(), **recorded}).items()}
    assert verdict_on(objects, folder).step == step


@pytest.mark.parametrize("key", ["model", "state_dict", "module", "model_state_dict"])
def test_where_the_state_dict_may_be(key):
    assert set(by_name(read(MemoryStore(ranks({key: weights(), "rank": 0}))))) == set(weights())


def test_a_file_may_be_a_state_dict_itself():
    assert set(by_name(read(MemoryStore(ranks(weights()))))) == set(weights())


def test_the_prefix_is_dropped_only_if_all_have_it():
    wrapped = {f"module.{key}": tensor for key, tensor in weights().items()}
    assert set(by_name(read(MemoryStore(ranks({"model": wrapped}))))) == set(weights())
    some = {"module.a": weights()["layer.bias"], "b": weights()["layer.bias"]}
    assert set(by_name(read(MemoryStore(ranks({"model": some}))))) == set(some)


# What says that files are no replicas


def test_other_shapes_on_other_ranks_are_undetermined():
    torch = pytest.importorskip("torch")
    catalog = read(MemoryStore(ranks(lambda n: {"model": weights(odd=torch.ones(2 + n))})))
    odd = {name: tensor for name, tensor in by_name(catalog).items() if tensor.undetermined}
    assert set(odd) == {"odd@dp=0", "odd@dp=1"}
    assert by_name(catalog)["layer.weight"].replica_axes == ("dp",)


def test_a_tensor_that_some_ranks_lack_is_undetermined():
    torch = pytest.importorskip("torch")
    objects = ranks(lambda n: {"model": weights(**({"odd": torch.ones(2)} if n else {}))})
    odd = by_name(read(MemoryStore(objects)))["odd@dp=1"]
    assert "not every rank file" in odd.undetermined
    assert not findings_of({f"s1/{name}": content for name, content in objects.items()}).findings


# A tensor that one rank lost


def saved_by_a_trained_model(lost, of_rank, count, *, only_rank_0=(), stateless=False):
    """A step in which every rank saved a real model and optimizer, ``lost`` taken out of one rank's model."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    optimizer = {} if stateless else {"optimizer": trained(torch, model.parameters(), model)}

    def content(rank):
        state = {key: tensor for key, tensor in model.state_dict().items() if rank != of_rank or key not in lost}
        return {"model": state, "step": 1, **(optimizer | dict(only_rank_0) if rank == 0 or not only_rank_0 else {})}

    return {f"step_1/{name}": content for name, content in ranks(content, count).items()}


@pytest.mark.parametrize(("lost", "count", "of_rank"), [
    ("2.weight", 4, 3), ("2.bias", 4, 0), ("1.running_mean", 4, 1), ("0.weight", 2, 0), ("2.bias", 2, 1),
])  # fmt: skip
def test_a_tensor_lost_from_one_ranks_model(lost, count, of_rank):
    objects = saved_by_a_trained_model({lost}, of_rank, count)
    run = findings_of(objects)
    (finding,) = run.findings
    (place,) = finding.locations
    assert (finding.id, finding.severity) == ("MET001", Severity.ERROR)
    assert (place.tensor, place.file) == (lost, f"step_1/rank_{of_rank}.pt")
    assert place.coordinate == Coordinate.of(dp=of_rank)
    assert place.role is (Role.BUFFER if "running" in lost else Role.PARAMETER)
    assert f"rank_{of_rank}.pt lacks {lost}" in finding.message
    assert run.last_good is None
    # The others are still held against each other, and the optimizer's numbers keep their names.
    catalog = read(MemoryStore(objects), "step_1")
    places = [
        catalog.replicas[number]
        for number, tensor in enumerate(catalog.tensors)
        if tensor.name == lost and tensor.role in (Role.PARAMETER, Role.BUFFER)
    ]
    assert places == [tuple(Coordinate.of(dp=rank) for rank in range(count) if rank != of_rank)]
    assert not [tensor for tensor in catalog.tensors if tensor.undetermined]
    assert moments_by_name(catalog) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}


def moments_by_name(catalog):
    return set(by_name(catalog, Role.FIRST_MOMENT))


def test_several_tensors_lost_from_one_rank_are_one_finding():
    (finding,) = findings_of(saved_by_a_trained_model({"2.weight", "2.bias"}, 2, 3)).findings
    assert [place.tensor for place in finding.locations] == ["2.weight", "2.bias"]


@pytest.mark.parametrize("count", [2, 4])
def test_what_every_rank_saves_of_its_model_is_silent(count):
    run = findings_of(saved_by_a_trained_model(set(), -1, count))
    assert not run.findings
    assert run.last_good.step == 1


@pytest.mark.parametrize("count", [2, 4])
def test_what_rank_0_saves_beside_the_model_is_silent(count):
    torch = pytest.importorskip("torch")
    extras = {"ema": {"0.weight": torch.ones(3, 2)}, "best": torch.ones(2)}
    assert not findings_of(saved_by_a_trained_model(set(), -1, count, only_rank_0=extras)).findings


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["stages", "experts", "extra on rank 0"])
def test_ranks_that_hold_parts_of_a_model_stay_undetermined(kind, count):
    torch = pytest.importorskip("torch")

    def model(rank):
        if kind == "stages":
            return {f"layers.{rank}.{key}": torch.ones(2, 2) for key in ("q", "k", "v")} | {"norm": torch.ones(2)}
        shared = {f"{key}.weight": torch.ones(2, 2) for key in "abcdefgh"}
        if kind == "experts":
            return shared | {f"experts.{rank}.weight": torch.ones(2)}
        return shared | ({"ema.weight": torch.ones(2)} if rank == 0 else {})

    objects = {f"step_1/{name}": c for name, c in ranks(lambda rank: {"model": model(rank)}, count).items()}
    run = findings_of(objects)
    assert not run.findings
    assert "not every rank file holds it" in {reason for _, reason in run.undetermined()}


def test_an_optimizer_that_never_had_what_its_rank_lacks_says_so():
    torch = pytest.importorskip("torch")
    model, fewer = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3, bias=False)

    def content(rank):
        own = fewer if rank == 2 else model
        more = {"buffer": torch.zeros(1, dtype=torch.int64), "other": torch.zeros(2, dtype=torch.int64)}
        return {"model": own.state_dict() | more, "optimizer": trained(torch, own.parameters(), own)}

    found = moments(ranks(content, 3))
    assert all("; rank_2.pt lacks bias" in tensor.undetermined for tensor in found.values())


def test_recorded_tensor_parallel_sizes_make_all_undetermined():
    for settings in ({"args": Namespace(tensor_model_parallel_size=2)}, {"config": {"tp_size": 2}}):
        catalog = read(MemoryStore(ranks({"model": weights(), **settings})))
        assert all("need not be replicas" in tensor.undetermined for tensor in catalog.tensors)
    assert not any(t.undetermined for t in read(MemoryStore(ranks({"model": weights(), "config": {"tp": 1}}))).tensors)


def test_records_of_a_mesh_that_the_ranks_do_not_make_up_make_all_undetermined():
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed.tensor")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        part = distributed.distribute_tensor(torch.ones(4), mesh, [distributed.Shard(0)])
        objects = ranks({"model": weights(part=part)})
    finally:
        torch.distributed.destroy_process_group()
    catalog = read(MemoryStore(objects))
    assert {tensor.undetermined for tensor in catalog.tensors} == {
        "rank files record a mesh of 1, which 2 ranks don't make up"
    }
    assert "part@dp=0" in {tensor.name for tensor in catalog.tensors}
    assert not findings_of({f"s1/{name}": content for name, content in objects.items()}).findings


def test_the_users_word_on_placement():
    objects = MemoryStore(ranks({"model": weights(), "config": {"tp_size": 2}}))
    placement = {"dp": [("*.weight", Shard(0)), ("*.bias", Replicate())]}
    tensors = by_name(read(objects, placement=placement))
    assert tensors["layer.weight"].shape == (6, 2)
    assert tensors["layer.bias"].replica_axes == ("dp",)
    assert (
        "no dim 1" in by_name(read(objects, placement={"dp": [("*.bias", Shard(1))]}))["layer.bias@dp=0"].undetermined
    )


# Which parameter an integer stands for


def trained(torch, groups, model):
    """The state dict of a real AdamW that took one step."""
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer.state_dict()


def moments(objects):
    catalog = read(MemoryStore(objects))
    named = {piece.key: catalog.tensors[piece.tensor] for piece in catalog.pieces if "exp_avg" in piece.key}
    return {int(key.split(".")[2]): tensor for key, tensor in named.items()}


def test_groups_split_by_decay():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 4))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    for groups, names in (
        ([{"params": decayed}, {"params": rest, "weight_decay": 0.0}],
         ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias"]),
        ([{"params": rest, "weight_decay": 0.0}, {"params": decayed}],
         ["0.bias", "1.weight", "1.bias", "2.bias", "0.weight", "2.weight"]),
        ([{"params": [*model[0].parameters()]}, {"params": [*model[1:].parameters()], "lr": 1.0}],
         [*dict(model.named_parameters())]),
    ):  # fmt: skip
        content = {"model": model.state_dict(), "optimizer": trained(torch, groups, model)}
        found = moments(ranks(content))
        assert [found[number].name for number in range(6)] == names


def test_tied_parameters_are_counted_once():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    found = moments(ranks({"model": model.state_dict(), "optimizer": trained(torch, model.parameters(), model)}))
    assert [found[number].name for number in range(3)] == ["0.weight", "1.weight", "1.bias"]


def test_an_optimizer_is_known_by_its_form_where_its_key_says_nothing():
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 3)
    state = trained(torch, model.parameters(), model)
    found = moments(ranks({"net": model.state_dict(), "opt": state, "sched": {"last_epoch": 3}}))
    assert [found[number].name for number in range(2)] == ["weight", "bias"]
    # Of two nothing tells which one is whose.
    assert not moments(ranks({"net": model.state_dict(), "opt_a": state, "opt_b": state}))


def test_state_that_fits_no_order_is_undetermined_with_the_reason():
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 3)
    backwards = trained(torch, [*model.parameters()][::-1], model)
    objects = ranks({"model": model.state_dict(), "optimizer": backwards})
    assert all("shapes" in tensor.undetermined for tensor in moments(objects).values())
    assert not findings_of({f"s1/{name}": content for name, content in objects.items()}).findings


def test_what_is_frozen_is_told_by_the_shapes_of_what_is_trained():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    for handed, known in (
        ([*model[1:].parameters()], {"1.weight", "1.bias", "2.weight", "2.bias"}),
        ([model[0].weight, *model[2].parameters()], {"0.weight", "2.weight", "2.bias"}),
        # Which of two biases of one shape it is stays open.
        ([model[0].bias, model[2].weight], {"2.weight"}),
    ):
        found = moments(ranks({"model": model.state_dict(), "optimizer": trained(torch, handed, model)}))
        assert {tensor.name for tensor in found.values() if not tensor.undetermined} == known
        assert len(found) == len(handed)


def kept(*shapes):
    return {at: {"exp_avg": StoredTensor(FLOAT32, shape, (1,) * len(shape), 0, "0")} for at, shape in enumerate(shapes)}


def test_several_orders_that_fit_are_no_answer():
    shapes = {"a.weight": (3,), "b.bias": (3,), "c.weight": (3,)}
    groups = ({"weight_decay": 0.1}, {"weight_decay": 0.0})
    state = IndexedState(groups, ((0, 1), (2,)), kept((3,), (3,), (3,)))
    only_biases = split_by_decay(shapes, state, lambda name, shape: name.endswith("bias"))
    assert only_biases == (("a.weight", "c.weight"), ("b.bias",))
    found = attach(shapes, state, [consecutive(shapes, state), only_biases])
    assert not found.names
    assert "several orders" in found.reason
    assert attach(shapes, state, [only_biases]).names == {0: "a.weight", 1: "c.weight", 2: "b.bias"}


def test_factored_moments_are_not_attached():
    shapes = {"a": (3, 2)}
    state = IndexedState(({},), ((0,),), kept((3,)))
    assert "shapes" in attach(shapes, state, [consecutive(shapes, state)]).reason


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"state": {}}, {"state": {}, "param_groups": [{}]}, {"state": [], "param_groups": []},
     {"state": {}, "param_groups": [{"params": ["name", 1]}]}, {"state": {}, "param_groups": [{"params": [True]}]}],
)  # fmt: skip
def test_what_is_no_indexed_state(value):
    assert indexed_state(value) is None


# Moving averages


def averaged(rank, step=3, factor=1.0):
    torch = pytest.importorskip("torch")
    model = {"layer.weight": torch.arange(6.0).reshape(3, 2) + step, "layer.bias": torch.arange(3.0) + step}
    ema = {key: tensor * 0.99 * (factor if rank else 1.0) for key, tensor in model.items()}
    return {"model": model, "ema": ema, "step": step, "rank": rank, "world_size": 2}


def test_moving_averages_have_a_role_of_their_own_and_are_replicas():
    objects = {f"step_3/{name}": content for name, content in ranks(averaged).items()}
    catalog = read(MemoryStore(objects), "step_3")
    assert set(by_name(catalog, Role.EMA)) == set(by_name(catalog)) == {"layer.weight", "layer.bias"}
    assert all(tensor.replica_axes == ("dp",) for tensor in by_name(catalog, Role.EMA).values())
    assert not findings_of(objects).findings


def test_a_moving_average_that_one_rank_has_otherwise():
    objects = {f"step_3/{name}": content for name, content in ranks(lambda n: averaged(n, factor=1.5)).items()}
    (finding,) = findings_of(objects).findings
    assert finding.id == "REP001"
    assert {place.role for place in finding.locations} == {Role.EMA}


def test_nan_in_the_moving_average_alone():
    objects = {f"step_3/{name}": content for name, content in ranks(lambda n: _poisoned(averaged(n))).items()}
    (finding,) = findings_of(objects).findings
    assert finding.id == "NUM001"
    assert {(place.tensor, place.role) for place in finding.locations} == {("layer.weight", Role.EMA)}


def _poisoned(content):
    content["ema"]["layer.weight"][0, 0] = float("nan")
    return content


# Tensors of other kinds


@pytest.mark.filterwarnings("ignore")
def test_quantised_sparse_float8_and_complex_tensors_are_read_where_there_are_bytes():
    torch = pytest.importorskip("torch")
    plain = torch.eye(4)
    kinds = {
        "quantised": torch.quantize_per_tensor(plain, 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(plain, torch.ones(4), torch.zeros(4), 0, torch.quint8),
        "sparse": plain.to_sparse(), "compressed": plain.to_sparse_csr(), "float8": plain.to(torch.float8_e4m3fn),
        "complex": plain.to(torch.complex64), "wide": torch.tensor([1, 2, 3], dtype=torch.uint16),
        "conjugate": (plain * 1j).conj(), "meta": torch.empty(3, device="meta"),
    }  # fmt: skip
    objects = ranks({"model": weights(**kinds)})
    catalog = read(MemoryStore(objects))
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    dtypes = {name: tensors[name].dtype.name for name in ("quantised", "channels", "float8", "complex", "wide")}
    assert dtypes == {
        "quantised": "int8", "channels": "uint8", "float8": "float8_e4m3fn", "complex": "complex64", "wide": "uint16",
    }  # fmt: skip
    assert {"sparse.indices", "sparse.values", "compressed.crow_indices", "compressed.values"} <= tensors.keys()
    # What has no rule is there all the same, with the reason.
    unread = {name for name, tensor in tensors.items() if "can't be read" in tensor.undetermined}
    assert unread == {"conjugate", "meta"}
    assert all(tensor.replica_axes == ("dp",) for name, tensor in tensors.items() if name not in unread)
    assert not findings_of({f"s1/{name}": content for name, content in objects.items()}).findings


@pytest.mark.parametrize(("content", "reason"), [
    ({"config": {"sync_every": 8}}, "sync_every 8"), ({"args": {"sharding_strategy": "FULL_SHARD"}}, "FULL_SHARD"),
    ({"model": {"blocks.0._flat_param": None}}, "of flat parameters each rank has a part"),
])  # fmt: skip
def test_what_records_that_ranks_hold_their_own_makes_them_no_replicas(content, reason):
    torch = pytest.importorskip("torch")
    flat = {key: {name: torch.ones(5) for name in value} for key, value in content.items() if key == "model"}
    catalog = read(MemoryStore(ranks({"model": weights(), **content, **flat})))
    assert all(reason in tensor.undetermined for tensor in catalog.tensors)
    unsharded = read(MemoryStore(ranks({"model": weights(), "args": {"sharding_strategy": "NO_SHARD"}})))
    assert not any(tensor.undetermined for tensor in unsharded.tensors)
