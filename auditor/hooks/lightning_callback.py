"""The hook as a callback of Lightning's Trainer.

Trainer(…, callbacks=[AuditorCallback(TorchHook(after=AfterCommit()))])
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from auditor.hooks.torch_hook import TorchHook


class AuditorCallback(Callback):
    """Witnesses every checkpoint on every rank, and has it audited once all ranks are done with it.

    ``on_save_checkpoint`` is not told where to, and comes before the file exists. Both are known one call further in
    and out: what a strategy is told to save it is told on every rank, also where rank 0 alone writes, and the
    Trainer's own ``save_checkpoint`` ends in a barrier.
    """

    def __init__(self, hook: TorchHook) -> None:
        self.hook = hook
        self._step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the hook around what saves; called by Lightning on every rank."""
        strategy, to_file, save = trainer.strategy, trainer.strategy.save_checkpoint, trainer.save_checkpoint
        if getattr(save, "audited", False):
            return

        def witnessed(checkpoint: dict[str, Any], filepath: Any, *arguments: Any, **choices: Any) -> None:
            self._step = int(checkpoint.get("global_step", 0))
            self.hook.witness(self._step, checkpoint, filepath)
            to_file(checkpoint, filepath, *arguments, **choices)

        def audited(filepath: Any, *arguments: Any, **choices: Any) -> None:
            save(filepath, *arguments, **choices)
            self.hook.committed(self._step, filepath)

        audited.audited = True  # type: ignore[attr-defined]
        strategy.save_checkpoint, trainer.save_checkpoint = witnessed, audited

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Waits for the audits under way."""
        self.hook.close()
