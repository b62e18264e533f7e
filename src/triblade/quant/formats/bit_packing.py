"""Codes of 2 to 8 bits in 32-bit words, always along the last axis; packing along another is a transpose by the caller.

"Dense" is one stream of bits, least significant first: code i takes bits i * b to i * b + b - 1 and may straddle two words.
"Padded" puts floor(32 / b) codes into a word and leaves the rest zero. For 2, 4 and 8 bits both are the same. Knows no file format.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 32
# Nibble i of a word of AutoAWQ holds output column 8 * word + AWQ_ORDER[i].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def dense_words(count: int, bits: int) -> int:
    """Words that `count` codes take as one stream."""
    return -(-count * bits // WORD_BITS)


def padded_words(count: int, bits: int) -> int:
    """Words that `count` codes take with whole codes in each."""
    return -(-count // (WORD_BITS // bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] uint8 -> dense words [..., dense_words(n)] int32; bits behind the last code are zero."""
    count = codes.shape[-1]
    eights = F.pad(codes, (0, -count % WORD_BITS)).unflatten(-1, (-1, 8))  # eight codes are `bits` whole bytes
    stream = torch.zeros(eights.shape[:-1], dtype=torch.int64, device=codes.device)
    for position in range(8):
        stream |= eights[..., position].long() << (bits * position)
    # The low bytes of a little-endian integer come first.
    octets = stream[..., None].view(torch.uint8)[..., :bits].flatten(-2)
    return octets.contiguous().view(torch.int32)[..., : dense_words(count, bits)].contiguous()


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: dense words [..., m] int32 -> codes [..., count] uint8."""
    # A lone column is contiguous whatever its strides, and could not be viewed as bytes.
    octets = words.contiguous().reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    octets = F.pad(octets, (0, -octets.shape[-1] % bits)).unflatten(-1, (-1, bits))
    stream = F.pad(octets, (0, 8 - bits)).contiguous().view(torch.int64)[..., 0]  # [..., n / 8]
    mask = (1 << bits) - 1
    codes = torch.empty(*stream.shape, 8, dtype=torch.uint8, device=words.device)
    for position in range(8):
        codes[..., position] = stream >> (bits * position) & mask
    return codes.flatten(-2)[..., :count].contiguous()


def unpack_padded(words: Tensor, bits: int, count: int) -> Tensor:
    """Padded words [..., m] int32 -> codes [..., count] uint8."""
    per_word, mask = WORD_BITS // bits, (1 << bits) - 1
    codes = torch.empty(*words.shape, per_word, dtype=torch.uint8, device=words.device)
    for position in range(per_word):
        codes[..., position] = words >> (bits * position) & mask
    return codes.flatten(-2)[..., :count].contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """4-bit codes [..., n], n a multiple of 8, in AutoAWQ's order: words [..., n / 8] int32."""
    return pack(codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2), 4)


def unpack_awq(words: Tensor) -> Tensor:
    """The inverse of `pack_awq`: words [..., m] int32 -> codes [..., 8 m] uint8."""
    nibbles = unpack(words, 4, 8 * words.shape[-1]).unflatten(-1, (-1, 8))
    back = sorted(range(8), key=AWQ_ORDER.__getitem__)  # nibbles 0, 4, 1, 5, 2, 6, 3, 7
    codes: Tensor = nibbles[..., back].flatten(-2)
    return codes
