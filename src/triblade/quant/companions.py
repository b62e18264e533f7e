"""The files that make weights a model: tokenizer, chat templates, generation defaults, licence; from a folder or a GGUF file.

A folder's are copied byte for byte. A GGUF file has none: they are made from what its header says, in the form that transformers
reads. Knows no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triblade.models.checkpoint import Checkpoint
from triblade.models.gguf_tokenizer import read_gguf_tokenizer

_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def companion_files(path: Path, checkpoint: Checkpoint) -> dict[str, bytes]:
    """File name, with a folder's name before it where there is one, -> content.

    Raises:
        CheckpointError: the tokenizer of a GGUF file is missing or broken.
    """
    if path.is_dir():
        found = sorted({file for pattern in _PATTERNS for file in path.glob(pattern) if file.is_file()})
        return {str(file.relative_to(path)): file.read_bytes() for file in found}
    return _from_gguf(path, checkpoint)


def _from_gguf(path: Path, checkpoint: Checkpoint) -> dict[str, bytes]:
    parts = read_gguf_tokenizer(path)
    generation: dict[str, Any] = {**checkpoint.generation_config, "eos_token_id": sorted(parts.eos_token_ids)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    files = {
        "tokenizer.json": parts.backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(settings),
        "generation_config.json": _json(generation),
    }
    for name, template in parts.chat_templates.items():
        place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        files[place] = template.encode()
    return files


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
