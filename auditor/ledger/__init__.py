"""What was measured and judged of every step, kept as a Zarr tree that outlives the checkpoints.

A ledger is files from strangers like any checkpoint: bounded when read, and believed only where its digests hold.
"""
