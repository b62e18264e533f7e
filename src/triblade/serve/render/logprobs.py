"""Log-probabilities in the three shapes clients know: legacy completions, chat, and vLLM's prompt log-probabilities.

Knows tokens and numbers, not requests. Invariant of the legacy shape: for a token that is valid text,
`full_text[offset : offset + len(token)] == token`, over the whole answer, streamed or not.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from triblade.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer

Legacy = dict[str, list[Any]]


class TextOffsets:
    """Where the text of each token begins in the whole answer, in characters.

    Works on bytes, as a character may be spread over several tokens; such a token gets the offset of that character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def advance(self, piece: bytes) -> int:
        """The offset of the token that adds `piece` to the text."""
        offset = self._characters
        self._characters += len(self._decoder.decode(piece))
        return offset

    def end_of_text(self) -> None:
        """A text ends here (a prompt, before its answer): an open character is closed as U+FFFD."""
        self._characters += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()


def aligned(pieces: Iterable[bytes], text: str) -> list[bytes]:
    """What each token contributes to `text`, which the tokens were made from.

    A token may show less in the text than it stands for: special tokens that were added, the space that some tokenizers
    put before the first word. A token that is not found at its place contributes nothing; the last one gets the rest.
    """
    whole = text.encode()
    position, found = 0, []
    for piece in pieces:
        shown = next((p for p in (piece, piece.removeprefix(b" ")) if p and whole.startswith(p, position)), b"")
        position += len(shown)
        found.append(shown)
    if found:
        found[-1] += whole[position:]
    return found


class LogprobWriter:
    """Writes the log-probabilities of one choice.

    Args:
        tokenizer: spells tokens.
        skips_special_tokens: whether the text leaves special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skips_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        self._offsets = TextOffsets()

    def legacy(self, entries: Sequence[TokenLogprobs]) -> Legacy:
        """Generated tokens in the shape of /v1/completions."""
        return self._legacy(entries, [self._shown(entry.token_id) for entry in entries])

    def legacy_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str) -> Legacy:
        """Prompt tokens in the shape of /v1/completions; the first one has no probability, it is given."""
        pieces = aligned((self._tokenizer.token_bytes(token) for token in token_ids), text)
        filled = [entry or TokenLogprobs(token, 0.0, 0) for token, entry in zip(token_ids, entries, strict=True)]
        legacy = self._legacy(filled, pieces)
        for index, entry in enumerate(entries):
            if entry is None:
                legacy["token_logprobs"][index] = legacy["top_logprobs"][index] = None
        self._offsets.end_of_text()
        return legacy

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Generated tokens in the shape of /v1/chat/completions."""
        return {"content": [{**self._entry(e.token_id, e.logprob), "top_logprobs": self._top(e)} for e in entries]}

    def _legacy(self, entries: Sequence[TokenLogprobs], pieces: Sequence[bytes]) -> Legacy:
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._named(entry) for entry in entries],
            "text_offset": [self._offsets.advance(piece) for piece in pieces],
        }

    def _named(self, entry: TokenLogprobs) -> dict[str, float]:
        """The best alternatives by name, and the chosen token, so that it can be looked up."""
        names = {self._name(token): logprob for token, logprob in entry.top}
        names.setdefault(self._name(entry.token_id), entry.logprob)
        return names

    def _name(self, token_id: int) -> str:
        """The token's text; `bytes:\\xe2\\x82` for one that is no text by itself, as the OpenAI API writes it."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _shown(self, token_id: int) -> bytes:
        """What a generated token adds to the text."""
        hidden = self._skips_special_tokens and self._is_special(token_id)
        return b"" if hidden else self._tokenizer.token_bytes(token_id)

    def _is_special(self, token_id: int) -> bool:
        decode = self._tokenizer.decode
        return decode([token_id], skip_special_tokens=True) != decode([token_id], skip_special_tokens=False)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": self._tokenizer.token(token_id), "logprob": logprob, "bytes": list(raw)}

    def _top(self, entry: TokenLogprobs) -> list[dict[str, Any]]:
        return [self._entry(token, logprob) for token, logprob in entry.top]


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: per prompt token, token id -> logprob, rank and text, of the given token and the best ones."""
    if entries is None:
        return None
    return [None if entry is None else _ranked(tokenizer, entry) for entry in entries]


def _ranked(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token(token)}
        for token, logprob, rank in ranked
    }
