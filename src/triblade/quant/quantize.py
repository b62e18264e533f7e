"""Quantize a model layer by layer: read a layer from disk, quantize it on the calibration text, write it down, drop it.

Memory is one layer and the hidden states of the text, whatever the model. Every finished layer is durable, so a run that was
killed goes on where it was. Knows nothing of checkpoint formats: what comes out lies in a `RunState`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from triblade.config import BiasMode
from triblade.console import progress
from triblade.models.checkpoint import open_checkpoint
from triblade.models.decoder import Decoder, DecoderWeights
from triblade.models.loader import OpenModel
from triblade.models.weights import DenseReader, TensorSource
from triblade.ops.backend import Backend, Linear
from triblade.quant.layer import LayerQuantizer, LayerResult, LayerSettings
from triblade.quant.passes import Recipe, Work
from triblade.quant.run_state import RunState
from triblade.quant.scheme import QuantScheme
from triblade.quant.statistics import InputStatistics
from triblade.quant.streams import Streams, StreamSizes, allocate
from triblade.quant.tables import EMBEDDING, HEAD, head_statistics, quantized_table

log = logging.getLogger(__name__)

Schemes = Mapping[str, QuantScheme | None]  # of one layer, by field of LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to quantize and how."""

    model: OpenModel
    recipe: Recipe
    schemes: Sequence[Schemes]  # by layer
    scale_type: torch.dtype
    ids: Tensor | None  # [N, S] calibration text; None: no calibration
    backend: Backend
    device: torch.device
    spill: Path | None = None  # folder for hidden states that do not fit memory
    tables: Mapping[str, QuantScheme] = field(default_factory=dict)  # of embedding and head, by module
    bias: BiasMode = "correct"
    path: Path | None = (
        None  # of the checkpoint, to read each layer through a mapping of its own; None: as `model` has it
    )

    def source(self) -> TensorSource:
        """The original's tensors; what is mapped for them goes when the source goes."""
        return self.model.checkpoint if self.path is None else open_checkpoint(self.path)

    @property
    def stream_sizes(self) -> StreamSizes | None:
        """What the hidden states of the text take."""
        if self.ids is None:
            return None
        config = self.model.config
        return StreamSizes(
            sequences=self.ids.shape[0],
            length=self.ids.shape[1],
            hidden=config.hidden_size,
            mixed=max(config.q_size, config.intermediate_size),
            dtype=self.model.dtype,
            compare=self.recipe.compares,
        )


@torch.no_grad()
def quantize_layers(job: Job, state: RunState) -> None:
    """Bring `state` to the model's last layer, embedding before the first and head behind it."""
    decoder = decoder_without_layers(job)
    if EMBEDDING in job.tables and not state.has_table(EMBEDDING):
        _quantize_table(job, state, EMBEDDING, None)
    sizes = job.stream_sizes
    streams = None if sizes is None else allocate(sizes, job.device, job.spill)
    if streams is not None:
        if state.layers:
            state.restore(streams)
        else:
            _embed(decoder, job, state, streams)
    todo = range(len(state.layers), job.model.config.num_layers)
    label = f"quantizing {job.model.name}" + (f" from layer {todo.start}" if todo.start else "")
    with progress(label, len(todo), unit="layers") as advance:
        for index in todo:
            started = time.monotonic()
            result = _quantized(decoder, job, index, streams)
            seconds = time.monotonic() - started
            state.finish_layer(result, seconds, streams)
            log.debug("layer %d: %.1f s, errors %s", index, seconds, result.errors)
            advance(1)
    if HEAD in job.tables and not state.has_table(HEAD):
        _quantize_table(job, state, HEAD, head_statistics(decoder, job.source(), streams))


def _quantize_table(job: Job, state: RunState, module: str, statistics: InputStatistics | None) -> None:
    started = time.monotonic()
    weight = job.source().tensor(f"{module}.weight").to(job.device)
    work = Work(name=module, weight=weight, scheme=job.tables[module], scale_type=job.scale_type, statistics=statistics)
    state.finish_table(module, quantized_table(work, job.recipe))
    log.info("%s: %s, %.1f s", module, work.scheme, time.monotonic() - started)


def _quantized(decoder: Decoder, job: Job, index: int, streams: Streams | None) -> LayerResult:
    """One layer, read from disk; what was mapped for it is given back with the reader, when this returns."""
    settings = LayerSettings(
        recipe=job.recipe,
        schemes=job.schemes[index],
        scale_type=job.scale_type,
        store_type=job.model.checkpoint.dtype,
        bias=job.bias,
    )
    reader = DenseReader(job.source(), job.model.config, job.model.dtype, job.device)
    return LayerQuantizer(decoder, index, reader.layer(index), settings, streams).run()


def decoder_without_layers(job: Job) -> Decoder:
    """Knows how the model computes and holds its embedding only."""
    model = job.model
    embedding = Linear(model.checkpoint.tensor("model.embed_tokens.weight").to(job.device, model.dtype))
    norm = torch.ones(model.config.hidden_size, device=job.device)
    weights = DecoderWeights(embedding=embedding, layers=[], final_norm=norm, head=embedding)
    length = 1 if job.ids is None else job.ids.shape[1]
    return Decoder(model.config, weights, job.backend, length)


def _embed(decoder: Decoder, job: Job, state: RunState, streams: Streams) -> None:
    """Begin both streams; that of the quantized model sees the embedding as it will be."""
    assert job.ids is not None
    table, scale = decoder.weights.embedding.weight, job.model.config.embedding_scale
    rounded = table
    if EMBEDDING in job.tables:
        rounded = state.read_table(EMBEDDING).dequantize().to(table)
    for batch in streams.batches():
        ids = job.ids[batch].to(job.device)
        streams.quantized[batch] = decoder.backend.embed(rounded, ids.flatten(), scale).unflatten(0, ids.shape)
        if streams.original is not None:
            streams.original[batch] = decoder.backend.embed(table, ids.flatten(), scale).unflatten(0, ids.shape)
