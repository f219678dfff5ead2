"""Seeds and inputs that crashed a reader once, each read again."""

from pathlib import Path

import pytest

from tests.fuzz.fuzz_readers import READERS, read, seeds

CRASHES = sorted((Path(__file__).resolve().parent / "crashes").glob("*-*"))


@pytest.mark.parametrize("path", CRASHES, ids=lambda path: path.name)
def test_what_crashed_once_is_harmless(path):
    read(path.name.split("-", 1)[0], path.read_bytes())


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "safetensors"])
def test_seeds_and_their_cuts_are_harmless(kind):
    found = seeds(kind)
    assert found
    for seed in found:
        for cut in range(0, len(seed), max(1, len(seed) // 50)):
            read(kind, seed[:cut])
            read(kind, seed[:cut] + bytes([seed[cut] ^ 0xFF]) + seed[cut + 1 :])
