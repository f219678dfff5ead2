"""Where the committed checkpoints are."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "samples" / "bloom_drift"
RUN, HEALTHY = SAMPLE / "run", SAMPLE / "healthy"
FIXTURES = ROOT / "tests" / "fixtures" / "deepspeed_pipeline"
TP2_PP2, TP4 = FIXTURES / "tp2_pp2", FIXTURES / "tp4"
DCP = ROOT / "tests" / "fixtures" / "dcp"


def load_expect():
    """The sample's own truth finder (torch only), as a module."""
    spec = importlib.util.spec_from_file_location("expect", SAMPLE / "expect.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
