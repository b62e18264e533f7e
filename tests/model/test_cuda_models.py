"""Whole tiny models on the CUDA kernels, emulated on the host: against float32, in chunks, batches, and with quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_models import CPU, config_of, cuda_executor, cuda_tiny, prompts, reference_executor, relative
from native_models import all_logits, compute, rounded_source, sequence
from tiny import prompt

from triblade.engine.cuda import why_not_cuda
from triblade.models.config import model_config
from triblade.ops.cuda.packing import unpack
from triblade.quant.device_weights import DeviceReader, device_bytes

pytestmark = pytest.mark.usefixtures("one_torch_thread")

IDS = prompt(30)
# Of bfloat16's roundings in a model of three layers; the reference in bfloat16 is as far from float32.
BOUND = 4e-2


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


KINDS = [
    ("llama-bias", "bfloat16"),
    ("qwen2-window", "int8"),
    ("qwen3", "bfloat16"),
    ("gemma2", "int8"),
    ("gemma3", "bfloat16"),
    ("phi3-partial", "bfloat16"),
]


@pytest.mark.parametrize(("family", "codec"), KINDS)
def test_every_family(family: str, codec: str, folder: Path) -> None:
    """Biases, q/k norms, post norms, windows, soft caps, gelu, partial rotation, tied and separate heads."""
    model = cuda_tiny(family)
    config = config_of(model)
    ours = all_logits(cuda_executor(model.source, config, folder, codec=codec), IDS, 11)
    expected = all_logits(reference_executor(model.source, config, codec, torch.float32), IDS)
    assert relative(ours, expected) < BOUND
    assert bool((ours.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9)


def test_float16(folder: Path) -> None:
    model = cuda_tiny("qwen2")
    config = config_of(model)
    ours = all_logits(cuda_executor(model.source, config, folder, torch.float16), IDS)
    assert relative(ours, all_logits(reference_executor(model.source, config, "float32", torch.float32), IDS)) < 6e-3


def test_mixed_steps_and_more_rows_than_are_streamed(folder: Path) -> None:
    """Chunks of several lengths and single tokens in one step, some of them beyond the streaming kernel."""
    model = cuda_tiny("mistral", max_position_embeddings=320)
    config = config_of(model)
    ours = cuda_executor(model.source, config, folder)
    alone = reference_executor(model.source, config, "bfloat16", torch.float32)
    tokens = prompts((150, 40, 9))
    requests = [sequence(number, ids) for number, ids in enumerate(tokens)]
    made = [compute(ours, requests, sizes) for sizes in ((140, 20, 5), (9, 19, 3), (1, 1, 1))]
    for number, ids in enumerate(tokens):
        rows = torch.cat([step[number] for step in made])
        assert relative(rows, all_logits(alone, ids, number=number)) < BOUND


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_weights_rounded_while_loading(scheme: Any, folder: Path) -> None:
    """The model computes what its codes say: the reference gets them spelled out."""
    model = cuda_tiny("llama", hidden_size=64, intermediate_size=192)
    config = config_of(model)
    weights = DeviceReader(model.source, config, torch.bfloat16, CPU, scheme).read()
    layer = weights.layers[0]
    assert [m.bits for m in (layer.qkv, layer.output, layer.gate_up, layer.down)] == [4 if scheme == "int4" else 8] * 4
    expected = rounded_source(model, torch.float32, scheme).tensors["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(unpack(layer.down), expected)
    total = sum(m.nbytes for w in weights.layers for m in (w.qkv, w.output, w.gate_up, w.down))
    assert total < device_bytes(model.source, config, torch.bfloat16, scheme)
    logits = all_logits(cuda_executor(model.source, config, folder, scheme=scheme), IDS)
    assert bool(logits.isfinite().all())


def test_what_is_left_to_the_reference() -> None:
    config = model_config(cuda_tiny("llama").hf_config)
    assert why_not_cuda(config, torch.bfloat16, "bfloat16") is None
    assert why_not_cuda(config, torch.float32, "float32") == "dtype torch.float32 (CUDA kernels: bfloat16, float16)"
    assert "KV cache dtype float16" in str(why_not_cuda(config, torch.bfloat16, "float16"))
    narrow = model_config(cuda_tiny("llama", head_dim=20).hf_config)
    assert why_not_cuda(narrow, torch.bfloat16, "int8") == "80 inputs (CUDA kernels: a multiple of 64)"
