"""What ranks wrote in safetensors files, by itself and beside what was put together of it."""

import json

import pytest

from auditor.audit import audit
from auditor.settings import Level, Settings
from auditor.storage.memory import MemoryStore
from tests.dcp_saves import FIXTURES, audited, files, objects_of, only, read

# Ranks' parts in safetensors files


def test_parts_of_ranks_in_safetensors():
    objects = objects_of(FIXTURES / "hf_sharded")
    run = audited(objects)
    assert not run.findings
    catalog = read(objects, "step-4")
    assert all("inferred" in tensor.undetermined for tensor in catalog.tensors)
    assert {tensor.name: tensor.shape for tensor in catalog.tensors}["embed.weight"] == (19, 6)


def test_a_missing_part_in_safetensors():
    objects = objects_of(FIXTURES / "hf_sharded")
    name = "step-4/shard-00001-model-00001-of-00001.safetensors"
    del objects[name]
    finding = only(objects, Level.HEADERS)
    assert (finding.id, files(finding)) == ("INT004", {name})


def test_every_rank_wrote_the_same_file():
    """HuggingFaceStorageWriter of a sharded model, without save_distributed: a real race."""
    finding = only(objects_of(FIXTURES / "hf_rank0_raced"))
    assert finding.id == "INT002"


# What ranks wrote, beside what was put together of it


CONSOLIDATED, SHARDED = (
    "step-4/model-00001-of-00001.safetensors",
    "step-4/sharded/shard-{}-model-00001-of-00001.safetensors",
)


@pytest.mark.parametrize("name", [CONSOLIDATED, SHARDED.format("00002")])
def test_the_whole_tensors_are_not_their_parts(name):
    objects = objects_of(FIXTURES / "hf_consolidated")
    content = bytearray(objects[name])
    content[-1] ^= 1
    (run,) = audit(MemoryStore(objects | {name: bytes(content)}), Settings(level=Level.VALUES)).runs
    (finding,) = run.findings
    assert finding.id == "REF001"
    assert len({location.tensor for location in finding.locations}) == 1
    assert [step.state.step for step in run.steps] == [4]


def test_the_parts_of_the_last_rank_lack():
    """Beside the whole tensors that shows, though nothing records how many ranks there were."""
    objects = objects_of(FIXTURES / "hf_consolidated")
    del objects[SHARDED.format("00002")]
    (run,) = audit(MemoryStore(objects), Settings(level=Level.HEADERS)).runs
    assert {finding.id for finding in run.findings} == {"COV001"}
    del objects[SHARDED.format("00001")]
    (run,) = audit(MemoryStore(objects), Settings(level=Level.VALUES)).runs
    assert run.findings == []


def test_a_tensor_that_was_left_out_when_parts_were_put_together():
    objects = objects_of(FIXTURES / "hf_consolidated")
    objects |= {CONSOLIDATED: without(objects[CONSOLIDATED], "norm.weight")}
    index = json.loads(objects["step-4/model.safetensors.index.json"])
    del index["weight_map"]["norm.weight"]
    objects["step-4/model.safetensors.index.json"] = json.dumps(index).encode()
    (run,) = audit(MemoryStore(objects), Settings(level=Level.VALUES)).runs
    (finding,) = [one for one in run.findings if one.id == "REF001"]
    assert "lacks norm.weight" in finding.message


def without(content, name):
    """A safetensors file without one of its tensors."""
    numpy = pytest.importorskip("safetensors.numpy")
    held = numpy.load(content)
    del held[name]
    return numpy.save(held)
