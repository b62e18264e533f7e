"""Install the programs of `tests/clients/clients.toml` and run each against a server on the demo model.

Run: python tools/clients.py [NAME ...] [--output FILE]

Without names: all of them. Exit code 1 if one of them found something wrong.
`--output` writes what docs/guides/clients.md shows; results of programs that were not run stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from client_programs import MODEL, Client, clients, install, run
from real_server import real_server

from triblade import __version__
from triblade.files import written_whole
from triblade.models.source import resolve


def main() -> int:
    """Run, say how each went, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chosen = [client for client in clients() if client.name in options.names] or clients()
    right = True
    for name, result in measure_all(chosen):
        right &= result["right"]
        if options.output is not None:
            write(options.output, name, result)
    return int(not right)


def measure_all(chosen: list[Client]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every client, against one server."""
    model = resolve(MODEL)
    with real_server(model, name=MODEL) as server:
        for client in chosen:
            yield client.name, measure(client, server.url, model)


def measure(client: Client, url: str, model: Path) -> dict[str, Any]:
    """Install and run one."""
    begin = time.monotonic()
    install(client)
    installed = time.monotonic()
    outcome = run(client, url, {"TRIBLADE_PYTHON": sys.executable, "TRIBLADE_MODEL": str(model)})
    seconds = {"install_s": round(installed - begin, 1), "run_s": round(time.monotonic() - installed, 1)}
    print(
        f"{client.name}: {len(outcome.checks)} right{'' if outcome.is_right else ', then WRONG'}, {seconds}", flush=True
    )
    if not outcome.is_right:
        print(outcome.output)
    installs = {"right": outcome.is_right, "installed": [*client.pip, *client.npm]}
    return {**installs, "checks": outcome.checks, "measured": outcome.measured, **seconds}


def write(path: Path, name: str, result: dict[str, Any]) -> None:
    """Put a result into the file, beside those of others."""
    before = json.loads(path.read_text(encoding="utf-8"))["clients"] if path.is_file() else {}
    content = {"triblade": __version__, "model": MODEL, "clients": before | {name: result}}
    with written_whole(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
