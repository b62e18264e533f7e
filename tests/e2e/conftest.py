"""One server on the real model for all end-to-end tests of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import RealServer, real_server


@pytest.fixture(scope="session")
def smollm2_path(smollm2: Path) -> Path:
    """The model's file."""
    return smollm2


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[RealServer]:
    """The server, ready."""
    with real_server(smollm2_path) as running:
        yield running
