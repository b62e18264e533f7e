"""Drafts made of their target: first layers compute what the target computes so far, rounded weights are those of the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from drafters import model_drafter, speculate
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.errors import CheckpointError, ConfigError
from triblade.models.config import model_config
from triblade.models.decoder import Decoder, DenseAttend
from triblade.models.loader import OpenModel
from triblade.models.weights import load_weights
from triblade.ops.attention import eager_attention
from triblade.ops.packing import unpack
from triblade.ops.reference import ReferenceBackend
from triblade.quant.packed_weights import PackingReader
from triblade.sampling_params import SamplingParams
from triblade.spec.self_draft import first_layers, rounded


def decoder(model: OpenModel) -> Decoder:
    return model.load(64, ReferenceBackend(eager_attention), torch.device("cpu"))


@torch.inference_mode()
def hidden(of: Decoder, ids: list[int]) -> torch.Tensor:
    attend = DenseAttend(of.config, of.backend, len(ids))
    return of.forward(torch.tensor(ids), torch.arange(len(ids)), attend)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-window"])
def test_the_first_layers_are_those_of_the_target(family: str) -> None:
    target = open_tiny(family)
    draft = decoder(first_layers(target, 2))
    whole = decoder(target)
    del whole.weights.layers[2:]
    assert torch.equal(hidden(draft, prompt(12)), hidden(whole, prompt(12)))
    assert torch.equal(draft.weights.head.weight, whole.weights.head.weight)


def test_first_layers_of_first_layers() -> None:
    draft = first_layers(first_layers(open_tiny("llama"), 2), 1)
    assert (draft.config.num_layers, draft.config.skipped_layers, len(draft.config.layers)) == (1, 2, 1)
    assert len(decoder(draft).weights.layers) == 1


@pytest.mark.parametrize("count", [0, 3, 4])
def test_there_must_be_fewer_layers_and_one_at_least(count: int) -> None:
    with pytest.raises(ConfigError, match=f"a draft of {count} layers cannot be made of llama, which has 3"):
        first_layers(open_tiny("llama"), count)


def test_a_checkpoint_with_more_layers_than_its_configuration_is_still_refused() -> None:
    target = open_tiny("llama")
    config = model_config({**target.checkpoint.config, "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="tensors that a LlamaForCausalLM does not have"):
        load_weights(target.checkpoint, config, torch.float32)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_error_is_half_a_step_at_most(bits: int) -> None:
    target = open_tiny("llama", hidden_size=64, intermediate_size=96)
    name = "model.layers.1.mlp.down_proj.weight"
    exact = target.checkpoint.tensor(name)
    coarse = rounded(target, bits).checkpoint.tensor(name)
    step = exact.unflatten(1, (-1, 32)).abs().amax(-1) / 2 ** (bits - 1)
    error = (coarse - exact).unflatten(1, (-1, 32)).abs().amax(-1)
    # Of 4-bit groups the scale may shrink, which cuts off the largest weights.
    assert (error <= step * (1.0 if bits != 4 else 2.2)).all()
    assert error.max() > 0
    norm = "model.norm.weight"
    assert torch.equal(rounded(target, bits).checkpoint.tensor(norm), target.checkpoint.tensor(norm))


def test_rounded_weights_are_those_that_kernels_would_multiply() -> None:
    target = open_tiny("llama", hidden_size=64, intermediate_size=96)
    packed = PackingReader(target.checkpoint, target.config, torch.float32, "int8").read()
    dense = decoder(rounded(target, 8))
    assert torch.equal(unpack(packed.layers[0].output), dense.weights.layers[0].output.weight)
    assert torch.equal(unpack(packed.embedding), dense.weights.embedding.weight)


def test_rounded_copies_have_another_identity() -> None:
    target = open_tiny("llama")
    prints = {m.checkpoint.fingerprint() for m in (target, rounded(target, 4), rounded(target, 8))}
    assert len(prints) == 3


@pytest.mark.parametrize("make", [lambda m: first_layers(m, 1), lambda m: rounded(m, 4), lambda m: rounded(m, 8)])
def test_a_self_draft_drafts_for_its_target(make: Callable[[OpenModel], OpenModel]) -> None:  # F01
    target = open_tiny("llama", hidden_size=64, intermediate_size=96)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = tiny_llm(target).generate([prompt(9)], params)[0][0].token_ids
    llm = tiny_llm(target)
    speculate(llm, model_drafter(llm, make(target)), 4)
    assert llm.generate([prompt(9)], params)[0][0].token_ids == plain
