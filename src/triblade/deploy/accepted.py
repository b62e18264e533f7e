"""What a vLLM accepts: asked of an installed one in its own environment, or read from the table of releases.

Knows no plan. Invariant: nothing is written or started whose option names, speculation methods, KV types or connectors were not
compared with these (`check`), so that a release that renamed one is found here and not by a server that does not start.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from triblade.errors import ConfigError, UnsupportedError
from triblade.registry import unknown_name

TABLE, PROBE = "vllm.toml", "vllm_probe.py"
PROBE_TIMEOUT_S = 300.0
SHOWN_LINES = 5
SHOWN_NAMES = 8  # of some hundred, the nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """One vLLM.

    Attributes:
        device: cuda or cpu.
        is_installed: asked itself, so that `packages` says what its environment has; else that is not known.
    """

    version: str
    device: str
    is_installed: bool
    engine: frozenset[str]
    speculative: frozenset[str]
    transfer: frozenset[str]
    methods: frozenset[str]
    kv_dtypes: frozenset[str]
    connectors: frozenset[str]
    packages: frozenset[str] = frozenset()


def installed(python: Path) -> Accepted:
    """Ask the vLLM of an environment.

    Args:
        python: the environment's Python.

    Raises:
        ConfigError: there is no vLLM, or it does not answer; the last lines it said are in the message.
    """
    with resources.as_file(resources.files("triblade.deploy") / PROBE) as script:
        try:
            done = subprocess.run(
                [str(python), str(script)], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"cannot ask vLLM in {python}: {error}", hint="check --vllm-python") from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-SHOWN_LINES:])
        raise ConfigError(f"no vLLM that can be asked in {python}:\n{said}", hint="install it there, or name another")
    return _from_probe(json.loads(done.stdout.strip().splitlines()[-1]))


def release(version: str, device: str) -> Accepted:
    """What a release is known to accept.

    Raises:
        UnsupportedError: it is not in the table.
    """
    table = tomllib.loads((resources.files("triblade.deploy") / TABLE).read_text(encoding="utf-8"))
    oldest, newest = table.pop("oldest"), table.pop("newest")
    if not _key(oldest) <= _key(version) <= _key(newest):
        raise UnsupportedError(
            f"vLLM {version} is not known here, {oldest} to {newest} are",
            hint="ask an installed one with --vllm-python",
            param="vllm_version",
        )
    fewer = table.pop("kv_dtypes_of")
    table["kv_dtypes"] = fewer.get(device, table["kv_dtypes"])
    sets = {name: frozenset(values) for name, values in table.items()}
    return Accepted(version=version, device=device, is_installed=False, **sets)


def check(options: Mapping[str, Any], accepted: Accepted) -> None:
    """Compare the options of one engine with what is accepted.

    Raises:
        ConfigError: an unknown one; the hint has the nearest name.
    """
    _known("option of vLLM", options, accepted.engine, accepted)
    speculative, transfer = options.get("speculative_config", {}), options.get("kv_transfer_config", {})
    _known("speculative_config key of vLLM", speculative, accepted.speculative, accepted)
    _known("kv_transfer_config key of vLLM", transfer, accepted.transfer, accepted)
    _known("speculation method of vLLM", _said(speculative, "method"), accepted.methods, accepted)
    _known("KV type of vLLM", _said(options, "kv_cache_dtype"), accepted.kv_dtypes, accepted)
    _known("KV connector of vLLM", _said(transfer, "kv_connector"), accepted.connectors, accepted)


def _said(options: Mapping[str, Any], name: str) -> list[str]:
    return [options[name]] if name in options else []


def _known(kind: str, names: Collection[str], accepted: frozenset[str], of: Accepted) -> None:
    for name in names:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=SHOWN_NAMES, cutoff=0.0)
            raise unknown_name(f"{kind} {of.version} on {of.device}", name, near)


def _from_probe(answer: Mapping[str, Any]) -> Accepted:
    """The probe's answer; a CPU's attention takes fewer KV types than the configuration class does."""
    known = release(_newest_known(), answer["device"])
    sets = {name: frozenset(values) for name, values in answer.items() if isinstance(values, list)}
    if answer["device"] == "cpu":
        sets["kv_dtypes"] &= known.kv_dtypes
    return Accepted(version=answer["version"], device=answer["device"], is_installed=True, **sets)


def _newest_known() -> str:
    table = tomllib.loads((resources.files("triblade.deploy") / TABLE).read_text(encoding="utf-8"))
    newest: str = table["newest"]
    return newest


def _key(version: str) -> tuple[int, ...]:
    """Major and minor number.

    Raises:
        ConfigError: it is no version.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"not a version of vLLM: {version!r}", hint="such as 0.33.0", param="vllm_version")
    return tuple(map(int, found.groups()))
