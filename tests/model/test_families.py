"""Every model family computes what transformers computes, for a prompt of three windows, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, PROMPT_TOKENS, TinyModel, prompt, tiny_model
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError
from triblade.models.config import model_config
from triblade.models.decoder import Decoder, DenseAttend
from triblade.models.weights import load_weights, resolve_tied_head
from triblade.ops.attention import eager_attention, sdpa_attention
from triblade.ops.backend import Backend
from triblade.ops.deterministic import DeterministicBackend
from triblade.ops.reference import ReferenceBackend


def our_logits(model: TinyModel, ids: list[int], backend: Backend, hf_config: dict[str, Any] | None = None) -> Tensor:
    config = resolve_tied_head(model_config(hf_config or model.hf_config), model.source.names())
    weights = load_weights(model.source, config, torch.float32)
    decoder = Decoder(config, weights, backend, context_length=len(ids))
    attend = DenseAttend(config, backend, len(ids))
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(ids), torch.arange(len(ids)), attend)
        return decoder.logits(hidden)


def backends(name: str) -> list[Backend]:
    fused = [] if name == "gemma2" else [ReferenceBackend(sdpa_attention)]
    return [ReferenceBackend(eager_attention), DeterministicBackend(), *fused]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str) -> None:
    model = tiny_model(name)
    ids = prompt(PROMPT_TOKENS)
    expected = model.oracle_logits(ids)
    assert expected.std() > 0.1  # the model says something
    for backend in backends(name):
        torch.testing.assert_close(our_logits(model, ids, backend), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["mistral", "qwen2-window", "phi3", "gemma2", "gemma3"])
def test_the_window_matters(name: str) -> None:
    """The comparison above can fail: without the window the logits differ."""
    model = tiny_model(name)
    ids = prompt(PROMPT_TOKENS)
    full = {**model.hf_config, "sliding_window": 4096}
    unwindowed = our_logits(model, ids, ReferenceBackend(eager_attention), full)
    assert (unwindowed - model.oracle_logits(ids)).abs().max() > 1e-2


def test_gemma3_old_and_new_spelling_agree() -> None:  # A19
    new = model_config(tiny_model("gemma3").hf_config)
    old = dict(tiny_model("gemma3").hf_config)
    for key in ("layer_types", "rope_parameters"):
        old.pop(key)
    old.update(sliding_window_pattern=6, rope_theta=1_000_000.0, rope_local_base_freq=10_000.0)
    assert model_config(old) == new
    assert [layer.window is not None for layer in new.layers] == [True] * 5 + [False, True]


@pytest.mark.parametrize(("present", "stated"), [(True, None), (False, None), (False, False), (True, False)])
def test_missing_tie_key_is_decided_by_the_tensors(present: bool, stated: bool | None) -> None:  # A06
    model = tiny_model("llama" if present else "llama-tied")
    hf_config = {key: value for key, value in model.hf_config.items() if key != "tie_word_embeddings"}
    if stated is not None:
        hf_config["tie_word_embeddings"] = stated
    ids = prompt(9)
    logits = our_logits(model, ids, ReferenceBackend(), hf_config)
    torch.testing.assert_close(logits, model.oracle_logits(ids), atol=2e-4, rtol=1e-3)


def test_a_missing_parameter_is_named() -> None:  # A01
    model = tiny_model("llama")
    del model.source.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        our_logits(model, prompt(3), ReferenceBackend())


def test_an_unknown_parameter_is_named() -> None:
    model = tiny_model("llama")
    model.source.tensors["model.layers.1.self_attn.q_proj.lora_A"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"lora_A"):
        our_logits(model, prompt(3), ReferenceBackend())


def test_a_wrong_shape_is_named() -> None:
    model = tiny_model("llama")
    model.source.tensors["model.norm.weight"] = torch.zeros(47)
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight has shape \[47\], the configuration asks for \[48\]"
    ):
        our_logits(model, prompt(3), ReferenceBackend())


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        model_config({"architectures": ["LamaForCausalLM"]})


def test_missing_shape_key_is_named() -> None:
    with pytest.raises(CheckpointError, match="hidden_size"):
        model_config({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2})


def test_rope_type_spellings_agree() -> None:  # A15
    base = tiny_model("llama-yarn").hf_config
    base.pop("rope_parameters")
    spellings = [{"type": "yarn"}, {"rope_type": "yarn"}, {"type": "linear", "rope_type": "yarn"}]
    settings = {"factor": 4.0, "original_max_position_embeddings": 16}
    configs = {model_config({**base, "rope_theta": 1e4, "rope_scaling": {**settings, **name}}) for name in spellings}
    assert len(configs) == 1


@pytest.mark.parametrize(
    ("kind", "stated", "expected"),
    [("yarn", 64, 64), ("llama3", 64, 64), ("linear", 2048, 4096), ("dynamic", 2048, 4096), ("default", 2048, 2048)],
)
def test_context_length(kind: str, stated: int, expected: int) -> None:  # A16, A17
    base = dict(tiny_model("llama").hf_config)
    base.pop("rope_parameters")
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 32}
    config = model_config({**base, "max_position_embeddings": stated, "rope_scaling": scaling})
    assert config.context_length == expected


def test_position_beyond_the_tables_is_an_error() -> None:  # A16: no silent read past the table
    model = tiny_model("llama-yarn")
    config = model_config(model.hf_config)
    decoder = Decoder(config, load_weights(model.source, config, torch.float32), ReferenceBackend(), 64)
    decoder.forward(torch.tensor([5]), torch.tensor([63]), lambda layer, q, k, v: q)
    with pytest.raises(IndexError):
        decoder.forward(torch.tensor([5]), torch.tensor([64]), lambda layer, q, k, v: q)
