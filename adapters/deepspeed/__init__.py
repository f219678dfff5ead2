"""DeepSpeed: its engine, pipelines and universal checkpoints."""
