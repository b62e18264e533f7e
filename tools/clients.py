"""Install the programs of `tests/clients/clients.toml`, run each against a server on the demo model, and tell how it went.

Run: python tools/clients.py [NAME ...] [--all] [--output FILE]

Without names: all that CI runs; with --all, the heavy ones, too. Exit code 1 if one of them found something wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from client_programs import MODEL, SERVE, Client, clients, install, run
from real_server import real_server

from triblade.models.source import resolve


def main() -> int:
    """Run, print a line per client, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chosen = [client for client in clients() if client.name in options.names]
    chosen = chosen or [client for client in clients() if options.all or not client.heavy]
    model = resolve("smollm2-135m")
    results = {}
    for serve, same in groupby(chosen, lambda client: tuple(client.serve)):
        with real_server(model, (*SERVE, *serve), MODEL) as server:
            results |= {client.name: measure(client, server.url, model) for client in same}
    return int(not all(result["right"] for result in results.values()))


def measure(client: Client, url: str, model: Path) -> dict[str, Any]:
    """Install and run one."""
    begin = time.monotonic()
    install(client)
    installed = time.monotonic()
    outcome = run(client, url, {"TRIBLADE_PYTHON": sys.executable, "TRIBLADE_MODEL": str(model)})
    ended = time.monotonic()
    print(f"{client.name}: {'right' if outcome.is_right else 'WRONG'}, {len(outcome.checks)} checks, "
          f"installed in {installed - begin:.1f} s, ran {ended - installed:.1f} s")
    print(outcome.output)
    return {"right": outcome.is_right}


if __name__ == "__main__":
    sys.exit(main())
