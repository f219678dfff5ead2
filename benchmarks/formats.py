"""What is recognised and seen in the committed checkpoints of every format, and what a check of one costs.

    python benchmarks/formats.py [FOLDER …]      prints the table, or these rows; --write puts them into docs/formats.md

A row is one step below ``tests/fixtures``, checked at level values in a process of its own. Steps of one `state` hold
the same numbers in different layouts: their digests are compared with those of the first, for every tensor that both
have.
"""

import json
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from auditor.adapters.adapter import Options
from auditor.audit import audit
from auditor.discovery import discover
from auditor.observe.one_pass import observe, wanted_rows
from auditor.observe.shares import Everything
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore

ROOT = Path(__file__).resolve().parents[1]
FIXTURES, PAGE = ROOT / "tests" / "fixtures", ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- measured -->", "<!-- end -->"
ROWS = {
    # step: what wrote it, and the state that it shares with others
    "dcp/fsdp2_2/step-4": ("FSDP2, 2 ranks", "trained"),
    "dcp/async/step-4": ("FSDP2, async_save", ""),
    "dcp/fsdp2_4/step-4": ("FSDP2, 4 ranks", ""),
    "dcp/fsdp_tp_2x2/step-4": ("FSDP2 and tensor parallel, 2×2", ""),
    "dcp/threads/step-4": ("FSDP2, two files a rank", "trained"),
    "dcp/file_per_item/step-4": ("FSDP2, a file an item", "trained"),
    "dcp/zstd/step-4": ("FSDP2, zstd extension", "trained"),
    "dcp/hsdp_2x2/step-4": ("HSDP 2×2", ""),
    "dcp/tp_2/step-4": ("tensor parallel, 2 ranks", "trained by two"),
    "dcp/no_coordinator/step-4": ("the same without a coordinator", "trained by two"),
    "dcp/ddp_2/step-4": ("DistributedDataParallel", ""),
    "dcp/torch_2_1/step-4": ("torch 2.1, DTensors over 2 ranks", ""),
    "dcp/same_state/per_rank/step-3": ("torch.save, a file a rank", "odd sizes"),
    **{
        f"dcp/same_state/{name}/step-3": (said, "odd sizes")
        for name, said in {
            "fsdp2_2": "FSDP2, 2 ranks", "fsdp2_4": "FSDP2, 4 ranks", "hsdp_2x2": "HSDP 2×2",
            "tp_2": "tensor parallel, 2 ranks", "fsdp_tp_2x2": "FSDP2 and tensor parallel 2×2",
            "ddp_2": "DistributedDataParallel", "hf_sharded": "HuggingFaceStorageWriter, a file a rank",
            "hf_consolidated": "HuggingFaceStorageWriter, consolidated",
        }.items()
    },
    "megatron_dist/legacy_tp1/iter_0000002": ("megatron-core, TP1, legacy", "one GPT"),
    "megatron_dist/legacy_tp2/iter_0000002": ("megatron-core, TP2, legacy", "one GPT"),
    "megatron_dist/tp1/iter_0000002": ("megatron-core, TP1", "one GPT"),
    "megatron_dist/tp2/iter_0000002": ("megatron-core, TP2", "one GPT"),
    "megatron_dist/tp2_pp2/iter_0000002": ("megatron-core, TP2 PP2", "one GPT"),
    "megatron_dist/tp2_llama/iter_0000004": ("megatron-core, gated, grouped queries, TP2", "one Llama"),
    "megatron_dist/tp1_llama_unstacked/iter_0000004": ("the same, a key a layer, TP1", "one Llama"),
    "megatron_dist/tp2_zarr_as_torch_dist/iter_0000004": ("megatron-core 0.12, TP2", "one GPT by 0.12"),
    "megatron_dist/tp2_zarr/iter_0000004": ("the same, backend zarr", "one GPT by 0.12"),
    "megatron_dist/ep2/iter_0000004": ("megatron-core, expert parallel", ""),
    "megatron_dist/dp2_fully_reshardable/iter_0000004": ("distributed optimizer, fully reshardable", "one optimizer"),
    "megatron_dist/legacy_dp2/iter_0000004": ("the same in Megatron-LM's legacy layout", "one optimizer"),
    "megatron_dist/dp2_dp_reshardable/iter_0000004": ("the same, in buckets", "one optimizer"),
    "megatron_dist/dp2_fully_sharded_model_space/iter_0000004": ("distributed optimizer, megatron-core 0.12", ""),
    "megatron_legacy/tp2/iter_0000004": ("Megatron-LM's layout, TP2", ""),
    "megatron_legacy/tp2_llama/iter_0000004": ("the same, gated, grouped queries", ""),
    "megatron_legacy/tp2_pp2/iter_0000004": ("the same, TP2 PP2", ""),
    "megatron_legacy/tp2_dp2_buckets/iter_0000004": ("distributed optimizer in buckets, TP2", ""),
    "megatron_legacy/pp2_distributed/iter_0000004": ("distributed optimizer, PP2, tied embedding", ""),
    "deepspeed/zero0_bf16/global_step2": ("DeepSpeed without ZeRO, bf16", ""),
    "deepspeed/zero0_fp16/global_step2": ("DeepSpeed without ZeRO, fp16", ""),
    "deepspeed/zero0_moe/global_step2": ("DeepSpeed without ZeRO, experts", ""),
    "deepspeed/zero0_tp2/global_step2": ("DeepSpeed without ZeRO, tensor parallel", ""),
    "deepspeed/zero1_bf16_fp32_grads/global_step2": ("DeepSpeed's BF16_Optimizer", ""),
    "deepspeed/zero1_moe/global_step2": ("ZeRO-1, experts", ""),
    "deepspeed/zero2_tp2/global_step2": ("ZeRO-2, tensor parallel", ""),
    "deepspeed/zero2_frozen/global_step2": ("ZeRO-2, frozen parameters", ""),
    "deepspeed/zero3_frozen/global_step2": ("ZeRO-3, frozen parameters", ""),
    "deepspeed/zero3_subgroups/global_step2": ("ZeRO-3, sub-groups", ""),
    "deepspeed/pipeline_zero1_fp16/global_step2": ("DeepSpeed's pipeline, ZeRO-1, fp16", ""),
    **{
        f"deepspeed/same_zero{stage}_dp{ranks}/global_step2": (f"ZeRO-{stage}, {ranks} ranks", "one engine's")
        for stage in (1, 2, 3) for ranks in (2, 3, 4)
    },
    "deepspeed/same_universal_from_zero2/global_step2_universal": ("ds_to_universal, of ZeRO-2", "one engine's"),
    "deepspeed/same_universal_from_zero3/global_step2_universal": ("ds_to_universal, of ZeRO-3", "one engine's"),
    "deepspeed/same_pipeline_pp2_dp2/global_step2": ("DeepSpeed's pipeline, 2 stages; names of its own", ""),
    "deepspeed/trainer_zero2/checkpoint-4": ("Trainer with DeepSpeed, ZeRO-2", ""),
    "deepspeed/trainer_zero3/checkpoint-4": ("Trainer with DeepSpeed, ZeRO-3", ""),
    "torch_per_rank/healthy/step_6": ("torch.save a rank, DistributedDataParallel", ""),
    "torch_per_rank/fsdp2_3/step_2": ("torch.save a rank, FSDP2, 3 ranks", ""),
    "torch_per_rank/tp_fsdp_2x2/step_2": ("the same, tensor parallel and FSDP2 2×2", ""),
    "torch_per_rank/hsdp_2x2_faulty/step_2": ("the same, HSDP 2×2", ""),
    "torch_per_rank/fsdp1_sharded/step_2": ("torch.save a rank, FSDP1 sharded", "FSDP1's"),
    "torch_per_rank/fsdp1_dcp/step_2": ("the same by torch.distributed.checkpoint", "FSDP1's"),
    "torch_per_rank/fsdp1_hybrid_2x2/step_2": ("torch.save a rank, FSDP1 hybrid 2×2", ""),
    "torch_per_rank/fsdp1_local/step_2": ("torch.save a rank, FSDP1 local", ""),
    "torch_file/folders/step_6": ("torch.save, a file a step", "one loop's"),
    "torch_file/apart": ("torch.save, the optimizer in a file of its own", "one loop's"),
    "hugging_face/llama_sharded": ("save_pretrained, three files", ""),
    "hugging_face/gpt2_torch": ("save_pretrained, torch file", ""),
    "hugging_face/trainer/checkpoint-6": ("Trainer", ""),
    "hugging_face/trainer_ddp/checkpoint-4": ("Trainer, 2 ranks", ""),
    "hugging_face/accelerate_bin/step_4": ("accelerate's save_state, torch files", "accelerate's"),
    "hugging_face/accelerate_safetensors/step_4": ("accelerate's save_state, safetensors", "accelerate's"),
    "hugging_face/lora_trainer/checkpoint-4": ("Trainer with peft, low-rank factors", ""),
    "orbax/manager/3": ("Orbax CheckpointManager, OCDBT over Zarr v2", ""),
    "orbax/zarr3/step_2": ("Orbax, OCDBT over Zarr v3", "by Orbax"),
    "orbax/one_replica/2": ("Orbax, replica 0 writes", "by Orbax"),
    "orbax/files_zarr2/checkpoint_3": ("Orbax, a folder an array", "linear"),
    "orbax/files_zarr3/checkpoint_3": ("Orbax, the same over Zarr v3", "linear"),
    "orbax/files_uncompressed/checkpoint_3": ("Orbax, the same uncompressed", "linear"),
    "orbax/v1/3": ("Orbax, the v1 API", "linear"),
    "orbax/standard/final": ("Orbax StandardCheckpointer", "linear"),
    "orbax/composite/ckpt_00000004": ("Orbax, items params, opt_state, data", ""),
    "orbax/processes/4": ("Orbax, two processes", ""),
    "orbax/flax_train_state/checkpoint_3": ("Flax's TrainState through Orbax", ""),
    "orbax/dtypes/1": ("Orbax, every dtype", ""),
    "flax/same_weights/msgpack": ("Flax msgpack", "weights"),
    "flax/same_weights/chunked": ("Flax msgpack, in chunks", "weights"),
    "flax/same_weights/npz": ("numpy.savez", "weights"),
    "flax/same_weights_apart/npz_compressed": ("numpy.savez_compressed", "weights"),
    "flax/same_weights/orbax": ("Orbax, OCDBT over Zarr v2", "weights"),
    "flax/same_weights_apart/orbax_zarr3": ("Orbax, OCDBT over Zarr v3", "weights"),
    "flax/same_weights_apart/orbax_files": ("Orbax, a folder an array", "weights"),
    "flax/same_weights_apart/orbax_files_zarr3": ("Orbax, the same over Zarr v3", "weights"),
    "flax/same_weights_apart/orbax_plain": ("Orbax, the same uncompressed", "weights"),
    "flax/same_weights_apart/orbax_v1": ("Orbax, the v1 API", "weights"),
    "flax/same_weights_apart/jax_pytree": ("JAX pytree_serialization", "weights"),
    "jax_pytree/run/step_4": ("JAX pytree_serialization, 8 devices", ""),
    "flax/nnx_pure/step_6": ("Flax NNX, model and optimizer apart", ""),
    "levanter/run/step-4": ("TensorStore, in Levanter's layout", ""),
}  # fmt: skip


def catalog_of(step):
    """The Catalog of a folder that is one step."""
    (run,) = discover(LocalStore(FIXTURES / step))
    (source,) = run.steps
    return source.adapter.read(LocalStore(FIXTURES / step), source.folder, source.match, Options())


def digests(step):
    """Role and name to the digests of all replicas, with dtype and shape."""
    catalog = catalog_of(step)
    with ThreadPoolExecutor(2) as workers:
        seen = observe(LocalStore(FIXTURES / step), catalog, wanted_rows(catalog), Everything(workers))
    found = {}
    for number, tensor in enumerate(catalog.tensors):
        for replica in range(len(catalog.replicas[number])):
            rows = catalog.rows_of(number, replica)
            lanes = [int(seen.pieces[lane][rows].sum(dtype=np.uint64)) for lane in ("lane0", "lane1")]
            found.setdefault((tensor.role.value, tensor.name), set()).add((tensor.dtype.name, tensor.shape, *lanes))
    return found


def facts(step):
    """One row, all but the digests."""
    begun = time.process_time()
    (run,) = audit(LocalStore(FIXTURES / step), Settings(level=Level.VALUES, ignore=("OPT010",))).runs
    seconds, catalog = time.process_time() - begun, catalog_of(step)
    replicated = sum(len(places) > 1 for places in catalog.replicas)
    once = sum(bool(tensor.stored_once) for tensor in catalog.tensors)
    return {
        "format": catalog.format, "mesh": " · ".join(f"{axis} {degree}" for axis, degree in catalog.mesh.axes),
        "roles": sorted({tensor.role.value.replace("_", " ") for tensor in catalog.tensors} - {"padding"}),
        "replicas": f"{replicated} compared, {once} stored once of {len(catalog.tensors)}",
        "findings": len(run.findings), "seconds": round(seconds, 2),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }  # fmt: skip


def measured(step):
    """The facts of one row, from a process that does nothing else."""
    done = subprocess.run([sys.executable, __file__, "--facts", step], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def table(chosen):
    """The table's lines."""
    yield "| step | written by | format | mesh | roles | replicas | digests | findings | CPU s | peak MiB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    firsts = {}
    for step, (said, state) in ROWS.items():
        same = "—"
        if state:
            name, first = firsts.setdefault(state, (step, digests(step)))
            own = first if name == step else digests(step)
            common = first.keys() & own.keys()
            equal = sum(first[key] == own[key] for key in common)
            same = f"{equal} of {len(common)} equal" if name != step else f"{state}: {len(own)}"
        if not chosen or step.startswith(chosen):
            f = measured(step)
            cells = [f"`{step}`", said, f["format"], f["mesh"], ", ".join(f["roles"]), f["replicas"], same,
                     f["findings"], f["seconds"], f["mib"]]  # fmt: skip
            yield f"| {' | '.join(map(str, cells))} |"


def main():
    chosen = tuple(one for one in sys.argv[1:] if not one.startswith("--"))
    if "--facts" in sys.argv:
        print(json.dumps(facts(chosen[0])))
        return
    lines = "\n".join(table(chosen))
    print(lines)
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        if chosen:
            # What was not measured anew stays.
            rows = {line.split("`")[1]: line for text in (rest.split(END)[0], lines) for line in text.splitlines()
                    if line.startswith("| `")}  # fmt: skip
            lines = "\n".join([*lines.splitlines()[:2], *(rows[step] for step in ROWS if step in rows)])
        PAGE.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
