"""Fetches models from the Hugging Face Hub with its own client, which resumes, checks and caches.

Only weights as safetensors or GGUF, configuration and tokenizer files are fetched, no pickles and no Python. Knows no
format.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triblade.config import offline
from triblade.errors import ModelNotFoundError

_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_UNWANTED = ("consolidated*", "original/*", "onnx/*", "openvino/*", "training_args*")
_NOT_CACHED = "offline mode is on (TRIBLADE_OFFLINE or HF_HUB_OFFLINE) and it is not in the cache"
_UNREACHABLE = "there is no such folder or file here; check the network, or the spelling if a local model was meant"


def fetch_repository(repository: str, revision: str | None) -> Path:
    """The folder with the model of a repository, from the client's cache or the network.

    Raises:
        ModelNotFoundError: there is no such repository, it is gated or has no safetensors, or it cannot be reached.
    """
    folder = _fetch(repository, revision, _WANTED)
    if not any(folder.glob("*.safetensors")):
        hint = f"if it has GGUF files, name one: {repository}:FILE.gguf"
        raise ModelNotFoundError(f"the repository {repository} has no safetensors weights", hint=hint, param="model")
    return folder


def fetch_repository_file(repository: str, file: str, revision: str | None) -> Path:
    """One GGUF file of a repository.

    Raises:
        ModelNotFoundError: there is no such repository or file, or it cannot be reached.
    """
    path = _fetch(repository, revision, (file,)) / file
    if not path.is_file():
        raise ModelNotFoundError(
            f"the repository {repository} has no file {file}", hint="check the name", param="model"
        )
    return path


def fetch_configuration(repository: str) -> Path:
    """A folder with config.json of a repository, whatever else it has.

    Raises:
        ModelNotFoundError: there is no such repository, it has none, or it cannot be reached.
    """
    folder = _fetch(repository, None, ("config.json",))
    if not (folder / "config.json").is_file():
        hint = f"if it has GGUF files, name one: {repository}:FILE.gguf"
        raise ModelNotFoundError(f"the repository {repository} has no config.json", hint=hint, param="model")
    return folder


def _fetch(repository: str, revision: str | None, wanted: Sequence[str]) -> Path:
    """Download the files that match, and translate the client's errors, which share no base class."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNWANTED),
            local_files_only=offline(),
            tqdm_class=_progress_class(),
        )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = f"cannot fetch {repository!r} from the Hugging Face Hub: {reason}"
        raise ModelNotFoundError(message, hint=_hint(error), param="model") from error
    return Path(folder)


def _hint(error: Exception) -> str:
    from huggingface_hub import errors

    hints: Sequence[tuple[type[Exception], str]] = (
        (errors.GatedRepoError, "accept its licence on huggingface.co and log in: hf auth login"),
        (errors.RepositoryNotFoundError, "check the spelling; a private repository needs a login: hf auth login"),
        (errors.RevisionNotFoundError, "check the revision"),
        (errors.LocalEntryNotFoundError, _NOT_CACHED if offline() else _UNREACHABLE),
        (errors.HFValidationError, "a repository is written owner/name"),
        (PermissionError, "the client's cache cannot be written; set HF_HOME to a folder that can"),
    )
    return next((hint for kind, hint in hints if isinstance(error, kind)), _UNREACHABLE)


def _progress_class() -> type[Any] | None:
    """The client's own bars on a terminal, none elsewhere (a log would get a line per update)."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if sys.stderr.isatty():
        return None

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return Silent
