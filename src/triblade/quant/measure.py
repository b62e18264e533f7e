"""Before and after: the original and what became of it on the same text, one in memory at a time.

Knows no file format: the quantized model is a source of tensors over the original's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triblade import host
from triblade.console import progress
from triblade.models.decoder import Decoder, DenseAttend
from triblade.models.loader import OpenModel
from triblade.models.weights import TensorSource, load_weights
from triblade.ops.backend import Backend, Linear
from triblade.quant.quality import Comparison, compare_remembered, remember
from triblade.quant.scheme import IntegerMatrix

SAMPLE_PROMPTS = ("The most important thing about the history of the city is", "In the beginning,")
SAMPLE_TOKENS = 24


class DequantizedSource:
    """A checkpoint whose quantized modules are dequantized when asked for.

    Args:
        original: the checkpoint.
        matrices: quantized modules by name.
        dense: tensors that replace the original's.
    """

    def __init__(
        self, original: TensorSource, matrices: Mapping[str, IntegerMatrix], dense: Mapping[str, Tensor]
    ) -> None:
        self._original, self._matrices, self._dense = original, matrices, dense

    def names(self) -> frozenset[str]:
        """The original's."""
        return self._original.names()

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name in the original."""
        if name in self._dense:
            return self._dense[name]
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in self._matrices:
            return self._matrices[module].dequantize()
        if kind == "bias" and module in self._matrices and (bias := self._matrices[module].bias) is not None:
            return bias
        return self._original.tensor(name)


class TokenActivations:
    """A backend whose products round their inputs to 8 bits, one scale per token, as W8A8 kernels do.

    Args:
        backend: makes everything else.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """See `Backend.linear`."""
        return self._backend.linear(round_tokens(x), linear)


def round_tokens(x: Tensor) -> Tensor:
    """Each row of [T, in] on 255 levels around zero."""
    scales = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return ((x.float() / scales).round() * scales).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What both models did."""

    comparison: Comparison
    num_tokens: int
    context: int
    samples: tuple[tuple[str, str, str], ...]  # prompt, the original's continuation, the quantized model's


def measure(
    model: OpenModel,
    sources: tuple[Callable[[], TensorSource], Callable[[], TensorSource]],
    ids: Tensor,
    backends: tuple[Backend, Backend],
    device: torch.device,
) -> Measured:
    """Compare on token ids [N], in windows of up to 2048 tokens.

    Args:
        model: the original.
        sources: open its tensors, and what became of them; what is mapped for one is gone when the other is opened.
        ids: the text.
        backends: for the original, and for the quantized model.
        device: where to compute.
    """
    context = min(2048, model.config.context_length, len(ids))
    prompts = [model.tokenizer.encode(prompt, add_special_tokens=False) for prompt in SAMPLE_PROMPTS]
    with progress("measuring", 2 * len(ids), unit="tokens") as advance:
        weights = load_weights(sources[0](), model.config, model.dtype, device)
        original = Decoder(model.config, weights, backends[0], context)
        before = [_continue(original, model, prompt) for prompt in prompts]
        remembered = remember(original, ids, context, advance)
        del original, weights
        host.return_free_memory()
        weights = load_weights(sources[1](), model.config, model.dtype, device)
        decoder = Decoder(model.config, weights, backends[1], context)
        after = [_continue(decoder, model, prompt) for prompt in prompts]
        comparison = compare_remembered(decoder, remembered, ids, context, advance)
        del decoder, weights, remembered
        host.return_free_memory()
    samples = tuple(zip(SAMPLE_PROMPTS, before, after, strict=True))
    return Measured(comparison=comparison, num_tokens=comparison.model.num_tokens, context=context, samples=samples)


@torch.inference_mode()
def _continue(decoder: Decoder, model: OpenModel, prompt: Sequence[int]) -> str:
    """Greedy continuation, without a cache: for a few tokens the plainest way."""
    ids = list(prompt)
    for _ in range(SAMPLE_TOKENS):
        if not ids or len(ids) >= decoder.context_length:
            break
        tokens = torch.tensor(ids, device=decoder.device)
        attend = DenseAttend(decoder.config, decoder.backend, len(ids), decoder.device)
        hidden = decoder.forward(tokens, torch.arange(len(ids), device=decoder.device), attend)
        best = int(decoder.logits(hidden[-1:])[0, : model.vocab_size].argmax())
        if best in model.eos_token_ids:
            break
        ids.append(best)
    return model.tokenizer.decode(ids[len(prompt) :])
