"""The hook for Lightning: around whatever writes its checkpoints.

    Trainer(…, plugins=[AuditedCheckpointIO(TorchHook(after=AfterCommit()))])

A callback's ``on_save_checkpoint`` comes before the file exists; a CheckpointIO sees what is saved, and is done when it
is there.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from auditor.hooks.torch_hook import TorchHook


class AuditedCheckpointIO(TorchCheckpointIO):
    """Writes as :class:`TorchCheckpointIO`, after it left a witness; then the step is audited."""

    def __init__(self, hook: TorchHook) -> None:
        super().__init__()
        self.hook = hook

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Called by Lightning, on the ranks that write."""
        step = int(checkpoint.get("global_step", 0))
        self.hook.witness(step, checkpoint, path)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.hook.committed(step, path)

    def teardown(self) -> None:
        """Waits for the audits under way."""
        self.hook.close()
        super().teardown()
