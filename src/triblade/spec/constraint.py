"""The seam between a sampler and whoever limits which tokens may come next: a grammar, seen token by token.

Knows no grammar and no request. A constraint stands behind the last token that it accepted; rolling back n tokens puts it where
it was before them, so drafts can be tried on it. End tokens are not accepted: whoever ends an output just stops asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TokenConstraint(Protocol):
    """What one output may look like.

    Attributes:
        fault: why the output cannot go on: nothing is allowed, or following it costs too much; None as long as it can.
    """

    fault: str | None

    def allowed(self) -> Tensor:
        """Which tokens may come next, as a mask (see `spec.token_mask`); end tokens are among them where the output may end."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and nothing has changed, if it may not come here."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens accepted."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether the output is complete and nothing but its end may follow."""
        ...


def allowed_length(constraint: TokenConstraint, token_ids: Sequence[int]) -> int:
    """How many of these tokens may come next, one after the other."""
    count = 0
    while count < len(token_ids) and constraint.accept(token_ids[count]):
        count += 1
    constraint.rollback(count)
    return count


def allowed_behind(constraint: TokenConstraint, drafts: Sequence[int]) -> list[Tensor | None]:
    """The mask of the allowed tokens at each position of a draft and behind it; None behind a draft token that may not come.

    Nobody looks at the rows that get None: what stands there can never be committed.
    """
    masks: list[Tensor | None] = [constraint.allowed()]
    for draft in drafts:
        if not constraint.accept(draft):
            break
        masks.append(constraint.allowed())
    constraint.rollback(len(masks) - 1)
    return masks + [None] * (len(drafts) + 1 - len(masks))
