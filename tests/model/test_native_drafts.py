"""Drafts on the native kernels: one team of threads for two programs, one pool of tiles for both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import WINDOW, random_weights
from tiny_folders import tiny_folder, words

from triblade.config import EngineConfig
from triblade.engine.eagle import NativeEagle, TorchEagle
from triblade.engine.executor import TorchExecutor
from triblade.engine.native import NativeExecutor
from triblade.engine.native_program import native_module
from triblade.errors import UnsupportedError
from triblade.kv.cache import KVCache
from triblade.llm import LLM
from triblade.models.loader import open_model
from triblade.ops.reference import ReferenceBackend
from triblade.sampling_params import SamplingParams
from triblade.spec.align.batches import target_hidden
from triblade.spec.eagle_drafter import EagleDrafter, GuessRun
from triblade.spec.eagle_files import load_eagle, save_eagle, target_facts

PARAMS = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "target")


def tokens(model: Path, **changes: Any) -> tuple[list[int], int]:
    """Greedy tokens, and the number of steps."""
    settings: dict[str, Any] = {"device": "cpu", "backend": "native", "num_kv_blocks": 64, "draft_policy": "fixed"}
    llm = LLM(EngineConfig(model=str(model), threads=2, **settings, **changes))
    found = llm.generate([words(21)], PARAMS)[0][0].token_ids
    llm.engine.check_idle()
    return found, llm.engine.load().num_steps


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_a_target_drafts_for_itself(target: Path, codec: str) -> None:  # F17
    plain, _ = tokens(target, kv_cache_dtype=codec)
    found, steps = tokens(target, drafter="draft", draft_model=str(target), kv_cache_dtype=codec)
    assert found == plain
    assert steps <= 2 + -(-32 // 5)  # one more than needed, should two logits be as good as equal


@pytest.mark.parametrize("changes", [{}, {"draft_layers": 1}, {"draft_quantization": "int8", "draft_layers": 2}])
def test_a_self_draft_changes_nothing(target: Path, changes: dict[str, Any]) -> None:  # F01
    assert tokens(target, drafter="self", **changes)[0] == tokens(target)[0]


def test_a_draft_that_the_kernels_cannot_run_is_refused(target: Path, tmp_path: Path) -> None:
    odd = tiny_folder(tmp_path / "odd", head_dim=20, num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="the draft cannot run on the target's native kernels: head size 20"):
        tokens(target, drafter="draft", draft_model=str(odd))


@pytest.fixture(scope="module", params=[[], [0]], ids=["final state", "inner state, too"])
def head(target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    model, inner = open_model(EngineConfig(model=str(target))), request.param
    path = tmp_path_factory.mktemp("head")
    weights = random_weights(model, bits=4, num_inner=len(inner))
    save_eagle(path, target_facts(model), weights, {"window": WINDOW, "inner_layers": inner})
    return path


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "int8"}, {"max_num_batched_tokens": 7}], ids=str)
def test_a_head_changes_nothing(target: Path, head: Path, changes: dict[str, Any]) -> None:  # F01
    assert tokens(target, drafter="eagle", draft_model=str(head), **changes)[0] == tokens(target, **changes)[0]


def remembered(executor: Any, count: int, width: int) -> torch.Tensor:
    """States [count, width] of the last step, of tokens 0 to `count` of one request."""
    native = native_module()
    assert native is not None
    memory = native.StateMemory(width=width, window=count)
    assert executor.program.remember(memory, [(1, 0, 0, count)]) == [0]
    found = torch.empty(count, width)
    memory.take(1, 0, count, found.data_ptr())
    return found


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_executors_show_the_states_of_inner_layers(target: Path, backend: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "bfloat16", "num_kv_blocks": 64, "threads": 2}
    config = EngineConfig(model=str(target), device="cpu", backend=backend, **settings)
    llm, ids = LLM(config), [5, 9, 2, 40, 7]
    executor: Any = llm.engine.runner.executor
    assert isinstance(executor, NativeExecutor if backend == "native" else TorchExecutor)
    executor.keep_layers([0, 1])
    llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1))
    decoder = open_model(config).load(64, ReferenceBackend(), torch.device("cpu"))
    wanted = target_hidden(decoder, torch.tensor([ids]), (0, 1))[0]
    found = remembered(executor, *wanted.shape) if backend == "native" else executor.states(range(len(ids)))
    assert found.shape == wanted.shape
    assert (found - wanted).norm() < 0.02 * wanted.norm()  # of keys and values in bfloat16


def no_states(rows: Any) -> torch.Tensor:
    raise AssertionError("this head is given its states")


def test_native_guesses_are_those_of_torch(target: Path, head: Path) -> None:
    """But for near ties, since native inputs are rounded to 8 bits; runs of several lengths, some without guesses, in one call."""
    settings: dict[str, Any] = {"device": "cpu", "backend": "native", "num_kv_blocks": 64, "threads": 2}
    llm = LLM(EngineConfig(model=str(target), drafter="eagle", draft_model=str(head), **settings))
    assert llm.engine.speculator is not None
    drafter = llm.engine.speculator.drafter
    assert isinstance(drafter, EagleDrafter)
    native = drafter._head
    assert isinstance(native, NativeEagle)
    model = open_model(EngineConfig(model=str(target), dtype="float32"))
    decoder = model.load(64, ReferenceBackend(), torch.device("cpu"))
    checkpoint = load_eagle(head, model)
    width = model.config.hidden_size * (1 + len(checkpoint.inner_layers))
    dense = checkpoint.head(decoder.weights.embedding, decoder.backend, 64)
    layout = replace(llm.engine.runner.executor.cache.layout, codec="float32", arrangement="tokens")
    reference = TorchEagle(dense, KVCache(layout, 64, torch.float32).draft(), no_states)
    generator = torch.Generator().manual_seed(4)
    equal = total = 0
    for _ in range(20):
        runs = []
        for number in range(3):
            size = int(torch.randint(1, 20, (1,), generator=generator))
            states = torch.randn(size, width, generator=generator)
            ids = torch.randint(0, model.config.vocab_size, (size,), generator=generator).tolist()
            request = llm.engine.prepare(ids, PARAMS)[0]
            request.block_table.extend(range(number * 4, number * 4 + 4))
            runs.append(GuessRun(request, 0, ids, (3, 0, 5)[number]))
            reference.memory.extend(request.number, -1, states)
            native.memory.extend(request.number, -1, size, states.data_ptr())
        for ours, theirs, run in zip(native.guess(runs), reference.guess(runs), runs, strict=True):
            assert len(ours) == len(theirs) == run.length
            equal += ours[:1] == theirs[:1]
            total += 1
    assert equal >= 0.85 * total
