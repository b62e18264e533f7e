"""GGUF files read as transformers checkpoints: values, names, row order, norms and configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import TYPES, metadata, random_tensor, write, write_model
from tiny import tiny_model

from triblade.errors import CheckpointError, UnsupportedError
from triblade.models.checkpoint import open_checkpoint
from triblade.models.config import ModelConfig, model_config
from triblade.models.gguf_checkpoint import GGUFCheckpoint
from triblade.models.gguf_config import llama3_factors
from triblade.models.rope import inverse_frequencies
from triblade.models.weights import resolve_tied_head

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
ARCHITECTURES |= {"gemma2": "gemma2", "gemma3": "gemma3", "llama-mha": "llama", "llama-mqa": "llama"}
ARCHITECTURES |= {"llama-tied": "llama", "llama-bias": "llama", "llama-head-dim": "llama"}


def written(path: Path, name: str, **extra: Any) -> tuple[GGUFCheckpoint, dict[str, torch.Tensor], dict[str, Any]]:
    """A tiny transformers model, its float16 state dict, and the same model through a GGUF file."""
    # llama.cpp takes the scale of Gemma 2 from head_dim; the file has no key for it.
    own = {"query_pre_attn_scalar": 16} if name.startswith("gemma") else {}
    model = tiny_model(name, **own)
    halves = {key: value.half().float() if value.ndim > 1 else value for key, value in model.source.tensors.items()}
    config = model.hf_config
    entries = {"rope.freq_base": theta(config)}
    if config.get("sliding_window") and ARCHITECTURES[name] != "qwen2":
        entries["attention.sliding_window"] = config["sliding_window"]
    if name == "gemma2":
        entries |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return (
        GGUFCheckpoint(write_model(path / f"{name}.gguf", ARCHITECTURES[name], config, halves, **entries, **extra)),
        halves,
        config,
    )


def theta(config: Mapping[str, Any]) -> float:
    rope = config["rope_parameters"]
    return float(rope.get("full_attention", rope)["rope_theta"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float16_gguf_equals_safetensors_bit_for_bit(name: str, tmp_path: Path) -> None:  # A30
    checkpoint, state, config = written(tmp_path, name)
    assert checkpoint.names() == frozenset(state)
    for key, expected in state.items():
        if "norm" in key and name.startswith("gemma"):  # stored as w + 1 in float32: one rounding each way
            torch.testing.assert_close(checkpoint.tensor(key), expected, atol=1.2e-7, rtol=0)
        else:
            assert torch.equal(checkpoint.tensor(key), expected), key
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.size_bytes == 2 * sum(value.numel() for value in state.values())
    assert config["num_attention_heads"] == checkpoint.config["num_attention_heads"]


def test_q_and_k_are_permuted_with_their_own_head_counts_for_llama_only(tmp_path: Path) -> None:  # A30
    """The comparison above can fail: stored rows of q and k differ from transformers' in a llama file, only there."""
    for name, permuted in (("llama", True), ("qwen2", False)):
        checkpoint, state, _ = written(tmp_path, name)
        file = gguf.GGUFReader(tmp_path / f"{name}.gguf")
        stored = {t.name: torch.from_numpy(t.data.astype(np.float32)) for t in file.tensors}
        for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
            key = f"model.layers.1.self_attn.{ours}.weight"
            assert torch.equal(stored[f"blk.1.{theirs}.weight"], state[key]) is not permuted
            assert torch.equal(checkpoint.tensor(key), state[key])
        assert torch.equal(stored["blk.1.attn_v.weight"], state["model.layers.1.self_attn.v_proj.weight"])


def comparable(config: ModelConfig) -> dict[str, Any]:
    """`factor` of an unscaled rope has no meaning, and where a default rope began to be trained neither."""
    fields = dataclasses.asdict(config)
    fields["ropes"] = [(inverse_frequencies(rope, 64)[0].tolist(), rope.rotary_dim) for rope in config.ropes]
    return fields


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama-bias"])
def test_the_configuration_means_what_the_original_means(name: str, tmp_path: Path) -> None:
    checkpoint, _, hf = written(tmp_path, name)
    ours = comparable(resolve_tied_head(model_config(checkpoint.config), checkpoint.names()))
    theirs = comparable(resolve_tied_head(model_config(hf), checkpoint.names()))
    assert ours == theirs


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_every_type_dequantizes_exactly(kind: str, tmp_path: Path) -> None:
    """Values equal the gguf package's own dequantization of the stored bytes, rows in order."""
    config = {**tiny_model("qwen2").hf_config, "num_hidden_layers": 1}
    rng = np.random.default_rng(0)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    rows, columns = 6, 512
    if kind.endswith("_K"):  # gguf cannot quantize to these: random bytes with sane scales are as good
        raw = rng.integers(0, 256, (rows, columns // block_elements * block_bytes), dtype=np.uint8)
        raw = with_finite_scales(raw.reshape(-1, block_bytes), kind).reshape(rows, -1)
    else:
        raw = gguf.quants.quantize(random_tensor(rows, columns).numpy(), TYPES[kind])
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    for key, value in metadata(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"qwen2.{key}", value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint(tmp_path / "x.gguf")
    expected = gguf.quants.dequantize(raw, TYPES[kind]).astype(np.float32)
    tensor = checkpoint.tensor("model.embed_tokens.weight")
    assert tensor.shape == (rows, columns)
    assert tensor.dtype == torch.float32
    assert torch.isfinite(tensor).all()
    assert torch.equal(tensor, torch.from_numpy(expected.copy()))
    blocks, stored = checkpoint.raw("model.embed_tokens.weight")
    assert stored == TYPES[kind]
    np.testing.assert_array_equal(blocks, raw.view(np.uint8).reshape(rows, -1))


def with_finite_scales(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Random bytes, but with half-precision scales that are numbers."""
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for place in places:
        blocks[:, place : place + 2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks


def test_raw_blocks_of_a_permuted_matrix_are_in_order(tmp_path: Path) -> None:
    """Whole rows of blocks can be mapped onto kernels: dequantizing raw blocks gives the tensor."""
    weight = random_tensor(8 * 4, 64)
    config = {**tiny_model("llama").hf_config, "num_attention_heads": 4, "num_key_value_heads": 2}
    entries = metadata(config)
    tensors = {"token_embd.weight": (random_tensor(4, 64), TYPES.Q8_0), "blk.0.attn_q.weight": (weight, TYPES.Q4_0)}
    checkpoint = GGUFCheckpoint(write(tmp_path / "x.gguf", "llama", entries, tensors))
    blocks, kind = checkpoint.raw("model.layers.0.self_attn.q_proj.weight")
    values = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(values, checkpoint.tensor("model.layers.0.self_attn.q_proj.weight"))
    stored = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    assert torch.equal(values[1], stored[2])  # of 8 rows per head, 0 2 4 6 are the first half
    assert torch.equal(values[4], stored[1])


def test_other_types_and_architectures_are_refused_by_name(tmp_path: Path) -> None:
    config = metadata(tiny_model("llama").hf_config)
    embedding = {"token_embd.weight": (random_tensor(4, 256), TYPES.F32)}
    path = write(tmp_path / "t.gguf", "llama", config, {"token_embd.weight": (random_tensor(4, 256), TYPES.TQ1_0)})
    with pytest.raises(UnsupportedError, match=r"'token_embd\.weight'.*TQ1_0"):
        GGUFCheckpoint(path)
    with pytest.raises(UnsupportedError, match="'mamba'") as error:
        GGUFCheckpoint(write(tmp_path / "a.gguf", "mamba", {}, embedding))
    assert "qwen3" in str(error.value)
    with pytest.raises(UnsupportedError, match="experts"):
        GGUFCheckpoint(write(tmp_path / "m.gguf", "llama", config | {"expert_count": 8}, embedding))
    with pytest.raises(UnsupportedError, match="one of 3 parts"):
        GGUFCheckpoint(write(tmp_path / "s.gguf", "llama", config, embedding, {"split.count": 3}))
    strange = embedding | {"blk.0.ssm_in.weight": (random_tensor(4, 4), TYPES.F32)}
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.ssm_in\.weight'"):
        GGUFCheckpoint(write(tmp_path / "u.gguf", "llama", config, strange))


@pytest.mark.parametrize("value", [None, 0, "many"])
def test_missing_or_senseless_metadata_is_named(value: object, tmp_path: Path) -> None:
    entries = metadata(tiny_model("llama").hf_config)
    entries.pop("block_count")
    entries |= {} if value is None else {"block_count": value}
    tensors = {"token_embd.weight": (random_tensor(4, 48), TYPES.F32)}
    with pytest.raises(CheckpointError, match=r"llama\.block_count in the GGUF file must be a positive number"):
        GGUFCheckpoint(write(tmp_path / "x.gguf", "llama", entries, tensors))


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    entries = metadata(tiny_model("llama").hf_config)
    with pytest.raises(CheckpointError, match=r"no tensor 'token_embd\.weight'"):
        GGUFCheckpoint(write(tmp_path / "x.gguf", "llama", entries, {"output.weight": (random_tensor(4), TYPES.F32)}))


def rope_of(path: Path, architecture: str, entries: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    embedding = {"token_embd.weight": (random_tensor(4, 128), TYPES.F32)}
    base = metadata({**tiny_model("llama").hf_config, "hidden_size": 128, "head_dim": None})
    return dict(
        GGUFCheckpoint(write(path / "x.gguf", architecture, base | dict(entries), embedding | dict(tensors))).config
    )


@pytest.mark.parametrize("scale", [8.0, 32.0])
def test_llama3_frequency_factors_become_its_scaling(scale: float, tmp_path: Path) -> None:
    """The stored divisors are recognised; the frequencies equal those of the published configuration."""
    hf = {
        "rope_type": "llama3",
        "factor": scale,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    published = {**tiny_model("llama").hf_config, "head_dim": 32, "rope_theta": 500000.0, "rope_scaling": hf}
    published["max_position_embeddings"] = 131072
    published.pop("rope_parameters")
    expected = model_config(published).ropes[0]
    plain = 500000.0 ** -(torch.arange(0, 32, 2) / 32)
    factors = plain / inverse_frequencies(expected, 1)[0]
    entries = {"rope.freq_base": 500000.0, "context_length": 131072, "attention.key_length": 32}
    config = rope_of(tmp_path, "llama", entries, {"rope_freqs.weight": (factors, TYPES.F32)})
    assert config["rope_scaling"] == hf
    assert "rope_freqs.weight" not in open_checkpoint(tmp_path / "x.gguf").names()


def test_other_frequency_factors_are_taken_as_they_are(tmp_path: Path) -> None:
    factors = torch.linspace(1, 3, 16)
    config = rope_of(tmp_path, "llama", {"attention.key_length": 32}, {"rope_freqs.weight": (factors, TYPES.F32)})
    frequencies, magnitude = inverse_frequencies(model_config(config).ropes[0], 64)
    torch.testing.assert_close(frequencies, 10000.0 ** -(torch.arange(0, 32, 2) / 32) / factors)
    assert magnitude == 1.0
    assert llama3_factors(1.0, 10000.0, 32) == [1.0] * 16


def test_phi3_longrope_factors_are_configuration(tmp_path: Path) -> None:
    short, long = torch.linspace(1, 2, 12), torch.linspace(1, 9, 12)
    entries = {
        "attention.key_length": 32,
        "rope.dimension_count": 24,
        "context_length": 131072,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.attn_factor": 1.25,
        "attention.sliding_window": 262144,
    }
    tensors = {"rope_factors_short.weight": (short, TYPES.F32), "rope_factors_long.weight": (long, TYPES.F32)}
    rope = model_config(rope_of(tmp_path, "phi3", entries, tensors)).ropes[0]
    assert (rope.kind, rope.rotary_dim, rope.original_context, rope.attention_factor) == ("longrope", 24, 4096, 1.25)
    assert rope.short_factor == tuple(short.tolist())
    assert rope.long_factor == tuple(long.tolist())


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_linear_and_yarn_scaling(kind: str, tmp_path: Path) -> None:
    entries = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "context_length": 128,
    }
    rope = model_config(rope_of(tmp_path, "qwen2", entries, {})).ropes[0]
    assert (rope.kind, rope.factor) == (kind, 4.0)
    if kind == "yarn":
        assert rope.original_context == 32


def test_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'spiral'"):
        rope_of(tmp_path, "qwen2", {"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, {})


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"), [("gemma2", 26, 16), ("gemma2", 46, 12), ("gemma3", 62, 12)]
)
def test_gemma_attention_scale_is_not_in_the_file(architecture: str, layers: int, scalar: int, tmp_path: Path) -> None:
    """27B models divide by hidden / heads (48 / 4 here), the others by head_dim."""
    config = tiny_model("gemma2").hf_config | {"num_hidden_layers": layers}
    tensors = {"token_embd.weight": (random_tensor(4, 48), TYPES.F32)}
    entries = metadata(config, **{"attention.sliding_window": 8})
    assert (
        GGUFCheckpoint(write(tmp_path / "x.gguf", architecture, entries, tensors)).config["query_pre_attn_scalar"]
        == scalar
    )


def test_per_layer_lists_must_agree(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (random_tensor(4, 48), TYPES.F32)}
    entries = metadata(tiny_model("llama").hf_config) | {"attention.head_count_kv": [2, 2, 2]}
    assert GGUFCheckpoint(write(tmp_path / "x.gguf", "llama", entries, tensors)).config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedError, match="head_count_kv differs between layers"):
        GGUFCheckpoint(write(tmp_path / "y.gguf", "llama", entries | {"attention.head_count_kv": [2, 1, 2]}, tensors))


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    one, _, _ = written(tmp_path, "llama-tied")
    (tmp_path / "copy.gguf").write_bytes((tmp_path / "llama-tied.gguf").read_bytes())
    assert GGUFCheckpoint(tmp_path / "copy.gguf").fingerprint() == one.fingerprint()
    content = bytearray((tmp_path / "llama-tied.gguf").read_bytes())
    content[-40] ^= 1  # one bit of one weight
    (tmp_path / "copy.gguf").write_bytes(content)
    assert GGUFCheckpoint(tmp_path / "copy.gguf").fingerprint() != one.fingerprint()
    other, _, _ = written(tmp_path, "llama-tied", **{"rope.dimension_count": 12})
    assert other.fingerprint() != one.fingerprint()


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    checkpoint, _, _ = written(tmp_path, "llama-tied")
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.tensor("lm_head.weight")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "text.gguf")
