"""What every source of a tokenizer is read into, and the byte spelling of its tokens.

Knows no file format. `TokenizerParts` is made by `tokenizer_files` (a folder) and `gguf_tokenizer` (a GGUF file) and
used by `tokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, processors

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A tokenizer as its files describe it."""

    backend: Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", as chat templates name them
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # name -> source; "default" is the usual one


def set_special_rule(backend: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `encode` put `bos` before and `eos` after every text; None adds nothing."""
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=tokens)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 is itself, 256, 257, ... are the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def spelling(backend: Tokenizer) -> Callable[[str], bytes] | None:
    """How vocabulary entries spell bytes, read off the tokenizer's decoder; None for a decoder of another kind."""
    steps = list(_decoder_steps(json.loads(backend.decoder.__getstate__()))) if backend.decoder else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        return lambda token: _byte_level(token, alphabet)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replacements = [pair for step in steps if (pair := _replacement(step))]
        return lambda token: _sentencepiece(token, replacements, "ByteFallback" in kinds)
    return None


def _decoder_steps(decoder: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _decoder_steps(step)


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:  # not spelled in the alphabet: the text itself
        return token.encode("utf-8")


def _sentencepiece(token: str, replacements: list[tuple[str, str]], byte_fallback: bool) -> bytes:
    if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode("utf-8")
