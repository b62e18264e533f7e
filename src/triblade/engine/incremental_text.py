"""Token ids in, text out, one token at a time, exactly as decoding them all at once would give it.

Two decoders, chosen by how the tokenizer spells bytes; each costs the same for every token however long the text is:

* byte-level (most models): a token is a piece of UTF-8 whatever stands before it; an unfinished character waits for
  its rest.
* in context (SentencePiece and all others): a token is decoded behind the one before it, because the first token of
  a text loses its leading space. Byte tokens ("<0xF0>") form a run that is final only when another token ends it:
  one invalid byte turns the whole run into U+FFFD, complete characters included. What the run says so far can be
  read as `open_text`.

Invariant: everything returned by `feed` and `flush`, joined, is `decode(all ids)`; behind a prompt that ends in
ordinary text, it is what those ids add to the text of the prompt.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from tokenizers import Tokenizer

from triblade.models.tokenizer_parts import byte_alphabet

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalText(Protocol):
    """Decodes the tokens of one text in order."""

    @property
    def open_text(self) -> str:
        """Complete characters that the next tokens could still turn into U+FFFD; not yet returned by `feed`."""
        ...

    def feed(self, token_id: int) -> str:
        """Take one token; returns the text that is final now, often of this token, never half a character."""
        ...

    def flush(self) -> str:
        """The rest, when no token follows."""
        ...


def incremental_text(backend: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> IncrementalText:
    """The decoder that fits the tokenizer, for text that follows `prompt_token_ids`."""
    kinds = _decoder_kinds(backend)
    if "ByteLevel" in kinds:
        return ByteLevelText(backend, skip_special_tokens)
    return TextInContext(backend, skip_special_tokens, prompt_token_ids, has_byte_tokens="ByteFallback" in kinds)


def _decoder_kinds(backend: Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}


class ByteLevelText:
    """Text of a byte-level tokenizer, whose tokens spell bytes in an alphabet of 256 characters."""

    open_text = ""  # an unfinished character is not complete, all others are final

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_unfinished = False

    def feed(self, token_id: int) -> str:
        """Whole characters are decoded by the tokenizer; bytes matter only around characters that tokens share."""
        text: str = self._backend.decode([token_id], skip_special_tokens=self._skip_special_tokens)
        if not text or not (self._is_unfinished or REPLACEMENT in text):
            return text
        text = self._utf8.decode(self._bytes(token_id))
        self._is_unfinished = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_unfinished = False
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            return bytes(self._alphabet[character] for character in token)
        except KeyError:  # an added token outside the alphabet stands for itself
            return bytes(token, "utf-8")

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        return byte_alphabet()


class TextInContext:
    """Text of a tokenizer whose tokens read differently at the start of a text, with or without byte tokens."""

    def __init__(
        self, backend: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int], *, has_byte_tokens: bool
    ) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._has_byte_tokens = has_byte_tokens
        self._context = self._last_ordinary(prompt_token_ids)  # at most one id, never a byte token
        self._context_text = self._decode(self._context)
        self._start_run()

    @property
    def open_text(self) -> str:
        return self._open_text

    def feed(self, token_id: int) -> str:
        byte = self._byte(token_id)
        if byte is not None:
            self._extend_run(token_id, byte)
            return ""
        alone = self._decode([token_id])
        if not alone and self._is_invisible(token_id):
            return ""
        text = self._behind_run(token_id) if self._run else self._behind_context([token_id])
        self._context, self._context_text = [token_id], alone
        return text

    def flush(self) -> str:
        text = self._behind_context(self._run)
        self._start_run()
        return text

    def _behind_context(self, token_ids: list[int]) -> str:
        return self._decode(self._context + token_ids)[len(self._context_text) :]

    def _behind_run(self, token_id: int) -> str:
        """The text of a run of byte tokens and of the token that ends it."""
        last = self._run[-1:]
        text = self.flush()
        return text + self._decode([*last, token_id])[len(self._decode(last)) :]

    def _start_run(self) -> None:
        self._run: list[int] = []
        self._run_is_valid = True
        self._open_text = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def _extend_run(self, token_id: int, byte: int) -> None:
        self._run.append(token_id)
        if not self._run_is_valid:
            return
        try:
            character = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_is_valid, self._open_text = False, ""
            return
        if character and not self._open_text:
            self._open_text = self._behind_context(self._run)  # the first character of a text may be stripped
        else:
            self._open_text += character

    def _byte(self, token_id: int) -> int | None:
        if not self._has_byte_tokens:
            return None
        match = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        return int(match[1], 16) if match else None

    def _is_invisible(self, token_id: int) -> bool:
        """Whether a token without text is a special one or none at all, not one whose space was stripped."""
        return self._backend.id_to_token(token_id) is None or bool(self._decode([token_id], keep_special=True))

    def _last_ordinary(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last token of the prompt's text; none when a special token stands after it, so that a new text begins."""
        for token_id in reversed(prompt_token_ids):
            if self._byte(token_id) is None:
                is_special = not self._backend.decode([token_id], skip_special_tokens=True) and self._is_invisible(
                    token_id
                )
                return [] if is_special else [token_id]
        return []

    def _decode(self, token_ids: list[int], *, keep_special: bool = False) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens and not keep_special)
        return text
