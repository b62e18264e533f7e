"""Drafts on the native kernels: one team of threads for two programs, one pool of tiles for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from triblade.spec.eagle_drafter import GuessRun
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
@pytest.mark.parametrize("confidence", [0.0, 0.02])
def test_a_head_changes_nothing(target: Path, head: Path, confidence: float, changes: dict[str, Any]) -> None:  # F01
    options = {"drafter": "eagle", "draft_model": str(head), "draft_confidence": confidence}
    assert tokens(target, **options, **changes)[0] == tokens(target, **changes)[0]


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


@dataclass(frozen=True)
class Twins:
    """The same head natively and in torch, and runs of three requests with random states."""

    llm: LLM
    native: NativeEagle
    torch: TorchEagle
    width: int
    generator: torch.Generator

    @classmethod
    def of(cls, target: Path, head: Path) -> Twins:
        settings: dict[str, Any] = {"device": "cpu", "backend": "native", "num_kv_blocks": 64, "threads": 2}
        llm = LLM(EngineConfig(model=str(target), drafter="eagle", draft_model=str(head), **settings))
        assert llm.engine.speculator is not None
        drafter: Any = llm.engine.speculator.drafter
        model = open_model(EngineConfig(model=str(target), dtype="float32"))
        decoder = model.load(64, ReferenceBackend(), torch.device("cpu"))
        checkpoint = load_eagle(head, model)
        dense = checkpoint.head(decoder.weights.embedding, decoder.backend, 64)
        layout = replace(llm.engine.runner.executor.cache.layout, codec="float32", arrangement="tokens")
        reference = TorchEagle(dense, KVCache(layout, 64, torch.float32).draft(), no_states)
        width = checkpoint.weights.state_size
        return cls(llm, drafter._head, reference, width, torch.Generator().manual_seed(4))

    def runs(self, lengths: Sequence[int]) -> list[GuessRun]:
        found = []
        for number, length in enumerate(lengths):
            size = int(torch.randint(1, 20, (1,), generator=self.generator))
            ids = torch.randint(0, self.llm.engine.model.vocab_size, (size,), generator=self.generator).tolist()
            request = self.llm.engine.prepare(ids, PARAMS)[0]
            request.block_table.extend(range(number * 4, number * 4 + 4))
            found.append(GuessRun(request, 0, ids, length))
        return found

    def guess(self, runs: list[GuessRun], seed: int, least_chance: float) -> tuple[list[list[int]], list[list[int]]]:
        """Guesses of both from the same states."""
        generator = torch.Generator().manual_seed(seed)
        self.native._least_chance = self.torch._least_chance = least_chance
        for run in runs:
            states = torch.randn(run.num_tokens, self.width, generator=generator)
            self.torch.memory.extend(run.request.number, -1, states)
            self.native.memory.extend(run.request.number, -1, len(states), states.data_ptr())
        return self.native.guess(runs), self.torch.guess(runs)


def test_native_guesses_are_those_of_torch(target: Path, head: Path) -> None:
    """But for near ties, since native inputs are rounded to 8 bits; runs of several lengths, some without guesses, in one call."""
    twins = Twins.of(target, head)
    equal = total = 0
    for seed in range(20):
        runs = twins.runs((3, 0, 5))
        for ours, theirs, run in zip(*twins.guess(runs, seed, 0.0), runs, strict=True):
            assert len(ours) == len(theirs) == run.length
            equal += ours[:1] == theirs[:1]
            total += 1
    assert equal >= 0.85 * total


def test_guesses_end_where_the_head_is_unsure(target: Path, head: Path) -> None:
    """The same guesses up to there, in both; those of a request do not depend on when the others of the call end."""
    twins = Twins.of(target, head)
    lengths, equal, total = set[int](), 0, 0
    for seed in range(20):
        runs = twins.runs((6, 2, 4))
        whole = twins.guess(runs, seed, 0.0)
        for least in (0.002, 0.02, 0.05, 0.1, 0.9999):
            parts = twins.guess(runs, seed, least)
            for part, full in zip((*parts[0], *parts[1]), (*whole[0], *whole[1]), strict=True):
                assert part == full[: len(part)]
                assert not part or least < 0.9
                lengths.add(len(part))
            equal += sum(len(ours) == len(theirs) for ours, theirs in zip(*parts, strict=True))
            total += len(runs)
    assert {0, 1, 2} < lengths
    assert equal >= 0.85 * total
