"""Opening all arrays of one OCDBT step: the auditor's Catalog against TensorStore listing and opening the same.

    python benchmarks/orbax_open.py write FOLDER [ARRAYS]      with tensorstore installed
    python benchmarks/orbax_open.py tensorstore FOLDER         the same
    python benchmarks/orbax_open.py auditor FOLDER

Each array has four chunks and lies under a name as Orbax gives it. CPU and wall seconds, peak memory; imports apart.
"""

import json
import resource
import sys
import time
from pathlib import Path

CHUNKS = 4


def names(count):
    return [f"params.layers_{at // 10}.block.weight_{at % 10}" for at in range(count)]


def write(folder, count=10_000):
    """One item as Orbax lays it out; values above a kilobyte lie outside the node."""
    import numpy as np
    import tensorstore as ts

    item = folder / "1" / "default"
    item.mkdir(parents=True)
    context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 28}})
    base = {"driver": "ocdbt", "base": f"file://{item}/", "config": {"max_inline_value_bytes": 1024}}
    with ts.Transaction() as transaction:
        for at, name in enumerate(names(count)):
            size = 512 if at % 10 else 2048
            spec = {
                "driver": "zarr", "kvstore": {**base, "path": f"{name}/"}, "create": True, "delete_existing": True,
                "metadata": {"shape": [size], "chunks": [size // CHUNKS], "dtype": "<f4",
                             "compressor": {"id": "zstd", "level": 1}, "order": "C", "filters": None},
            }  # fmt: skip
            array = ts.open(spec, context=context).result()
            values = np.random.default_rng(at).standard_normal(size).astype(np.float32)
            array.with_transaction(transaction).write(values).result()
    rows = {
        f"('params', '{name}')": {
            "key_metadata": [{"key": part, "key_type": 2} for part in name.split(".")],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for name in names(count)
    }
    (item / "_METADATA").write_text(json.dumps({"tree_metadata": rows, "use_ocdbt": True, "use_zarr3": False}))


def by_tensorstore(folder):
    import tensorstore as ts

    item = folder / "1" / "default"
    base = {"driver": "ocdbt", "base": f"file://{item}/"}

    def work():
        context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 28}})
        keys = ts.KvStore.open(base, context=context).result().list().result()
        wanted = [key.decode().rpartition("/")[0] for key in keys if key.endswith(b"/.zarray")]
        opening = [
            ts.open({"driver": "zarr", "kvstore": {**base, "path": f"{name}/"}}, context=context, open=True, read=True)
            for name in wanted
        ]
        return len([array.result() for array in opening])

    return work


def by_auditor(folder):
    from auditor.adapters.adapter import Folder, Options
    from auditor.adapters.orbax.adapter import Orbax
    from auditor.storage.local import LocalStore

    store, adapter = LocalStore(folder), Orbax()

    def work():
        step = Folder.read(store, "1")
        return len(adapter.read(store, step, adapter.recognise(store, step), Options()).tensors)

    return work


def main():
    kind, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    if kind == "write":
        write(folder, *map(int, sys.argv[3:]))
        return
    work = {"tensorstore": by_tensorstore, "auditor": by_auditor}[kind](folder)
    work()
    wall, cpu = time.perf_counter(), time.process_time()
    count = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{kind}: {count} arrays, {cpu:.2f} s of CPU, {wall:.2f} s, {1e6 * cpu / count:.0f} us an array, {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
