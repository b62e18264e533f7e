"""The combinations that a plan chooses from: bits x KV codec x drafter and length x placement. Pure enumeration.

Nothing is left out here because it looks bad: gates and the cost model reject, and say why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from triblade.tune.cost import Weights
from triblade.tune.hardware import Hardware
from triblade.tune.serving import Candidate
from triblade.tune.shape import ModelShape

SCHEMES = {"bf16": 16, "int8": 8, "int4": 4, "int3": 3}
DRAFT_LENGTHS = (2, 4, 6)
SPLITS = ("20:80", "30:70", "50:50")
SMALL_CHUNKS = (256, 128)  # tokens of a step of one engine, where streams are not to pause long


def candidates(
    shape: ModelShape, hardware: Hardware, devices: int, draft_model: str | None, *, small_chunks: bool = False
) -> Iterator[Candidate]:
    """Every combination, the plainest first; with smaller steps of one engine only where somebody asks for short pauses."""
    drafts: list[tuple[str | None, int]] = [(None, 0)]
    drafts += [(name, length) for name in drafters(shape, draft_model) for length in DRAFT_LENGTHS]
    axes = product(
        weights(shape, hardware),
        ("bfloat16", "int8"),
        drafts,
        placements(devices, SMALL_CHUNKS if small_chunks else ()),
        tensor_parallels(devices),
    )
    for stored, kv_dtype, (drafter, length), place, parallel in axes:
        if parallel == 1 or place["placement"] == "together":
            yield Candidate(
                weights=stored,
                kv_dtype=kv_dtype,
                drafter=drafter,
                draft_length=length,
                tensor_parallel=parallel,
                **place,
            )


def baseline(shape: ModelShape, hardware: Hardware) -> Candidate:
    """None of the three techniques."""
    return Candidate(weights=weights(shape, hardware)[0])


def weights(shape: ModelShape, hardware: Hardware) -> list[Weights]:
    """How the weights may be stored, most precise first; what is quantized already stays as it is."""
    table_bits = 8 if hardware.kind == "cpu" else 16
    if shape.stored_bits < 16:
        return [Weights(scheme="stored", bits=shape.stored_bits, table_bits=table_bits)]
    return [
        Weights(scheme=name, bits=bits, table_bits=table_bits if bits < 16 else 16) for name, bits in SCHEMES.items()
    ]


def drafters(shape: ModelShape, draft_model: str | None) -> list[str]:
    """What may draft; a head can be trained for any model, a small model must be named."""
    return ["suffix", "eagle", *(["draft"] if draft_model is not None else [])]


def placements(devices: int, chunks: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """Where prompts are computed, and in steps of how many tokens."""
    yield {"placement": "together"}
    yield from ({"placement": "together", "chunk": chunk} for chunk in chunks)
    yield from ({"placement": "one", "split": split} for split in SPLITS if devices == 1)
    counts = {max(1, devices // 4), devices // 2} if devices > 1 else set()
    yield from ({"placement": "two", "prefill_devices": count} for count in sorted(counts))


def tensor_parallels(devices: int) -> tuple[int, ...]:
    """Devices that share a model's matrices."""
    return (1, devices) if devices > 1 else (1,)
