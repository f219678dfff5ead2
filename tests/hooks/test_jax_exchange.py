"""The exchange through JAX's own distributed service, in a process of its own. Needs jax."""

import socket
import subprocess
import sys

import pytest

pytest.importorskip("jax")

JOB = """
import sys, time, jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=1, process_id=0)
from auditor.hooks.jax_exchange import jax_exchange
exchange = jax_exchange(0.3)
exchange.hand_over(3, "3", 0, 1, b"part of rank 1")
begun = time.monotonic()
assert [*exchange.collected(3, "3", 0, 4)] == [(1, b"part of rank 1")]
assert time.monotonic() - begun < 5
assert [*exchange.collected(3, "3", 0, 2)] == []
"""


def test_a_part_arrives_once_and_dead_ranks_hold_nobody_up():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    done = subprocess.run([sys.executable, "-c", JOB, port], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
