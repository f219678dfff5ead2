"""Named damage to checkpoints in megatron-core's torch_dist format, each with its healthy twin."""

import io
import json
import os
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest

from auditor.audit import audit
from auditor.model.catalog import Role
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from tests.adapters.test_megatron_dist import FIXTURES, STEP, objects_of, read

FIRST = "iter_0000002"
DATA = tuple(f"__{rank}_{number}.distcp" for rank in (0, 1) for number in (0, 1))


def run_of(name="tp2"):
    return objects_of(FIXTURES / name)


def audited(objects, level=Level.FULL, **settings):
    (run,) = audit(MemoryStore(objects), Settings(level=level, **settings), now=1e9).runs
    return run


def ids(objects, level=Level.FULL):
    return {finding.id for finding in audited(objects, level).findings}


def only(objects, level=Level.FULL):
    (finding,) = audited(objects, level).findings
    return finding


def files(finding):
    return {location.file for location in finding.locations}


def changed(objects, name, by):
    """The checkpoint with a pickle in it changed by ``by``."""
    pytest.importorskip("torch.distributed.checkpoint")
    metadata = pickle.loads(objects[name])
    by(metadata)
    return {**objects, name: pickle.dumps(metadata)}


def with_common(objects, by, step=STEP):
    """The checkpoint with its ``common.pt`` changed by ``by`` and saved again."""
    torch = pytest.importorskip("torch")
    content = torch.load(io.BytesIO(objects[f"{step}/common.pt"]), weights_only=False)
    by(content)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return {**objects, f"{step}/common.pt": buffer.getvalue()}


def edited(objects, name, role, change, step=STEP):
    """The checkpoint with ``change`` made to the float32 values of every piece of a tensor."""
    objects = dict(objects)
    catalog = read(MemoryStore(objects), step)
    (number,) = [n for n, t in enumerate(catalog.tensors) if (t.name, t.role) == (name, role)]
    for row in catalog.rows_of(number, 0).tolist():
        piece = catalog.pieces[row]
        file = catalog.files[piece.file].name
        content = bytearray(objects[file])
        count = int(np.prod(piece.shape))
        values = np.frombuffer(bytes(content), "<f4", count, piece.offset)
        new = np.asarray(change(values.copy()), "<f4")
        content[piece.offset : piece.offset + 4 * count] = new.tobytes()
        objects[file] = bytes(content)
    return objects


# Files


@pytest.mark.parametrize("name", [*DATA, ".metadata", "common.pt", "metadata.json"])
@pytest.mark.parametrize("level", [Level.NAMES, Level.HEADERS, Level.FULL])
def test_a_missing_file(name, level):
    for step, consequences in ((FIRST, set()), (STEP, {"INT003"})):
        objects = run_of()
        del objects[f"{step}/{name}"]
        finding = only(objects, level)
        assert (finding.id, files(finding)) == ("INT001", {f"{step}/{name}"})
        assert {*finding.consequences} - {"COV001"} == consequences


@pytest.mark.parametrize(("name", "identifier"), [("metadata.json", "INT004"), (".metadata", "INT001")])
def test_a_newest_step_without_marker_is_uncommitted(name, identifier):
    """The marker is written last: an index that lacks beside it was lost later."""
    objects = run_of()
    objects["latest_checkpointed_iteration.txt"] = b"2"
    del objects[f"{STEP}/{name}"]
    found = audited(objects)
    assert {f.id for f in found.findings} == {identifier}
    assert found.last_good.step == 2


def test_a_save_that_got_no_further_than_its_first_file():
    objects = run_of()
    kept = objects[f"{STEP}/common.pt"]
    objects = {name: data for name, data in objects.items() if not name.startswith(STEP)}
    objects |= {f"{STEP}/common.pt": kept, "latest_checkpointed_iteration.txt": b"2"}
    found = audited(objects)
    assert {f.id for f in found.findings} == {"INT004"}
    assert not found.unrecognised


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999, 1.01])
def test_a_data_file_that_is_too_short_or_too_long(name, share):
    objects = run_of()
    content = objects[f"{STEP}/{name}"]
    length = int(share * len(content))
    objects[f"{STEP}/{name}"] = (content + bytes(length))[:length]
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT002", {f"{STEP}/{name}"})


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", ".metadata"])
def test_a_short_small_file(name):
    objects = run_of()
    objects[f"{STEP}/{name}"] = objects[f"{STEP}/{name}"][:-9]
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT002", {f"{STEP}/{name}"})


def test_an_index_of_another_mesh():
    objects = run_of()
    objects[f"{STEP}/.metadata"] = run_of("tp2_pp2")[f"{STEP}/.metadata"]
    assert {"INT001", "INT002"} & ids(objects)


def test_a_file_of_a_larger_mesh():
    objects = run_of()
    objects[f"{STEP}/__7_0.distcp"] = objects[f"{STEP}/__1_0.distcp"]
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT009", {f"{STEP}/__7_0.distcp"})
    # A rank that had nothing to write leaves an empty one.
    objects[f"{STEP}/__1_2.distcp"] = objects.pop(f"{STEP}/__7_0.distcp")[:0]
    assert not ids(objects)


def test_a_copy_of_another_ranks_file():
    objects = run_of()
    objects[f"{STEP}/__1_0.distcp"] = objects[f"{STEP}/__0_0.distcp"]
    finding = only(objects)
    assert (finding.id, files(finding)) == ("INT002", {f"{STEP}/__1_0.distcp"})


def test_swapped_files_of_two_ranks():
    objects = run_of()
    one, other = (f"{STEP}/__{rank}_0.distcp" for rank in (0, 1))
    objects[one], objects[other] = objects[other], objects[one]
    assert files(only(objects)) == {one, other}


@pytest.mark.parametrize("text", ["6", "../iter_0000004", "release", "nonsense", ""])
def test_a_dangling_tracker(text):
    assert ids(run_of() | {"latest_checkpointed_iteration.txt": text.encode()}) == {"INT003"}


def test_common_of_another_iteration():
    objects = run_of()
    objects[f"{STEP}/common.pt"] = objects[f"{FIRST}/common.pt"]
    findings = audited(objects).findings
    (finding,) = [f for f in findings if f.id == "INT005"]
    assert files(finding) == {f"{STEP}/common.pt"}


def test_dangerous_calls_are_named_with_their_file():
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    finding = only(with_common(run_of(), lambda content: content.update(extra=Evil())))
    assert (finding.id, files(finding)) == ("SEC001", {f"{STEP}/common.pt"})
    assert not ids(with_common(run_of(), lambda content: content.update(extra="nothing")))


def test_an_object_that_lacks_a_rank():
    def drop(metadata):
        for table in (metadata.state_dict_metadata, metadata.storage_data):
            for key in [key for key in table if "rng_state/shard_0.1" in str(getattr(key, "fqn", key))]:
                del table[key]

    objects = changed(run_of(), f"{STEP}/.metadata", drop)
    finding = only(objects)
    assert finding.id == "MET002"
    assert "lists 1 of the 2 parts of the object 'rng_state'" in finding.message


def test_a_layer_that_is_stored_nowhere():
    def drop(metadata):
        key = "decoder.layers.mlp.linear_fc2.weight"
        for index in [i for i in metadata.storage_data if i.fqn == key and i.offset[0] == 1]:
            del metadata.storage_data[index]
        chunks = metadata.state_dict_metadata[key].chunks
        chunks[:] = [chunk for chunk in chunks if chunk.offsets[0] != 1]

    findings = audited(changed(run_of(), f"{STEP}/.metadata", drop)).findings
    (finding,) = [f for f in findings if f.id == "COV001"]
    assert {location.tensor for location in finding.locations} == {"decoder.layers.1.mlp.linear_fc2.weight"}


# The older backend

ARRAY = "decoder.layers.mlp.linear_fc1.weight"


@pytest.mark.parametrize(("name", "identifier"), [
    (f"{ARRAY}/0.1.0", "INT001"), ("rng_state/shard_0.1_1.2.pt", "MET002"), ("common.pt", "INT001"),
])  # fmt: skip
def test_a_missing_file_of_the_older_backend(name, identifier):
    objects = run_of("tp2_zarr")
    del objects[f"{STEP}/{name}"]
    finding = only(objects, Level.HEADERS)
    assert finding.id == identifier
    assert identifier == "MET002" or files(finding) == {f"{STEP}/{name}"}


def test_a_newest_step_of_the_older_backend_without_marker():
    objects = run_of("tp2_zarr")
    del objects["latest_checkpointed_iteration.txt"], objects[f"{STEP}/metadata.json"]
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("INT004", {f"{STEP}/metadata.json"})


@pytest.mark.parametrize("name", [f"{ARRAY}/0.1.0", f"{ARRAY}/.zarray", "rng_state/shard_0.1_1.2.pt", "common.pt"])
@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_a_damaged_file_of_the_older_backend(name, content):
    objects = run_of("tp2_zarr")
    own = objects[f"{STEP}/{name}"]
    objects[f"{STEP}/{name}"] = own[:-1] if content is None else content
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("INT002", {f"{STEP}/{name}"})


@pytest.mark.parametrize(
    ("what", "lacks"), [("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("fp32_param", "master")]
)
def test_a_tensor_of_the_optimizer_that_is_lost_whole(what, lacks):
    """Groups don't name their parameters: what is kept for the others tells what must be there."""
    key = f"optimizer.state.{what}.decoder.final_layernorm.weight"
    objects = {name: held for name, held in run_of("tp2_zarr").items() if not name.startswith(f"{STEP}/{key}/")}
    finding = only(objects, Level.HEADERS)
    assert finding.id == "OPT001"
    assert finding.message.endswith(f"but no {lacks}")
    assert {location.tensor for location in finding.locations} == {"decoder.final_layernorm.weight"}


def test_a_tensor_of_the_optimizer_that_the_index_has_lost():
    def drop(metadata):
        del metadata.state_dict_metadata[key]
        metadata.storage_data = {at: held for at, held in metadata.storage_data.items() if at.fqn != key}

    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    found = audited(changed(run_of(), f"{STEP}/.metadata", drop), Level.HEADERS).findings
    assert "OPT001" in {identifier for finding in found for identifier in (finding.id, *finding.consequences)}


def test_all_that_the_optimizer_keeps_for_a_parameter_may_be_lost_unseen():
    objects = {name: held for name, held in run_of("tp2_zarr").items()
               if not re.search(r"optimizer\.state\.\w+\.decoder\.final_layernorm\.weight/", name)}  # fmt: skip
    found = audited(objects, Level.HEADERS)
    assert found.findings == []
    assert {key for key, count in found.undetermined().items() if key[0] == "OPT001" and count == 1}


@pytest.mark.parametrize("shape", [[0, 32, 8], [1, 16, 8], [1, 0, 8]])
def test_a_document_that_has_no_place_for_stored_chunks(shape):
    objects = run_of("tp2_zarr")
    name = f"{STEP}/{ARRAY}/.zarray"
    document = json.loads(objects[name])
    assert document["shape"] == [1, 32, 8]
    objects[name] = json.dumps(document | {"shape": shape}).encode()
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("MET002", {name})
    assert "is stored" in finding.message


@pytest.mark.parametrize("change", [
    {"shape": [1 << 40, 32, 8]}, {"shape": [1, 32, 1 << 46]}, {"chunks": [1, 1, 1]}, {"compressor": {"id": "blosc"}},
    {"dtype": "<f4"},
])  # fmt: skip
def test_documents_that_lie_are_bounded(change):
    objects = run_of("tp2_zarr")
    name = f"{STEP}/{ARRAY}/.zarray"
    objects[name] = json.dumps(json.loads(objects[name]) | change).encode()
    found = audited(objects, Level.HEADERS)
    assert found.findings or found.steps[0].failures


# Values


WEIGHT = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.mark.parametrize("run", ["tp2", "dp2_fully_reshardable", "dp2_fully_sharded_model_space"])
def test_a_master_that_its_weight_is_not_rounded_from(run):
    name = WEIGHT if run == "tp2" else WEIGHT.replace("layers.1", "layers.0")
    assert "CST001" not in ids(edited(run_of(run), name, Role.MASTER, lambda v: v), Level.VALUES)
    found = audited(edited(run_of(run), name, Role.MASTER, lambda v: v * 1.01), Level.VALUES).findings
    (finding,) = [f for f in found if f.id == "CST001"]
    assert {location.tensor for location in finding.locations} == {name}
    assert not [f for f in found if f.id.startswith(("INT", "COV", "REP"))]


def test_not_a_number_in_a_moment():
    def spoil(values):
        values[3] = np.nan
        return values

    finding = only(edited(run_of(), WEIGHT, Role.SECOND_MOMENT, spoil), Level.VALUES)
    assert finding.id == "NUM001"
    assert {(location.tensor, location.role) for location in finding.locations} == {(WEIGHT, Role.SECOND_MOMENT)}


def test_a_first_moment_that_its_second_can_not_bound():
    assert "OPT011" in ids(edited(run_of(), WEIGHT, Role.FIRST_MOMENT, lambda v: v * 100 + 1), Level.VALUES)


@pytest.mark.parametrize("name", DATA)
def test_a_data_file_of_another_step(name):
    """Sizes fit. That it is stale explains weights that don't round from masters, and moments that don't fit."""
    objects = run_of()
    assert len(objects[f"{STEP}/{name}"]) == len(objects[f"{FIRST}/{name}"])
    objects[f"{STEP}/{name}"] = objects[f"{FIRST}/{name}"]
    assert ids(objects) == {"MOT003"}


def test_an_index_that_lies_about_its_layers():
    torch = pytest.importorskip("torch")

    def grow(metadata):
        for key, held in metadata.state_dict_metadata.items():
            if ".layers." in key and hasattr(held, "size"):
                held.size = torch.Size([1 << 40, *held.size[1:]])
                held.chunks[0].sizes = torch.Size([1 << 40, *held.chunks[0].sizes[1:]])

    catalog = read(MemoryStore(changed(run_of(), f"{STEP}/.metadata", grow)), STEP)
    assert all("more layers" in tensor.undetermined for tensor in catalog.tensors if ".layers." in tensor.name)


# Scales of FP8: by torch in the forms that Transformer Engine gives them, which does not run on a CPU

LAYER = "decoder.layers.mlp.linear_fc1"


def scales_of(torch, **changed):
    state = {
        "scale_fwd": torch.tensor([448.0, 2.0, 0.5]), "amax_history_fwd": torch.rand(16, 3),
        "scale_bwd": torch.tensor([1.0, 8.0]), "amax_history_bwd": torch.zeros(16, 2),
        "extra_fp8_variables": {"num_gemms": 1}, "recipe": Fraction(1, 2),
    }  # fmt: skip
    return state | {key: torch.tensor(value) for key, value in changed.items()}


def in_bytes_io(torch, state):
    held = io.BytesIO()
    torch.save(state, held)
    return held


def in_a_tensor(torch, state):
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def with_extra_state(objects, held):
    """The checkpoint with a rank's objects of one layer saved again, each the last item of a file."""
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save([held], buffer)
    name = f"{STEP}/__0_0.distcp"
    objects = dict(objects)

    def place(metadata):
        (index,) = [i for i in metadata.storage_data if i.fqn.startswith(f"{LAYER}._extra_state/shard_0")]
        stored = metadata.storage_data[index]
        before, length = stored.offset, stored.length
        assert stored.relative_path == "__0_0.distcp"
        content = objects[name]
        objects[name] = content[:before] + buffer.getvalue() + content[before + length :]
        for other in metadata.storage_data.values():
            if other.relative_path == stored.relative_path and other.offset > before:
                other.offset += len(buffer.getvalue()) - length
        stored.length = len(buffer.getvalue())

    return changed(objects, f"{STEP}/.metadata", place) | {name: objects[name]}


@pytest.mark.parametrize("form", [in_bytes_io, in_a_tensor])
def test_scales_of_low_precision(form):
    torch = pytest.importorskip("torch")
    run = run_of()

    def found(**changes):
        return audited(with_extra_state(run, form(torch, scales_of(torch, **changes))), Level.HEADERS)

    healthy = found()
    assert not healthy.findings
    assert healthy.steps[-1].judgements["NUM005"].num_holds == 4
    for changes, severity in (
        ({"scale_fwd": [1.0, 0.0]}, "ERROR"), ({"scale_bwd": [float("nan")]}, "ERROR"),
        ({"scale_bwd": [-1.0]}, "ERROR"), ({"amax_history_fwd": [[float("inf")]]}, "NOTE"),
    ):  # fmt: skip
        (finding,) = found(**changes).findings
        (location,) = finding.locations
        assert (finding.id, finding.severity.name) == ("NUM005", severity)
        assert location.tensor == f"{LAYER}._extra_state[0].{next(iter(changes))}"
        assert location.file == f"{STEP}/__0_0.distcp"


def test_extra_states_that_hold_nothing_or_what_is_not_known():
    torch = pytest.importorskip("torch")
    for held in (None, torch.empty(0, dtype=torch.uint8), in_a_tensor(torch, None), in_bytes_io(torch, None)):
        found = audited(with_extra_state(run_of(), held), Level.HEADERS)
        assert not found.findings
        assert found.steps[-1].judgements["NUM005"].not_applicable == {"no scale is recorded": 1}
        assert not any("_extra_state" in name for name in found.steps[-1].opaque)
    broken = in_a_tensor(torch, scales_of(torch))[:200].clone()
    for held in (broken, io.BytesIO(b"PK\x03\x04"), torch.full((9,), 128, dtype=torch.uint8), "text"):
        found = audited(with_extra_state(run_of(), held), Level.HEADERS)
        assert not found.findings
        assert found.steps[-1].opaque["an _extra_state in a form that is not known"] == 1


def test_a_dangerous_call_in_what_is_loaded_again():
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    held = in_a_tensor(torch, scales_of(torch) | {"recipe": Evil()})
    finding = only(with_extra_state(run_of(), held), Level.HEADERS)
    assert (finding.id, files(finding)) == ("SEC001", {f"{STEP}/__0_0.distcp"})
