"""Conversions: the same weights under other names, fused, transposed, padded; and with one planted error each."""

import json
import shutil
import tomllib

import numpy as np
import pytest

from auditor.adapters.adapter import Options
from auditor.comparison.holding import Source
from auditor.comparison.maps import MAPS
from auditor.comparison.outcome import DIFFERENT, PROVED, Standing
from auditor.discovery import one_run
from auditor.model.name_map import mapped
from auditor.model.region import whole
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.view.assemble import read_box
from tests import command
from tests.comparison.test_exact import code, compared
from tests.comparison.tree import write_step
from tests.faults import rewrite
from tests.flax_files import pack
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
DEEPSPEED, MEGATRON = FIXTURES / "deepspeed", FIXTURES / "megatron_dist"


def values(run, role="parameter"):
    """Name to array, as bits."""
    store = LocalStore(run)
    source = one_run(store).steps[-1]
    catalog = source.adapter.read(store, source.folder, source.match, Options())
    return {t.name: read_box(store, catalog, n, 0, whole(t.shape))
            for n, t in enumerate(catalog.tensors) if t.role.value == role}  # fmt: skip


def hugging_face(folder, tensors, **configuration):
    """A folder as `save_pretrained` leaves it, of bfloat16 tensors given as their bits."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder.mkdir(parents=True)
    found = {name: torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)
             for name, bits in tensors.items()}  # fmt: skip
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(configuration))
    return folder


def unfused(rows, groups, parts):
    """Query, key and value, of which every group holds so many rows each, one after the other."""
    by_group = rows.reshape(groups, -1, *rows.shape[1:])
    cuts = np.cumsum(parts)[:-1]
    return [part.reshape(-1, *rows.shape[1:]) for part in np.split(by_group, cuts, axis=1)]


def llama(swapped=False):
    """What a converter makes of `tp2_llama`: two groups of two query heads, four wide."""
    own = values(MEGATRON / "tp2_llama")
    found = {}
    for name, bits in own.items():
        layer = name.split(".")[2] if name.startswith("decoder.layers") else ""
        at = f"model.layers.{layer}."
        if "linear_qkv.weight" in name:
            parts = unfused(bits, 2, (8, 4, 4))
            found |= {f"{at}self_attn.{x}_proj.weight": part for x, part in zip("qkv", parts, strict=True)}
        elif "linear_fc1" in name:
            gate, up = np.split(bits, 2)[:: -1 if swapped and layer == "1" else 1]
            found |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
        else:
            plain = {"linear_proj": "self_attn.o_proj.weight", "input_layernorm": "input_layernorm.weight",
                     "pre_mlp_layernorm": "post_attention_layernorm.weight", "linear_fc2": "mlp.down_proj.weight",
                     "q_layernorm": "self_attn.q_norm.weight", "k_layernorm": "self_attn.k_norm.weight"}  # fmt: skip
            outside = {
                "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                "decoder.final_layernorm.weight": "model.norm.weight",
                "output_layer.weight": "lm_head.weight",
            }
            known = [at + new for word, new in plain.items() if layer and f".{word}." in name]
            found[known[0] if known else outside[name]] = bits
    return found


def test_megatron_as_llama_is_proved_equal_and_one_exchanged_layer_is_named(tmp_path):
    good = hugging_face(tmp_path / "good", llama())
    found = compared(MEGATRON / "tp2_llama", good)
    rows = [row for row in found.steps[0].rows if row.pair.role.value == "parameter"]
    assert {row.standing for row in rows} == {Standing.EQUAL}
    assert len(rows) == len(llama())
    assert code(found) == 0
    assert "megatron-hf on the reference" in found.maps[0]
    bad = hugging_face(tmp_path / "bad", llama(swapped=True))
    found = compared(bad, MEGATRON / "tp2_llama")
    wrong = {row.pair.name: row.detail for row in found.steps[0].rows if row.standing not in PROVED}
    assert wrong == {
        "model.layers.1.mlp.gate_proj.weight": "holds the reference's model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight": "holds the reference's model.layers.1.mlp.gate_proj.weight",
    }
    assert code(found) == 1


@pytest.mark.parametrize(
    ("recorded", "groups", "ending"), [(True, 2, 0), (True, 1, 1), (True, 4, 1), (False, 2, 3), (False, 4, 3)]
)
def test_heads_lie_as_a_configuration_has_them_and_are_open_where_none_does(tmp_path, recorded, groups, ending):
    """Under the wrong number of groups a conversion that cut all heads so is equal: what fits proves nothing."""
    drawn = np.random.default_rng(9)
    parts = [drawn.integers(0x3C00, 0x3F00, (rows, 8)).astype(np.uint16) for rows in (16, 8, 8)]
    embedding = drawn.integers(0x3C00, 0x3F00, (20, 8)).astype(np.uint16)
    fused = np.concatenate([part.reshape(groups, -1, 8) for part in parts], axis=1).reshape(-1, 8)
    own = {"embedding.word_embeddings.weight": embedding, "decoder.layers.0.self_attention.linear_qkv.weight": fused}
    names = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    theirs = {"model.embed_tokens.weight": embedding, **dict(zip(names, parts, strict=True))}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4} if recorded else {}
    found = compared(hugging_face(tmp_path / "there", theirs, **sizes), write_step(tmp_path / "here", 1, own))
    assert code(found) == ending
    open_ones = found.steps[0].of(Standing.UNDETERMINED)
    assert len(open_ones) == (0 if recorded else 3)
    assert all(f"if heads lie in {groups} groups, which no" in row.detail for row in open_ones)


NUMBER_OF_EXPERTS, WIDTH, INNER = 4, 8, 12


def experts_of(seed=3):
    """One layer's router, experts and shared expert, as Megatron names and fuses them."""
    drawn = np.random.default_rng(seed)
    shapes = {"router.weight": (NUMBER_OF_EXPERTS, WIDTH), "shared_experts.gate_weight": (1, WIDTH)}
    for at in ("shared_experts", *(f"experts.local_experts.{number}" for number in range(NUMBER_OF_EXPERTS))):
        shapes |= {f"{at}.linear_fc1.weight": (2 * INNER, WIDTH), f"{at}.linear_fc2.weight": (WIDTH, INNER)}
    return {f"decoder.layers.0.mlp.{name}": drawn.normal(0, 1, shape).astype("f4") for name, shape in shapes.items()}


def converted(own, family):
    """The same under the names that transformers 5.24 writes for Mixtral and Qwen, or stacked in one tensor."""
    inner = "model.layers.0." + ("block_sparse_moe." if family == "mixtral" else "mlp.")
    parts = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, values in own.items():
        short = name.removeprefix("decoder.layers.0.mlp.")
        at = short.replace("local_experts.", "").replace("shared_experts.", "shared_expert.").rpartition(".linear")[0]
        if "router" in short:
            found[f"{inner}gate.weight"] = values
        elif "gate_weight" in short:
            found[f"{inner}shared_expert_gate.weight"] = values
        elif "fc1" in short:
            found |= {
                f"{inner}{at}.{part}.weight": half for part, half in zip(parts, np.split(values, 2), strict=False)
            }
        else:
            found[f"{inner}{at}.{parts[2]}.weight"] = values
    if family == "stacked":
        each = [f"{inner}experts.{number}." for number in range(NUMBER_OF_EXPERTS)]
        fused = [np.concatenate([found.pop(f"{at}{part}.weight") for part in parts[:2]]).T for at in each]
        found[f"{inner}experts.gate_up_proj"] = np.stack(fused)
        found[f"{inner}experts.down_proj"] = np.stack([found.pop(f"{at}down_proj.weight").T for at in each])
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen", "stacked"])
def test_experts_are_proved_equal_and_named_where_they_changed_places(tmp_path, family):
    own = experts_of()
    right = write_step(tmp_path / "there", 1, converted(own, family))
    found = compared(right, write_step(tmp_path / "here", 1, own))
    assert {row.standing for row in found.steps[0].rows} == {Standing.EQUAL}
    assert (len(found.steps[0].rows), code(found)) == (len(converted(own, family)), 0)
    moved = dict(own)
    for part in ("linear_fc1", "linear_fc2"):
        names = [f"decoder.layers.0.mlp.experts.local_experts.{number}.{part}.weight" for number in (1, 2)]
        moved |= {names[0]: own[names[1]], names[1]: own[names[0]]}
    found = compared(right, write_step(tmp_path / "moved", 1, moved))
    wrong = {row.pair.name.partition("0.")[2]: row.detail for row in found.steps[0].of(*DIFFERENT)}
    assert code(found) == 1
    if family == "stacked":
        assert {detail.partition(" along")[0] for detail in wrong.values()} == {
            "interleaved: 2 × 2 blocks of 1 read the other way round"
        }
        return
    assert len(wrong) == 6
    down = {"mixtral": "block_sparse_moe.experts.{}.w2.weight", "qwen": "mlp.experts.{}.down_proj.weight"}[family]
    assert wrong[down.format(1)] == f"holds the reference's model.layers.0.{down.format(2)}"
    assert ["tokens go to other experts" in cause.text for cause in found.steps[0].causes] == [True]
    router = "decoder.layers.0.mlp.router.weight"
    found = compared(right, write_step(tmp_path / "all", 1, {**moved, router: own[router][[0, 2, 1, 3]]}))
    assert ["the model is the same" in cause.text for cause in found.steps[0].causes] == [True]


def test_gate_and_up_of_one_expert_exchanged(tmp_path):
    own = experts_of()
    name = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"
    swapped = {**own, name: np.concatenate(np.split(own[name], 2)[::-1])}
    sides = write_step(tmp_path / "one", 1, converted(own, "mixtral")), write_step(tmp_path / "two", 1, swapped)
    found = compared(*sides)
    wrong = {row.pair.name.rpartition("experts.")[2]: row.detail.rpartition("experts.")[2]
             for row in found.steps[0].of(*DIFFERENT)}  # fmt: skip
    assert wrong == {"3.w1.weight": "3.w3.weight", "3.w3.weight": "3.w1.weight"}


def test_megatron_as_gpt2_transposed_fused_otherwise_and_padded(tmp_path):
    own, found = values(MEGATRON / "tp1"), {}
    heads = 2
    for name, bits in own.items():
        layer = name.split(".")[2] if name.startswith("decoder.layers") else ""
        last = name.rpartition(".")[2]
        at = f"transformer.h.{layer}."
        if "linear_qkv" in name:
            whole_one = np.concatenate(unfused(bits, heads, (4, 4, 4)))
            found[f"{at}attn.c_attn.{last}"] = whole_one.T
        elif layer:
            words = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2", "linear_proj": "attn.c_proj",
                     "linear_fc1": "mlp.c_fc", "linear_fc2": "mlp.c_proj"}  # fmt: skip
            (new,) = [new for word, new in words.items() if f".{word}." in name]
            found[f"{at}{new}.{last}"] = bits.T if bits.ndim == 2 else bits
        else:
            outside = {"word_embeddings": "wte", "position_embeddings": "wpe", "final_layernorm": "ln_f"}
            new = outside[name.split(".")[1]]
            found[f"transformer.{new}.{last}"] = bits
    found["transformer.wte.weight"] = found["transformer.wte.weight"][:29]
    told = compared(hugging_face(tmp_path / "gpt2", found), MEGATRON / "tp1")
    rows = {row.pair.name: row for row in told.steps[0].rows if row.pair.role.value == "parameter"}
    assert set(rows) == set(found)
    assert {row.standing for row in rows.values()} == {Standing.EQUAL}
    assert "the candidate has 3 more" in rows["transformer.wte.weight"].detail
    found["transformer.h.1.attn.c_attn.weight"] = np.roll(found["transformer.h.1.attn.c_attn.weight"], 4, axis=1)
    told = compared(hugging_face(tmp_path / "rolled", found), MEGATRON / "tp1")
    (wrong,) = told.steps[0].of(*DIFFERENT)
    assert (wrong.pair.name, wrong.detail) == ("transformer.h.1.attn.c_attn.weight", "rolled by 4 along dim 1")


def test_a_pipeline_is_proved_equal_to_zero_and_what_was_planted_is_found(tmp_path):
    pipeline, zero = DEEPSPEED / "same_pipeline_pp2_dp2", DEEPSPEED / "same_zero2_dp3"
    found = compared(pipeline, zero)
    assert code(found) == 0
    assert not [row for row in found.steps[0].rows if row.standing not in PROVED]
    assert sum(row.pair.role.value == "first_moment" for row in found.steps[0].rows) >= 19
    shutil.copytree(pipeline, tmp_path / "run")
    rewrite(tmp_path / "run", 2, "2.norm.weight", "parameter", lambda bits: bits[::-1])
    found = compared(zero, tmp_path / "run")
    (wrong,) = found.steps[0].of(*DIFFERENT)
    assert (wrong.pair.name, wrong.shown or "2.norm.weight") == ("blocks.1.norm.weight", "2.norm.weight")


def test_zero_to_fp32_is_held_against_masters(tmp_path):
    found = compared(DEEPSPEED / "zero2_bf16", DEEPSPEED / "exported", steps="6")
    counts = found.steps[0].counts()
    # The tied head has no master: the export's is the weight, widened.
    assert counts == {Standing.EQUAL: 19, Standing.CAST: 1}
    assert code(found) == 0
    shutil.copytree(DEEPSPEED / "exported", tmp_path / "run")
    rewrite(tmp_path / "run", 0, "blocks.1.rise.weight", "parameter", lambda bits: np.roll(bits, 12))
    (wrong,) = compared(DEEPSPEED / "zero2_bf16", tmp_path / "run", steps="6").steps[0].of(*DIFFERENT)
    assert (wrong.pair.name, wrong.detail) == ("blocks.1.rise.weight", "rolled by 1 along dim 0")


def test_a_flax_state_is_seen_as_torch_has_it():
    found = compared(
        FIXTURES / "dcp" / "same_state" / "ddp_2", FIXTURES / "flax" / "same_weights" / "orbax", only=["up*", "down*"]
    )
    assert {row.standing for row in found.steps[0].rows} == {Standing.EQUAL}
    assert len(found.steps[0].rows) == 3


def test_rules_are_proposed_and_do_what_they_say(tmp_path):
    own = llama()
    strange = {}
    for name, bits in own.items():
        layer = name.split(".")[2] if "layers" in name else ""
        if "q_proj" in name or "v_proj" in name:
            continue
        if "k_proj" in name:
            parts = [own[name.replace("k_proj", f"{part}_proj")] for part in "qkv"]
            strange[f"block_{layer}.mixed"] = np.concatenate(parts)
        elif "down_proj" in name:
            strange[f"block_{layer}.fall.kernel"] = bits.T
        else:
            strange[name.replace("model.layers.", "block_").replace(".weight", ".w")] = bits
    left, right = hugging_face(tmp_path / "own", own), hugging_face(tmp_path / "strange", strange)
    done = command.run(["compare", left, right, "--map", "none", "--propose"])
    assert done.returncode == 0
    (tmp_path / "auditor.toml").write_bytes(done.stdout)
    tables = tomllib.loads(done.stdout.decode())["map"]
    assert {"from": "block_{n}.fall.kernel", "to": "model.layers.{n}.mlp.down_proj.weight", "transpose": True} in tables
    assert sum("sizes" in table for table in tables) == 1
    done = command.run(["compare", left, right, "--map", "none", "--config", tmp_path / "auditor.toml", "--exact"])
    assert (done.returncode, done.stdout.count(b"equal")) != (0, 0)
    assert b"differs" not in done.stdout, done.stdout.decode()


def nested(shapes):
    """A state in memory, and its Catalog, with parameters of these names and shapes."""
    root = {}
    for name, shape in shapes.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            at = at.setdefault(part, {})
        at[last] = np.ones(shape, np.float32)
    store = MemoryStore({"run_1/state.msgpack": pack({"params": root})})
    source = one_run(store).steps[-1]
    return Source(store, source.adapter.read(store, source.folder, source.match, Options()))


_QKV = {f"model.layers.0.self_attn.{part}_proj.weight": () for part in "qkv"}


@pytest.mark.parametrize(
    ("name", "own", "theirs"),
    [
        ("megatron-hf", {"decoder.layers.0.self_attention.linear_qkv.weight": (4, 4)}, _QKV),
        ("megatron-hf", {"language_model.encoder.layers.0.attention.query_key_value.weight": ()},
         {"h.0.attn.c_attn.weight": (4, 12), "wte.weight": ()}),
        ("meta-hf", {"layers.0.attention.wq.weight": (8, 2), "layers.0.attention.wk.weight": (0,)}, _QKV),
        ("fused-hf",
         {"model.layers.0.self_attn.qkv_proj.weight": (6, 2), "model.layers.0.mlp.experts.down_proj": (2, 2, 2)},
         {**_QKV, "model.layers.0.mlp.experts.0.down_proj.weight": ()}),
        ("deepspeed-hf", {"3.a.weight": (2,), "{b}.c.{b}": (3,)}, {"layers.0.a.weight": (2,), "x.{b}.c.{b}": (3,)}),
    ],
)  # fmt: skip
def test_maps_bear_what_no_converter_writes(name, own, theirs):
    """Scalars and empty tensors where matrices belong, braces in names: nothing is brought together, or broken."""
    one, other = nested(own), nested(theirs)
    rules = MAPS[name].build(one, other)
    shapes = {tensor.name: tensor.shape for tensor in mapped(one.catalog, rules).tensors}
    assert sum(map(np.prod, shapes.values())) == sum(map(np.prod, own.values()))
