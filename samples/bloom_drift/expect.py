"""What is true about the sample, found with ``torch.load`` and ``torch.equal`` alone: nothing of the auditor is used.

    python samples/bloom_drift/expect.py RUN > expected.json

For every saved step and every parameter that Megatron replicates over tensor-parallel ranks: which of parameter,
master and the two moments differ between the ranks, in how many elements and by how much. The files come from
``train.py`` and hold classes that aren't importable here, so they are loaded with ``weights_only=False`` behind a
finder that makes a stand-in for every unknown class. Never do that with files that you didn't write.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path

import torch

REPLICATED = re.compile(r"norm\.(weight|bias)$|(attention\.dense|dense_4h_to_h)\.bias$|^6\.(weight|bias)$")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if module.split(".")[0] in ("torch", "collections", "argparse", "numpy", "_codecs", "copyreg"):
            return super().find_class(module, name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: self.__dict__.update(args=args)})


class _Pickle:
    Unpickler = _Unpickler
    load = staticmethod(lambda file, **kwargs: _Unpickler(file, **kwargs).load())


def load(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Pickle)


def parameters(step: Path, tp: int) -> dict[str, torch.Tensor]:
    """Optimizer-side name -> bf16 tensor, from the layer files of one tensor-parallel rank."""
    found = {}
    for path in sorted(step.glob(f"layer_*-model_{tp:02d}-model_states.pt")):
        layer = int(re.match(r"layer_(\d+)-", path.name).group(1))
        prefix = "tied_modules.embed" if layer == 1 else str(layer)
        found.update({f"{prefix}.{name}": tensor for name, tensor in load(path).items()})
    return found


def flat_states(step: Path, tp: int) -> dict[str, dict[str, torch.Tensor]]:
    """Role -> name -> fp32 tensor, from the flat partitions of one tensor-parallel rank in data-parallel order."""
    shapes = load(step / f"mp_rank_{tp:02d}_model_states.pt")["param_shapes"]
    number = re.compile(r"pp_rank_(\d+)_")
    files = sorted(
        step.glob(f"*zero_pp_rank_*_mp_rank_{tp:02d}_optim_states.pt"),
        key=lambda p: int(number.search(p.name).group(1)),
    )
    states = [load(path)["optimizer_state_dict"] for path in files]
    roles: dict[str, dict[str, torch.Tensor]] = {"master": {}, "first_moment": {}, "second_moment": {}}
    for group, members in enumerate(shapes):
        flats = {
            "master": torch.cat([s["single_partition_of_fp32_groups"][group] for s in states]),
            "first_moment": torch.cat([s["base_optimizer_state"]["state"][group]["exp_avg"] for s in states]),
            "second_moment": torch.cat([s["base_optimizer_state"]["state"][group]["exp_avg_sq"] for s in states]),
        }
        at = 0
        for name, shape in members.items():
            for role, flat in flats.items():
                roles[role][name] = flat[at : at + shape.numel()].view(shape)
            at += shape.numel()
    return roles


def differences(step: Path) -> list[dict]:
    sides = [{"parameter": parameters(step, tp), **flat_states(step, tp)} for tp in (0, 1)]
    found = []
    for role in sides[0]:
        names = [name for name in sides[0][role] if REPLICATED.search(name)]
        assert len(names) == 2 + 6 * 2 + 2, names
        for name in names:
            left, right = (side[role][name] for side in sides)
            if not torch.equal(left, right):
                gap = (left.double() - right.double()).abs()
                found.append({
                    "tensor": name, "role": role, "num_elements_differ": int((left != right).sum()),
                    "max_abs_difference": float(gap.max()),
                })  # fmt: skip
    return found


def main(run: Path) -> None:
    steps = sorted(run.glob("global_step*"), key=lambda p: int(p.name.removeprefix("global_step")))
    truth = {int(p.name.removeprefix("global_step")): differences(p) for p in steps}
    print(json.dumps({"steps": truth, "num_replicated_tensors_per_role": 16}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
