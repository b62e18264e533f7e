"""An eagle head changes nothing but the number of steps, and guesses over paged KV what it would guess over the whole text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import speculate
from eagle_heads import WINDOW, random_head, random_weights, target
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.config import EngineConfig
from triblade.engine.build import assemble
from triblade.engine.eagle_plan import TorchHeadExecutor, eagle
from triblade.engine.executor import TorchExecutor
from triblade.errors import ConfigError, UnsupportedError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.llm import LLM
from triblade.models.decoder import DenseAttend
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams
from triblade.spec.align.batches import target_hidden
from triblade.spec.drafter import Draft, DraftItem, DraftState
from triblade.spec.eagle import EagleHead
from triblade.spec.eagle_drafter import EagleDrafter
from triblade.spec.eagle_files import save_eagle, target_facts

LENGTHS = [1, 4, 5, 17, 30]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"num_kv_blocks": 22},
    "no prefix cache": {"enable_prefix_caching": False},
}


@cache
def model() -> OpenModel:
    return target()


@cache
def head() -> EagleHead:
    return random_head(model())


@cache
def prompts() -> list[list[int]]:
    shared = prompt(9, seed=99)
    return [(shared + prompt(length, seed=length))[-length:] for length in LENGTHS]


@cache
def plain(seed: int | None = None) -> list[list[int]]:
    params = GREEDY if seed is None else sampled(seed)
    return [tiny_llm(model()).generate([ids], params)[0][0].token_ids for ids in prompts()]


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True)


class Recorder:
    """A drafter that notes what is proposed behind which tokens."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter = drafter
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, items: list[DraftItem]) -> list[Draft]:
        drafts = self.drafter.propose(items)
        self.seen += [(i.request.token_ids[: i.stop + 1], d.token_ids) for i, d in zip(items, drafts, strict=True)]
        return drafts

    def forget(self, request: DraftState) -> None:
        self.drafter.forget(request)


def with_head(length: int = 3, **options: Any) -> tuple[LLM, Recorder]:
    llm = tiny_llm(model(), **options)
    executor, scheduler = llm.engine.runner.executor, llm.engine.scheduler
    assert isinstance(executor, TorchExecutor)
    config = head().config
    layout = KVLayout(
        num_layers=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=scheduler.block_size,
        codec="float32",
    )
    heads = TorchHeadExecutor(head(), executor, KVCache(layout, llm.engine.pool.num_blocks, torch.float32))
    drafter = EagleDrafter(heads, scheduler.block_size, 64, scheduler.max_num_batched_tokens)
    recorder = Recorder(drafter)
    return speculate(llm, recorder, length), recorder


@pytest.mark.parametrize("way", WAYS)
def test_greedy_output_is_that_of_the_target(way: str) -> None:  # F01, F17, F21, F22
    llm, recorder = with_head(**WAYS[way])
    for _ in range(2):  # cold and warm
        assert [choices[0].token_ids for choices in llm.generate(prompts(), GREEDY)] == plain()
    if way == "preempted":
        assert llm.engine.load().num_preemptions > 0
    llm.engine.check_idle()
    assert recorder.drafter.num_requests == 0
    assert sum(len(draft) for _, draft in recorder.seen) > 100


def test_certain_proposals_keep_seeded_output() -> None:  # F11
    llm, _ = with_head()
    assert [choices[0].token_ids for choices in llm.generate(prompts(), sampled(3))] == plain(3)


@pytest.mark.parametrize("way", ["batched", "chunks of 7", "two at a time"])
def test_guesses_are_those_of_the_head_over_the_whole_text(way: str) -> None:  # F17: no hole, no stale state
    llm, recorder = with_head(**WAYS[way], enable_prefix_caching=False)
    llm.generate(prompts(), GREEDY)
    drafts = [(tokens, draft) for tokens, draft in recorder.seen if draft]
    assert len(drafts) > 50
    for tokens, draft in drafts[::3]:
        assert draft == whole_text_guesses(tokens, len(draft))


@torch.inference_mode()
def whole_text_guesses(tokens: list[int], count: int) -> list[int]:
    """A chain of guesses behind `tokens`, everything computed again for each, without a cache."""
    executor = tiny_llm(model()).engine.runner.executor
    assert isinstance(executor, TorchExecutor)
    hidden = target_hidden(executor.decoder, torch.tensor([tokens]))[0]  # [T, C]
    before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    ids, guesses = list(tokens), list[int]()
    for _ in range(count):
        attend = DenseAttend(head().config, head().backend, len(ids))
        states = head().forward(torch.tensor(ids), before, torch.arange(len(ids)), attend)
        guesses.append(int(head().greedy(states[-1:])))
        ids.append(guesses[-1])
        before = torch.cat((before, states[-1:]))
    return guesses


def test_drafts_end_where_the_context_does() -> None:  # F15, F16
    llm, recorder = with_head(length=6)
    ids = prompt(55, seed=1)
    params = SamplingParams(temperature=0, ignore_eos=True)
    (choices,) = llm.generate([ids], params)
    assert choices[0].token_ids == tiny_llm(model()).generate([ids], params)[0][0].token_ids
    assert len(ids) + len(choices[0].token_ids) == 64
    assert max(len(tokens) + len(draft) for tokens, draft in recorder.seen) <= 64


# The plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_eagle(tmp_path / "head", target_facts(model()), random_weights(model()), {"window": WINDOW})
    return tmp_path / "head"


def test_an_engine_finds_the_head_that_it_is_told(folder: Path) -> None:
    config = EngineConfig(
        model="tiny",
        drafter="eagle",
        draft_model=str(folder),
        deterministic=True,
        block_size=4,
        num_kv_blocks=128,
        device="cpu",
    )
    llm = LLM.from_engine(assemble(config, model(), torch.device("cpu")))
    assert [choices[0].token_ids for choices in llm.generate(prompts(), GREEDY)] == plain()
    plan = eagle(config, model(), is_native=False)
    assert (plan.layers.num_layers, plan.layers.head_dim) == (1, model().config.head_dim)
    matrices = plan.checkpoint.weights.matrices().values()
    assert plan.weight_bytes == 4 * sum(matrix.codes.numel() for matrix in matrices)


def test_a_model_without_a_head_is_told_how_to_get_one() -> None:
    config = EngineConfig(model="tiny", drafter="eagle", device="cpu")
    with pytest.raises(ConfigError, match="no eagle head for llama") as raised:
        eagle(config, open_tiny(), is_native=False)
    assert "triblade align" in (raised.value.hint or "")
    with pytest.raises(UnsupportedError, match="native"):
        eagle(config, model(), is_native=True)
