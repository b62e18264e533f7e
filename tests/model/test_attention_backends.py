"""Ways to attend: all give what the formula gives, and what cannot be taken is said and replaced (E2)."""

from __future__ import annotations

import logging
import sys
from array import array
from functools import cache
from types import ModuleType
from typing import Any

import attention_packages
import pytest
import torch
from cuda_models import config_of, cuda_executor, cuda_tiny, kernel_folder, reference_executor, relative
from native_models import all_logits
from tiny import prompt

from triblade.engine.attend import AttentionNeeds, EagerAttention, SdpaAttention
from triblade.engine.attention_choice import choose_attention
from triblade.engine.attention_packages import FlashAttention, FlashInfer
from triblade.engine.batch import Batch, NobodysItem
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig

HOPPER = (9, 0)
FAMILIES = ("qwen2-window", "gemma2", "llama")


@cache
def config(family: str) -> ModelConfig:
    return config_of(cuda_tiny(family))


def filled_cache(config: ModelConfig, codec: str, block_size: int) -> KVCache:
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        codec=codec,
    )
    cache = KVCache(layout, 12 * 16 // block_size + 5, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(cache.num_blocks * block_size)
    for layer in range(config.num_layers):
        k, v = (torch.randn(len(slots), config.num_kv_heads, config.head_dim, generator=generator) for _ in "kv")
        cache.write(layer, slots, k.bfloat16(), v.bfloat16())
    return cache


def needs(config: ModelConfig, **changes: Any) -> AttentionNeeds:
    values = {"model": config, "dtype": torch.bfloat16, "codec": "bfloat16", "capability": HOPPER}
    return AttentionNeeds(**(values | changes))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Both packages are installed; what flash-attn was called with."""
    for family in FAMILIES:  # transformers asks for these packages while it is imported
        config(family)
    found: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "flash_attn", attention_packages.flash_attn(found))
    monkeypatch.setitem(sys.modules, "flashinfer", attention_packages.flashinfer())
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "codec", "block_size"),
    [
        (SdpaAttention, "bfloat16", 16),
        (FlashAttention, "bfloat16", 16),
        (FlashAttention, "bfloat16", 256),
        (FlashAttention, "int8", 16),
        (FlashInfer, "bfloat16", 16),
    ],
)
def test_every_way_gives_the_same(
    family: str, kind: Any, codec: str, block_size: int, calls: list[dict[str, Any]]
) -> None:
    """Single tokens of several lengths, then chunks, in one step over scattered blocks; windows and soft caps."""
    model = config(family)
    asked = needs(model, codec=codec)
    if kind.why_not(asked) is not None:
        assert (kind, family) == (SdpaAttention, "gemma2")
        return
    pool = filled_cache(model, codec, block_size)
    tables = [array("i", [4, 2]), array("i", [0, 3]), array("i", [1, 4]), array("i", [3, 1])]
    items = [
        NobodysItem(tables[0], 20, 1),
        NobodysItem(tables[1], 3, 1),
        NobodysItem(tables[2], 11, 7),
        NobodysItem(tables[3], 0, 7),
    ]
    groups = Batch.build(items, block_size, torch.device("cpu")).groups
    q = torch.randn(16, model.num_heads + 2, model.head_dim).bfloat16()[:, : model.num_heads]
    ways = [made(pool, model) for made in (EagerAttention, kind)]
    for layer in range(model.num_layers):
        results = []
        for way in ways:
            way.begin(groups)
            results.append(way.attend(layer, q))
        assert relative(results[1], results[0]) < 6e-3, layer
    if kind is FlashAttention:
        assert all((call["block_table"] is not None) == (block_size == 256) for call in calls)
        windows = {layer.window for layer in model.layers}
        assert {call["window_size"] for call in calls} == {(-1 if w is None else w - 1, -1) for w in windows}


@pytest.mark.parametrize(("codec", "is_paged"), [("bfloat16", True), ("int8", False)])
def test_flash_attn_4_reads_any_block(
    codec: str, is_paged: bool, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 tokens as well, where version 2 needs multiples of 256; codes of 8 bits are gathered."""
    for name, module in attention_packages.flash_attn_4(calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    model = config("gemma2")
    pool = filled_cache(model, codec, 16)
    items = [NobodysItem(array("i", [4, 2]), 20, 3), NobodysItem(array("i", [0, 3]), 13, 3)]
    q = torch.randn(6, model.num_heads, model.head_dim).bfloat16()
    results = []
    for way in (EagerAttention(pool, model), FlashAttention(pool, model)):
        way.begin(Batch.build(items, 16, torch.device("cpu")).groups)
        results.append(torch.stack([way.attend(layer, q) for layer in range(model.num_layers)]))
    assert relative(results[1], results[0]) < 6e-3
    assert [call["block_table"] is not None for call in calls] == [is_paged] * model.num_layers


def chosen(
    wanted: str, asked: AttentionNeeds, caplog: pytest.LogCaptureFixture, default: str = "sdpa"
) -> tuple[Any, list[str]]:
    pool = filled_cache(asked.model, asked.codec, 16)
    caplog.clear()
    with caplog.at_level(logging.INFO, "triblade.engine.attention_choice"):
        attention = choose_attention(wanted, (default, "fastest"), asked, pool)
    return attention, caplog.messages


def test_what_is_asked_for_is_taken(calls: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    asked = needs(config("llama"))
    for name, kind in (("flash_attn", FlashAttention), ("flashinfer", FlashInfer), ("eager", EagerAttention)):
        attention, lines = chosen(name, asked, caplog)
        assert isinstance(attention, kind)
        assert lines == [f"attention {name}: asked for"]
    assert chosen("auto", asked, caplog)[1] == ["attention sdpa: fastest"]
    assert chosen("triblade", asked, caplog, "triblade") == (None, ["attention triblade: asked for"])


FALLBACKS = [
    ("flash_attn", {}, "it cannot be imported (No module named 'flash_attn')"),
    ("flashinfer", {}, "it cannot be imported (No module named 'flashinfer')"),
    ("triton", {}, "it cannot be imported (No module named 'triton')"),
    ("triton", {"codec": "int8"}, "KV cache dtype int8 (triton: that of the model)"),
    ("flash_attn", {"capability": None}, "it needs a CUDA device"),
    ("flash_attn", {"capability": (7, 5)}, "compute capability 7.5 (flash_attn: 8.0)"),
    ("flash_attn", {"dtype": torch.float32}, "dtype float32 (flash_attn: bfloat16, float16)"),
    ("flashinfer", {"codec": "int8"}, "KV cache dtype int8 (flashinfer: that of the model)"),
    ("triblade", {}, "the reference backend computes with torch"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), FALLBACKS)
def test_what_cannot_be_taken_is_replaced(
    name: str, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("flash_attn", "flashinfer", "triton"):
        monkeypatch.setattr(sys, "path", [])  # also where they are installed
        monkeypatch.delitem(sys.modules, package, raising=False)
    attention, lines = chosen(name, needs(config("llama"), **changes), caplog)
    assert isinstance(attention, SdpaAttention)
    assert lines == [
        f"attention {name} is not taken: {reason}; sdpa is taken instead",
        "attention sdpa: fastest",
    ]


def test_a_soft_cap_is_not_for_sdpa(caplog: pytest.LogCaptureFixture) -> None:
    attention, lines = chosen("sdpa", needs(config("gemma2")), caplog, "eager")
    assert isinstance(attention, EagerAttention)
    assert "torch's kernel cannot cap scores" in lines[0]


def broken(_q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def wrong(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return q


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (broken, "it fails here (RuntimeError: FlashAttention only supports Ampere GPUs or newer.)"),
        (wrong, "it computes something else than the formula"),
    ],
)
def test_a_package_is_tried_before_it_is_trusted(
    function: Any, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = function
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    attention, lines = chosen("flash_attn", needs(config("llama")), caplog)
    assert isinstance(attention, SdpaAttention)
    assert reason in lines[0]


@pytest.mark.parametrize(("family", "kind"), [("qwen2-window", SdpaAttention), ("gemma2", EagerAttention)])
def test_cuda_kernels_with_another_attention(family: str, kind: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everything else of the step stays with the kernels: prompts in chunks and single tokens."""
    model = cuda_tiny(family)
    shape = config_of(model)
    executor = cuda_executor(model.source, shape, kernel_folder(tmp_path_factory))
    executor.attend_by(kind(executor.cache, shape))
    ids = prompt(30)
    expected = all_logits(reference_executor(model.source, shape, "bfloat16", torch.float32), ids)
    rounded = all_logits(reference_executor(model.source, shape, "bfloat16", torch.bfloat16), ids)
    for chunk in (11, 1):
        assert relative(all_logits(executor, ids, chunk), expected) < 1.25 * relative(rounded, expected)
