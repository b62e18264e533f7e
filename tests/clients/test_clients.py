"""The programs people use with an OpenAI server, each in an environment of its own, against the real model.

What a program must find right stands in its script; the result that the guide shows is the one that is found here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from client_programs import MODEL, SERVE, Client, clients, install, recorded, run
from real_server import RealServer, real_server

FOR_CI = [client for client in clients() if not client.heavy]


@pytest.fixture(scope="module")
def serve(smollm2: Path) -> Iterator[Callable[[Sequence[str]], RealServer]]:
    """A server for each set of options, started when it is first asked for."""
    running: dict[tuple[str, ...], RealServer] = {}
    with ExitStack() as stack:

        def started(options: Sequence[str]) -> RealServer:
            key = (*SERVE, *options)
            if key not in running:
                running[key] = stack.enter_context(real_server(smollm2, key, MODEL))
            return running[key]

        yield started


@pytest.mark.parametrize("client", FOR_CI, ids=[client.name for client in FOR_CI])
def test_client(client: Client, serve: Callable[[Sequence[str]], RealServer], smollm2: Path) -> None:
    install(client)
    server = serve(client.serve)
    outcome = run(client, server.url, {"TRIBLADE_PYTHON": sys.executable, "TRIBLADE_MODEL": str(smollm2)})
    assert outcome.is_right, outcome.output
    assert outcome.checks == recorded()[client.name]["checks"]
