"""Fetches models from the Hugging Face Hub with its own client, which resumes, checks and caches.

Only weights as safetensors or GGUF, configuration and tokenizer files are fetched: no pickles, no Python. Knows no
format.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triblade.config import offline
from triblade.errors import ModelNotFoundError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_NOT_CACHED = "offline mode is on (TRIBLADE_OFFLINE or HF_HUB_OFFLINE) and it is not in the cache"
_UNREACHABLE = "there is no such folder or file here; check the network, or the spelling if a local model was meant"
_UNWANTED = ["consolidated*", "original/*", "onnx/*", "openvino/*", "training_args*"]


def fetch_repository(repository: str, revision: str | None) -> Path:
    """The folder with the model of a repository, from the client's cache or the network.

    Raises:
        ModelNotFoundError: there is no such repository, it is gated, or it cannot be reached.
    """
    from huggingface_hub import snapshot_download

    folder = _fetch(
        repository,
        lambda: snapshot_download(
            repository,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=offline(),
            tqdm_class=_progress_class(),
        ),
    )
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"the repository {repository} has no safetensors weights",
            hint=f"if it has GGUF files, name one: {repository}:FILE.gguf",
            param="model",
        )
    return folder


def fetch_repository_file(repository: str, file: str, revision: str | None) -> Path:
    """One GGUF file of a repository.

    Raises:
        ModelNotFoundError: there is no such repository or file, or it cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    return _fetch(
        f"{repository}:{file}",
        lambda: hf_hub_download(
            repository, file, revision=revision, local_files_only=offline(), tqdm_class=_progress_class()
        ),
    )


def _fetch(what: str, download: Callable[[], str]) -> Path:
    """Run a download and translate the client's errors, which share no base class."""
    try:
        return Path(download())
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = f"cannot fetch {what!r} from the Hugging Face Hub: {reason}"
        raise ModelNotFoundError(message, hint=_hint(error), param="model") from error


def _hint(error: Exception) -> str:
    from huggingface_hub import errors

    hints: Sequence[tuple[type[Exception], str]] = (
        (errors.GatedRepoError, "accept its licence on huggingface.co and log in: hf auth login"),
        (errors.RepositoryNotFoundError, "check the spelling; a private repository needs a login: hf auth login"),
        (errors.RevisionNotFoundError, "check the revision"),
        (errors.LocalEntryNotFoundError, _NOT_CACHED if offline() else _UNREACHABLE),
        (errors.EntryNotFoundError, "check the name of the file"),
        (errors.HFValidationError, "a repository is written owner/name"),
        (PermissionError, "its cache cannot be written; set HF_HOME to a folder that can"),
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
