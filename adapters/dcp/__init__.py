"""``torch.distributed.checkpoint``."""
