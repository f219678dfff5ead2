"""Conversions by others' converters (tests/fixtures/conversions), and errors of the kind that conversions have.

Each error is planted into what a converter made, at a known place; what of it is said is expected by its words.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from auditor.adapters.adapter import Options
from auditor.discovery import one_run
from auditor.model.finding import Severity
from auditor.model.region import whole
from auditor.storage.local import LocalStore
from auditor.view.assemble import read_box
from tests.faults import rewrite
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
PAIRS = FIXTURES / "conversions"
SAMPLE = ROOT / "samples" / "bloom_drift"
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Planted:
    """One error: what is done to the converted tensors' bits, and what must be said of which tensors."""

    what: str
    change: Callable
    """Changes a dictionary of name to bits."""
    said: str
    """Words of the report, in the detail of the first tensor that is told from the reference, or as a cause."""
    tensors: tuple[str, ...]
    """All that is told from the reference."""
    severity: Severity = Severity.ERROR


@dataclass(frozen=True)
class Conversion:
    """A source, what a converter made of it, and errors."""

    what: str
    source: Path
    converted: Path
    planted: tuple[Planted, ...]
    choices: dict = field(default_factory=dict)
    """Of the comparison; `exact` where the converted weights have the dtype of the source's."""


def catalog_of(run):
    """The Catalog of the newest step of a run, and where it is read."""
    store = LocalStore(run)
    source = one_run(store).steps[-1]
    return store, source.adapter.read(store, source.folder, source.match, Options())


def bits_of(run):
    """Name of each weight to its bits, and to its dtype."""
    store, catalog = catalog_of(run)
    own = [(n, t) for n, t in enumerate(catalog.tensors) if t.role.value == _role(catalog)]
    values = {t.name: read_box(store, catalog, n, 0, whole(t.shape)).copy() for n, t in own}
    return values, {t.name: t.dtype.name for _, t in own}


def _role(catalog):
    """As what weights are kept: as masters alone where a framework keeps no others."""
    return next(role for role in ("parameter", "master") if any(t.role.value == role for t in catalog.tensors))


def plant(conversion, planted, folder):
    """The converted checkpoint with one error, in a new folder."""
    before, dtypes = bits_of(conversion.converted)
    after = {name: bits.copy() for name, bits in before.items()}
    planted.change(after)
    if list(conversion.converted.glob("config.json")) and not list(conversion.converted.glob("*.msgpack")):
        folder.mkdir(parents=True)
        shutil.copy(conversion.converted / "config.json", folder)
        write_safetensors(folder / "model.safetensors", after, dtypes)
        return folder
    shutil.copytree(conversion.converted, folder)
    _, catalog = catalog_of(folder)
    for name, bits in after.items():
        if not np.array_equal(bits, before[name]):
            flat = np.ascontiguousarray(bits).reshape(-1)
            role = next(
                t.role.value for t in catalog.tensors if t.name == name and t.role.value in ("parameter", "master")
            )
            rewrite(folder, catalog.step, name, role, lambda old, flat=flat: flat.view(old.dtype))
    return folder


def write_safetensors(path, tensors, dtypes):
    """Bits of any float dtype, which numpy's own writer does not know."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, bits in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS[dtypes[name]],
            "shape": bits.shape,
            "data_offsets": [at, at + bits.nbytes],
        }
        at += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(bits.tobytes() for bits in tensors.values()))


# What conversions get wrong, as changes of name to bits.


def each(name, change):
    """One tensor's bits changed."""

    def changed(bits):
        bits[name] = np.ascontiguousarray(change(bits[name]))

    return changed


def exchanged(one, other):
    """All tensors whose names hold ``one`` against those with ``other`` in its place."""

    def changed(bits):
        for name in [name for name in bits if one in name]:
            twin = name.replace(one, other)
            bits[name], bits[twin] = bits[twin].copy(), bits[name].copy()

    return changed


def copied(one, other):
    """Those with ``other`` are those with ``one`` once more."""

    def changed(bits):
        for name in [name for name in bits if one in name]:
            bits[name.replace(one, other)] = bits[name].copy()

    return changed


def without(name):
    """One tensor left out."""
    return lambda bits: bits.pop(name)


def turned_back(rows, heads):
    """Halves of each head as pairs of neighbours again: the rotation of rows left out."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def regrouped(rows, groups, parts=3):
    """Parts one after the other as groups that hold all parts."""
    return rows.reshape(parts, groups, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def numbers(change, dtype):
    """A change of numbers for one of bits."""

    def changed(bits):
        values = change(bits.view(dtype))
        return np.asarray(values, dtype).view(bits.dtype)

    return changed


def bfloat16(values):
    """Numbers, rounded to bfloat16 and back."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def experts_exchanged(bits):
    """Two of a layer's stacked experts, the router's rows as they were."""
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{part}"
        bits[name] = bits[name][[2, 1, 0]]


def qkv_as_if_in_order(bits):
    """What lies as key, value, query, cut as query, key, value."""
    q, k, v = (f"decoder.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    bits[q], bits[k], bits[v] = bits[k].copy(), bits[v].copy(), bits[q].copy()


def rows_of_kind(bits):
    """Query and key and value cut as if every head held its own three."""
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rows = np.concatenate([bits[name] for name in names])
    order = np.arange(len(rows)).reshape(4, -1).T.reshape(-1)
    cuts = np.cumsum([len(bits[name]) for name in names])[:-1]
    for name, part in zip(names, np.split(rows[order], cuts), strict=True):
        bits[name] = part


def stale(bits):
    """One layer of an earlier save."""
    earlier, _ = bits_of(SAMPLE / "healthy" / "global_step40")
    for name in [name for name in bits if name.startswith("h.1.")]:
        bits[name] = earlier["4." + name.removeprefix("h.1.")]


def _from_source(change):
    """One matrix made anew of the source's float32 numbers, whose bits are changed to those of bfloat16."""

    def changed(bits):
        name = "model.layers.0.mlp.up_proj.weight"
        values = bits_of(PAIRS / "adapter" / "source")[0][name].view(np.float32)
        bits[name] = (change(values).view(np.uint32) >> 16).astype(np.uint16).reshape(bits[name].shape)

    return changed


twice_rounded = _from_source(lambda values: bfloat16(values.astype(np.float16)))
cut_off = _from_source(lambda values: values)


def layer(number, *names, stem="model.layers"):
    """Names in one layer."""
    return tuple(f"{stem}.{number}.{name}.weight" for name in names)


_META = ("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm",
         "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj")  # fmt: skip
_BLOOM = tuple(f"{name}.{kind}" for name in ("input_layernorm", "mlp.dense_4h_to_h", "mlp.dense_h_to_4h",
               "post_attention_layernorm", "self_attention.dense", "self_attention.query_key_value")
               for kind in ("bias", "weight"))  # fmt: skip
_BLOCK = ("gain", "fall.bias", "fall.weight", "norm.bias", "norm.weight", "rise.bias", "rise.weight")
_OLD = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"

CONVERSIONS = (
    Conversion("Meta's Llama, `convert_llama_weights_to_hf`", PAIRS / "meta_llama/source/consolidated.00.pth",
               PAIRS / "meta_llama/converted", (
        Planted("rotary rows of one query left as they were",
                each("model.layers.1.self_attn.q_proj.weight", lambda bits: turned_back(bits, 4)),
                "another form of rotary embeddings", layer(1, "self_attn.q_proj")),
        Planted("rotary rows of all queries and keys left so",
                lambda bits: [each(f"model.layers.{n}.self_attn.{x}_proj.weight", lambda b, heads=heads:
                                   turned_back(b, heads))(bits) for n in (0, 1) for x, heads in (("q", 4), ("k", 2))],
                "in each of 4 stretches of 4 along dim 0",
                tuple(sorted(layer(0, "self_attn.k_proj", "self_attn.q_proj")
                             + layer(1, "self_attn.k_proj", "self_attn.q_proj")))),
        Planted("one layer twice", copied("layers.0.", "layers.1."), "holds the reference's model.layers.0.",
                layer(1, *_META)),
        Planted("gate and up exchanged", exchanged("layers.0.mlp.gate", "layers.0.mlp.up"),
                "holds the reference's model.layers.0.mlp.up_proj", layer(0, "mlp.gate_proj", "mlp.up_proj")),
        Planted("a square matrix transposed", each("model.layers.1.self_attn.o_proj.weight", np.transpose),
                "transposed", layer(1, "self_attn.o_proj")))),
    Conversion("Gemma, `convert_gemma_weights_to_hf`", PAIRS / "gemma/source", PAIRS / "gemma/converted", (
        Planted("a norm's offset of one counted twice",
                each("model.layers.1.input_layernorm.weight", numbers(lambda x: x + 1, np.float32)),
                "every element is the reference's and 1", layer(1, "input_layernorm")),
        Planted("rows of query, key and value cut otherwise than they lie", rows_of_kind,
                "rows of q_proj, k_proj, v_proj lie among each other",
                layer(0, "self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj")),
        Planted("a vocabulary one row short", each("model.embed_tokens.weight", lambda bits: bits[:-1]), "",
                ("model.embed_tokens.weight",)),
        Planted("rounded to bfloat16 on the way",
                each("model.layers.0.mlp.up_proj.weight", numbers(bfloat16, np.float32)),
                "rounded to bfloat16 on their way", layer(0, "mlp.up_proj")))),
    Conversion("OPT, `convert_opt_original_pytorch_checkpoint_to_pytorch`", PAIRS / "opt/source",
               PAIRS / "opt/converted", (
        Planted("key, value, query taken for query, key, value", qkv_as_if_in_order,
                "holds the reference's decoder.layers.1.self_attn.v_proj",
                layer(1, "self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj", stem="decoder.layers")),)),
    Conversion("old Megatron-LM's GPT-2, `convert_megatron_gpt2_checkpoint`", PAIRS / "megatron_gpt2/source",
               PAIRS / "megatron_gpt2/converted", (
        Planted("query, key and value left head by head",
                each("transformer.h.1.attn.c_attn.weight", lambda bits: regrouped(bits.T, 2).T),
                "read the other way round along dim 1", layer(1, "attn.c_attn", stem="transformer.h")),
        Planted("all queries, keys and values left head by head",
                lambda bits: [each(f"transformer.h.{n}.attn.c_attn.{kind}", lambda b: regrouped(b.T, 2).T)(bits)
                              for n in (0, 1) for kind in ("weight", "bias")],
                "read the other way round along dim 1",
                tuple(f"transformer.h.{n}.attn.c_attn.{kind}" for n in (0, 1) for kind in ("bias", "weight"))),
        Planted("a square matrix left as it was", each("transformer.h.0.attn.c_proj.weight", np.transpose),
                "transposed", layer(0, "attn.c_proj", stem="transformer.h")),
        Planted("the padding cut from the wrong end",
                lambda bits: bits.update(dict.fromkeys(("transformer.wte.weight", "lm_head.weight"),
                                                       np.roll(bits["transformer.wte.weight"], 4, axis=0))),
                "the first 20 rows", ("transformer.wte.weight",)),
        Planted("the tied head not copied",
                each("lm_head.weight", lambda bits: np.zeros_like(bits)), "", ("lm_head.weight",)))),
    Conversion("BLOOM, `convert_bloom_original_checkpoint_to_pytorch`", SAMPLE / "healthy" / "global_step80",
               PAIRS / "bloom/healthy", (
        Planted("a layer of an earlier save", stale, "no training came between",
                tuple(f"h.1.{name}" for name in _BLOOM)),)),
    Conversion("GPT-2 as Flax, `from_pt`", PAIRS / "flax_gpt2/source", PAIRS / "flax_gpt2/converted", (
        Planted("query, key and value of a head put together",
                each("transformer.h.0.attn.c_attn.kernel", lambda bits: regrouped(bits, 2)),
                "read the other way round along dim 1", layer(0, "attn.c_attn", stem="transformer.h")),)),
    Conversion("BERT as Flax, `from_pt`", PAIRS / "flax_bert/source", PAIRS / "flax_bert/converted", (
        Planted("a square kernel left as torch has it",
                each("bert.encoder.layer.1.attention.self.query.kernel", np.transpose), "transposed",
                ("bert.encoder.layer.1.attention.self.query.weight",)),)),
    Conversion("Llama as Flax, `from_pt`", PAIRS / "flax_llama/source", PAIRS / "flax_llama/converted", (
        Planted("two layers exchanged", exchanged("layers.0.", "layers.1."),
                "holds the reference's model.layers.1.", layer(0, *_META) + layer(1, *_META)),)),
    Conversion("Mixtral's experts stacked, transformers 5", PAIRS / "mixtral/source", PAIRS / "mixtral/converted", (
        Planted("two experts exchanged, the router not", experts_exchanged, "tokens go to other experts",
                tuple(sorted(_OLD.format(0, e, w) for e in (0, 2) for w in ("w1", "w2", "w3")))),
        Planted("an expert twice",
                each("model.layers.1.mlp.experts.down_proj", lambda bits: bits[[0, 0, 2]]),
                "expert 0 is there twice, and what expert 1 was is lost", (_OLD.format(1, 1, "w2"),)),
        Planted("gate and up of one expert exchanged",
                each("model.layers.1.mlp.experts.gate_up_proj",
                     lambda bits: np.concatenate([bits[:2], np.roll(bits[2:], bits.shape[1] // 2, axis=1)])),
                "holds the reference's model.layers.1.block_sparse_moe.experts.2.w3",
                (_OLD.format(1, 2, "w1"), _OLD.format(1, 2, "w3"))),
        Planted("the last expert left out",
                each("model.layers.0.mlp.experts.down_proj", lambda bits: bits[:2]), "",
                (_OLD.format(0, 2, "w2"),)))),
    Conversion("Qwen-MoE's experts stacked, transformers 5", PAIRS / "qwen2_moe/source",
               PAIRS / "qwen2_moe/converted", (
        Planted("gate and up row by row",
                each("model.layers.0.mlp.experts.gate_up_proj",
                     lambda bits: bits.reshape(3, 2, -1, bits.shape[2]).swapaxes(1, 2).reshape(bits.shape)),
                "rows of gate_proj, up_proj lie among each other",
                tuple(sorted(f"model.layers.0.mlp.experts.{e}.{part}_proj.weight"
                             for e in range(3) for part in ("gate", "up")))),
        Planted("the router's rows in another order",
                each("model.layers.1.mlp.gate.weight", lambda bits: bits[[1, 2, 0]]), "rolled by 1 along dim 0",
                layer(1, "mlp.gate")))),
    Conversion("BERT with norms' old names, transformers 5", PAIRS / "legacy_bert/source",
               PAIRS / "legacy_bert/converted", (
        Planted("two norms exchanged",
                exchanged("encoder.layer.0.output.LayerNorm", "encoder.layer.1.output.LayerNorm"),
                "holds the reference's encoder.layer.1.output.LayerNorm.gamma",
                tuple(f"encoder.layer.{n}.output.LayerNorm.{x}" for n in (0, 1) for x in ("beta", "gamma"))),)),
    Conversion("FSDP2 on two ranks as one file, `dcp_to_torch_save`", FIXTURES / "dcp/same_state/fsdp2_2",
               PAIRS / "dcp", (
        Planted("rows of one rank's part moved", each("up.weight", lambda bits: np.roll(bits, 1, axis=0)),
                "rolled by 1 along dim 0", ("up.weight",)),)),
    Conversion("ZeRO-2 in bfloat16 as float32, `zero_to_fp32`", FIXTURES / "deepspeed/zero2_bf16",
               FIXTURES / "deepspeed/exported", (
        Planted("one master rounded to bfloat16, and back",
                each("blocks.1.rise.weight", numbers(bfloat16, np.float32)), "rounded to bfloat16 on their way",
                ("blocks.1.rise.weight",)),), {"steps": "6"}),
    Conversion("ZeRO-2 on three ranks, `ds_to_universal`", FIXTURES / "deepspeed/same_zero2_dp3",
               FIXTURES / "deepspeed/same_universal_from_zero2", (
        Planted("two blocks exchanged", exchanged("blocks.0.", "blocks.1."), "holds the reference's blocks.1.",
                tuple(f"blocks.{n}.{name}" for n in (0, 1) for name in _BLOCK)),)),
    Conversion("Llama in float32 as bfloat16, `save_pretrained`", PAIRS / "adapter/source", PAIRS / "cast", (
        Planted("rounded to float16 before", twice_rounded, "not the nearest numbers", layer(0, "mlp.up_proj"),
                Severity.WARNING),
        Planted("cut off, not rounded", cut_off, "a cut-off, no rounding to nearest", layer(0, "mlp.up_proj"))),
        {"exact": False}),
    Conversion("Llama in three files as one, `save_pretrained`", FIXTURES / "hugging_face" / "llama_sharded",
               PAIRS / "resharded", (
        Planted("a norm left out", without("model.norm.weight"), "", ("model.norm.weight",)),)),
)  # fmt: skip
