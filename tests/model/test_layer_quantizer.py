"""Whole tiny models, layer by layer: folding keeps the function, the text's hidden states are those of the quantized model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from tiny import prompt
from tiny_engine import open_tiny
from torch import Tensor

from triblade.models.decoder import Decoder, DenseAttend
from triblade.models.loader import OpenModel
from triblade.models.weights import DenseReader, load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.reference import ReferenceBackend
from triblade.quant.layer import FIELDS, LayerQuantizer, LayerResult, LayerSettings, value_sharing
from triblade.quant.measure import DequantizedSource
from triblade.quant.passes import RANGE, Pass, Recipe, Stage, Work, recipe
from triblade.quant.quantize import Job, decoder_without_layers
from triblade.quant.scheme import IntegerMatrix, QuantScheme
from triblade.quant.streams import Streams, allocate

LENGTH = 20
W8 = QuantScheme(bits=8, group_size=8, symmetric=False)
W4 = QuantScheme(bits=4, group_size=16, symmetric=False)
FAMILIES = (
    "llama",
    "llama-bias",
    "llama-mqa",
    "llama-head-dim",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
)


def random_scales(work: Work) -> Work:
    generator = torch.Generator().manual_seed(work.weight.shape[0])
    scales = (0.5 * torch.randn(work.weight.shape[1], generator=generator)).exp()
    return replace(work, scales=scales if work.sharing is None else scales[work.sharing])


RANDOM = Recipe("random", (Pass(Stage.SCALES, random_scales), RANGE))
EXACT = Recipe("range", (RANGE,))


def job(model: OpenModel, steps: Recipe, scheme: QuantScheme | None, **fields: QuantScheme | None) -> Job:
    schemes: list[Mapping[str, QuantScheme | None]] = [{name: fields.get(name, scheme) for name in FIELDS}]
    ids = torch.tensor([prompt(LENGTH, seed) for seed in range(30)])
    backend = ReferenceBackend(eager_attention)
    return Job(
        model=model,
        recipe=steps,
        schemes=schemes * model.config.num_layers,
        scale_type=torch.float32,
        ids=ids,
        backend=backend,
        device=torch.device("cpu"),
    )


def run(task: Job, *, compare: bool = True) -> tuple[list[LayerResult], Streams]:
    """All layers, in memory."""
    decoder = decoder_without_layers(task)
    sizes = task.stream_sizes
    assert sizes is not None
    assert task.ids is not None
    streams = allocate(replace(sizes, compare=compare), task.device, None)
    table = decoder.weights.embedding.weight
    embedded = decoder.backend.embed(table, task.ids.flatten(), task.model.config.embedding_scale)
    streams.quantized.copy_(embedded.unflatten(0, task.ids.shape))
    if streams.original is not None:
        streams.original.copy_(streams.quantized)
    reader = DenseReader(task.model.checkpoint, task.model.config, task.model.dtype, task.device)
    results = []
    for index in range(task.model.config.num_layers):
        settings = LayerSettings(
            recipe=task.recipe,
            schemes=task.schemes[index],
            scale_type=task.scale_type,
            store_type=task.model.checkpoint.dtype,
        )
        results.append(LayerQuantizer(decoder, index, reader.layer(index), settings, streams).run())
    return results, streams


def quantized_decoder(model: OpenModel, results: list[LayerResult]) -> Decoder:
    matrices: dict[str, IntegerMatrix] = {}
    dense: dict[str, Tensor] = {}
    for result in results:
        matrices |= result.matrices
        dense |= result.dense
    source = DequantizedSource(model.checkpoint, matrices, dense)
    weights = load_weights(source, model.config, model.dtype)
    return Decoder(model.config, weights, ReferenceBackend(eager_attention), LENGTH)


def hidden(decoder: Decoder, ids: Tensor) -> Tensor:
    attend = DenseAttend(decoder.config, decoder.backend, LENGTH)
    return torch.stack([decoder.forward(row, torch.arange(LENGTH), attend) for row in ids])


def original_decoder(model: OpenModel) -> Decoder:
    weights = load_weights(model.checkpoint, model.config, model.dtype)
    return Decoder(model.config, weights, ReferenceBackend(eager_attention), LENGTH)


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_any_scales_keeps_the_function(family: str) -> None:
    """At 8 bits the scales move errors about and change nothing else; a wrong neighbour would change everything."""
    model = open_tiny(family)
    task = job(model, RANDOM, W8)
    results, _ = run(task)
    assert task.ids is not None
    expected = hidden(original_decoder(model), task.ids)
    found = hidden(quantized_decoder(model, results), task.ids)
    assert ((found - expected).norm() / expected.norm()).item() < 0.05
    changed = {name.rpartition("layers.")[2] for result in results for name in result.dense}
    assert len(changed) == 2 * model.config.num_layers  # both norms of every layer


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_into_dense_neighbours_keeps_the_function_exactly(family: str) -> None:
    """Where v and up stay dense, and so is everything that is compared: only `output` and `down` have scales."""
    model = open_tiny(family)
    task = job(model, RANDOM, None, output=W8, down=W8)
    results, _ = run(task)
    plain, _ = run(job(model, EXACT, None, output=W8, down=W8))
    assert task.ids is not None
    expected = hidden(original_decoder(model), task.ids)
    for some in (results, plain):
        found = hidden(quantized_decoder(model, some), task.ids)
        assert ((found - expected).norm() / expected.norm()).item() < 0.02


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["best", "awq+gptq"])
def test_hidden_states_are_those_of_the_quantized_model(family: str, method: str) -> None:
    model = open_tiny(family)
    task = job(model, recipe(method), W4)
    results, streams = run(task, compare=method == "best")
    decoder = quantized_decoder(model, results)
    norm = decoder.backend.rms_norm(streams.quantized, decoder.weights.final_norm, model.config.rms_norm_eps)
    assert task.ids is not None
    torch.testing.assert_close(norm, hidden(decoder, task.ids), rtol=2e-3, atol=2e-3)
    if streams.original is not None:
        own = original_decoder(model)
        before = own.backend.rms_norm(streams.original, own.weights.final_norm, model.config.rms_norm_eps)
        torch.testing.assert_close(before, hidden(own, task.ids), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3"])
def test_methods_in_the_expected_order(family: str) -> None:
    model = open_tiny(family)
    errors = []
    for method in ("rtn", "gptq", "best"):
        task = job(model, recipe(method), QuantScheme(bits=3, group_size=16, symmetric=False))
        results, _ = run(task)
        assert task.ids is not None
        expected = hidden(original_decoder(model), task.ids)
        errors.append((hidden(quantized_decoder(model, results), task.ids) - expected).norm().item())
    assert errors[0] > errors[1] > errors[2]


def test_one_scale_for_all_query_heads_of_a_value_head() -> None:
    config = open_tiny("llama").config  # 4 query heads, 2 value heads of 12
    sharing = value_sharing(config)
    assert sharing.tolist() == [*range(12), *range(12), *range(12, 24), *range(12, 24)]


def test_a_bias_makes_up_for_the_mean_that_rounding_took() -> None:
    """Q3: the mean of a product's output over the calibration text is the original's."""
    model = open_tiny("llama-bias")
    results, _ = run(job(model, recipe("gptq"), QuantScheme(bits=3, group_size=16, symmetric=False)))
    matrix = results[0].matrices["model.layers.0.mlp.down_proj"]
    stored = model.checkpoint.tensor("model.layers.0.mlp.down_proj.bias")
    assert matrix.bias is not None
    assert not torch.equal(matrix.bias, stored)
    plain, _ = run(job(model, EXACT, None, down=W8))
    assert plain[0].matrices["model.layers.0.mlp.down_proj"].bias is not None


def test_without_calibration_biases_stay_as_they_are() -> None:  # B13
    model = open_tiny("llama-bias")
    task = job(model, EXACT, W4)
    decoder = decoder_without_layers(task)
    reader = DenseReader(model.checkpoint, model.config, model.dtype, task.device)
    settings = LayerSettings(
        recipe=EXACT, schemes=task.schemes[0], scale_type=torch.float16, store_type=model.checkpoint.dtype
    )
    result = LayerQuantizer(decoder, 0, reader.layer(0), settings, None).run()
    for module, matrix in result.matrices.items():
        assert matrix.bias is not None
        assert torch.equal(matrix.bias, model.checkpoint.tensor(f"{module}.bias"))
    assert not result.dense
    assert not result.errors


def test_streams_in_files_are_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = open_tiny("llama")
    task = job(model, recipe("best"), W4)
    sizes = task.stream_sizes
    assert sizes is not None
    spilled = allocate(sizes, task.device, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"quantized.stream", "original.stream", "mixed.stream"}
    spilled.quantized.normal_()
    assert spilled.original is not None
    spilled.original.normal_()
    spilled.save(tmp_path / "saved")
    other = allocate(sizes, task.device, None)
    other.load(tmp_path / "saved")
    assert torch.equal(other.quantized, spilled.quantized)
    assert other.original is not None
    assert torch.equal(other.original, spilled.original)
