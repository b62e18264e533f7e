"""Whole engines on the CUDA kernels, emulated on the host, with steps that are replayed as graphs would be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_models import RecordingExecutor
from emulated_device import EmulatedDevice
from tiny_engine import open_tiny

from triblade.config import EngineConfig
from triblade.engine import build
from triblade.engine.build import assemble
from triblade.llm import LLM
from triblade.models.loader import OpenModel

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}


def cuda_open(name: str = "llama", **overrides: Any) -> OpenModel:
    """A tiny model that the kernels take, in bfloat16."""
    return replace(open_tiny(name, **{**SIZES, **overrides}), dtype=torch.bfloat16)


def on_emulated_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on are; kernels are compiled into `folder`."""
    monkeypatch.setattr(build, "choose_kernels", lambda *_: "cuda")
    monkeypatch.setattr(build, "CudaDevice", lambda *_: EmulatedDevice(folder))
    monkeypatch.setattr(build, "CudaExecutor", RecordingExecutor)


def cuda_llm(model: OpenModel, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """An engine around it; kernels are compiled into `folder`."""
    on_emulated_device(folder, monkeypatch)
    settings = {"block_size": 16, "num_kv_blocks": 40, "device": "cpu", **options}
    return LLM.from_engine(assemble(EngineConfig(model=model.name, **settings), model, torch.device("cpu")))
