"""Open a model by name, look at it without loading it, then load it.

`open_model` reads configuration, tokenizer and tensor names only, so that memory can be planned first; `OpenModel.load` reads the
weights. Knows files and decoders, no cache and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from triblade.config import EngineConfig
from triblade.errors import ConfigError
from triblade.models.checkpoint import Checkpoint, open_checkpoint
from triblade.models.config import ModelConfig, model_config
from triblade.models.decoder import Decoder, DecoderWeights
from triblade.models.source import resolve
from triblade.models.tokenizer import Tokenizer
from triblade.models.weights import load_weights, resolve_tied_head
from triblade.ops.backend import Backend, Linear

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model whose weights are still on disk."""

    name: str
    config: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    dtype: torch.dtype
    eos_token_ids: frozenset[int]  # everything that any of the model's files says ends a turn
    generation_config: Mapping[str, Any]
    token_limit: int | None = None  # a draft has no tokens that its target has not

    @property
    def vocab_size(self) -> int:
        """Valid ids are below this: tokens without an embedding row, and rows without a token, exist for nobody."""
        known = min(self.tokenizer.vocab_size, self.config.vocab_size)
        return known if self.token_limit is None else min(known, self.token_limit)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights in `dtype`."""
        return self.config.num_parameters * self.dtype.itemsize

    def read(self, device: torch.device) -> DecoderWeights[Linear]:
        """The weights, dense."""
        return load_weights(self.checkpoint, self.config, self.dtype, device)

    def load(self, context_length: int, backend: Backend, device: torch.device) -> Decoder:
        """Read the weights."""
        return Decoder(self.config, self.read(device), backend, context_length)


def open_model(config: EngineConfig) -> OpenModel:
    """Resolve `config.model` (downloading it if need be) and read everything but the weights."""
    path = resolve(config.model, revision=config.revision)
    tokenizer_path = resolve(config.tokenizer) if config.tokenizer else path
    checkpoint = open_checkpoint(path)
    model = resolve_tied_head(model_config(checkpoint.config), checkpoint.names())
    tokenizer = Tokenizer.load(tokenizer_path, chat_template=config.chat_template)
    return OpenModel(
        name=config.model,
        config=model,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        dtype=choose_dtype(config, checkpoint.dtype, model),
        eos_token_ids=end_token_ids(checkpoint, tokenizer),
        generation_config=checkpoint.generation_config,
    )


def choose_dtype(config: EngineConfig, stored: torch.dtype, model: ModelConfig) -> torch.dtype:
    """The type of weights and activations.

    Raises:
        ConfigError: float16 for a model whose activations overflow it.
    """
    if config.deterministic:
        return torch.float32
    if config.dtype == "auto":
        return torch.bfloat16 if stored == torch.float16 and model.trained_in_bfloat16_range else stored
    if config.dtype == "float16" and model.trained_in_bfloat16_range:
        raise ConfigError(
            f"{model.architecture} overflows float16 (activations above 65504 become infinite)",
            hint="use --dtype bfloat16",
        )
    chosen: torch.dtype = getattr(torch, config.dtype)
    return chosen


def end_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """The union of what configuration, generation configuration and tokenizer call an end."""
    ids: set[int] = set(tokenizer.eos_token_ids)
    for source in (checkpoint.config, checkpoint.generation_config):
        value = source.get("eos_token_id")
        ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return frozenset(token for token in ids if 0 <= token < tokenizer.vocab_size)
