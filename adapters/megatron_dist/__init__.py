"""Megatron-core's ``torch_dist``."""
