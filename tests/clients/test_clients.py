"""The programs people use with an OpenAI server, each in an environment of its own, against the real model.

What a program must find right stands in its script; the result that the guide shows is the one that is found here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_programs import MODEL, Client, clients, install, recorded, run
from real_server import RealServer, real_server

CLIENTS = clients()


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RealServer]:
    """One server for all of them."""
    with real_server(smollm2, name=MODEL) as running:
        yield running


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_client(client: Client, server: RealServer, smollm2: Path) -> None:
    install(client)
    outcome = run(client, server.url, {"TRIBLADE_PYTHON": sys.executable, "TRIBLADE_MODEL": str(smollm2)})
    assert outcome.is_right, outcome.output
    assert outcome.checks == recorded()[client.name]["checks"]
