"""Everything that can stop a conversion, checked before it starts: shapes, format, memory, disk, weights, text.

A run takes minutes to hours; what is known at the start must not end it later. Knows no numerics.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from triblade import host
from triblade.errors import CheckpointError, MemoryBudgetError, NumericalError, UnsupportedError
from triblade.models.config import ModelConfig
from triblade.models.loader import OpenModel
from triblade.models.weights import TensorSource, layer_modules
from triblade.quant.plan import Schemes, average_bits, check_divisibility, elements, inputs_of
from triblade.quant.scheme import QuantScheme
from triblade.quant.shard_writer import HEADER_BYTES
from triblade.quant.streams import TOKENS_AT_ONCE, StreamSizes
from triblade.quant.tables import EMBEDDING, table_elements
from triblade.registry import CHECKPOINT_FORMATS

log = logging.getLogger(__name__)

NO_TABLES: Mapping[str, QuantScheme] = MappingProxyType({})
COPIES_OF_A_PRODUCT = 7  # float32 copies of the largest matrix that live at once while it is rounded
COPIES_OF_A_MOMENT = 6  # float32 copies of the largest second moment, double precision counted twice
PROCESS_BYTES = 450 * 2**20  # interpreter and torch
MODULE_BYTES = 64  # of a quantized module beside codes, scales and zero points: its shape, alignment
STREAMS_SHARE = 0.4  # of the free memory that hidden states may take before they go to files


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run takes, in bytes."""

    memory: int  # without the hidden states
    streams: int
    output: int
    state: int  # files of an unfinished run

    def __str__(self) -> str:
        gib = (self.memory / 2**30, self.streams / 2**30, (self.output + self.state) / 2**30)
        return "memory {:.2f} GiB and hidden states {:.2f} GiB; disk {:.2f} GiB".format(*gib)


def check_shapes(
    config: ModelConfig, plan: Sequence[Schemes], layout: str, tables: Mapping[str, QuantScheme] = NO_TABLES
) -> None:
    """Refuse what the group size or the format cannot hold, naming the matrices.

    Raises:
        ConfigError: a group size that does not divide a row.
        UnsupportedError: a scheme or a shape that the format has no place for.
    """
    check_divisibility(config, plan)
    layout_class = CHECKPOINT_FORMATS[layout]()
    for index, schemes in enumerate(plan):
        for field, scheme in schemes.items():
            for name, rows in layer_modules(config, index)[field] if scheme is not None else ():
                reason = layout_class.why_not(scheme, rows, inputs_of(config, field))
                if reason is not None:
                    raise UnsupportedError(f"{name}: {reason}", hint="use --format compressed-tensors")
    for name, scheme in tables.items():
        reason = layout_class.why_not(scheme, config.vocab_size, config.hidden_size)
        if name == EMBEDDING and not layout_class.holds_embeddings:
            reason = f"{layout} checkpoints hold linear layers only"
        if reason is not None:
            raise UnsupportedError(f"{name}: {reason}", hint="keep it, or use --format compressed-tensors")
    layout_class.quantization_config({**_by_module(config, plan), **tables}, [])


def _by_module(config: ModelConfig, plan: Sequence[Schemes]) -> dict[str, QuantScheme]:
    fields = [(index, *item) for index, schemes in enumerate(plan) for item in schemes.items()]
    return {
        name: scheme
        for index, field, scheme in fields
        if scheme is not None
        for name, _ in layer_modules(config, index)[field]
    }


def needs(
    model: OpenModel,
    plan: Sequence[Schemes],
    streams: StreamSizes | None,
    tables: Mapping[str, QuantScheme] = NO_TABLES,
) -> Needs:
    """Estimate what a run takes."""
    config = model.config
    largest = max(elements(config, 0, field) for field in plan[0])
    widest = max(inputs_of(config, field) for field in plan[0])
    layer = sum(elements(config, 0, field) for field in plan[0])
    moments = COPIES_OF_A_MOMENT * widest**2 * 4 if streams is not None else 0
    batch = 0 if streams is None else TOKENS_AT_ONCE * (2 * config.intermediate_size + config.q_size) * 8
    body = config.num_layers * layer
    packed = int(body * average_bits(config, plan) / 8)
    output = packed + int(_rest_bytes(model, body, tables))
    coded = len(tables) * table_elements(config)
    return Needs(
        memory=PROCESS_BYTES
        + 2 * coded
        + largest * 4 * COPIES_OF_A_PRODUCT
        + 2 * layer * model.dtype.itemsize
        + moments
        + batch,
        streams=0 if streams is None else streams.nbytes,
        output=output,
        state=body + coded + (0 if streams is None else 2 * streams.saved_bytes),
    )


def _rest_bytes(model: OpenModel, body: int, tables: Mapping[str, QuantScheme]) -> float:
    """Of everything but the matrices of the layers, tables in their schemes."""
    config = model.config
    coded = sum(scheme.bits_per_weight(config.hidden_size) for scheme in tables.values()) / 8
    dense = config.num_parameters - body - len(tables) * table_elements(config)
    return dense * model.checkpoint.dtype.itemsize + coded * table_elements(config)


def bits_within(model: OpenModel, num_bytes: float, tables: Mapping[str, QuantScheme] = NO_TABLES) -> float:
    """Bits per weight, scales included, with which the weights' file has `num_bytes`; negative if not even the rest fits."""
    config = model.config
    fields = [
        (i, field, modules) for i in range(config.num_layers) for field, modules in layer_modules(config, i).items()
    ]
    body = sum(elements(config, index, field) for index, field, _ in fields)
    rest = _rest_bytes(model, body, tables)
    overhead = HEADER_BYTES + MODULE_BYTES * (sum(len(modules) for _, _, modules in fields) + len(tables))
    return (num_bytes - rest - overhead) * 8 / body


def check_resources(wanted: Needs, folder: Path, device: torch.device) -> bool:
    """Refuse what does not fit; whether the hidden states should go to files.

    Raises:
        MemoryBudgetError: one layer does not fit.
        CheckpointError: the disk has too little room.
    """
    free = _free_memory(device)
    if wanted.memory > free:
        raise MemoryBudgetError(
            f"quantizing takes about {wanted.memory:,} bytes of memory, {free:,} are free",
            hint="free some, or use a machine with more; a layer must fit as a whole",
        )
    spill = wanted.streams > STREAMS_SHARE * (free - wanted.memory) and device.type == "cpu"
    if wanted.streams > free - wanted.memory and not spill:
        raise MemoryBudgetError(
            f"the hidden states of the calibration text take {wanted.streams:,} bytes, {free - wanted.memory:,} are free",
            hint="use fewer or shorter samples: --calibration-samples, --calibration-length",
        )
    room = shutil.disk_usage(_existing(folder)).free
    disk = wanted.output + wanted.state + (wanted.streams if spill else 0)
    if disk > room:
        raise CheckpointError(
            f"the run takes {disk:,} bytes of disk, {_existing(folder)} has {room:,}",
            hint="free some, or move --output",
        )
    log.info("%s%s", wanted, ", hidden states in files" if spill else "")
    return spill


def check_weights(source: TensorSource) -> None:
    """Refuse weights that are not finite, naming the first. `source` should be dropped afterwards: it maps what it read.

    Raises:
        NumericalError: there is one.
    """
    for name in sorted(source.names()):
        tensor = source.tensor(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
            count = int((~torch.isfinite(tensor)).sum())
            if count:
                raise NumericalError(
                    f"{name} holds {count} values that are not finite", hint="the checkpoint is damaged; fetch it again"
                )


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host.memory().available_bytes


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())
