"""Write docs/reference/cli.md from the code: commands from their signatures, options from the config fields.

Run: python tools/reference_docs.py [--check]

A test runs the check, so the page cannot fall behind. It depends on our code alone, not on the version of a library.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from triblade import cli  # noqa: F401 - registers every command
from triblade.commands.frame import SamplingFlags, app
from triblade.config import (
    AlignConfig,
    BenchConfig,
    ConvertConfig,
    DeployConfig,
    EngineConfig,
    KVCalibrateConfig,
    PlanConfig,
    RouteConfig,
    ServerConfig,
    SimulateConfig,
    TopologyConfig,
    TransferConfig,
    TuneConfig,
    WorkerConfig,
)

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
COMMANDS = {name: app[name].default_command for name in app if not name.startswith("-")}
GROUPS = {"EngineFlags": "engine", "Sampling": "sampling", "ServerConfig": "server"}
GROUPS |= {"ConvertConfig": "conversion", "AlignConfig": "alignment", "KVCalibrateConfig": "KV table"}
GROUPS |= {
    "TopologyConfig": "workers",
    "WorkerConfig": "worker",
    "TransferFlags": "transfer",
    "BenchConfig": "load test",
    "PlanConfig": "plan",
    "TuneConfig": "tuning",
    "DeployConfig": "deployment",
    "RouteConfig": "router",
    "SimulateConfig": "simulation",
}
INTRODUCTION = """\
# Command line

Written by `make docs` from the code; change the code, not this page.

Answers go to standard output; logs, progress and errors to standard error. Exit codes: 0 done, 1 failed, 2 wrong
options, 130 interrupted. Every option has the name of a field with dashes (`max_model_len` is `--max-model-len`); a
switch that is on is turned off with `--no-...`. The model is the first argument or `--model` (`--target` of `align`).
Every command but `compare` and `version` takes `--log-level`: `debug`, `info`, `warning` or `error`.
"""
ENVIRONMENT = """\
## Environment

| variable | meaning |
|---|---|
| `TRIBLADE_API_KEY` | one more API key for `serve`; the key that `bench` sends, before `OPENAI_API_KEY` |
| `TRIBLADE_ADMIN_KEY` | key for `/replicas` of `route`, where `--admin-key` gives none |
| `TRIBLADE_CACHE` | folder for downloads; default: `triblade` under `XDG_CACHE_HOME` or `~/.cache` |
| `TRIBLADE_ISA` | instruction set of the native kernels, as `--isa`, which goes before it |
| `TRIBLADE_OFFLINE`, `HF_HUB_OFFLINE` | any value but 0: never use the network |
"""


def field_docs(kind: type) -> dict[str, str]:
    """Field name -> the string that stands below it in the class, or in one that it inherits from."""
    docs: dict[str, str] = {}
    for parent in kind.__bases__:
        docs |= field_docs(parent) if is_dataclass(parent) else {}
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    for node, below in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def default(field: Field[Any]) -> str:
    """The default as a user would write it."""
    if field.default is MISSING:
        return "required"
    return "" if field.default in (None, (), "") else f"`{as_written(field.default)}`"


def as_written(value: Any) -> str:
    """A value as it stands in TOML or on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def choices(hint: Any) -> str:
    """The values of a closed set, or of one that may be left out, as the end of a sentence."""
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is Literal:
            return f" One of: {', '.join(f'`{value}`' for value in get_args(kind))}."
    return ""


def option_table(title: str, kind: type) -> Iterator[str]:
    """A Markdown table of the fields of a config dataclass."""
    docs, hints = field_docs(kind), get_type_hints(kind)
    yield f"## {title}\n\n{' '.join((kind.__doc__ or '').split())}\n\n| option | default | meaning |\n|---|---|---|"
    for field in fields(kind):
        meaning = docs[field.name] + choices(hints[field.name])
        yield f"| `--{field.name.replace('_', '-')}` | {default(field)} | {meaning} |"
    yield ""


def command(name: str, function: Any) -> Iterator[str]:
    """One command: what it does, its own options, and which option groups it takes."""
    text, _, arguments = inspect.cleandoc(function.__doc__).partition("\nArgs:\n")
    yield f"### `triblade {name}`\n\n{text.strip()}\n"
    described = dict(line.split(": ", 1) for line in textwrap.dedent(arguments).splitlines())
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.name in described:
            yield f"- `{flag(parameter)}`{given(parameter)}: {described[parameter.name]}"
    taken = [group for p in parameters.values() for key, group in GROUPS.items() if key in str(p.annotation)]
    if taken:
        yield f"- and the options of: {', '.join(taken)}"
    yield ""


def flag(parameter: inspect.Parameter) -> str:
    """The name on the command line."""
    if parameter.name == "as_json":
        return "--json"
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
        return parameter.name.upper()
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"{parameter.name.removesuffix('s').upper()} ..."
    return f"--{parameter.name.replace('_', '-')}"


def given(parameter: inspect.Parameter) -> str:
    """The default in words."""
    if parameter.default is parameter.empty:
        return " (required)"
    return "" if parameter.default in (None, False) else f" (`{as_written(parameter.default)}`)"


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Commands\n"]
    for name, function in COMMANDS.items():
        parts += command(name, function)
    parts += option_table("Engine options", EngineConfig)
    parts += option_table("Sampling options", SamplingFlags)
    parts += option_table("Server options", ServerConfig)
    parts += option_table("Workers options", TopologyConfig)
    parts += option_table("Worker options", WorkerConfig)
    parts += option_table("Transfer options", TransferConfig)
    parts += option_table("Plan options", PlanConfig)
    parts += option_table("Tuning options", TuneConfig)
    parts += option_table("Deployment options", DeployConfig)
    parts += option_table("Router options", RouteConfig)
    parts += option_table("Simulation options", SimulateConfig)
    parts += option_table("Conversion options", ConvertConfig)
    parts += option_table("Alignment options", AlignConfig)
    parts += option_table("Load test options", BenchConfig)
    parts += option_table("KV table options", KVCalibrateConfig)
    return "\n".join([*parts, ENVIRONMENT])


def main() -> int:
    """Write the page, or with --check say whether it is current."""
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'current' if current else 'out of date; run: make docs'}")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
