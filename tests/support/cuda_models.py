"""Tiny models in sizes that the CUDA kernels take, on the emulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice
from native_models import SEQUENCE_BLOCKS
from tiny import TinyModel, tiny_model

from triblade.engine.cuda import CudaExecutor
from triblade.engine.cuda_steps import Recorded, RecordedSteps, Shape
from triblade.engine.executor import TorchExecutor
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig, model_config
from triblade.models.decoder import Decoder
from triblade.models.weights import load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.reference import ReferenceBackend
from triblade.quant.device_weights import DeviceReader

CPU = torch.device("cpu")


def kernel_folder(factory: pytest.TempPathFactory) -> Path:
    """One folder of compiled kernels for all tests of a session."""
    folder = factory.getbasetemp() / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


def cuda_tiny(name: str, **overrides: Any) -> TinyModel:
    return tiny_model(name, **{"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, **overrides})


def cache_for(config: ModelConfig, codec: str, dtype: torch.dtype) -> KVCache:
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        codec=codec,
    )
    return KVCache(layout, 4 * SEQUENCE_BLOCKS, dtype)


def cuda_executor(
    source: Any,
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    codec: str | None = None,
    scheme: Any = None,
    kind: Any = CudaExecutor,
) -> Any:
    weights = DeviceReader(source, config, dtype, CPU, scheme).read()
    return kind(
        config,
        weights,
        cache_for(config, codec or str(dtype).removeprefix("torch."), dtype),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        device=EmulatedDevice(folder),
    )


class Replayed:
    """What stands for a CUDA graph: the launches again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        self._run()


class RecordingSteps(RecordedSteps):
    """Recorded steps without a GPU."""

    def _record(self, shape: Shape, draws: bool) -> Recorded:
        inputs = self._inputs(shape)
        self._decoder.reserve(shape.size, shape.queries)
        return Recorded(Replayed(lambda: self._run(inputs, shape.queries, draws)), inputs, shape, draws)


class RecordingExecutor(CudaExecutor):
    """An executor that records without a GPU."""

    steps_kind = RecordingSteps

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._records = True

    @property
    def replays(self) -> int:
        return sum(step.graph.count for step in self._steps.recorded.values())


def reference_executor(source: Any, config: ModelConfig, codec: str, dtype: torch.dtype) -> TorchExecutor:
    weights = load_weights(source, config, dtype)
    decoder = Decoder(config, weights, ReferenceBackend(eager_attention), config.context_length)
    return TorchExecutor(decoder, cache_for(config, codec, dtype), config.vocab_size)


def config_of(model: TinyModel) -> ModelConfig:
    return model_config(model.hf_config)


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference in parts of the expected one's own."""
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]
