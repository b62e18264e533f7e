"""Engines around tiny random models, and the plainest possible generation loop to compare them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
import torch
from tiny import TinyModel, tiny_model
from tokenizers import models, pre_tokenizers
from torch import Tensor

from triblade.config import EngineConfig
from triblade.engine.build import assemble
from triblade.llm import LLM
from triblade.models.config import model_config
from triblade.models.decoder import Decoder, DenseAttend
from triblade.models.loader import OpenModel
from triblade.models.tokenizer import Tokenizer
from triblade.models.tokenizer_parts import TokenizerParts
from triblade.models.weights import load_weights
from triblade.ops.deterministic import DeterministicBackend

EOS = 2


class DictionaryCheckpoint:
    """A checkpoint in memory."""

    generation_config: Mapping[str, Any] = {}
    dtype = torch.float32

    def __init__(self, model: TinyModel) -> None:
        self.config = model.hf_config
        self._source = model.source

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._source.tensors.values())

    def names(self) -> frozenset[str]:
        return self._source.names()

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(name)

    def release(self) -> None:
        """Nothing was read."""

    def fingerprint(self) -> str:
        return "tiny"


def word_tokenizer(size: int) -> Tokenizer:
    """Tokens are the words w0, w1, ...; id 2 ends a text."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(TokenizerParts(backend=backend, eos_token_ids=frozenset({EOS})))


def open_tiny(name: str = "llama", vocabulary: int | None = None, **overrides: Any) -> OpenModel:
    """An opened tiny model with a tokenizer of as many words (or of `vocabulary` words: the rest is padding)."""
    model = tiny_model(name, **overrides)
    config = model_config(model.hf_config)
    return OpenModel(
        name=name,
        config=config,
        checkpoint=DictionaryCheckpoint(model),
        tokenizer=word_tokenizer(vocabulary or config.vocab_size),
        dtype=torch.float32,
        eos_token_ids=frozenset({EOS}),
        generation_config={},
    )


def tiny_llm(model: OpenModel, **options: Any) -> LLM:
    """An engine around it; deterministic unless told otherwise."""
    settings: dict[str, Any] = {
        "deterministic": True,
        "block_size": 4,
        "num_kv_blocks": 128,
        "device": "cpu",
        **options,
    }
    config = EngineConfig(model=model.name, **settings)
    return LLM.from_engine(assemble(config, model, torch.device(settings["device"])))


def plain_decoder(model: OpenModel) -> Decoder:
    """The model without an engine, deterministic, for its whole context."""
    weights = load_weights(model.checkpoint, model.config, torch.float32)
    return Decoder(model.config, weights, DeterministicBackend(), model.config.context_length)


@torch.inference_mode()
def plain_logits(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    """[T, V] of a prompt computed in one piece without a cache."""
    attend = DenseAttend(decoder.config, decoder.backend, len(ids))
    return decoder.logits(decoder.forward(torch.tensor(list(ids)), torch.arange(len(ids)), attend))


def plain_greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by computing everything again for each; the end token does not end it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
