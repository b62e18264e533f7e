"""Packed words: the golden ones of each format, and no code lost at any width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triblade.quant.formats.bit_packing import (
    dense_words,
    pack,
    pack_awq,
    padded_words,
    unpack,
    unpack_awq,
    unpack_padded,
)


def words(text: str) -> Tensor:
    """Hexadecimal words in index order."""
    return torch.tensor([int(word, 16) for word in text.split()], dtype=torch.uint32).view(torch.int32)


def counting(bits: int, count: int = 32) -> Tensor:
    """0, 1, 2 ... modulo 2 ** bits."""
    return (torch.arange(count) % 2**bits).to(torch.uint8)


DENSE = {
    2: "e4e4e4e4 e4e4e4e4",
    3: "88fac688 c688fac6 fac688fa",
    4: "76543210 fedcba98 76543210 fedcba98",
    8: "03020100 07060504 0b0a0908 0f0e0d0c 13121110 17161514 1b1a1918 1f1e1d1c",
}


@pytest.mark.parametrize("bits", DENSE)
def test_golden_words(bits: int) -> None:
    codes = counting(bits)
    assert torch.equal(pack(codes, bits), words(DENSE[bits]))
    assert torch.equal(unpack(words(DENSE[bits]), bits, 32), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_padded_and_dense_are_one_where_codes_fill_words(bits: int) -> None:
    assert torch.equal(unpack_padded(words(DENSE[bits]), bits, 32), counting(bits))


def test_golden_words_of_three_padded_bits() -> None:
    """Compressed-tensors up to 0.17 wrote these."""
    assert torch.equal(unpack_padded(words("08fac688 1a23eb1a 2c688fac 0000003e"), 3, 32), counting(3))


def test_golden_word_of_awq() -> None:
    codes = torch.arange(8, dtype=torch.uint8)
    assert torch.equal(pack_awq(codes), words("75316420"))
    assert torch.equal(unpack_awq(words("75316420")), codes)


def test_packing_along_the_other_axis_is_a_transpose() -> None:
    """Zero points of 16 rows and one group in compressed-tensors; rows of GPTQ weights."""
    column = counting(4, 16)[:, None]
    assert torch.equal(pack(column.T, 4).T, words("76543210 fedcba98")[:, None])


@pytest.mark.parametrize(("inputs", "padded", "dense"), [(512, 52, 48), (576, 58, 54), (4096, 410, 384)])
def test_widths_of_three_bits(inputs: int, padded: int, dense: int) -> None:
    assert (padded_words(inputs, 3), dense_words(inputs, 3)) == (padded, dense)


@pytest.mark.parametrize("count", [1, 7, 8, 10, 11, 31, 33, 192, 576, 1536])  # B15
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_packing_is_a_bijection(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    packed = pack(codes, bits)
    assert packed.shape == (3, dense_words(count, bits))
    assert packed.dtype == torch.int32
    assert torch.equal(unpack(packed, bits, count), codes)
    assert torch.equal(pack(unpack(packed, bits, count), bits), packed)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_padded_words_give_back_every_code(bits: int) -> None:
    codes = counting(bits, 77)
    per_word = 32 // bits
    padded = torch.zeros(padded_words(77, bits), dtype=torch.int64)
    for index, code in enumerate(codes.tolist()):
        padded[index // per_word] |= code << (bits * (index % per_word))
    assert torch.equal(unpack_padded(padded.to(torch.uint32).view(torch.int32), bits, 77), codes)


def test_a_transposed_column_of_one_word_is_read() -> None:
    """Zero points of few rows: one word for each group, side by side in the file."""
    codes = torch.arange(6, dtype=torch.uint8)[:, None] + torch.arange(8, dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, 4).reshape(1, 6).T, 4, 8), codes)


def test_awq_is_a_bijection() -> None:
    codes = torch.randint(0, 16, (5, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_awq(pack_awq(codes)), codes)
