"""Wire codecs on real decoders: keys turned back are those before the rotary embedding, and decoding goes on from what arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import prompt
from tiny_engine import open_tiny
from torch import Tensor

from triblade.kv.calibration_collect import Collector, Taps
from triblade.kv.calibration_fit import FitOptions, fit_table
from triblade.kv.calibration_statistics import KVStatistics
from triblade.kv.layout import KVLayout
from triblade.kv.wire import RawWire
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_quality import Route, measure_codecs
from triblade.kv.wire_rotation import Rotation, rope_identity
from triblade.kv.wire_table import TableModel
from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel
from triblade.models.weights import load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.reference import ReferenceBackend

LENGTH = 40
# A window, key norms, two ropes, part of the dimensions rotated, and every kind of scaling.
ROTATIONS = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gemma3-scaled", "phi3-partial", "llama-linear")
ROTATIONS += ("llama-dynamic", "llama-yarn", "llama-llama3", "phi3-longrope-short", "phi3-longrope-long")


class WatchedRope(ReferenceBackend):
    """Keeps what it rotates: queries and keys."""

    def __init__(self) -> None:
        super().__init__(eager_attention)
        self.seen: list[Tensor] = []

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self.seen.append(x)
        return super().rope(x, cos, sin)


def decoder_of(model: OpenModel) -> tuple[Decoder, WatchedRope]:
    backend = WatchedRope()
    weights = load_weights(model.checkpoint, model.config, torch.float32)
    return Decoder(model.config, weights, backend, model.config.context_length), backend


def layout_of(model: OpenModel, codec: str = "float32") -> KVLayout:
    config = model.config
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=4,
        codec=codec,
        model_hash=model.name,
        rope=rope_identity(config, config.context_length),
    )


@pytest.mark.parametrize("name", ROTATIONS)
def test_keys_turned_back_are_those_before_the_rotation(name: str) -> None:
    model = open_tiny(name)
    decoder, backend = decoder_of(model)
    length = min(LENGTH, model.config.context_length)
    positions, taps = torch.arange(length), Taps(decoder, length)
    with torch.inference_mode():
        decoder.forward(torch.tensor(prompt(length)), positions, taps)
        keys = taps.vectors()[:, 0].clone()
        expected = torch.stack([x[:, model.config.num_heads :] for x in backend.seen])
        rotation = Rotation(rope_identity(model.config, model.config.context_length))
        assert not torch.allclose(keys, expected, atol=1e-2)
        rotation.undo(keys, positions)
        assert torch.allclose(keys, expected, atol=1e-4)
        rotation.apply(keys, positions)
        assert torch.allclose(keys, taps.vectors()[:, 0], atol=1e-4)


def test_only_kinds_that_depend_on_the_length_have_it_in_their_identity() -> None:
    for name, depends in (
        ("llama", False),
        ("llama-yarn", False),
        ("llama-dynamic", True),
        ("phi3-longrope-long", True),
    ):
        config = open_tiny(name).config
        assert (rope_identity(config, 30) != rope_identity(config, 60)) == depends


def gathered(model: OpenModel, decoder: Decoder, sequences: int = 40) -> KVStatistics:
    config = model.config
    statistics = KVStatistics(config.num_layers, config.num_kv_heads * config.head_dim, 2000)
    rotation = Rotation(rope_identity(config, config.context_length))
    collector = Collector(decoder, rotation, statistics, skip=2)
    for seed in range(sequences):
        collector.add(torch.tensor(prompt(LENGTH, seed)), with_gradients=seed < 10)
    return statistics


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3", "phi3-partial", "llama-yarn"])
def test_a_text_goes_on_from_what_arrived(name: str) -> None:
    model = open_tiny(name)
    decoder, _ = decoder_of(model)
    moments, layout = gathered(model, decoder).moments(), layout_of(model)
    routes = {"raw": Route(RawWire(layout), layout, layout)}
    for bits in (1.0, 4.0, 8.0):
        table = fit_table(TableModel.of(layout), moments, FitOptions(bits=bits, exact_first=2, exact_last=4))
        routes[str(bits)] = Route(PcaLutWire(layout, table), layout, layout)
    windows = [torch.tensor(prompt(LENGTH, 100 + seed)) for seed in range(4)]
    found = measure_codecs(decoder, windows, 30, routes)
    assert found["raw"].kl_nats < 1e-9
    assert found["raw"].relative_errors == (0.0, 0.0)
    assert 0 < found["8.0"].kl_nats < 0.2 * found["4.0"].kl_nats
    assert found["4.0"].kl_nats < found["1.0"].kl_nats
    assert found["8.0"].num_tokens == 4 * (LENGTH - 30 - 1)
    assert max(found["8.0"].relative_errors) < 1e-3


def test_the_metric_is_what_a_small_error_does_to_predictions() -> None:
    """KL of predictions after errors of known size, summed over all later tokens, against e' metric e / 2."""
    model = open_tiny("qwen3")
    decoder, _ = decoder_of(model)
    statistics = gathered(model, decoder, 10)
    metric = statistics.moments().metric
    assert metric is not None
    generator, size = torch.Generator().manual_seed(0), 0.02
    expected = size**2 * float(metric.diagonal(dim1=-2, dim2=-1).sum()) / 2

    class Noisy(Taps):
        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            noise = [size * torch.randn(x.shape, generator=generator) for x in (k, v)]
            for each in noise:
                each[:2] = 0  # left out of the metric as well
            return super().__call__(layer, q, k + noise[0], v + noise[1])

    def log_p(ids: Tensor, attend: Any) -> Tensor:
        return decoder.logits(decoder.forward(ids, torch.arange(LENGTH), attend)).log_softmax(-1)

    total = 0.0
    with torch.inference_mode():
        for seed in range(10):
            ids = torch.tensor(prompt(LENGTH, seed))
            exact, noisy = log_p(ids, Taps(decoder, LENGTH)), log_p(ids, Noisy(decoder, LENGTH))
            total += float((exact.exp() * (exact - noisy)).sum()) / 10 / (LENGTH - 2)
    assert total == pytest.approx(expected, rel=0.3)
