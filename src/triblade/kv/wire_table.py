"""The table of the codec `pca-lut`: per layer a mean, a basis, bits and levels of its components, and the model it was made for.

A file of safetensors. It is refused for another model with the first difference, and when it is damaged; what it says of itself
(`figures`) was measured when it was made. Knows how to be stored and checked, not how it is made (`calibration_fit`) or used
(`wire_pca`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError
from triblade.files import written_whole
from triblade.kv.calibration_lloyd import MAX_BITS
from triblade.kv.layout import KVLayout

FORMAT = "triblade-kv-table-1"
_DAMAGED = "the file is damaged or cut short; make it again with triblade kv-calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableModel:
    """The model whose keys and values a table describes."""

    model_hash: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, layout: KVLayout) -> TableModel:
        """The model of a layout."""
        return cls(**{part.name: getattr(layout, part.name) for part in fields(cls)})

    def difference(self, layout: KVLayout) -> str | None:
        """The first thing in which a layout is of another model; None: it is not."""
        for name, value in asdict(self).items():
            if value != getattr(layout, name):
                return f"{name} is {value}, the model's is {getattr(layout, name)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVTable:
    """L layers, 2 for keys and values, C = key-value heads * head size. Components are y = basis (x - mean).

    Errors in y have squared lengths in nats times two, where the table was made with a metric (see `calibration_statistics`).
    """

    model: TableModel
    mean: Tensor  # [L, 2, C] float32, of keys before the rotary embedding, and of values
    basis: Tensor  # [L, 2, C, C] float32
    spread: Tensor  # [L, 2, C] float32, standard deviations of the components
    bits: Tensor  # [L, 2, C] uint8; 0: not sent
    levels: Tensor  # [sum of 2 ** bits over components with bits] float32, in standard deviations, in order of the components
    exact_first: int = 4  # tokens at the beginning of a prompt that travel as they are
    exact_last: int = 128  # and at its end
    figures: Mapping[str, float] = field(default_factory=dict)  # see `calibration`

    @property
    def bits_per_token(self) -> int:
        """Of a token that is not exact."""
        return int(self.bits.sum(dtype=torch.long))

    def fingerprint(self) -> bytes:
        """Eight bytes that tell tables apart."""
        total = hashlib.sha256(json.dumps([asdict(self.model), self.exact_first, self.exact_last]).encode())
        for tensor in self._tensors().values():
            total.update(tensor.contiguous().numpy().tobytes())
        return total.digest()[:8]

    def require_model(self, layout: KVLayout) -> None:
        """Raises:
        ConfigError: the table was made for another model.
        """
        difference = self.model.difference(layout)
        if difference is not None:
            raise ConfigError(
                f"the KV table was made for another model: its {difference}",
                hint="make one for this model with triblade kv-calibrate",
                param="kv_table",
            )

    def to_bytes(self) -> bytes:
        """The file's content."""
        about = {
            "model": asdict(self.model),
            "exact": [self.exact_first, self.exact_last],
            "figures": dict(self.figures),
        }
        return safetensors.torch.save(self._tensors(), {"format": FORMAT, "about": json.dumps(about)})

    def save(self, path: Path) -> None:
        """Write a file; it has its name only when it is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as part:
            part.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> KVTable:
        """Read a file.

        Raises:
            ConfigError: there is none.
            CheckpointError: it is no table, or damaged.
        """
        if not path.is_file():
            raise ConfigError(f"no such KV table: {path}", hint="make one with triblade kv-calibrate", param="kv_table")
        return cls.from_bytes(path.read_bytes(), name=str(path))

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str = "received") -> KVTable:
        """A file's content, as a sender gives it to a receiver; `name` is for messages.

        Raises:
            CheckpointError: it is no table, or damaged.
        """
        try:
            tensors = safetensors.torch.load(content)
            (length,) = struct.unpack_from("<Q", content)
            metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
            return cls._parsed(metadata, tensors)
        except (SafetensorError, struct.error, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"cannot read the KV table {name}: {error}", hint=_DAMAGED) from error

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("mean", "basis", "spread", "bits", "levels")}

    @classmethod
    def _parsed(cls, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> KVTable:
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
        about: Mapping[str, Any] = json.loads(metadata["about"])
        first, last = map(int, about["exact"])
        table = cls(
            model=TableModel(**about["model"]),
            **{name: tensors[name] for name in ("mean", "basis", "spread", "bits", "levels")},
            exact_first=first,
            exact_last=last,
            figures={str(name): float(value) for name, value in about["figures"].items()},
        )
        table._check()
        return table

    def _check(self) -> None:
        """Raises:
        ValueError: shapes or numbers that no table has.
        """
        model = self.model
        shape = (model.num_layers, 2, model.num_kv_heads * model.head_dim)
        for name, wanted in (("mean", shape), ("basis", (*shape, shape[-1])), ("spread", shape), ("bits", shape)):
            found: Tensor = getattr(self, name)
            if tuple(found.shape) != wanted:
                raise ValueError(f"{name} has the shape {tuple(found.shape)}, expected {wanted}")
            if found.is_floating_point() and not bool(found.isfinite().all()):
                raise ValueError(f"{name} has numbers that are not finite")
        if int(self.bits.max()) > MAX_BITS:
            raise ValueError(f"a component has {int(self.bits.max())} bits, at most {MAX_BITS} are possible")
        wanted_levels = int((2 ** self.bits[self.bits > 0].long()).sum())
        if self.levels.shape != (wanted_levels,) or not bool(self.levels.isfinite().all()):
            raise ValueError(f"levels are {tuple(self.levels.shape)}, expected {wanted_levels} finite numbers")
