"""Drafters on the GPU: whole engines whose output is that of plain decoding, with verification and the head as recorded graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import random_weights
from gpu_support import CUDA, gpu_cache_of
from native_models import all_logits
from tiny import prompt
from tiny_engine import open_tiny

from triblade.config import EngineConfig
from triblade.engine.build import assemble
from triblade.engine.cuda import CudaExecutor
from triblade.engine.cuda_eagle import CudaEagle
from triblade.engine.eagle import TorchEagle
from triblade.engine.executor import TorchExecutor
from triblade.llm import LLM
from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel
from triblade.models.weights import load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.reference import ReferenceBackend
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle_files import save_eagle, target_facts

pytestmark = pytest.mark.gpu
WAYS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True),
}
WINDOW = 32
FIXED: dict[str, Any] = {"draft_policy": "fixed", "num_speculative_tokens": 4, "draft_confidence": 0.0}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 320}


def opened(**overrides: Any) -> OpenModel:
    """In float16, whose roundings seldom turn a token of a random model, as those of bfloat16 do."""
    return replace(open_tiny("llama", **{**SIZES, **overrides}), dtype=torch.float16)


def engine(model: OpenModel, **options: Any) -> LLM:
    settings = {"block_size": 16, "num_kv_blocks": 400, "device": "cuda", "max_num_batched_tokens": 64, **options}
    return LLM.from_engine(assemble(EngineConfig(model=model.name, **settings), model, CUDA))


def gpu_reference_of(model: OpenModel) -> TorchExecutor:
    """The model in float32, as the judge of near ties."""
    weights = load_weights(model.checkpoint, model.config, torch.float32, CUDA)
    decoder = Decoder(model.config, weights, ReferenceBackend(eager_attention), model.config.context_length)
    return TorchExecutor(decoder, gpu_cache_of(model.config, "float32", 100, torch.float32), model.config.vocab_size)


def prompts(vocabulary: int) -> list[list[int]]:
    return [prompt(length, seed=length, vocab_size=vocabulary) for length in (18, 21, 5, 70, 33, 9)]


def answers(llm: LLM, tokens: list[list[int]], params: SamplingParams) -> list[list[int]]:
    found = [choices[0].token_ids for choices in llm.generate(tokens, params)]
    llm.engine.check_idle()
    return found


def check_equal(ours: list[list[int]], plain: list[list[int]], model: OpenModel, way: str) -> None:
    """Rows of another number may round a near tie the other way; answers part there, and nowhere else."""
    lengths = [length_of_common(a, b) for a, b in zip(ours, plain, strict=True)]
    assert sum(lengths) >= 0.6 * sum(map(len, plain)), lengths
    if way == "drawn":
        return
    judge = gpu_reference_of(model)
    for ids, a, b, length in zip(prompts(model.config.vocab_size), ours, plain, lengths, strict=True):
        if length < len(b):
            logits = all_logits(judge, [*ids, *b[:length]])[-1]
            assert abs(float(logits[a[length]] - logits[b[length]])) < 0.1 * float(logits.std()), length


def length_of_common(a: list[int], b: list[int]) -> int:
    return next((n for n, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(b))


@pytest.mark.parametrize("way", WAYS)
def test_suffix(way: str) -> None:
    """So few words that they come back; all lengths of drafts in steps that were recorded."""
    model = opened(vocab_size=6)
    plain = answers(engine(model), prompts(6), WAYS[way])
    llm = engine(model, drafter="suffix", **FIXED)
    check_equal(answers(llm, prompts(6), WAYS[way]), plain, model, way)
    assert llm.engine.load().speculation.num_draft_tokens > 20
    executor = llm.engine.runner.executor
    assert isinstance(executor, CudaExecutor)
    assert any(shape.queries > 1 for shape, _ in executor._steps.recorded)


@pytest.mark.parametrize("way", WAYS)
def test_self_draft(way: str) -> None:
    model = opened()
    plain = answers(engine(model), prompts(96), WAYS[way])
    llm = engine(model, drafter="self", draft_layers=2, **FIXED)
    check_equal(answers(llm, prompts(96), WAYS[way]), plain, model, way)
    assert llm.engine.load().speculation.num_draft_tokens > 20


@pytest.fixture(scope="module", params=[[], [0, 1]], ids=["final state", "inner states, too"])
def head(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[OpenModel, Path]:
    path, model = tmp_path_factory.mktemp("head"), opened()
    weights = random_weights(model, bits=8, num_inner=len(request.param))
    save_eagle(path, target_facts(model), weights, {"window": WINDOW, "inner_layers": request.param})
    return model, path


def eagle(head: tuple[OpenModel, Path], **options: Any) -> LLM:
    model, path = head
    return engine(model, drafter="eagle", draft_model=str(path), **FIXED, **options)


@pytest.mark.parametrize("way", WAYS)
def test_eagle(way: str, head: tuple[OpenModel, Path]) -> None:
    plain = answers(engine(head[0]), prompts(96), WAYS[way])
    llm = eagle(head)
    check_equal(answers(llm, prompts(96), WAYS[way]), plain, head[0], way)
    assert llm.engine.load().speculation.num_draft_tokens > 100


class Spy:
    """Remembers what was proposed after which tokens."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.seen: dict[tuple[int, ...], list[int]] = {}

    def propose(self, items: Any) -> Any:
        drafts = self._drafter.propose(items)
        pairs = zip(items, drafts, strict=True)
        self.seen |= {tuple(i.request.token_ids): d.token_ids for i, d in pairs if d.token_ids}
        return drafts

    def forget(self, request: Any) -> None:
        self._drafter.forget(request)


def test_guesses_of_the_graphs_are_those_of_torch(head: tuple[OpenModel, Path]) -> None:
    """The same head beside the reference kernels: after equal texts most first guesses are equal, and most that follow them."""
    seen = []
    for backend, kind, kernels in (("auto", CudaEagle, CudaExecutor), ("reference", TorchEagle, TorchExecutor)):
        llm = eagle(head, backend=backend)
        assert llm.engine.speculator is not None
        spy = Spy(llm.engine.speculator.drafter)
        assert isinstance(spy._drafter._head, kind)
        assert isinstance(llm.engine.runner.executor, kernels)
        llm.engine.speculator.drafter = spy
        answers(llm, prompts(96), WAYS["greedy"])
        seen.append(spy.seen)
    both = seen[0].keys() & seen[1].keys()
    assert len(both) > 30
    lengths = [length_of_common(seen[0][text], seen[1][text]) for text in both]
    assert sum(length > 0 for length in lengths) >= 0.9 * len(both)
    assert sum(lengths) >= 0.8 * sum(len(seen[1][text]) for text in both)
