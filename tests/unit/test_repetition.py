"""Repetition of texts against counts made by hand."""

from __future__ import annotations

import pytest

from triblade.quant.repetition import repetition_rate


def test_pieces_said_before_are_counted() -> None:
    assert repetition_rate([list(range(50))]) == 0
    assert repetition_rate([[7] * 13]) == pytest.approx(9 / 10)  # ten pieces, all the same
    assert repetition_rate([[1, 2, 3, 4, 5, 1, 2, 3, 4]]) == pytest.approx(1 / 6)
    assert repetition_rate([[7] * 13, list(range(50))]) == pytest.approx(9 / 20)
    assert repetition_rate([[1, 2, 3], []]) == 0
    assert repetition_rate([]) == 0
