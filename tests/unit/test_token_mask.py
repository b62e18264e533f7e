"""Sets of tokens as bits."""

from __future__ import annotations

import pytest
import torch

from triblade.spec.token_mask import has_any, packed, unpacked


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 1000])
def test_every_token_has_its_bit(size: int) -> None:
    for token in {0, size // 2, size - 1}:
        allowed = torch.zeros(size, dtype=torch.bool)
        allowed[token] = True
        mask = packed(allowed)
        assert mask.dtype is torch.int32
        assert len(mask) == -(-size // 32)
        assert torch.equal(unpacked(mask, size), allowed)
        assert has_any(mask, [token])
        assert not has_any(mask, [other for other in range(size) if other != token])


def test_masks_are_unpacked_together() -> None:
    allowed = torch.rand(3, 70, generator=torch.Generator().manual_seed(1)) > 0.5
    masks = torch.stack([packed(row) for row in allowed])
    assert torch.equal(unpacked(masks, 70), allowed)
