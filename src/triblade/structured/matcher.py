"""A grammar followed token by token: the library's matcher behind the engine's seam, `TokenConstraint`.

The only module of the engine's process that imports xgrammar, so it is imported when a request first asks for a form. Knows no
request. Special tokens have no text here, so no grammar allows one: end tokens are added where the text so far is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xgrammar
from torch import Tensor

from triblade.models.tokenizer import Tokenizer
from triblade.spec.token_mask import packed
from triblade.structured.patience import SLOW, Worker


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the library sees it."""

    info: xgrammar.TokenizerInfo
    spoken: Tensor  # mask of those that stand for text
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
    return Vocabulary(info, packed(torch.tensor([bool(text) for text in spelled])), size)


SLOW_S = 0.5  # that one output may spend here,
SLOW_TOKEN_S = 0.003  # and for every token of it
SUSPECT_S = 0.005  # a mask that took longer was the last that the engine's thread computes itself


class GrammarConstraint:
    """Implements `TokenConstraint`.

    Nothing can stop the library while it computes a mask, so masks of suspect grammars are computed by a thread of their own, and
    the engine stops waiting when the output's time is spent. From then on the matcher belongs to that thread.

    Args:
        grammar: compiled for this vocabulary.
        vocabulary: tokens.
        stops: tokens that end an output.
        give_up: told when the grammar is too slow, with the thread that goes on computing, if there is one.
        is_suspect: its masks are computed by another thread from the start.
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocabulary: Vocabulary,
        stops: frozenset[int],
        give_up: Callable[[Worker | None], None],
        *,
        is_suspect: bool = False,
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocabulary = vocabulary
        is_stop = torch.zeros(vocabulary.size, dtype=torch.bool)
        is_stop[[t for t in stops if t < vocabulary.size]] = True
        self._stops = packed(is_stop)
        self._text: Tensor | None = None  # mask: tokens that go on with the text from here
        self._known: Tensor | None = None  # the same, with end tokens
        self._left_s = SLOW_S
        self._give_up = give_up
        self._is_suspect = is_suspect
        self._worker: Worker | None = None
        self._is_lost = False
        self.fault: str | None = None

    def allowed(self) -> Tensor:
        """See `TokenConstraint`."""
        if self._known is None:
            self._left_s += SLOW_TOKEN_S
            self._known = self._text_tokens()
            if not self._is_lost and self._matcher.is_completed():
                self._known = self._known | self._stops
            if self.fault is None and not bool(self._known.any()):
                self.fault = "the grammar came to a point where no token may follow"
        return self._known

    def accept(self, token_id: int) -> bool:
        """See `TokenConstraint`."""
        if self._is_lost or token_id in self._vocabulary.info.stop_token_ids:
            return False
        accepted: bool = self._matcher.accept_token(token_id)
        if accepted:
            self._text = self._known = None
        return accepted

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        if count and not self._is_lost:
            self._matcher.rollback(count)
            self._text = self._known = None

    @property
    def is_exhausted(self) -> bool:
        """See `TokenConstraint`."""
        return not self._is_lost and self._matcher.is_completed() and not bool(self._text_tokens().any())

    def _text_tokens(self) -> Tensor:
        """Mask of the tokens that go on with the text; any of them where it was not found out in time, which is a fault."""
        if self._text is None:
            start = time.perf_counter()
            bits = xgrammar.allocate_token_bitmask(1, self._vocabulary.size)  # int32 [1, W]
            if self._is_suspect:
                self._worker = self._worker or Worker()
                self._is_lost = not self._worker.run(lambda: self._matcher.fill_next_token_bitmask(bits), self._left_s)
            else:
                self._matcher.fill_next_token_bitmask(bits)
            spent_s = time.perf_counter() - start
            self._left_s -= spent_s
            self._is_suspect |= spent_s > SUSPECT_S
            if self.fault is None and (self._is_lost or self._left_s < 0):
                self.fault = SLOW
                self._give_up(self._worker if self._is_lost else None)
            self._text = torch.full_like(bits[0], -1) if self._is_lost else bits[0] & self._vocabulary.spoken
        return self._text
