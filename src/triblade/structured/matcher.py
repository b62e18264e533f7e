"""A grammar followed token by token: the library's matcher behind the engine's seam, `TokenConstraint`.

The only module of the engine's process that imports xgrammar, so it is imported when a request first asks for a form. Knows no
request. Special tokens have no text here, so no grammar allows one: end tokens are added where the text so far is complete.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import xgrammar
from torch import Tensor

from triblade.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the library sees it; `special` are the tokens that stand for no text."""

    info: xgrammar.TokenizerInfo
    special: Tensor  # int64 [S]
    size: int


def read_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The first `size` tokens of a tokenizer; reading them takes a fraction of a second."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special} | set(tokenizer.eos_token_ids)
    spelled = [b"" if i in special else tokenizer.token_bytes(i) for i in range(size)]
    ends = sorted(i for i in tokenizer.eos_token_ids if i < size)
    info = xgrammar.TokenizerInfo(
        list[bytes](spelled), xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=ends or [0]
    )
    silent = [i for i, text in enumerate(spelled) if not text]
    return Vocabulary(info, torch.tensor(silent, dtype=torch.int64), size)


SLOW_S = 1.0  # that one output may spend here,
SLOW_TOKEN_S = 0.003  # and for every token of it


class GrammarConstraint:
    """Implements `TokenConstraint`.

    Args:
        grammar: compiled for this vocabulary.
        vocabulary: tokens.
        stops: tokens that end an output.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, stops: frozenset[int]) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocabulary = vocabulary
        self._stops = torch.tensor(sorted(t for t in stops if t < vocabulary.size), dtype=torch.int64)
        self._bits = xgrammar.allocate_token_bitmask(1, vocabulary.size)  # int32 [1, W]
        self._known: Tensor | None = None
        self._left_s = SLOW_S
        self.fault: str | None = None

    def allowed(self) -> Tensor:
        """See `TokenConstraint`."""
        if self._known is None:
            start = time.perf_counter()
            self._known = self._text_tokens()
            self._left_s += SLOW_TOKEN_S - (time.perf_counter() - start)
            if self._matcher.is_completed():
                self._known[self._stops] = True
            self._look_for_faults()
        return self._known

    def accept(self, token_id: int) -> bool:
        """See `TokenConstraint`."""
        accepted = token_id not in self._vocabulary.info.stop_token_ids and self._matcher.accept_token(token_id)
        if accepted:
            self._known = None
        return accepted

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        if count:
            self._matcher.rollback(count)
            self._known = None

    @property
    def is_exhausted(self) -> bool:
        """See `TokenConstraint`."""
        return self._matcher.is_completed() and not bool(self._text_tokens().any())

    def _look_for_faults(self) -> None:
        if self._left_s < 0:
            self.fault = "the grammar takes too long to follow; simplify it"
        elif self._known is not None and not bool(self._known.any()):
            self.fault = "the grammar came to a point where no token may follow"

    def _text_tokens(self) -> Tensor:
        """Tokens that go on with the text, bool [V]."""
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits.numpy().view(np.uint8).reshape(-1), bitorder="little")
        mask = torch.from_numpy(bits[: self._vocabulary.size].astype(np.bool_))
        mask[self._vocabulary.special] = False
        return mask
