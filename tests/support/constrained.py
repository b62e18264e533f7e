"""Tiny random models over bytes whose outputs follow grammars, compiled by one process for all tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import tokenizers
from tiny_engine import open_tiny, tiny_llm
from tokenizers import decoders, models, pre_tokenizers

from triblade.llm import LLM, Completion
from triblade.models.loader import OpenModel
from triblade.models.tokenizer import Tokenizer
from triblade.models.tokenizer_parts import TokenizerParts, byte_alphabet
from triblade.sampling_params import SamplingParams, StructuredOutputs
from triblade.structured.compiler import GrammarCompiler

PIECES = ('{"', '":', '",', '"}', "null", "name", "red", "true")
VOCABULARY = 256 + len(PIECES)
END = VOCABULARY  # the last token; rows behind it are padding
PADDED = 288


def byte_tokenizer() -> Tokenizer:
    """Every byte, some pieces of JSON, and a special token that ends a text."""
    alphabet = {character: number for number, character in enumerate(byte_alphabet())}
    vocabulary = alphabet | {piece: 256 + number for number, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(TokenizerParts(backend=backend, eos_token_ids=frozenset({END})))


@cache
def model() -> OpenModel:
    tiny = open_tiny(vocab_size=PADDED, max_position_embeddings=512, hidden_size=64, intermediate_size=96)
    return replace(tiny, tokenizer=byte_tokenizer(), eos_token_ids=frozenset({END}))


@cache
def compiler() -> GrammarCompiler:
    """One for all tests: its process takes seconds to start."""
    return GrammarCompiler(byte_tokenizer(), END + 1)


def engine(**options: Any) -> LLM:
    llm = tiny_llm(model(), **{"deterministic": False, "num_kv_blocks": 1024, "max_model_len": 250, **options})
    llm.engine.compile = compiler().compile
    return llm


def form(kind: Any, text: Any = "") -> StructuredOutputs:
    return StructuredOutputs(kind, text if isinstance(text, str) else json.dumps(text))


def answers(llm: LLM, forms: Sequence[StructuredOutputs], **params: Any) -> list[Completion]:
    """One answer per form, all of them in one batch."""
    each = [
        SamplingParams(**{"max_tokens": 200, "seed": number, **params}, structured_outputs=wanted)
        for number, wanted in enumerate(forms)
    ]
    return [found for (found,) in llm.generate([[1, 2, 3]] * len(forms), each)]
