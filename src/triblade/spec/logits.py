"""What a request does to its logits before a distribution is made of them: bias, penalties, barred tokens.

Order, as in vLLM and transformers: logit_bias, repetition penalty, frequency and presence penalty, then the bars,
which set -inf (the mask of a constraint, allowed_token_ids, bad_words, stop tokens before min_tokens). The work is
sparse: only the tokens concerned are read and written, so a request pays for its own options and its neighbours stay
as they are.

Bars that leave a row no token yield: first those of min_tokens (the output ends early), then bad_words, then
allowed_token_ids, which only a constraint can leave nothing of; constraints and the end of the vocabulary never do. So
a row with finite logits always has a token to choose, as long as its constraint has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triblade.spec.sampler_row import SamplerRow
from triblade.spec.token_mask import has_any, unpacked


@dataclass(slots=True)
class Cells:
    """Places in a matrix of logits, each with a number, collected on the host and sent to the device at once."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, tokens: Iterable[int], values: float | Iterable[float] = 0.0) -> None:
        """Add distinct `tokens` of one row, with one value for all or one for each."""
        before = len(self.tokens)
        self.tokens.extend(tokens)
        count = len(self.tokens) - before
        self.rows.extend([row] * count)
        self.values.extend([values] * count if isinstance(values, (int, float)) else values)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column indices, int64 [N] each."""
        rows, tokens = torch.tensor([self.rows, self.tokens], dtype=torch.int64).to(device)
        return rows, tokens

    def numbers(self, device: torch.device) -> Tensor:
        """The values, float32 [N]."""
        return torch.tensor(self.values, dtype=torch.float32).to(device)


def process_logits(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Logits [R, V] with the options of each row applied, -inf where a token is barred.

    The argument is not changed; without anything to apply it is returned as it is.
    """
    if all(row.is_plain for row in rows):
        return logits
    logits = logits.clone()
    _add_bias(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_presence(logits, rows)
    _keep_allowed(logits, rows)
    _keep_constrained(logits, rows)
    _bar(logits, rows)
    return logits


def _add_bias(logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    cells = Cells()
    for number, row in enumerate(rows):
        cells.add(number, row.params.logit_bias.keys(), row.params.logit_bias.values())
    if cells:
        logits[cells.index(logits.device)] += cells.numbers(logits.device)


def _penalise_repetition(logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    """Of every token in prompt or output, a positive logit is divided by the penalty, a negative one multiplied."""
    cells = Cells()
    for number, row in enumerate(rows):
        if row.params.repetition_penalty != 1.0:
            seen = set(row.prompt_token_ids).union(row.output_token_ids)
            cells.add(number, seen, row.params.repetition_penalty)
    if not cells:
        return
    index, penalty = cells.index(logits.device), cells.numbers(logits.device)
    values = logits[index]  # [N]
    logits[index] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_presence(logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    """Of every token in the output: logit -= presence_penalty + frequency_penalty x occurrences."""
    cells = Cells()
    for number, row in enumerate(rows):
        presence, frequency = row.params.presence_penalty, row.params.frequency_penalty
        if presence != 0.0 or frequency != 0.0:
            counts = Counter(row.output_token_ids)
            cells.add(number, counts.keys(), [presence + frequency * count for count in counts.values()])
    if cells:
        logits[cells.index(logits.device)] -= cells.numbers(logits.device)


def _keep_allowed(logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    cells = Cells()
    for number, row in enumerate(rows):
        cells.add(number, _kept_ids(row))
    if not cells:
        return
    index = cells.index(logits.device)
    values = logits[index]
    logits[index[0]] = -torch.inf
    logits[index] = values


def _kept_ids(row: SamplerRow) -> Sequence[int]:
    """`allowed_token_ids`, as far as a constraint leaves one of them."""
    ids = row.params.allowed_token_ids or ()
    return ids if row.allowed is None or has_any(row.allowed, ids) else ()


def _keep_constrained(logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    constrained = [number for number, row in enumerate(rows) if row.allowed is not None]
    if not constrained:
        return
    masks = torch.stack([row.allowed for row in rows if row.allowed is not None]).to(logits.device)  # [N, W]
    index = torch.tensor(constrained).to(logits.device)
    logits[index] = logits[index].masked_fill_(~unpacked(masks, logits.shape[1]), -torch.inf)


def _bar(logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    cells = Cells()
    for number, row in enumerate(rows):
        cells.add(number, _barred(row, logits.shape[1]))
    if cells:
        logits[cells.index(logits.device)] = -torch.inf


def _barred(row: SamplerRow, vocab_size: int) -> set[int]:
    """Tokens that this row must not choose, as far as that leaves one to choose."""
    words = {token for token in _completions(row) if token < vocab_size}
    stops: set[int] = set()
    if row.position < row.params.min_tokens:
        stops = {token for token in row.stop_token_ids if token < vocab_size}
    for bars in (stops | words, words):
        if _leaves_a_token(row, bars, vocab_size):
            return bars
    return set()


def _leaves_a_token(row: SamplerRow, bars: set[int], vocab_size: int) -> bool:
    if not bars:
        return True
    allowed: Iterable[int] | None = _kept_ids(row) or None
    if row.allowed is not None:
        constrained: list[int] = unpacked(row.allowed, vocab_size).nonzero()[:, 0].tolist()
        allowed = constrained if allowed is None else set(allowed).intersection(constrained)
    return len(bars) < vocab_size if allowed is None else not bars.issuperset(allowed)


def _completions(row: SamplerRow) -> Iterator[int]:
    """The last token of every bad word whose other tokens are the latest ones of the output."""
    for word in row.bad_words:
        start = len(row.output_token_ids) - len(word) + 1
        if word and start >= 0 and list(row.output_token_ids[start:]) == list(word[:-1]):
            yield word[-1]
