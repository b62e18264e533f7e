"""Rows from GPU to GPU over CUDA IPC: two workers equal one engine, and whatever breaks on the way costs time and no token.

The prefill worker is a process of its own, on another GPU where there are two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from disaggregated import Pair
from gpu_workers import Kind, workers
from tiny import prompt
from tiny_engine import tiny_llm

from triblade.disagg.cuda_ipc import CudaIpc
from triblade.disagg.placed_rows import quantization
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.llm import Completion
from triblade.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
LENGTHS = [2, 15, 16, 17, 33, 120, 257, 600]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
NEAR_TIE = 0.2  # nats between the best two tokens, which bfloat16 may exchange


def prompts() -> list[list[int]]:
    return [prompt(length, seed=length) for length in LENGTHS]


def alone(kind: Kind, ids: Sequence[list[int]]) -> list[Completion]:
    return [choices[0] for choices in tiny_llm(kind.model(), **kind.settings).generate(list(ids), GREEDY)]


def same(found: Completion, expected: Completion, *, is_exact: bool) -> None:
    """The same tokens, in bfloat16 up to the first near tie."""
    if found.token_ids == expected.token_ids:
        return
    assert not is_exact
    pairs = zip(found.token_ids, expected.token_ids, strict=True)
    at = next(number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)
    assert expected.logprobs is not None
    best, second = (logprob for _, logprob in expected.logprobs[at].top)
    assert best - second < NEAR_TIE


KINDS = {
    "float32": Kind(),
    "float32, chunks of 48": Kind(prefill={"max_num_batched_tokens": 48}),
    "bfloat16": Kind(is_float32=False, prefill={"max_num_batched_tokens": 64}),
    "int8 on both": Kind(is_float32=False, options={"kv_cache_dtype": "int8"}),
    "int8 on the way": Kind(
        is_float32=False, options={"kv_cache_dtype": "int8"}, prefill={"kv_cache_dtype": "bfloat16"}, codec="int8"
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_two_workers_equal_one_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # G11, G13, G17
    kind = KINDS[name]
    expected = alone(kind, prompts())
    with workers(kind, monkeypatch) as pair:
        for _ in range(2):  # the second time out of the prefix cache, but for the last blocks
            for (choice, *_), reference in zip(pair.generate(prompts(), GREEDY), expected, strict=True):
                same(choice, reference, is_exact=kind.is_float32)
        longer = prompts()[-1] + prompt(90, seed=1)  # begins with rows that are here
        same(pair.generate([longer], GREEDY)[0][0], alone(kind, [longer])[0], is_exact=kind.is_float32)
        counts = pair.remote.counts
        assert counts.num_complete == counts.num_fetches > len(LENGTHS)
        assert counts.num_failed == counts.num_damaged == 0


LONG = Kind(options={"num_kv_blocks": 700}, prefill={"max_num_batched_tokens": 16})


def test_an_abort_while_rows_come(monkeypatch: pytest.MonkeyPatch) -> None:  # G01, G02
    ids, other = prompt(4000, seed=2), prompt(500, seed=3)
    with workers(LONG, monkeypatch) as pair:

        async def scenario() -> None:
            async def first_output() -> None:
                await anext(pair.client.generate(ids, GREEDY))

            task = asyncio.create_task(first_output())
            while pair.remote.counts.num_tokens < 400:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(scenario())
        Pair.eventually(lambda: pair.remote.counts.num_dropped == 1)
        assert pair.generate([other], GREEDY)[0][0].token_ids == alone(LONG, [other])[0].token_ids
        assert pair.remote.counts.num_complete == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_prefill_worker_that_is_killed(share: float, monkeypatch: pytest.MonkeyPatch) -> None:  # G05
    ids = prompt(4000, seed=4)
    expected = alone(LONG, [ids])[0].token_ids
    with workers(LONG, monkeypatch) as pair:

        async def scenario() -> list[int]:
            async def whole() -> list[int]:
                return [t async for output in pair.client.generate(ids, GREEDY) for t in output.token_ids]

            task = asyncio.create_task(whole())
            while pair.remote.counts.num_tokens < share * len(ids):
                await asyncio.sleep(0.001)
            pair.process.kill()
            return await task

        assert asyncio.run(scenario()) == expected
        assert pair.remote.counts.num_failed == 1
        assert len(ids) > pair.remote.counts.num_tokens >= share * len(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_on_the_device(dtype: torch.dtype) -> None:
    """The kernels on a GPU as the emulation has them: copies, sums, and int8 as the codec makes it."""
    settings: dict[str, Any] = {"num_layers": 28, "num_kv_heads": 4, "head_dim": 128, "block_size": 16}
    source = KVCache(KVLayout(codec=str(dtype).removeprefix("torch."), **settings), 300, dtype, "cuda")
    same_kind = KVCache(source.layout, 300, dtype, "cuda")
    smaller = KVCache(KVLayout(codec="int8", **settings), 300, dtype, "cuda")
    expected = KVCache(smaller.layout, 300, dtype, "cuda")
    slots = torch.arange(300 * 16, device="cuda")
    for layer in range(28):
        k, v = torch.randn(2, len(slots), 4, 128, device="cuda", dtype=dtype) * 3
        source.write(layer, slots, k, v)
        expected.write(layer, slots, k, v)
    blocks = torch.randperm(300)[:256].tolist()
    memory = CudaIpc(torch.device("cuda"))
    conversion = quantization(source.layout, smaller.layout, "int8")
    assert conversion is not None
    here = memory.kernels(source.pool)
    for target in (same_kind, smaller):
        memory.wait(memory.mark())
        with memory.queue():
            if target is smaller:
                here.quantize(blocks, target.pool.data_ptr(), blocks, conversion)
            else:
                here.copy(blocks, target.pool.data_ptr(), blocks)
        there = memory.kernels(target.pool)
        with memory.queue():
            there.copy(blocks, None, blocks)
        assert there.total() == here.total() != 0
    assert torch.equal(same_kind.pool[blocks], source.pool[blocks])
    codes, wanted = smaller.pool[blocks], expected.pool[blocks]
    assert float((codes != wanted).float().mean()) < 1e-3  # a scale may round the other way
