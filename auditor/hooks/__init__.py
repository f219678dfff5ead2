"""What a training job adds: a witness of every rank's memory before a save, and an audit after it. See docs/hooks.md.

Nothing here is imported by the auditor itself; torch and jax are imported only when a hook for them is made.
"""
