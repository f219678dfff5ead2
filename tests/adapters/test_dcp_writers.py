"""What other writers than its own examples save by torch.distributed.checkpoint, and other releases of torch."""

import io
import struct

import pytest

from auditor.adapters.adapter import Declined, Folder
from auditor.audit import audit
from auditor.model.catalog import Role
from auditor.model.region import whole
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from auditor.view.assemble import read_box
from tests.dcp_saves import ADAPTER, PLAIN, audited, changed, files, objects_of, only, read, saved

# Tensors of every kind


def test_tensors_of_every_kind(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {
        "turned": torch.arange(20.0).reshape(4, 5).T, "view": torch.arange(100)[10:20], "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3), "half": torch.ones(3, dtype=torch.bfloat16), "flags": torch.tensor([True, False]),
        "small": torch.ones(4).to(torch.float8_e4m3fn), "count": torch.tensor([1, 2], dtype=torch.uint16),
    }  # fmt: skip
    objects = saved(tmp_path, {"model": tensors})
    store, catalog = MemoryStore(objects), read(objects, "step-7")
    assert {tensor.name for tensor in catalog.tensors} == set(tensors)
    for number, tensor in enumerate(catalog.tensors):
        wanted = tensors[tensor.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.num_elements:
            assert read_box(store, catalog, number, 0, whole(tensor.shape)).tobytes() == wanted, tensor.name
    run = audited(objects)
    assert not run.findings


def test_tensors_in_forms_that_are_not_known_are_counted_and_left_out(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"model": {"a": torch.ones(2), "turned": torch.ones(2, dtype=torch.complex64).conj()}}
    objects = saved(tmp_path, state)
    catalog = read(objects, "step-7")
    assert [tensor.name for tensor in catalog.tensors] == ["a"]
    assert sum(catalog.opaque.values()) == 1
    assert not audited(objects).findings


# Other writers


def trained(torch):
    model = {"model.embed.weight": torch.ones(3, 2), "lm_head.weight": torch.full((3, 2), 2.0)}
    kept = {
        name: {"exp_avg": torch.zeros(3, 2), "exp_avg_sq": torch.ones(3, 2), "step": torch.tensor(7.0)}
        for name in model
    }
    return model, kept


def roles(catalog):
    return {(tensor.role.value, tensor.name) for tensor in catalog.tensors}


WANTED = {
    (role, name)
    for role in ("parameter", "first_moment", "second_moment", "counter")
    for name in ("model.embed.weight", "lm_head.weight")
}
GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("top", [("model", "optimizer"), ("state_dict", "optimizer_0"), ("app", None), ("", "optim")])
def test_where_model_and_optimizer_may_be(tmp_path, top):
    torch = pytest.importorskip("torch")
    model, kept = trained(torch)
    optimizing = {"state": kept, "param_groups": [{**GROUP, "params": [*kept]}]}
    if top[0] == "app":
        state = {"app": {"model": model, "optim": optimizing}}
    else:
        state = {**({top[0]: model} if top[0] else model), top[1]: optimizing}
    objects = saved(tmp_path, state)
    if top[0] == "state_dict":
        objects["step-7/meta.pt"] = zipped(torch, {"global_step": 7})
    catalog = read(objects, "step-7")
    assert roles(catalog) == WANTED
    (group,) = catalog.groups
    assert set(group.parameters) == set(model)
    assert not audited(objects, Level.HEADERS).findings


def test_a_model_under_a_key_of_somebodys_own(tmp_path):
    torch = pytest.importorskip("torch")
    model, kept = trained(torch)
    optimizing = {"state": kept, "param_groups": [{**GROUP, "params": [*kept]}]}
    objects = saved(tmp_path, {"net": model, "optimizer": optimizing, "other": {"x": torch.ones(2)}})
    assert roles(read(objects, "step-7")) == WANTED | {("object", "other.x")}
    assert not audited(objects, Level.HEADERS).findings


def stepped(torch, groups, model, **options):
    optimizer = torch.optim.AdamW(groups, **options)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer.state_dict()


def test_an_optimizer_that_numbers_its_parameters(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    for number, groups in enumerate((model.parameters(), [{"params": decayed}, {"params": rest, "weight_decay": 0.0}])):
        state = {"model": model.state_dict(), "optimizer": stepped(torch, groups, model)}
        objects = saved(tmp_path / str(number), state)
        catalog = read(objects, "step-7")
        named = {name for name, _ in model.named_parameters()}
        for role in (Role.PARAMETER, Role.FIRST_MOMENT, Role.SECOND_MOMENT, Role.COUNTER):
            assert {tensor.name for tensor in catalog.tensors if tensor.role is role} == named
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        moments = [tensor for tensor in catalog.tensors if tensor.role is Role.FIRST_MOMENT]
        assert {tensor.name: tensor.shape for tensor in moments} == shapes
        assert {name for group in catalog.groups for name in group.parameters} == named
        assert not audited(objects, Level.HEADERS).findings


def test_an_order_that_is_not_known_is_undetermined(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 3)
    backwards = stepped(torch, [model.bias, model.weight], model)
    objects = saved(tmp_path, {"model": model.state_dict(), "optimizer": backwards})
    catalog = read(objects, "step-7")
    moments = [tensor for tensor in catalog.tensors if tensor.role is Role.FIRST_MOMENT]
    assert {tensor.name for tensor in moments} == {"optimizer.state.0", "optimizer.state.1"}
    assert all("shapes" in tensor.undetermined for tensor in moments)
    for level in (Level.NAMES, Level.FULL):
        assert not audited(objects, level).findings


def test_hyperparameters_that_are_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    model, kept = trained(torch)
    group = {**GROUP, "lr": torch.tensor(0.25), "params": [*kept]}
    objects = saved(tmp_path, {"model": model, "optimizer": {"state": kept, "param_groups": [group]}})
    (found,) = read(objects, "step-7").groups
    assert found.hyperparameters["lr"] == 0.25
    assert not audited(objects, Level.HEADERS).findings


def zipped(torch, content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_torchtitan(tmp_path):
    torch = pytest.importorskip("torch")
    model, kept = trained(torch)
    flat = {f"state.{name}.{key}": value for name, own in kept.items() for key, value in own.items()}
    flat |= {f"param_groups.{name}.{key}": value for name in kept for key, value in GROUP.items()}
    state = {
        **model, "optimizer": flat, "train_state": {"step": torch.tensor(7, dtype=torch.int32)},
        "lr_scheduler": {"last_epoch": 7}, "dataloader": {"dp_rank_0": b"position"},
    }  # fmt: skip
    catalog = read(saved(tmp_path, state), "step-7")
    assert roles(catalog) == WANTED | {("counter", "train_state.step")}
    (group,) = catalog.groups
    assert set(group.parameters) == set(model)
    assert group.hyperparameters["betas"] == (0.9, 0.99)
    assert [s.value for s in catalog.scalars if s.name == "global_steps"] == [7.0]
    assert not audited(objects_of(tmp_path), Level.HEADERS).findings


def test_lightning_writes_a_file_of_its_own_last(tmp_path):
    torch = pytest.importorskip("torch")
    objects = saved(tmp_path, {"state_dict": {"a": torch.ones(2)}}, "epoch=0-step=9.ckpt")
    finding = only(objects, Level.NAMES)
    assert (finding.id, files(finding)) == ("INT004", {"epoch=0-step=9.ckpt/meta.pt"})
    # Others call their model so, too.
    assert not audited(saved(tmp_path / "other", {"state_dict": {"a": torch.ones(2)}}), Level.NAMES).findings
    objects["epoch=0-step=9.ckpt/meta.pt"] = zipped(torch, {"global_step": 9})
    run = audited(objects)
    assert not run.findings
    assert [step.state.step for step in run.steps] == [9]


def test_accelerate_puts_two_beside_each_other(tmp_path):
    torch = pytest.importorskip("torch")
    model, kept = trained(torch)
    optimizing = {"state": kept, "param_groups": [{**GROUP, "params": [*kept]}]}
    saved(tmp_path, {"model": model}, "checkpoint-7/pytorch_model_fsdp_0")
    objects = saved(tmp_path, {"optimizer": optimizing}, "checkpoint-7/optimizer_0")
    catalog = read(objects, "checkpoint-7")
    assert roles(catalog) == WANTED
    run = audited(objects)
    assert [step.state.step for step in run.steps] == [7]
    assert not [finding for finding in run.findings if finding.id != "OPT010"]
    # The Trainer records its step beside them.
    recorded = objects | {"checkpoint-7/trainer_state.json": b'{"global_step": 9}'}
    assert [(f.id, f.severity.name) for f in audited(recorded, Level.HEADERS).findings] == [("INT012", "NOTE")]
    # Opened by itself it is one run all the same.
    inner = {name.removeprefix("checkpoint-7/"): content for name, content in objects.items()}
    assert len(audit(MemoryStore(inner), Settings(level=Level.NAMES)).runs) == 1
    del objects["checkpoint-7/optimizer_0/.metadata"]
    finding = only(objects, Level.NAMES)
    assert (finding.id, files(finding)) == ("INT004", {"checkpoint-7/optimizer_0/.metadata"})


@pytest.mark.parametrize("parts", [("model", "optim"), ("weights", "optimizer")])
def test_scripts_put_two_beside_each_other(tmp_path, parts):
    torch = pytest.importorskip("torch")
    model, kept = trained(torch)
    optimizing = {"state": kept, "param_groups": [{**GROUP, "params": [*kept]}]}
    saved(tmp_path, model | {"step": torch.tensor(7)}, f"7/{parts[0]}")
    objects = saved(tmp_path, optimizing | {"step": torch.tensor(7)}, f"7/{parts[1]}")
    assert roles(read(objects, "7")) >= WANTED
    run = audited(objects)
    assert ([step.state.step for step in run.steps], run.path) == ([7], "")
    assert not [finding for finding in run.findings if finding.id != "OPT010"]
    del objects[f"7/{parts[0]}/__0_0.distcp"]
    assert files(only(objects, Level.NAMES)) == {f"7/{parts[0]}/__0_0.distcp"}
    # Without its model an optimizer is no step of theirs, and its state is of nothing that could be missing.
    objects = {name: content for name, content in objects.items() if parts[0] not in name}
    run = audited(objects)
    assert not [finding for finding in run.findings if finding.id != "OPT010"]
    assert ("OPT002", "no model was read in this step") in run.undetermined()


# Other releases of torch


def test_indexes_of_older_releases():
    def strip(metadata):
        for name in ("planner_data", "storage_meta", "version"):
            metadata.__dict__.pop(name)
        for place in metadata.storage_data.values():
            place.__dict__.pop("transform_descriptors", None)

    newer = objects_of(PLAIN)
    older = changed(newer, "step-4/.metadata", strip)
    assert roles(read(older, "step-4")) == roles(read(newer, "step-4"))
    assert not audited(older, Level.HEADERS).findings


def test_members_of_enumerations_by_name(monkeypatch):
    """As Python 3.11.0 pickled them, and from where they were before torch 2.3."""
    torch = pytest.importorskip("torch")
    sharded = pytest.importorskip("torch.distributed._shard.sharded_tensor.metadata")
    monkeypatch.setattr(
        sharded.MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name))
    )

    def older(metadata):
        for tensor in metadata.state_dict_metadata.values():
            if hasattr(tensor, "properties"):
                tensor.properties = sharded.TensorProperties(dtype=torch.float32)

    objects = changed(objects_of(PLAIN), "step-4/.metadata", older)
    assert b"getattr" in objects["step-4/.metadata"]
    assert b"MEM_FORMAT_ENCODING" in objects["step-4/.metadata"]
    run = audited(objects, Level.HEADERS)
    assert not run.findings
    assert not any(step.opaque for step in run.steps)


def test_paths_of_newer_pythons():
    objects = objects_of(PLAIN)
    content = objects["step-4/.metadata"]
    old, new = b"\x8c\x07pathlib", b"\x8c\x0epathlib._local"
    assert content.count(old) == 1
    length = struct.unpack_from("<Q", content, 3)[0] + len(new) - len(old)
    objects["step-4/.metadata"] = content[:3] + struct.pack("<Q", length) + content[11:].replace(old, new)
    run = audited(objects, Level.HEADERS)
    assert not run.findings
    assert not any(step.opaque for step in run.steps)


def test_megatrons_form_is_declined():
    objects = objects_of(PLAIN / "step-4") | {"metadata.json": b"{}"}
    verdict = ADAPTER.recognise(MemoryStore(objects), Folder.read(MemoryStore(objects), ""))
    assert isinstance(verdict, Declined)
