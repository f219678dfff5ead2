"""The hook as a callback of Hugging Face's Trainer.

trainer = Trainer(…, callbacks=[AuditorCallback(TorchHook(after=AfterCommit()))])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from auditor.hooks.hook import survived
from auditor.hooks.torch_hook import TorchHook


class AuditorCallback(TrainerCallback):
    """Witnesses the model of every saved step, and has the step audited.

    ``on_save`` comes when the step's files are there and the weights are still those that were saved. The model is
    witnessed under the keys of its state dict, and so is its optimizer.
    """

    def __init__(self, hook: TorchHook) -> None:
        self.hook = hook

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer on every rank."""
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        model = kwargs.get("model")
        with survived(f"the witness of step {state.global_step}", raising=self.hook.raising):
            if model is not None:
                buffers = [name for name, _ in model.named_buffers()]
                optimizer = kwargs.get("optimizer")
                self.hook.witness(state.global_step, stored_keys(model), path, buffers=buffers, optimizer=optimizer)
        self.hook.committed(state.global_step, path)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits for the audits under way."""
        self.hook.close()


def stored_keys(model: Any) -> dict[str, Any]:
    """A model's state as ``save_pretrained`` stores it: of tied tensors the first alone, no wrapper in the names."""
    own = getattr(model, "module", model)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    for key, value in own.state_dict().items():
        place = (value.data_ptr(), tuple(value.shape)) if hasattr(value, "data_ptr") else (id(value), ())
        if place not in seen or not place[0]:
            seen.add(place)
            found[key] = value
    return found
