"""The calibration text on its way through the model: hidden states of all its tokens, kept between one layer and the next.

Two streams run side by side: in the model as it is quantized so far, and, if somebody compares, in the original. What is larger
than the memory it may take lies in a mapped file. Invariant: between layers the streams can be written and read back bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triblade.errors import CheckpointError
from triblade.files import written_whole

TOKENS_AT_ONCE = 2048


@dataclass(slots=True, kw_only=True)
class Streams:
    """N sequences of S tokens."""

    quantized: Tensor  # [N, S, C]
    original: Tensor | None  # [N, S, C]
    mixed: Tensor  # [N, S, widest input of a second projection]: scratch within a layer

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.quantized.shape[1]

    def batches(self) -> Iterator[slice]:
        """Sequences to run through a layer at once."""
        step = max(1, TOKENS_AT_ONCE // self.sequence_length)
        for start in range(0, len(self.quantized), step):
            yield slice(start, start + step)

    def drift(self) -> float | None:
        """How far the quantized stream is from the original: squared distance over squared length; None without one."""
        if self.original is None:
            return None
        distance = length = 0.0
        for batch in self.batches():
            original = self.original[batch].float()
            distance += (original - self.quantized[batch].float()).square().sum().item()
            length += original.square().sum().item()
        return distance / length if length else 0.0

    def save(self, path: Path) -> None:
        """Write both streams, durably and all at once."""
        with written_whole(path) as part, part.open("wb") as file:
            for stream in self._kept():
                for batch in self.batches():
                    file.write(stream[batch].contiguous().cpu().view(torch.uint8).numpy().data)

    def load(self, path: Path) -> None:
        """Read what `save` wrote into these streams.

        Raises:
            CheckpointError: the file has another size.
        """
        expected = sum(stream.nbytes for stream in self._kept())
        if not path.is_file() or path.stat().st_size != expected:
            raise CheckpointError(
                f"the saved hidden states are not complete: {path}", hint="start again without --resume"
            )
        with path.open("rb") as file:
            for stream in self._kept():
                for batch in self.batches():
                    target = stream[batch]
                    data = bytearray(file.read(target.nbytes))
                    target.copy_(torch.frombuffer(data, dtype=target.dtype).view(target.shape))

    def _kept(self) -> list[Tensor]:
        return [self.quantized] if self.original is None else [self.quantized, self.original]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSizes:
    """What streams for N sequences of S tokens take."""

    sequences: int
    length: int
    hidden: int
    mixed: int  # the widest input of an output or down projection
    dtype: torch.dtype
    compare: bool

    @property
    def nbytes(self) -> int:
        """All of them."""
        kept = self.hidden * (2 if self.compare else 1)
        return self.sequences * self.length * (kept + self.mixed) * self.dtype.itemsize

    @property
    def saved_bytes(self) -> int:
        """What `Streams.save` writes."""
        return self.sequences * self.length * self.hidden * (2 if self.compare else 1) * self.dtype.itemsize


def allocate(sizes: StreamSizes, device: torch.device, spill: Path | None) -> Streams:
    """Streams without content, in memory or in files of the folder `spill`."""

    def empty(name: str, width: int) -> Tensor:
        shape = (sizes.sequences, sizes.length, width)
        if spill is None:
            return torch.empty(shape, dtype=sizes.dtype, device=device)
        count = torch.Size(shape).numel()
        return torch.from_file(str(spill / f"{name}.stream"), shared=True, size=count, dtype=sizes.dtype).view(shape)

    return Streams(
        quantized=empty("quantized", sizes.hidden),
        original=empty("original", sizes.hidden) if sizes.compare else None,
        mixed=empty("mixed", sizes.mixed),
    )
