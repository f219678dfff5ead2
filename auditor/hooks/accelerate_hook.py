"""The hook around accelerate's ``save_state``.

save_state = around_save_state(accelerator, TorchHook(after=AfterCommit()))
save_state(step, f"{run}/step-{step}")                # instead of accelerator.save_state(f"{run}/step-{step}")
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from auditor.hooks.torch_hook import TorchHook


def around_save_state(accelerator: Any, hook: TorchHook) -> Callable[..., str]:
    """``save_state`` with the step first: witnesses what is about to be saved, and has the step audited.

    accelerate tells its pre-hooks the models' state dicts before it writes them, and nobody when it is done.
    """
    now: dict[str, int] = {}

    def witness(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if "step" in now:
            states = weights or [accelerator.get_state_dict(model, unwrap=True) for model in models]
            several = len(states) > 1
            state = {f"{n}.{k}" if several else k: v for n, own in enumerate(states) for k, v in own.items()}
            buffers = [name for model in models for name, _ in model.named_buffers()]
            # Of several, each in a file of its own, all number their parameters from 0.
            (optimizer,) = accelerator._optimizers if len(accelerator._optimizers) == 1 else (None,)
            hook.witness(now["step"], state, output_dir, buffers=buffers, optimizer=optimizer)

    accelerator.register_save_state_pre_hook(witness)

    def save_state(step: int, output_dir: str | os.PathLike[str], **choices: Any) -> str:
        now["step"] = step
        try:
            done = str(accelerator.save_state(os.fspath(output_dir), **choices))
        finally:
            now.clear()
        accelerator.wait_for_everyone()
        hook.committed(step, output_dir)
        return done

    return save_state
