"""Megatron-LM's own files."""
