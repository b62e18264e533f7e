"""Perplexity and distances equal their definitions, computed in one piece from transformers' logits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import TinyModel, prompt, tiny_model

from triblade.errors import ConfigError, NumericalError
from triblade.models.config import model_config
from triblade.models.decoder import Decoder
from triblade.models.weights import load_weights
from triblade.ops.reference import ReferenceBackend
from triblade.quant import quality

CONTEXT = 12
IDS = torch.tensor(prompt(3 * CONTEXT + 7))


def decoder(model: TinyModel) -> Decoder:
    config = model_config(model.hf_config)
    return Decoder(
        config, load_weights(model.source, config, torch.float32), ReferenceBackend(), context_length=CONTEXT
    )


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def other() -> TinyModel:
    return tiny_model("llama", seed=1)


def log_probabilities(model: TinyModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities [N, V] of every predicted position, targets [N]), from the oracle."""
    windows = [window for window in ids.split(CONTEXT) if len(window) > 1]
    rows = [model.oracle_logits(window.tolist())[:-1].double().log_softmax(-1) for window in windows]
    return torch.cat(rows), torch.cat([window[1:] for window in windows])


@pytest.fixture(params=[1, 5 * 96, 2**24], ids=["row by row", "five rows", "whole windows"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many logits are made at once must not matter."""
    monkeypatch.setattr(quality, "LOGITS_AT_ONCE", request.param)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("length", [len(IDS), 2 * CONTEXT, 2 * CONTEXT + 1, 2])
def test_perplexity(tiny: TinyModel, length: int) -> None:
    seen: list[int] = []
    found = quality.perplexity(decoder(tiny), IDS[:length], CONTEXT, seen.append)
    rows, targets = log_probabilities(tiny, IDS[:length])
    expected = math.exp(-rows.gather(1, targets[:, None]).mean().item())
    assert found.num_tokens == len(targets)
    assert found.value == pytest.approx(expected, rel=1e-5)
    assert sum(seen) == length - (length % CONTEXT == 1)


@pytest.mark.usefixtures("pieces")
def test_comparison(tiny: TinyModel, other: TinyModel) -> None:
    model, original = decoder(other), decoder(tiny)
    found = quality.compare(model, original, IDS, CONTEXT)
    log_q, _ = log_probabilities(other, IDS)
    log_p, _ = log_probabilities(tiny, IDS)
    assert found.kl == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).mean().item(), rel=1e-4)
    assert found.top1_agreement == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item())
    assert found.model.value == pytest.approx(quality.perplexity(model, IDS, CONTEXT).value, rel=1e-6)
    assert found.original.value == pytest.approx(quality.perplexity(original, IDS, CONTEXT).value, rel=1e-6)


def states(model: TinyModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states behind every layer, from the oracle."""
    seen: list[torch.Tensor] = []
    for layer in model.oracle.model.layers:
        layer.register_forward_hook(lambda module, inputs, out: seen.append(out[0] if isinstance(out, tuple) else out))
    model.oracle_logits(ids.tolist())
    return seen


def test_errors_by_layer(tiny: TinyModel) -> None:
    other = tiny_model("llama", seed=1)
    found = quality.layer_errors(decoder(other), decoder(tiny), IDS[:CONTEXT])
    pairs = zip(states(other, IDS[:CONTEXT]), states(tiny, IDS[:CONTEXT]), strict=True)
    assert found == pytest.approx([((x - y).square().sum() / y.square().sum()).item() for x, y in pairs], rel=1e-3)
    deeper = tiny_model("llama", num_hidden_layers=5)
    assert quality.layer_errors(decoder(deeper), decoder(tiny), IDS[:CONTEXT]) == []


def test_a_model_equals_itself(tiny: TinyModel) -> None:
    found = quality.compare(decoder(tiny), decoder(tiny), IDS, CONTEXT)
    assert found.kl == 0
    assert found.top1_agreement == 1
    assert found.model == found.original


@pytest.mark.parametrize(("length", "context", "message"), [(9, CONTEXT + 1, "13"), (9, 1, "1"), (1, CONTEXT, "1")])
def test_impossible_requests_are_refused(tiny: TinyModel, length: int, context: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"got: {message}"):
        quality.perplexity(decoder(tiny), IDS[:length], context)


def test_different_vocabularies_are_refused(tiny: TinyModel) -> None:
    with pytest.raises(ConfigError, match="96 and 80"):
        quality.compare(decoder(tiny), decoder(tiny_model("llama", vocab_size=80)), IDS, CONTEXT)


def test_broken_weights_are_an_error_not_a_figure(tiny: TinyModel) -> None:
    model = decoder(tiny)
    model.weights = replace(model.weights, final_norm=model.weights.final_norm * math.nan)
    with pytest.raises(NumericalError):
        quality.perplexity(model, IDS, CONTEXT)
