"""Embedding and head as integers: which of them, in which scheme, and how their rows are rounded.

A table has no layer before it that scales could be folded into, so of a method only levels, targets, codes and refinement are used;
an embedding has no inputs either, and gets the range search. A tied head is the embedding: one tensor, one scheme. Rows are rounded
in pieces, because a vocabulary times float32 would be the largest matrix of the whole run. Knows no file format.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from triblade.errors import ConfigError
from triblade.models.config import ModelConfig
from triblade.models.decoder import Decoder
from triblade.models.weights import TensorSource
from triblade.quant.passes import Recipe, Work
from triblade.quant.plan import parse_scheme
from triblade.quant.scheme import IntegerMatrix, QuantScheme
from triblade.quant.statistics import Accumulator, InputStatistics
from triblade.quant.streams import Streams

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
KEPT = "keep"
ROWS_AT_ONCE = 8192


def table_schemes(config: ModelConfig, default: QuantScheme, embeddings: str, head: str) -> dict[str, QuantScheme]:
    """Schemes by module name of the tables that are to be quantized.

    Args:
        config: the model.
        default: what a scheme leaves out, as in rules.
        embeddings: `keep`, or a scheme.
        head: the same for the head.

    Raises:
        ConfigError: a scheme is none or does not divide the rows, or a tied head was not asked to be what the embedding is.
    """
    wanted = [(EMBEDDING, embeddings, "embeddings"), (HEAD, head, "lm_head")]
    if config.tie_word_embeddings:
        if embeddings != head:
            spec = head if embeddings == KEPT else embeddings
            raise ConfigError(
                f"the head is the embedding (tied) and cannot be {head} where that is {embeddings}",
                hint=f"ask for both: --embeddings {spec} --lm-head {spec}",
                param="lm_head",
            )
        wanted.pop()  # one tensor
    found = {}
    for module, spec, param in wanted:
        scheme = None if spec == KEPT else parse_scheme(spec, replace(default, activation_bits=None), param)
        if scheme is not None:
            scheme.group(config.hidden_size)
            found[module] = scheme
    return found


def table_elements(config: ModelConfig) -> int:
    """Weights of a table."""
    return config.vocab_size * config.hidden_size


def quantized_table(work: Work, recipe: Recipe) -> IntegerMatrix:
    """The table that is the weight [V, C] of `work`, of any type, as integers."""
    codes, scales, zeros = [], [], []
    for piece in work.weight.split(ROWS_AT_ONCE):
        done = recipe.rounded(replace(work, weight=piece.float()))
        assert done.grid is not None
        assert done.codes is not None
        matrix = done.grid.matrix(done.codes, work.scale_type)
        codes.append(matrix.codes)
        scales.append(matrix.scales)
        zeros += [] if matrix.zero_points is None else [matrix.zero_points]
    return IntegerMatrix(
        codes=torch.cat(codes),
        scales=torch.cat(scales),
        zero_points=torch.cat(zeros) if zeros else None,
        scheme=work.scheme,
    )


def head_statistics(decoder: Decoder, source: TensorSource, streams: Streams | None) -> InputStatistics | None:
    """What the head will multiply: the hidden states behind the last layer, normed."""
    if streams is None:
        return None
    config = decoder.config
    norm = source.tensor("model.norm.weight").to(decoder.device, torch.float32) + config.norm_offset

    def normed(stream: Tensor, batch: slice) -> Tensor:
        return decoder.backend.rms_norm(stream[batch].flatten(0, 1), norm, config.rms_norm_eps)

    accumulator = Accumulator(HEAD)
    for batch in streams.batches():
        original = None if streams.original is None else normed(streams.original, batch)
        accumulator.add(normed(streams.quantized, batch), original)
    return accumulator.result()
