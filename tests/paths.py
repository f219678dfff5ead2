"""Where the committed checkpoints are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "samples" / "bloom_drift"
RUN, HEALTHY = SAMPLE / "run", SAMPLE / "healthy"
FIXTURES = ROOT / "tests" / "fixtures" / "deepspeed_pipeline"
TP2_PP2, TP4 = FIXTURES / "tp2_pp2", FIXTURES / "tp4"
