"""Rank files with tensors of other kinds, or with parts of which nothing is recorded."""

import pytest

from auditor.model.catalog import Role
from auditor.storage.memory import MemoryStore
from tests.adapters.test_torch_per_rank import findings_of, ranks, read

torch = pytest.importorskip("torch")


class Eight(torch.Tensor):
    """A subclass as torchao's optimizers of eight bits have it: codes, and a scale for each block of them."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def test_moments_of_eight_bits_are_read_as_what_they_are_made_of():
    model = {"layer.weight": torch.ones(4, 2)}
    eight = [Eight(torch.ones(4, 2, dtype=torch.uint8), torch.ones(1)) for _ in range(2)]
    state = {0: {"step": torch.tensor(3.0), "exp_avg": eight[0], "exp_avg_sq": eight[1]}}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    objects = ranks({"model": model, "optimizer": {"state": state, "param_groups": [group]}})
    names = {tensor.name for tensor in read(MemoryStore(objects)).tensors if tensor.role is Role.MOMENT}
    assert names == {f"layer.weight.{key}:{part}" for key in ("exp_avg", "exp_avg_sq") for part in ("codes", "scale")}
    # Nobody calls the moments lost.
    run = findings_of({f"s3/{name}": content for name, content in objects.items()})
    assert not run.findings


# Parts of which nothing is recorded


def cut(rank, *, whole):
    """What ``{name: p.to_local()}`` gives on one of two ranks, or the whole model, of which rank 1's drifted."""
    full = {"embed.weight": (6, 8), "up.weight": (16, 8), "up.bias": (16,), "norm.weight": (8,), "norm.bias": (8,)}
    generator = torch.Generator().manual_seed(0 if whole else rank)
    shapes = {name: (shape[0] // (1 if whole else 2), *shape[1:]) for name, shape in full.items()}
    return {"model": {name: torch.randn(shape, generator=generator) + 0.01 * rank for name, shape in shapes.items()}}


def flat(rank, *, whole):
    """The local parameters of FSDP1, laid flat."""
    return {"model": {name: tensor.flatten() for name, tensor in cut(rank, whole=whole)["model"].items()}}


@pytest.mark.parametrize(("content", "reason"), [
    (cut, "norm.weight has 4 elements, layers take 8"), (flat, "up.weight has one dim, and its bias another length"),
])  # fmt: skip
def test_parts_that_nothing_records_are_no_replicas(content, reason):
    objects = {f"s1/{name}": part for name, part in ranks(lambda rank: content(rank, whole=False)).items()}
    run = findings_of(objects)
    assert not run.findings
    assert any(reason in told for identifier, told in run.undetermined() if identifier == "REP001")


def test_replicas_of_such_a_model_are_compared_all_the_same():
    objects = {f"s1/{name}": part for name, part in ranks(lambda rank: cut(rank, whole=True)).items()}
    assert [finding.id for finding in findings_of(objects).findings] == ["REP001"]
