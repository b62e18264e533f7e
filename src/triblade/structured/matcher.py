"""A grammar followed token by token: the library's matcher behind the engine's seam, `TokenConstraint`.

The only module of the engine's process that imports xgrammar, so it is imported when a request first asks for a form. Knows no
request. Special tokens have no text here, so no grammar allows one: end tokens are added where the text so far is complete.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import xgrammar
from torch import Tensor

from triblade.models.tokenizer import Tokenizer
from triblade.spec.token_mask import has_token, packed
from triblade.structured.patience import SLOW, Worker

log = logging.getLogger(__name__)

HALF = re.compile(rb"\xed[\xa0-\xbf]")  # of a surrogate pair
HALF_BEGIN = b"\xed"
HALF_ENDS = frozenset(bytes([byte]) for byte in range(0xA0, 0xC0))
SLOW_S = 0.5  # that one output may spend here,
SLOW_TOKEN_S = 0.003  # and for every token of it
SUSPECT_S = 0.005  # a mask that took longer was the last that the engine's thread computes itself


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as the library sees it.

    The library takes halves of surrogate pairs for characters, so "any but some" may be one. In UTF-8 they would be the byte 0xED
    and one of 0xA0 to 0xBF, which follow each other nowhere else.

    Attributes:
        kept: mask of the tokens that an output may have: not those that stand for no text, and not the broken ones.
        ends: tokens that end a text.
        broken: tokens that have half of a surrogate pair inside.
        openers: tokens that end in 0xED.
        enders: tokens that make such a half behind an opener.
        kept_behind_opener: mask of `kept` without them.
    """

    info: xgrammar.TokenizerInfo
    size: int
    kept: Tensor
    ends: frozenset[int]
    broken: frozenset[int]
    openers: frozenset[int]
    enders: frozenset[int]
    kept_behind_opener: Tensor


def read_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The first `size` tokens of a tokenizer; reading them takes a fraction of a second."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special} | set(tokenizer.eos_token_ids)
    spelled = [b"" if i in special else tokenizer.token_bytes(i) for i in range(size)]
    ends = sorted(i for i in tokenizer.eos_token_ids if i < size)
    info = xgrammar.TokenizerInfo(
        list[bytes](spelled), xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=ends or [0]
    )
    silent = {i for i, text in enumerate(spelled) if not text}
    broken = frozenset(i for i, text in enumerate(spelled) if HALF.search(text))
    enders = frozenset(i for i, text in enumerate(spelled) if text[:1] in HALF_ENDS)
    return Vocabulary(
        info=info,
        size=size,
        kept=_mask(set(range(size)) - silent - broken, size),
        ends=frozenset(info.stop_token_ids),
        broken=broken,
        openers=frozenset(i for i, text in enumerate(spelled) if text.endswith(HALF_BEGIN)),
        enders=enders,
        kept_behind_opener=_mask(set(range(size)) - silent - broken - enders, size),
    )


def _mask(tokens: Iterable[int], size: int) -> Tensor:
    is_in = torch.zeros(size, dtype=torch.bool)
    is_in[list(tokens)] = True
    return packed(is_in)


class GrammarConstraint:
    """Implements `TokenConstraint`.

    Nothing can stop the library while it computes, so it computes for suspect grammars in a thread of their own, and the engine
    stops waiting when the output's time is spent. From then on the matcher belongs to that thread.

    Args:
        grammar: compiled for this vocabulary.
        vocabulary: tokens.
        stops: tokens that end an output.
        give_up: told when the grammar is too slow, with the thread that goes on computing, if there is one.
        is_suspect: the library computes in another thread from the start.
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
        self._stops = _mask((t for t in stops if t < vocabulary.size), vocabulary.size)
        self._text: Tensor | None = None  # mask: tokens that go on with the text from here
        self._is_complete = False  # the text so far is one that the grammar knows; found out with `_text`
        self._left_s = SLOW_S
        self._accepted: list[int] = []
        self._followed: list[int] = []  # by the library
        self._common = 0  # tokens that both begin with
        self._give_up = give_up
        self._is_suspect = is_suspect
        self._worker: Worker | None = None
        self._is_lost = False
        self.fault: str | None = None

    def allowed(self) -> Tensor:
        """See `TokenConstraint`."""
        if self._text is None:
            self._look()
        assert self._text is not None
        return self._text | self._stops if self._is_complete else self._text

    def accept(self, token_id: int) -> bool:
        """See `TokenConstraint`. Where the mask is known it has the answer, and the library follows when it is asked again."""
        if self._is_lost or token_id in self._vocabulary.ends or self._is_half(token_id):
            return False
        if self._text is None:
            is_accepted = bool(self._computed(lambda: self._matcher.accept_token(token_id)))
            self._followed += [token_id] * is_accepted
            self._common += is_accepted
        else:
            is_accepted = has_token(self._text, token_id)
            if not is_accepted and self.fault is None and not bool(self.allowed().any()):
                self.fault = "the grammar came to a point where no token may follow"
        if is_accepted:
            self._accepted.append(token_id)
            self._text = None
        return is_accepted

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        if count and not self._is_lost:
            del self._accepted[-count:]
            self._common = min(self._common, len(self._accepted))
            self._text = None

    @property
    def is_exhausted(self) -> bool:
        """See `TokenConstraint`."""
        if self._text is None and not self._computed(self._matcher.is_completed):
            return False  # without looking what may follow
        if self._text is None:
            self._look()
        assert self._text is not None
        return self._is_complete and not bool(self._text.any())

    def _look(self) -> None:
        """Find out what may follow the text so far: anything where that is not found out in time, which is a fault."""
        vocabulary = self._vocabulary
        kept = vocabulary.kept_behind_opener if self._is_behind_opener else vocabulary.kept
        mask = torch.empty_like(kept)

        def look() -> bool:
            self._matcher.fill_next_token_bitmask(mask.unsqueeze(0))
            return self._matcher.is_completed()

        self._left_s += SLOW_TOKEN_S
        self._is_complete = bool(self._computed(look))
        self._text = torch.full_like(kept, -1) if self._is_lost else mask.bitwise_and_(kept)

    def _is_half(self, token_id: int) -> bool:
        """Whether a token has, or makes, half of a surrogate pair."""
        vocabulary = self._vocabulary
        return token_id in vocabulary.broken or (self._is_behind_opener and token_id in vocabulary.enders)

    @property
    def _is_behind_opener(self) -> bool:
        return bool(self._accepted) and self._accepted[-1] in self._vocabulary.openers

    def _computed(self, call: Callable[[], Any]) -> Any:
        """What the library says about the text so far; None where it fails or does not say so in time, which is a fault.

        What counts is the time that it computes, so that a busy machine makes no grammar slow.
        """
        if self._is_lost:
            return None
        try:
            found, spent_s = self._timed(call) if not self._is_suspect else self._elsewhere(call)
        except Exception as error:  # the library's own: it ends this output and nobody else's
            log.exception("a grammar cannot be followed any more")
            self._is_lost, self.fault = True, f"the grammar cannot be followed: {error}"
            return None
        self._left_s -= spent_s
        self._is_suspect |= spent_s > SUSPECT_S
        if self.fault is None and (self._is_lost or self._left_s < 0):
            self.fault = SLOW
            self._give_up(self._worker if self._is_lost else None)
        return found

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call returns behind the accepted tokens, and the processor time that this took."""
        start_s = time.thread_time()
        self._catch_up()
        return call(), time.thread_time() - start_s

    def _elsewhere(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The same by a thread that can be left; None, and the matcher is lost, if it does not come back in time."""
        found = Future[tuple[Any, float]]()

        def compute() -> None:
            try:
                found.set_result(self._timed(call))
            except Exception as error:  # raised where it is waited for
                found.set_exception(error)

        self._worker = self._worker or Worker()
        self._is_lost = not self._worker.run(compute, self._left_s)
        return (None, 0.0) if self._is_lost else found.result()

    def _catch_up(self) -> None:
        """Have the library follow the accepted tokens."""
        if self._common < len(self._followed):
            self._matcher.rollback(len(self._followed) - self._common)
            del self._followed[self._common :]
        for token in self._accepted[self._common :]:
            if not self._matcher.accept_token(token):
                raise RuntimeError(f"the grammar refuses a token that its mask allowed: {token}")
            self._followed.append(token)
        self._common = len(self._accepted)
