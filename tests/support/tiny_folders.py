"""A tiny model as a folder on disk, with a tokenizer of words w0, w1, ..., and text in such words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import tiny_model
from tiny_engine import word_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def tiny_folder(path: Path, name: str = "llama", dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    """64 wide, 96 in between, so that groups of 32 divide everything and 128 nothing."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model(name, **{**sizes, **overrides})
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.to(dtype).contiguous() for key, tensor in model.source.tensors.items()}, path / "model.safetensors"
    )
    config = {**model.hf_config, "dtype": str(dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(config, default=str))
    (path / "tokenizer.json").write_text(word_tokenizer(96).backend.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def words(count: int, seed: int = 0, low: int = 3, high: int = 96) -> str:
    """Text of `count` tokens."""
    numbers = random.Random(seed)
    return " ".join(f"w{numbers.randrange(low, high)}" for _ in range(count))
