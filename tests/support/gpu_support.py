"""What tests on a GPU share: the device, random matrices, and executors over one tiny model."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tiny import TinyModel

from triblade.engine.cuda import CudaExecutor
from triblade.engine.executor import TorchExecutor
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig, model_config
from triblade.models.decoder import Decoder
from triblade.models.weights import load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.cuda.device import CudaDevice
from triblade.ops.packing import QuantizedMatrix
from triblade.ops.reference import ReferenceBackend
from triblade.quant.device_weights import DeviceReader

CUDA = torch.device("cuda")


@cache
def cuda_device() -> CudaDevice:
    """One for all tests, which keeps what was compiled."""
    return CudaDevice(CUDA)


def random_codes(rows: int, inputs: int, group: int, bits: int, *, has_offsets: bool) -> QuantizedMatrix:
    """Codes about their zero point, scaled to a matrix of unit gain, with a bias."""
    spread = inputs**-0.5 * (0.5 if bits == 4 else 0.03)
    scales = (torch.rand(rows, inputs // group, device=CUDA) + 0.5) * spread
    offsets = -(1 << bits - 1) * scales + torch.randn_like(scales) * spread if has_offsets else None
    return QuantizedMatrix(
        codes=torch.randint(0, 1 << bits, (rows, inputs), dtype=torch.uint8, device=CUDA),
        scales=scales.half(),
        offsets=None if offsets is None else offsets.half(),
        bits=bits,
        bias=torch.randn(rows, device=CUDA),
    )


def gpu_cache(model: TinyModel, codec: str, num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return gpu_cache_of(model_config(model.hf_config), codec, num_blocks, dtype)


def gpu_cache_of(config: ModelConfig, codec: str, num_blocks: int, dtype: torch.dtype) -> KVCache:
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        codec=codec,
    )
    return KVCache(layout, num_blocks, dtype, CUDA)


def gpu_executor(
    model: TinyModel,
    codec: str = "bfloat16",
    scheme: Any = None,
    num_blocks: int = 512,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaExecutor:
    config = model_config(model.hf_config)
    return CudaExecutor(
        config,
        DeviceReader(model.source, config, dtype, CUDA, scheme).read(),
        gpu_cache(model, codec, num_blocks, dtype),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        device=cuda_device(),
    )


def gpu_reference(model: TinyModel, dtype: torch.dtype, num_blocks: int = 512) -> TorchExecutor:
    config = model_config(model.hf_config)
    weights = load_weights(model.source, config, dtype, CUDA)
    decoder = Decoder(config, weights, ReferenceBackend(eager_attention), config.context_length)
    cache = gpu_cache(model, str(dtype).removeprefix("torch."), num_blocks, dtype)
    return TorchExecutor(decoder, cache, config.vocab_size)
