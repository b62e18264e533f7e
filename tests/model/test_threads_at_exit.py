"""A process that ends while its threads compute ends well: the interpreter waits for them instead of stopping them in torch's code.

Each case runs in a process of its own. Without the wait it is aborted with "terminate called without an active exception".
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
ENGINE = """
import asyncio
from tiny_engine import open_tiny, tiny_llm
from triblade.engine.local import LocalClient
from triblade.sampling_params import SamplingParams

client = LocalClient(tiny_llm(open_tiny("llama", max_position_embeddings=4096), num_kv_blocks=1000).engine)

outputs = client.generate([5, 6, 7], SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0))

async def first_tokens():
    for _ in range(20):
        await anext(outputs)

asyncio.new_event_loop().run_until_complete(first_tokens())  # nobody closes the loop or the client
"""
LINK = """
import socket, time
import torch
from triblade.disagg.sockets import SocketLink

class Busy:
    def received(self, link, message): ...
    def writable(self, link): ...
    def lost(self, link, reason):
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            torch.ones(1 << 16).add(1).sum()

ours, theirs = socket.socketpair()
link = SocketLink(ours, "peer")
link.start(Busy())
theirs.close()
time.sleep(0.2)
"""


@pytest.mark.parametrize("program", [ENGINE, LINK], ids=["engine", "link"])
def test_threads_in_torch_do_not_abort_the_end(program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(SUPPORT)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
