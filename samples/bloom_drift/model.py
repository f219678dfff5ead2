"""A tiny GPT with Megatron's module names, cut for tensor parallelism, as a DeepSpeed pipeline.

The list of layer specs has the shape of Megatron-DeepSpeed's ``GPTModelPipe``, so the saved layer files get the
same numbers as BLOOM's: 1 is the embedding, 3 … 2+L are transformer layers, 4+L is the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole model, not of one tensor-parallel rank."""

    hidden: int = 16
    ffn: int = 64
    layers: int = 2
    heads: int = 4
    vocab: int = 48
    sequence: int = 16


class TensorParallel:
    """This process's tensor-parallel group. Module level, as in Megatron: layers are built from specs."""

    group: dist.ProcessGroup
    rank: int = 0
    size: int = 1


class _ToRegion(torch.autograd.Function):
    """Identity forward, sum over the tensor-parallel group backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=TensorParallel.group)
        return grad


class _FromRegion(torch.autograd.Function):
    """Sum over the tensor-parallel group forward, identity backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=TensorParallel.group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class _GatherLast(torch.autograd.Function):
    """Concatenate the last dimension over the group; backward keeps this rank's part."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(TensorParallel.size)]
        dist.all_gather(parts, x.contiguous(), group=TensorParallel.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.chunk(TensorParallel.size, dim=-1)[TensorParallel.rank].contiguous()


def _sharded(shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter of which every rank holds another part: drawn from a generator seeded per rank.

    One seed for all ranks would make sharded parts equal over the ranks and so hide a wrong replica rule.
    """
    _sharded.count += 1
    generator = torch.Generator().manual_seed(1000 * _sharded.count + 17 * TensorParallel.rank + 5)
    parameter = nn.Parameter(torch.randn(shape, generator=generator) * 0.05)
    parameter.tensor_model_parallel = True
    return parameter


_sharded.count = 0


def _replicated(size: int, value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((size,), value))
    parameter.tensor_model_parallel = False
    return parameter


class LayerNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight, self.bias = _replicated(hidden, 1.0), _replicated(hidden, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class ColumnParallelLinear(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = _sharded((rows // TensorParallel.size, columns))
        self.bias = _sharded((rows // TensorParallel.size,))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_ToRegion.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = _sharded((rows, columns // TensorParallel.size))
        self.bias = _replicated(rows, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return _FromRegion.apply(F.linear(x, self.weight)) + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary cut over the group; with ``norm`` as under ``--embed-layernorm``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.rows = sizes.vocab // TensorParallel.size
        self.weight = _sharded((self.rows, sizes.hidden))
        self.norm = LayerNorm(sizes.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - TensorParallel.rank * self.rows
        mine = (local >= 0) & (local < self.rows)
        found = F.embedding(local.clamp(0, self.rows - 1), self.weight) * mine.unsqueeze(-1).to(self.weight.dtype)
        return self.norm(_FromRegion.apply(found))


class EmbeddingPipe(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(sizes)

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        """What DeepSpeed ties between the first and the last stage: this weight alone, not the norm."""
        return self.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


class SelfAttention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads // TensorParallel.size
        self.query_key_value = ColumnParallelLinear(sizes.hidden, 3 * sizes.hidden)
        self.dense = RowParallelLinear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.query_key_value(x).view(batch, length, self.heads, -1).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(sizes.hidden, sizes.ffn)
        self.dense_4h_to_h = RowParallelLinear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(sizes.hidden)
        self.self_attention = SelfAttention(sizes)
        self.post_attention_layernorm = LayerNorm(sizes.hidden)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def _logits(embedding: EmbeddingPipe, hidden: Tensor) -> Tensor:
    return _GatherLast.apply(F.linear(_ToRegion.apply(hidden), embedding.word_embeddings.weight))


def _same(x: Tensor) -> Tensor:
    return x


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layer_specs(sizes: Sizes) -> list:
    """The specs in the order of ``GPTModelPipe``; functions hold places, so numbers have holes on disk."""
    tied = {"key": "embed", "tied_weight_attr": "word_embeddings_weight"}
    return [
        _same,
        TiedLayerSpec(tied["key"], EmbeddingPipe, sizes, tied_weight_attr=tied["tied_weight_attr"]),
        _same,
        *(LayerSpec(ParallelTransformerLayerPipe, sizes) for _ in range(sizes.layers)),
        _same,
        LayerSpec(LayerNorm, sizes.hidden),
        TiedLayerSpec(tied["key"], EmbeddingPipe, sizes, forward_fn=_logits, tied_weight_attr=tied["tied_weight_attr"]),
        _same,
    ]
