"""Whole tiny models as quantized checkpoints: the same weights on every backend, and codes multiplied as they are stored."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import all_logits, executor_of, make_cache, native_tiny
from quantized import is_layer_weight, rounded, write_tiny
from safetensors.torch import load_file, save_file
from tiny import PROMPT_TOKENS, StateDictSource, TinyModel, prompt
from tiny_engine import plain_greedy, word_tokenizer
from torch import Tensor

from triblade.engine.executor import TorchExecutor
from triblade.errors import CheckpointError
from triblade.llm import LLM
from triblade.models.checkpoint import open_checkpoint
from triblade.models.config import model_config
from triblade.models.decoder import Decoder
from triblade.models.weights import load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.backend import AttentionMask, Linear
from triblade.ops.deterministic import DeterministicBackend
from triblade.ops.packing import Format, unpack
from triblade.ops.reference import ReferenceBackend
from triblade.quant.packed_weights import PackingReader, packed_bytes
from triblade.quant.quantized_checkpoint import QuantizedCheckpoint
from triblade.quant.scheme import QuantScheme
from triblade.sampling_params import SamplingParams

IDS = prompt(PROMPT_TOKENS + 15)


def scheme(bits: int = 4, group_size: int | None = 32, symmetric: bool = True, **more: Any) -> QuantScheme:
    return QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric, **more)


W8A8 = scheme(8, None, activation_bits=8)
# (format, scheme, group in which the kernels round inputs of the 64- and the 96-wide matrices)
KINDS = [
    ("awq", scheme(symmetric=False), (32, 32)),
    ("awq", scheme(group_size=None), (64, 32)),
    ("gptq", scheme(), (32, 32)),
    ("gptq", scheme(3, symmetric=False), (32, 32)),
    ("gptq", scheme(8, None), (64, 32)),
    *(
        ("compressed-tensors", scheme(bits, 32, symmetric), (32, 32))
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
    ),
    ("compressed-tensors", scheme(4, None, False), (64, 32)),
    ("compressed-tensors", W8A8, (64, 96)),
]


def dequantized(model: TinyModel, how: QuantScheme) -> StateDictSource:
    """What a checkpoint of the model means, made without any file."""
    return StateDictSource(
        {
            name: rounded(tensor, how).dequantize() if is_layer_weight(name, tensor) else tensor
            for name, tensor in model.source.tensors.items()
        }
    )


def opened(path: Path) -> QuantizedCheckpoint:
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    return checkpoint


class RoundedInputs(ReferenceBackend):
    """Float32 with the kernels' roundings; inputs of a matrix in groups by its width, those of the head not at all."""

    def __init__(self, groups: Mapping[int, int], head: Linear) -> None:
        super().__init__(eager_attention)
        self._groups, self._head = groups, head

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        if linear is not self._head:
            groups = x.unflatten(1, (-1, self._groups[x.shape[1]]))
            top = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
            x = ((groups * (127 / top)).round() * (top / 127)).flatten(1)
        return super().linear(x, linear)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float | None
    ) -> Tensor:
        return super().attention(q.bfloat16().float(), k, v, mask, scale, softcap)


def native_logits(checkpoint: QuantizedCheckpoint) -> Tensor:
    config = model_config(checkpoint.config)
    return all_logits(executor_of(config, PackingReader(checkpoint, config, torch.float32).read()), IDS)


def expected_logits(checkpoint: QuantizedCheckpoint, groups: tuple[int, int]) -> Tensor:
    config = model_config(checkpoint.config)
    weights = load_weights(checkpoint, config, torch.float32)
    backend = RoundedInputs({64: groups[0], 96: groups[1]}, weights.head)
    decoder = Decoder(config, weights, backend, config.context_length)
    return all_logits(TorchExecutor(decoder, make_cache(config, "bfloat16", "tokens"), config.vocab_size), IDS)


def assert_near(ours: Tensor, expected: Tensor, bound: float) -> None:
    error = (ours - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= bound, float(error)


@pytest.mark.parametrize(("layout", "how", "groups"), KINDS, ids=lambda value: str(value).replace(" ", "-"))
def test_reference_and_native_compute_what_is_stored(  # B24
    layout: str, how: QuantScheme, groups: tuple[int, int], tmp_path: Path
) -> None:
    """Reference weights are exactly codes times scales; native logits differ by nothing but the rounding of inputs."""
    model = native_tiny("llama-bias")
    checkpoint = opened(write_tiny(tmp_path / "out", model, layout, how))
    assert checkpoint.dtype == torch.float32  # of what is not quantized
    expected = dequantized(model, how)
    assert checkpoint.names() == expected.names()
    assert all(torch.equal(checkpoint.tensor(name), expected.tensor(name)) for name in expected.names())
    assert_near(native_logits(checkpoint), expected_logits(checkpoint, groups), 5e-2)


@pytest.mark.parametrize(("layout", "how", "groups"), KINDS, ids=lambda value: str(value).replace(" ", "-"))
def test_the_memory_that_is_planned_is_what_is_packed(
    layout: str, how: QuantScheme, groups: tuple[int, int], tmp_path: Path
) -> None:
    checkpoint = opened(write_tiny(tmp_path / "out", native_tiny("llama-bias"), layout, how))
    config = model_config(checkpoint.config)
    weights = PackingReader(checkpoint, config, torch.bfloat16).read()
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert {matrix.format for matrix in matrices} == {Format.INT8 if how.bits == 8 else Format.INT4}
    assert all((matrix.offsets is None) == how.symmetric or layout == "awq" for matrix in matrices)
    assert {(m.num_inputs, m.group) for m in matrices} == {(64, groups[0]), (96, groups[1])}
    total = sum(matrix.nbytes for matrix in (*matrices, weights.embedding, weights.head))
    assert packed_bytes(checkpoint, config, torch.bfloat16, None) == total


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "llama-tied"])
def test_families(family: str, tmp_path: Path) -> None:
    """Fused projections, folded norms, tied heads: quantized modules are found under every family's names."""
    model = native_tiny(family)
    checkpoint = opened(write_tiny(tmp_path / "out", model, "compressed-tensors", scheme(8, 32)))
    config = model_config(checkpoint.config)
    weights = load_weights(checkpoint, config, torch.float32)
    plain = load_weights(dequantized(model, scheme(8, 32)), config, torch.float32)
    for ours, expected in zip(weights.layers, plain.layers, strict=True):
        assert torch.equal(ours.qkv.weight, expected.qkv.weight)
        assert torch.equal(ours.gate_up.weight, expected.gate_up.weight)
    packed = PackingReader(checkpoint, config, torch.float32).read()
    for ours, expected in zip(packed.layers, plain.layers, strict=True):
        torch.testing.assert_close(unpack(ours.qkv), expected.qkv.weight)
        torch.testing.assert_close(unpack(ours.down), expected.down.weight)
    assert (weights.head is weights.embedding) == config.tie_word_embeddings


MIXES: dict[str, tuple[dict[str, QuantScheme], Format, int]] = {
    "4 and 8 bits": ({"q_proj": scheme(4), "k_proj": scheme(8), "v_proj": scheme(3)}, Format.INT8, 32),
    "groups of 16 and 64": ({"q_proj": scheme(4, 16), "k_proj": scheme(4, 64), "v_proj": scheme(4)}, Format.INT4, 16),
    "with and without zero points": (
        {"q_proj": scheme(), "k_proj": scheme(symmetric=False), "v_proj": scheme(2)},
        Format.INT4,
        32,
    ),
    "all at once": (
        {"q_proj": W8A8, "k_proj": scheme(2, 16, symmetric=False), "v_proj": scheme(4, None)},
        Format.INT8,
        16,
    ),
    "a part in full precision": ({"q_proj": scheme(), "v_proj": scheme()}, Format.FP32, 0),
}


@pytest.mark.parametrize("mix", MIXES)
def test_parts_of_one_matrix_may_be_stored_differently(mix: str, tmp_path: Path) -> None:  # A28, B25
    """The merged matrix is what its parts say, each by its own scheme; full precision next to codes is not taken for codes."""
    schemes, form, group = MIXES[mix]
    model = native_tiny("llama")
    checkpoint = opened(write_tiny(tmp_path / "out", model, "compressed-tensors", schemes))
    config = model_config(checkpoint.config)
    layers = PackingReader(checkpoint, config, torch.float32).read().layers
    for index, layer in enumerate(layers):
        parts = [f"model.layers.{index}.self_attn.{name}_proj" for name in ("q", "k", "v")]
        stored = [model.source.tensor(f"{part}.weight") for part in parts]
        hows = [next((how for end, how in schemes.items() if part.endswith(end)), None) for part in parts]
        expected = [w if how is None else rounded(w, how).dequantize() for w, how in zip(stored, hows, strict=True)]
        assert (layer.qkv.format, layer.qkv.group) == (form, group)
        bound = 0 if layer.qkv.offsets is None else 1e-3  # offsets are float16
        torch.testing.assert_close(unpack(layer.qkv), torch.cat(expected), atol=bound, rtol=bound)
        assert layer.down.format == Format.FP32  # not quantized


def test_modules_that_a_rule_leaves_out_are_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # A27
    model = native_tiny("llama")
    schemes = {end: scheme() for end in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")}
    checkpoint = opened(write_tiny(tmp_path / "out", model, "gptq", schemes))
    rules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert set(rules) == {rf"-:^model\.layers\.{i}\.mlp\.gate_proj$" for i in range(3)}
    name = "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(checkpoint.tensor(name), model.source.tensor(name))
    config = model_config(checkpoint.config)
    with caplog.at_level(logging.INFO):
        layers = PackingReader(checkpoint, config, torch.float32).read().layers
    assert (layers[1].gate_up.format, layers[1].down.format) == (Format.FP32, Format.INT4)
    assert "gate_proj and all alike are multiplied dense: a part of the matrix is stored dense" in caplog.text


def test_scattered_groups_are_served_dense_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Act-order of GPTQ: the weights are those of the file, inputs of a group wherever they are."""
    model = native_tiny("llama")
    path = write_tiny(tmp_path / "out", model, "gptq", scheme())
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    index = (torch.arange(96) // 32)[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
    tensors[f"{name}.g_idx"] = index.int()
    save_file(tensors, path / "model.safetensors")
    checkpoint = opened(path)
    config = model_config(checkpoint.config)
    with caplog.at_level(logging.INFO):
        layers = PackingReader(checkpoint, config, torch.float32).read().layers
    assert "down_proj and all alike are multiplied dense: its groups are of scattered inputs (act-order)" in caplog.text
    codes = rounded(model.source.tensor(f"{name}.weight"), scheme())
    expected = (codes.codes.float() - 8) * codes.scales.float()[:, index]
    assert torch.equal(unpack(layers[1].down), expected)
    assert layers[0].down.format == Format.INT4
    total = packed_bytes(checkpoint, config, torch.float32, None)
    assert total - 64 * 96 * 4 == packed_bytes(
        opened(write_tiny(tmp_path / "plain", model, "gptq", scheme())), config, torch.float32, None
    ) - 64 * (96 // 2 + 3 * 2)


def test_narrow_codes_are_said_to_take_four_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = opened(write_tiny(tmp_path / "out", native_tiny("llama"), "compressed-tensors", scheme(3)))
    with caplog.at_level(logging.INFO):
        PackingReader(checkpoint, model_config(checkpoint.config), torch.float32).read()
    assert "codes of 3 bits are multiplied as 4-bit ones" in caplog.text


@pytest.mark.parametrize(("factor", "form"), [(2.0**-4, Format.INT8), (2.0**-30, Format.FP32), (2.0**40, Format.FP32)])
def test_scales_beyond_float16_are_not_squeezed_into_it(factor: float, form: Format, tmp_path: Path) -> None:
    """Bfloat16 has a wider range than the kernels' scales: such a matrix is multiplied dense, never with zeros or infinities."""
    model = native_tiny("llama")
    path = write_tiny(tmp_path / "out", model, "compressed-tensors", scheme(8, 32))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.weight_scale"] = (tensors[f"{name}.weight_scale"].float() * factor).bfloat16()
    save_file(tensors, path / "model.safetensors")
    checkpoint = opened(path)
    layers = PackingReader(checkpoint, model_config(checkpoint.config), torch.float32).read().layers
    assert layers[0].down.format == form
    torch.testing.assert_close(unpack(layers[0].down), checkpoint.tensor(f"{name}.weight"), atol=0, rtol=2e-3)


def test_float16_beside_codes_is_computed_in_bfloat16(tmp_path: Path) -> None:
    model = native_tiny("llama")
    half = TinyModel(
        model.oracle, model.hf_config, StateDictSource({n: t.half() for n, t in model.source.tensors.items()})
    )
    assert opened(write_tiny(tmp_path / "out", half, "awq", scheme())).dtype == torch.bfloat16


def test_a_module_of_another_model_is_refused_by_both_backends(tmp_path: Path) -> None:  # A14
    checkpoint = opened(write_tiny(tmp_path / "out", native_tiny("llama"), "awq", scheme(), intermediate_size=128))
    config = model_config(checkpoint.config)
    wanted = r"gate_proj\.weight has shape \[96, 64\], the configuration asks for \[128, 64\]"
    for read in (
        lambda: load_weights(checkpoint, config, torch.float32),
        lambda: PackingReader(checkpoint, config, torch.float32).read(),
        lambda: packed_bytes(checkpoint, config, torch.float32, None),
    ):
        with pytest.raises(CheckpointError, match=wanted):
            read()


def test_stored_tensors_that_belong_to_nothing_are_refused(tmp_path: Path) -> None:
    """No byte of the file is overlooked: a stray tensor of a module is an error, a scale of the cache is not."""
    path = write_tiny(tmp_path / "out", native_tiny("llama"), "compressed-tensors", scheme())
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, path / "model.safetensors")
    checkpoint = opened(path)
    load_weights(checkpoint, model_config(checkpoint.config), torch.float32)
    tensors["model.layers.0.mlp.up_proj.weight_packed_2"] = torch.ones(1)
    save_file(tensors, path / "model.safetensors")
    checkpoint = opened(path)
    with pytest.raises(CheckpointError, match="weight_packed_2"):
        load_weights(checkpoint, model_config(checkpoint.config), torch.float32)


def test_biases_of_zeros_that_the_model_does_not_have_are_nothing(tmp_path: Path) -> None:
    """Older GPTQ tools save them for every layer; one that is not zero is an error."""
    path = write_tiny(tmp_path / "out", native_tiny("llama"), "gptq", scheme())
    tensors = load_file(path / "model.safetensors")
    bias = "model.layers.0.mlp.down_proj.bias"
    for value in (0.0, 1.0):
        save_file({**tensors, bias: torch.full((64,), value).half()}, path / "model.safetensors")
        checkpoint = opened(path)
        if value:
            with pytest.raises(CheckpointError, match=bias):
                load_weights(checkpoint, model_config(checkpoint.config), torch.float32)
        else:
            load_weights(checkpoint, model_config(checkpoint.config), torch.float32)


@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed-tensors"])
def test_generation_from_a_folder(layout: str, tmp_path: Path) -> None:
    """Through every door: the same greedy tokens as from weights in memory, and the native backend by default."""
    model = native_tiny("llama")
    path = write_tiny(tmp_path / "out", model, layout, scheme())
    (path / "tokenizer.json").write_text(word_tokenizer(96).backend.to_str())
    config = model_config(model.hf_config)
    weights = load_weights(dequantized(model, scheme()), config, torch.float32)
    expected = plain_greedy(Decoder(config, weights, DeterministicBackend(), config.context_length), IDS[:20], 8)
    options: dict[str, Any] = {"num_kv_blocks": 16, "kv_cache_dtype": "bfloat16", "device": "cpu"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    exact = LLM(str(path), deterministic=True, num_kv_blocks=16, device="cpu")
    assert exact.generate([IDS[:20]], params)[0][0].token_ids == expected
    native = LLM(str(path), **options)
    assert native.engine.runner.executor.name.startswith("native")
    assert len(native.generate([IDS[:20]], params)[0][0].token_ids) == 8
