"""Rows that are placed: the same kernels as on a GPU, emulated, between two workers of one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cuda_engines import cuda_open, on_emulated_device
from cuda_models import kernel_folder
from disaggregated import PLACED, pair
from emulated_device import EmulatedIpcConnector, EmulatedMemory
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm
from two_engines import storages, two_engines

from triblade.disagg.one_process import OneProcess
from triblade.disagg.placed_rows import quantization
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IDS = prompt(57, seed=21)


@cache
def model() -> OpenModel:
    return open_tiny("llama")


def layout(codec: str, head_dim: int = 64) -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=2, head_dim=head_dim, block_size=8, codec=codec)


def filled(codec: str, dtype: torch.dtype, head_dim: int = 64) -> KVCache:
    """Six blocks of random numbers of very different sizes, zeros among them."""
    cache = KVCache(layout(codec, head_dim), 6, dtype)
    generator = torch.Generator().manual_seed(3)
    for layer in range(3):
        k, v = torch.randn(2, 48, 2, head_dim, generator=generator)
        k *= torch.logspace(-6, 3, 48)[:, None, None]
        v[::7] = 0
        cache.write(layer, torch.arange(48), k.to(dtype), v.to(dtype))
    return cache


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_rows_are_copied_and_summed_where_they_are(codec: str) -> None:
    source, memory = filled(codec, torch.float32), EmulatedMemory(EmulatedIpcConnector())
    target = KVCache(source.layout, 9, torch.float32)
    here, there = memory.kernels(source.pool), memory.kernels(target.pool)
    with memory.queue():
        here.copy([4, 0, 5], target.pool.data_ptr(), [1, 8, 2])
        there.copy([1, 8, 2], None, [1, 8, 2])
    assert torch.equal(target.pool[[1, 8, 2]], source.pool[[4, 0, 5]])
    assert not target.pool[[0, 3, 4, 5, 6, 7]].any()
    assert here.total() == there.total() != 0
    for wrong in ([8, 1, 2], [1, 8, 3]):
        with memory.queue():
            there.copy(wrong, None, wrong)
        assert there.total() != here.total()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_become_int8_as_the_codec_makes_them(dtype: torch.dtype, head_dim: int) -> None:
    source = filled(str(dtype).removeprefix("torch."), dtype, head_dim)
    memory = EmulatedMemory(EmulatedIpcConnector())
    target = KVCache(layout("int8", head_dim), 9, dtype)
    conversion = quantization(source.layout, target.layout, "int8")
    assert conversion is not None
    here, there = memory.kernels(source.pool), memory.kernels(target.pool)
    with memory.queue():
        here.quantize([2, 5], target.pool.data_ptr(), [7, 0], conversion)
        there.copy([7, 0], None, [7, 0])
    assert here.total() == there.total() != 0
    expected = KVCache(layout("int8", head_dim), 9, dtype)
    slots = torch.cat((torch.arange(56, 64), torch.arange(8)))
    for layer in range(3):
        k, v = (x.flatten(0, 1) for x in source.read(layer, torch.tensor([[2, 5]])))
        expected.write(layer, slots, k, v)
    assert torch.equal(target.pool, expected.pool)


@pytest.mark.parametrize(
    ("theirs", "codec"), [("int8", "raw"), ("float16", "int8"), ("bfloat16", "pca-lut"), ("float32", "int8")]
)
def test_what_is_not_done_on_the_way_is_said(theirs: str, codec: str) -> None:
    if (theirs, codec) == ("int8", "raw"):
        assert quantization(layout("bfloat16"), layout("int8"), codec) is not None  # the handshake refuses it before
        return
    with pytest.raises(Exception, match=r"changes rows|do not become"):
        quantization(layout("bfloat16"), layout(theirs), codec)


def test_rows_are_placed_and_the_memory_is_left_with_the_link() -> None:
    connector = EmulatedIpcConnector()
    with pair(model(), PLACED, way=connector) as workers:
        (completions,) = workers.generate([IDS], GREEDY)
        assert completions[0].token_ids == tiny_llm(model()).generate([IDS], GREEDY)[0][0].token_ids
        assert workers.remote.counts.num_complete == 1
        assert connector.num_open == 2
    assert connector.num_open == 0


def test_without_access_rows_are_sent_and_the_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with pair(model(), PLACED, way=EmulatedIpcConnector("no peer access")) as workers:
        for seed in (1, 2):
            ids = prompt(40, seed=seed)
            (completions,) = workers.generate([ids], GREEDY)
            assert completions[0].token_ids == tiny_llm(model()).generate([ids], GREEDY)[0][0].token_ids
        assert workers.remote.counts.num_complete == 2
    told = [record for record in caplog.records if "instead of placing them: no peer access" in record.getMessage()]
    assert len(told) == 1


def test_two_engines_of_one_process_on_a_device(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the weights there, and rows are placed."""
    on_emulated_device(kernel_folder(tmp_path_factory), monkeypatch)
    monkeypatch.setattr(OneProcess, "row_memory", lambda _, pool: EmulatedMemory(EmulatedIpcConnector()))
    opened, settings = cuda_open(), {"deterministic": False, "block_size": 16, "num_kv_blocks": 80}
    expected = tiny_llm(opened, **settings).generate([IDS], GREEDY)[0][0].token_ids
    with two_engines(opened, **settings) as roles:
        assert roles.prefill.runner.executor.name == roles.decode.runner.executor.name == "cuda"
        assert storages(roles.prefill) == storages(roles.decode)
        assert roles.generate([IDS], GREEDY)[0][0].token_ids == expected
        assert roles.counts.num_complete == roles.counts.num_fetches == 1
