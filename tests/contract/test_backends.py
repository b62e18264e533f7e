"""The contract of backends and attention functions: every op against plain formulas, and rows that do not feel each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from triblade.errors import UnsupportedError
from triblade.ops.attention import AttentionFunction, eager_attention, sdpa_attention, tiled_attention
from triblade.ops.backend import AttentionMask, Backend, Linear
from triblade.ops.deterministic import DeterministicBackend
from triblade.ops.select import select_backend, select_device
from triblade.registry import BACKENDS

ATTENTION = {"eager": eager_attention, "sdpa": sdpa_attention, "tiled": tiled_attention}


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = BACKENDS[request.param]()
    return made


@pytest.fixture(params=sorted(ATTENTION))
def attention(request: pytest.FixtureRequest) -> AttentionFunction:
    return ATTENTION[request.param]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, softcap: float | None) -> Tensor:
    """One query, one head, one key at a time."""
    s, queries, heads, _ = q.shape
    out = torch.zeros_like(q)
    for i in range(s):
        for t in range(queries):
            for h in range(heads):
                g = h // (heads // k.shape[2])
                keys = [j for j in range(k.shape[1]) if allowed[i % len(allowed), t, j]]
                scores = [float(q[i, t, h] @ k[i, j, g]) * scale for j in keys]
                if softcap:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = torch.tensor(scores).softmax(0)
                out[i, t, h] = sum(w * v[i, j, g] for w, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (5, 5), (3, 20), (17, 17)])
def test_causal_attention(attention: AttentionFunction, heads: int, groups: int, queries: int, keys: int) -> None:
    q, k, v = randn(1, queries, heads, 8), randn(1, keys, groups, 8, seed=1), randn(1, keys, groups, 8, seed=2)
    allowed = torch.ones(1, queries, keys, dtype=torch.bool).tril(keys - queries)
    expected = slow_attention(q, k, v, allowed, 0.3, None)
    for mask in (AttentionMask(None), AttentionMask(allowed)):
        torch.testing.assert_close(attention(q, k, v, mask, 0.3, None), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("queries", [1, 4])
def test_masked_attention_of_several_sequences(attention: AttentionFunction, queries: int) -> None:
    q, k, v = randn(3, queries, 4, 8), randn(3, 12, 2, 8, seed=1), randn(3, 12, 2, 8, seed=2)
    allowed = randn(3, queries, 12, seed=3) > 0
    allowed[..., 0] = True
    expected = slow_attention(q, k, v, allowed, 0.35, None)
    torch.testing.assert_close(attention(q, k, v, AttentionMask(allowed), 0.35, None), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["eager", "tiled"])
def test_soft_cap(name: str) -> None:
    q, k, v = randn(1, 3, 4, 8) * 5, randn(1, 6, 2, 8, seed=1) * 5, randn(1, 6, 2, 8, seed=2)
    allowed = torch.ones(1, 3, 6, dtype=torch.bool).tril(3)
    expected = slow_attention(q, k, v, allowed, 1.0, 4.0)
    assert (expected - slow_attention(q, k, v, allowed, 1.0, None)).abs().max() > 0.01
    torch.testing.assert_close(ATTENTION[name](q, k, v, AttentionMask(None), 1.0, 4.0), expected, atol=1e-5, rtol=1e-4)


def test_sdpa_refuses_a_soft_cap() -> None:
    q = randn(1, 1, 1, 8)
    with pytest.raises(UnsupportedError, match="soft cap"):
        sdpa_attention(q, q, q, AttentionMask(None), 1.0, 30.0)


def test_rms_norm(backend: Backend) -> None:
    x, weight = randn(5, 24) * 10, randn(24, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), expected)
    assert backend.rms_norm(x.bfloat16(), weight, 1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(backend: Backend, tokens: int, bias: bool) -> None:
    x, weight, shift = randn(tokens, 20), randn(30, 20, seed=1), randn(30, seed=2)
    expected = x @ weight.T + (shift if bias else 0)
    torch.testing.assert_close(backend.linear(x, Linear(weight, shift if bias else None)), expected)


def test_rope_rotates_pairs_and_keeps_the_rest(backend: Backend) -> None:
    x, angles = randn(3, 2, 10), torch.tensor([[0.0, 0.0], [0.5, 1.0], [2.0, -1.0]])
    out = backend.rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(out[0], x[0])
    torch.testing.assert_close(out[..., 4:], x[..., 4:])
    for token in range(3):
        for i in range(2):
            pair = torch.complex(x[token, :, i], x[token, :, i + 2]) * torch.exp(1j * angles[token, i])
            torch.testing.assert_close(out[token, :, i], pair.real)
            torch.testing.assert_close(out[token, :, i + 2], pair.imag)


def test_gated_activation(backend: Backend) -> None:
    gate, up = randn(4, 6), randn(4, 6, seed=1)
    both = torch.cat((gate, up), -1)
    torch.testing.assert_close(backend.gated_activation(both, "silu"), gate * torch.sigmoid(gate) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(backend.gated_activation(both, "gelu_tanh"), 0.5 * gate * (1 + inner.tanh()) * up)


def test_embed_and_logits(backend: Backend) -> None:
    weight, ids = randn(11, 8), torch.tensor([3, 0, 10])
    torch.testing.assert_close(backend.embed(weight, ids, 1.0), weight[ids])
    torch.testing.assert_close(backend.embed(weight, ids, 3.0), weight[ids] * 3)
    hidden = randn(2, 8, seed=1) * 10
    raw = hidden @ weight.T
    torch.testing.assert_close(backend.logits(hidden, Linear(weight), None), raw)
    torch.testing.assert_close(backend.logits(hidden, Linear(weight), 5.0), 5 * torch.tanh(raw / 5))
    assert backend.logits(hidden.bfloat16(), Linear(weight.bfloat16()), None).dtype == torch.float32


@pytest.mark.parametrize("shape", [(576, 960), (576, 49152), (1536, 576), (48, 100), (33, 7)])
def test_deterministic_linear_is_batch_invariant(shape: tuple[int, int]) -> None:  # E14
    inputs, outputs = shape
    backend, matrix = DeterministicBackend(), Linear(randn(outputs, inputs, seed=1))
    x = randn(40, inputs)
    alone = backend.linear(x[:1], matrix)[0]
    for size in (2, 7, 16, 17, 40):
        for place in (0, size - 1):
            batch = randn(size, inputs, seed=size)
            batch[place] = x[0]
            assert torch.equal(backend.linear(batch, matrix)[place], alone)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_tiled_attention_does_not_depend_on_chunks_batch_or_padding(softcap: float | None) -> None:  # E14, E15
    length, heads, groups, d = 200, 6, 2, 16
    q, k, v = randn(1, length, heads, d), randn(1, length, groups, d, seed=1), randn(1, length, groups, d, seed=2)
    whole = tiled_attention(q, k, v, AttentionMask(None), 0.25, softcap)
    for chunk in (1, 7, 31, 32, 33):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = tiled_attention(q[:, start:stop], k[:, :stop], v[:, :stop], AttentionMask(None), 0.25, softcap)
            assert torch.equal(part, whole[:, start:stop])
    padded_k, padded_v = (torch.cat((x, randn(1, 300, groups, d, seed=3)), 1) for x in (k, v))
    neighbour = randn(1, 1, heads, d, seed=4)
    both_q = torch.cat((q[:, -1:], neighbour))
    both_k, both_v = (torch.cat((x, x.flip(1))) for x in (padded_k, padded_v))
    allowed = torch.zeros(2, 1, 500, dtype=torch.bool)
    allowed[0, :, :length], allowed[1, :, :450] = True, True
    batched = tiled_attention(both_q, both_k, both_v, AttentionMask(allowed), 0.25, softcap)
    assert torch.equal(batched[:1], whole[:, -1:])


def test_automatic_choices_say_why() -> None:  # E2
    assert (
        select_backend("auto", deterministic=False, softcap=True)[1]
        == "attention eager: the model caps attention scores"
    )
    assert (
        select_backend("auto", deterministic=False, softcap=False)[1] == "attention sdpa: fastest that fits the model"
    )
    assert select_backend("eager", deterministic=False, softcap=False)[1] == "attention eager: asked for"
    assert select_backend("sdpa", deterministic=False, softcap=True)[1].startswith("attention eager: the model caps")


def test_device_selection() -> None:  # H05
    if torch.cuda.is_available():
        assert select_device("auto")[0].type == "cuda"
        return
    assert select_device("auto") == (torch.device("cpu"), "no CUDA device")
    with pytest.raises(UnsupportedError, match=r"no CUDA device: .+"):
        select_device("cuda")
