"""Layouts whose records lie: recorded meshes, steps, indices, configurations, pointers, names of files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.hostile.making import (
    FIXTURES,
    HUGGING_FACE,
    LAYER,
    MODEL,
    SAFETENSORS,
    Input,
    copied,
    edited,
    megatron_step,
    pipeline_step,
    rank_step,
    safetensors_folder,
    with_number,
)

RANKS = 100_000
HUGE = 1 << 62
TRACKER = "latest_checkpointed_iteration.txt"
Change = Callable[[Path], object]


def on(folders: Callable[[Path], Path], change: Change) -> Change:
    """Build a checkpoint, then spoil the step."""
    return lambda folder: change(folders(folder))


def numbers(pattern: str, **values: int) -> Change:
    def change(step: Path) -> None:
        found = sorted(step.glob(pattern))
        assert found
        for path in found:
            with_number(path, **values)

    return change


# DeepSpeed


def pipeline(name: str, lie: str, change: Change, code: int = 1, says: str = "", file: str = "", **more) -> Input:
    return Input(f"deepspeed: {name}", lie, "deepspeed-pipeline", on(pipeline_step, change), code, says, file, **more)


def recorded(name: str, code: int = 1, says: str = "MET002", file: str = "mp_rank_0", **values: int) -> Input:
    return pipeline(name, "recorded sizes or steps", numbers("mp_rank_*", **values), code, says, file)


def latest(name: str, lie: str, change: Callable[[Path], object], code: int = 1, says: str = "INT003") -> Input:
    """Something else in place of the pointer."""

    def build(step: Path) -> None:
        pointer = step.parent / "latest"
        pointer.unlink()
        change(pointer)

    return pipeline(f"latest {name}", lie, build, code, says, "latest")


def written(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


PIPELINES = [
    pipeline("healthy twin", "nothing", lambda step: None, 0, "holds"),
    recorded("dp_world_size of 1,000", dp_world_size=1000),
    recorded("dp_world_size of 25,000", dp_world_size=RANKS // 4),
    recorded("mp_world_size of 100,000", mp_world_size=RANKS),
    recorded("tp_degree of 100,000", mp_world_size=RANKS, tp_degree=RANKS),
    recorded("mesh of 2^31 ranks", dp_world_size=1 << 14, mp_world_size=1 << 17),
    recorded("dp_world_size of 2^62", 0, "holds", "", dp_world_size=HUGE),
    recorded("global_steps of 2^70", 0, "holds", "", global_steps=1 << 70),
    recorded("global_steps below zero", 0, "holds", "", global_steps=-6),
    pipeline(
        "files of ranks beyond any mesh",
        "ranks and layers in file names",
        lambda step: [
            shutil.copy(step / MODEL, step / name)
            for name in (
                f"mp_rank_{'9' * 200}_model_states.pt",
                f"layer_{'9' * 100}-model_{'9' * 100}-model_states.pt",
                f"bf16_zero_pp_rank_{'9' * 100}_mp_rank_00_optim_states.pt",
            )
        ],
        1,
        "INT009",
        "mp_rank_999",
    ),
    pipeline(
        "digits of another script",
        "a rank in a file name, in Arabic digits",
        lambda step: shutil.copy(step / LAYER, step / "layer_٠٣-model_٠١-model_states.pt"),
        1,
        "INT009",
        "layer_",
    ),
    pipeline(
        "step of 240 digits",
        "the step, in a folder's name",
        lambda step: (
            [path.write_bytes(b"") for path in step.glob("mp_rank_*")],
            (step.parent / "latest").unlink(),
            step.rename(step.with_name(f"global_step{'9' * 240}")),
        ),
        1,
        "INT002",
        "mp_rank_0",
    ),
    latest("to the parent", "the step to resume from", written(b"..")),
    latest("to the root", "the step to resume from", written(b"/etc")),
    latest("with escapes", "the step to resume from", written(b"\x1b[2J\x1b]0;owned\x07\r\n\xff\x9b")),
    latest("of 41 GB", "length of the pointer", lambda path: (path.touch(), os.truncate(path, 41 << 30))),
    latest("empty", "that it points", written(b"")),
    latest("of zero bytes", "the step to resume from", written(bytes(100))),
    latest("linked to itself", "a pointer without end", lambda path: path.symlink_to("latest"), 3, "oo many levels"),
    latest(
        "linked out of the run",
        "a pointer that is another file's content",
        lambda path: path.symlink_to("/etc/hostname"),
    ),
    latest(
        "linked to /dev/zero",
        "a pointer without end",
        lambda path: path.symlink_to("/dev/zero"),
        3,
        "not a regular file",
    ),
    latest("that is a named pipe", "a pointer that is never written", os.mkfifo, 3, "not a regular file"),
]


# Megatron-LM and files a rank


def megatron(name: str, lie: str, change: Change, code: int = 1, says: str = "", file: str = "") -> Input:
    return Input(f"megatron: {name}", lie, "megatron-legacy", on(megatron_step, change), code, says, file)


def megatron_mesh(name: str, code: int = 1, says: str = "MET002", **values: int) -> Input:
    return megatron(
        name,
        "recorded sizes of the mesh",
        numbers("*/*.pt", **values),
        code,
        says,
        "model_optim_rng.pt" if code else "",
    )


def tracker(content: bytes, code: int = 1, says: str = "INT003") -> Change:
    return lambda step: (step.parent / TRACKER).write_bytes(content)


MEGATRONS = [
    megatron("healthy twin", "nothing", lambda step: None, 0, "holds"),
    megatron_mesh("world of 100,000", 0, "holds", world_size=RANKS, data_parallel_size=RANKS // 2),
    megatron_mesh("100,000 tensor-parallel ranks", world_size=RANKS, tensor_model_parallel_size=RANKS),
    megatron_mesh("50,000 pipeline stages", world_size=RANKS, pipeline_model_parallel_size=RANKS // 2),
    megatron_mesh("250 tensor-parallel ranks", says="INT001", world_size=250, tensor_model_parallel_size=250),
    megatron_mesh("mesh of 2^40 ranks", tensor_model_parallel_size=1 << 20, pipeline_model_parallel_size=1 << 20),
    megatron_mesh("negative mesh", 1, "", tensor_model_parallel_size=-2),
    megatron_mesh("iteration of 2^70", 0, "holds", iteration=1 << 70),
    megatron("tracker leads out", "the step to resume from", tracker(b"../../etc"), 1, "INT003", TRACKER),
    megatron("tracker of 10^15", "the step to resume from", tracker(b"9" * 15), 1, "INT003", TRACKER),
    megatron("tracker with escapes", "the step to resume from", tracker(b"\x1b[2J4"), 1, "INT003", TRACKER),
    Input("rank files: healthy twin", "nothing", "torch-per-rank", rank_step, 0, "holds"),
    Input(
        "rank files: world of 100,000",
        "recorded size of the mesh",
        "torch-per-rank",
        on(rank_step, numbers("*.pt", world_size=RANKS)),
        1,
        "MET002",
        "rank_",
    ),
    Input(
        "rank files: world of 2^62",
        "recorded size of the mesh",
        "torch-per-rank",
        on(rank_step, numbers("*.pt", world_size=HUGE)),
        0,
        "holds",
    ),
    Input(
        "rank files: rank 999,999",
        "the rank in a file name",
        "torch-per-rank",
        on(rank_step, lambda step: (step / "rank_1.pt").rename(step / "rank_999999.pt")),
        1,
        "",
        "rank_999999.pt",
    ),
]


def engine_step(folder: Path) -> Path:
    """A run of a plain DeepSpeed engine with ZeRO-3; the step's folder."""
    copied(FIXTURES / "deepspeed" / "zero3_bf16" / "global_step6", folder / "global_step6")
    (folder / "latest").write_text("global_step6")
    return folder / "global_step6"


def flat_step(folder: Path) -> Path:
    """A run with Megatron's distributed optimizer; the step's folder."""
    (folder / TRACKER).write_text("4")
    return copied(FIXTURES / "megatron_legacy" / "tp2_dp2_buckets" / "iter_0000004", folder / "iter_0000004")


def parts_step(folder: Path) -> Path:
    """One step of rank files that hold parts of tensors; its folder."""
    return copied(FIXTURES / "torch_per_rank" / "fsdp2_3" / "step_2", folder / "step_2")


MODELS, FLATS, PARTS = "*model_states.pt", "*/distrib_optim.pt", "*.pt"
LATER = [
    Input("zero-3: dp_world_size of 100,000", "recorded size of the mesh", "deepspeed",
          on(engine_step, numbers(MODELS, dp_world_size=RANKS)), 1, "MET002", "model_states.pt"),
    Input("distributed optimizer: buckets of one element", "where its buckets end", "megatron-legacy",
          on(flat_step, numbers("*/model_optim_rng.pt", ddp_bucket_size=1)), 0, "no known order"),
    Input("distributed optimizer: buckets of 2^62", "where its buckets end", "megatron-legacy",
          on(flat_step, numbers("*/model_optim_rng.pt", ddp_bucket_size=HUGE)), 0, "no known order"),
    Input("distributed optimizer: 2^62 elements", "length of its buffer", "megatron-legacy",
          on(flat_step, numbers(FLATS, numel_unpadded=HUGE)), 0, "holds"),
    Input("parts: world of 100,000", "recorded size of the mesh", "torch-per-rank",
          on(parts_step, numbers(PARTS, world_size=RANKS)), 1, "", "rank_"),
]  # fmt: skip


# Hugging Face


def sharded(folder: Path) -> Path:
    """A model in three files with an index; the index."""
    return copied(HUGGING_FACE / "llama_sharded", folder) / f"{SAFETENSORS}.index.json"


def index(
    name: str,
    lie: str,
    change: Callable[[dict], object] | bytes,
    code: int = 1,
    says: str = "INT002",
    file: str = "index.json",
) -> Input:
    def build(folder: Path) -> None:
        path = sharded(folder)
        _ = path.write_bytes(change) if isinstance(change, bytes) else edited(path, change)

    return Input(f"index: {name}", lie, "hugging-face", build, code, says, file)


def mapped(to: object) -> Callable[[dict], object]:
    """One tensor said to be elsewhere."""
    return lambda content: content["weight_map"].update({"lm_head.weight": to})


def config(
    name: str,
    lie: str,
    change: Callable[[dict], object] | bytes,
    code: int = 1,
    says: str = "",
    file: str = "config.json",
) -> Input:
    def build(folder: Path) -> None:
        path = safetensors_folder(folder).with_name("config.json")
        _ = path.write_bytes(change) if isinstance(change, bytes) else edited(path, change)

    return Input(f"config: {name}", lie, "hugging-face", build, code, says, file)


def sizes(**values: object) -> Callable[[dict], object]:
    return lambda content: content.update(values)


def trainer(name: str, lie: str, change: Callable[[dict], object] | bytes, code: int, says: str = "") -> Input:
    def build(folder: Path) -> None:
        path = copied(HUGGING_FACE / "trainer" / "checkpoint-6", folder / "checkpoint-6") / "trainer_state.json"
        _ = path.write_bytes(change) if isinstance(change, bytes) else edited(path, change)

    return Input(f"trainer_state: {name}", lie, "hugging-face", build, code, says, "trainer_state.json" if code else "")


DEEP = b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"

HUGGING_FACES = [
    Input("index: healthy twin", "nothing", "hugging-face", sharded, 0, "holds"),
    index("leads out", "a file called ../../../etc/passwd", mapped("../../../etc/passwd"), 1, ""),
    index("absolute", "a file called /etc/passwd", mapped("/etc/passwd"), 1, ""),
    index("with escapes", "a file's name acts on terminals", mapped("\x1b[2J\x1b]0;owned\x07\r\n"), 1, ""),
    index("of itself", "a file of weights that is the index", mapped(f"{SAFETENSORS}.index.json"), 1, ""),
    index("of a number", "a file's name is a number", mapped(7), 1, ""),
    index(
        "of 20,000 files",
        "number of files",
        lambda content: content.update(weight_map={f"t{n}": f"f{n}" for n in range(20_000)}),
    ),
    index(
        "of 50,000 tensors",
        "number of tensors",
        lambda content: content["weight_map"].update({f"t{n}": SAFETENSORS for n in range(50_000)}),
        1,
        "model.safetensors: it is not there",
        "",
    ),
    index("nesting", "nesting", DEEP),
    index("no map", "that it maps", b'{"weight_map": []}'),
    index("total_size of 10^400", "size of all", b'{"metadata":{"total_size":1e400},"weight_map":{}}', 1, ""),
    index(
        "total_size that is no number",
        "size of all",
        lambda content: content["metadata"].update(total_size=float("nan")),
        0,
        "MET002",
    ),
    config("2^62 layers", "number of layers", sizes(num_hidden_layers=HUGE), 0),
    config("negative layers", "number of layers", sizes(num_hidden_layers=-2), 0),
    config("100,000 layers", "number of layers", sizes(num_hidden_layers=100_000), 0),
    config("vocabulary of 2^62", "size of the vocabulary", sizes(vocab_size=HUGE), 0),
    config("hidden size of 10^400", "width", b'{"model_type":"qwen2","hidden_size":1e400}', 0),
    config("sizes that are lists", "all sizes", sizes(hidden_size=[1], num_attention_heads={}, vocab_size="x"), 0),
    config("no heads", "number of heads", sizes(num_attention_heads=0, num_key_value_heads=0), 0),
    config("nesting", "nesting", DEEP, 1, "INT002"),
    config("70 MB", "length", b"{" + b" " * 70_000_000 + b"}", 1, "INT002"),
    config("empty", "that it holds anything", b"", 1, "INT002"),
    trainer("step below zero", "the step", sizes(global_step=-1), 0),
    trainer("step of 2^70", "the step", sizes(global_step=1 << 70), 0),
    trainer("step of 10^400", "the step", lambda content: content.update(global_step=float("inf")), 0),
    trainer("nesting", "nesting", DEEP, 1, "INT002"),
]

LAYOUTS = (*PIPELINES, *MEGATRONS, *LATER, *HUGGING_FACES)
