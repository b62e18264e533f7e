"""How many guesses of a head the target would accept: exact for greedy decoding, from one unrolled pass over greedy text.

As long as a chain's guesses are right its tokens are those of the text, so a pass that is given the text's tokens says where each
chain breaks. Knows no engine; what an engine measures differs by the rounding of its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from triblade.spec.align.unroll import Sequences, unroll
from triblade.spec.eagle import EagleHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Of greedy chains of one length, over the steps that decoding the text would take."""

    per_position: tuple[
        float, ...
    ]  # share of chains in which guess 1, 2, ... was accepted, given that those before it were
    tokens_per_step: float  # accepted guesses and the target's own token
    num_tokens: int

    def __str__(self) -> str:
        shares = " ".join(f"{share:.0%}" for share in self.per_position)
        return f"{self.tokens_per_step:.2f} tokens per step (accepted by position: {shares})"


@torch.inference_mode()
def measure_acceptance(head: EagleHead, batches: Iterable[Sequences], length: int) -> Acceptance:
    """Decode greedy text speculatively, on paper.

    Args:
        head: with the weights to use.
        batches: text that the target wrote greedily.
        length: guesses per step.
    """
    reached, accepted = [0] * length, [0] * length
    tokens = steps = 0
    for batch in batches:
        right = _right(head, batch, length).tolist()
        for row, first, end in zip(right, batch.first.tolist(), batch.lengths.tolist(), strict=True):
            position = first
            while position + 1 < end:  # token `position` is known, the guesses are for those behind it
                most = min(length, end - 1 - position)
                run = next((place for place in range(most) if not row[position][place]), most)
                for place in range(min(run + 1, most)):
                    reached[place] += 1
                    accepted[place] += place < run
                steps += 1
                step_tokens = min(run + 1, end - 1 - position)
                tokens += step_tokens
                position += step_tokens
    shares = tuple(a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True))
    return Acceptance(per_position=shares, tokens_per_step=tokens / max(steps, 1), num_tokens=tokens)


def _right(head: EagleHead, batch: Sequences, length: int) -> Tensor:
    """[B, L, length] int64 on the CPU: whether guess i of the chain that begins behind token p is the text's token p + 1 + i."""
    states = unroll(head, batch, length)
    after = torch.cat((batch.ids[:, 1:], torch.full_like(batch.ids[:, :1], -1)), 1)
    columns = []
    for step, state in enumerate(states):
        hit = (head.greedy(state.flatten(0, 1)).view_as(batch.ids) == after).long()
        columns.append(torch.cat((hit[:, step:], torch.zeros_like(hit[:, :step])), 1))
    return torch.stack(columns, -1).cpu()
