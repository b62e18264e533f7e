"""The eagle head: one decoder layer that guesses the target's next tokens from the target's hidden states.

    x_p = fc [embedding(token_p); states_{p-1}]        g_p = norm(layer(x_p))        guess for token p+1 = table[argmax(head g_p)]

Entry p depends on tokens 0 .. p only, so the keys and values of slot p stay valid as long as those of the target do. Where the
target's states are not known they are zero (position 0, the first token behind a cached prefix); for a token that is itself a
guess the head's own g_{p-1} takes the place of the final state, and zeros that of the inner ones. Knows no cache and no request:
attention is an argument, as in the decoder it is made of. Sources: EAGLE (Li et al. 2024, section 4.1: features and the shifted
token), EAGLE-3 (Li et al. 2025, section 3.1: states of several layers, no loss on them, unrolled training), FR-Spec (Zhao et al.
2025, section 4: the reduced vocabulary).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.models.config import LayerConfig, ModelConfig
from triblade.models.decoder import Attend, Decoder, DecoderWeights, LayerWeights, M
from triblade.ops.backend import Backend, Linear

N = TypeVar("N")
MATRICES = ("fc", "qkv", "output", "gate_up", "down", "head")
NORMS = ("input_norm", "mlp_norm", "final_norm")
INNER_NORMS = "inner_norms"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights(Generic[M]):
    """All weights of a head but the embedding, which is the target's; N is the size of the draft vocabulary."""

    fc: M  # [C, (1 + F) C], inputs: embedding, final state, inner states
    inner_norms: Tensor  # [F - 1, C] float32: what brings every channel of an inner state, normalised, to about 1
    layer: LayerWeights[M]
    final_norm: Tensor  # [C] float32
    head: M  # [N, C]
    token_ids: Tensor  # [N] int64: the target's id of each row of the head, ascending

    @classmethod
    def from_parts(cls, matrices: dict[str, M], norms: dict[str, Tensor], token_ids: Tensor) -> EagleWeights[M]:
        """From matrices named as in MATRICES and norms named as in NORMS, with INNER_NORMS where there are inner states."""
        layer: LayerWeights[M] = LayerWeights(  # a subscripted call would set an attribute that slots do not have
            input_norm=norms["input_norm"],
            mlp_norm=norms["mlp_norm"],
            qkv=matrices["qkv"],
            output=matrices["output"],
            gate_up=matrices["gate_up"],
            down=matrices["down"],
        )
        final_norm = norms["final_norm"]
        return cls(
            fc=matrices["fc"],
            inner_norms=norms.get(INNER_NORMS, final_norm.new_empty(0, len(final_norm))),
            layer=layer,
            final_norm=final_norm,
            head=matrices["head"],
            token_ids=token_ids,
        )

    @property
    def state_size(self) -> int:
        """F * C: what the head reads of one token of the target."""
        return (1 + len(self.inner_norms)) * len(self.final_norm)

    def matrices(self) -> dict[str, M]:
        """The matrices by name."""
        layer = self.layer
        parts = (self.fc, layer.qkv, layer.output, layer.gate_up, layer.down, self.head)
        return dict(zip(MATRICES, parts, strict=True))

    def norms(self) -> dict[str, Tensor]:
        """The norms by name."""
        norms = dict(zip(NORMS, (self.layer.input_norm, self.layer.mlp_norm, self.final_norm), strict=True))
        return norms | {INNER_NORMS: self.inner_norms}

    def mapped(self, change: Callable[[M], N]) -> EagleWeights[N]:
        """The same head with every matrix in another form."""
        matrices = {name: change(matrix) for name, matrix in self.matrices().items()}
        return EagleWeights.from_parts(matrices, self.norms(), self.token_ids)


def head_config(target: ModelConfig, window: int | None) -> ModelConfig:
    """The head as a decoder of one layer: the target's sizes and the rope of its last layer, without its special cases.

    Args:
        target: the model the head belongs to.
        window: tokens that the head's attention sees; None is all.
    """
    return replace(
        target,
        num_layers=1,
        layers=(LayerConfig(window=window),),
        ropes=(target.ropes[target.layers[-1].rope],),
        attention_scale=target.head_dim**-0.5,
        attention_softcap=None,
        logits_softcap=None,
        norm_offset=0.0,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        post_norms=False,
    )


def matrix_shapes(config: ModelConfig, draft_vocab_size: int, num_inner: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix of a head that reads the states of `num_inner` inner layers."""
    c, inner = config.hidden_size, config.intermediate_size
    return {
        "fc": (c, (2 + num_inner) * c),
        "qkv": (config.q_size + 2 * config.kv_size, c),
        "output": (c, config.q_size),
        "gate_up": (2 * inner, c),
        "down": (c, inner),
        "head": (draft_vocab_size, c),
    }


class EagleHead:
    """Tokens, the target's hidden states and positions in, guesses out.

    Args:
        config: see `head_config`.
        weights: of the head.
        embedding: the target's, [V, C].
        backend: the kernels.
        context_length: positions the rope table covers.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: EagleWeights[Linear],
        embedding: Linear,
        backend: Backend,
        context_length: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        self._decoder = Decoder(config, _decoder_weights(weights, embedding), backend, context_length)

    def reweighted(self, weights: EagleWeights[Linear]) -> EagleHead:
        """The same head with other weights; everything else is shared."""
        head, decoder = copy.copy(self), copy.copy(self._decoder)
        head.weights = weights
        decoder.weights = _decoder_weights(weights, decoder.weights.embedding)
        head._decoder = decoder
        return head

    def forward(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The head's own hidden states [T, C].

        Args:
            input_ids: tokens [T].
            hidden: states of the token before each: the target's [T, F * C], the head's own [T, C], or zeros.
            positions: [T], absolute.
            attend: see `models.decoder`; the head is its layer 0.
        """
        decoder, layer = self._decoder, self.weights.layer
        embedded = self.backend.embed(decoder.weights.embedding.weight, input_ids, self.config.embedding_scale)
        x = self.backend.linear(self._inputs(embedded, hidden.to(embedded.dtype)), self.weights.fc)  # [T, C]
        x = x + decoder.attention_out(
            layer, decoder.attention_mix(0, layer, x, decoder.rotations(positions)[0], attend)
        )
        x = x + decoder.mlp_out(layer, decoder.mlp_mix(layer, x))
        return self.backend.rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[T, (1 + F) C]: what `fc` multiplies."""
        norms, width = self.weights.inner_norms, self.config.hidden_size
        final, *inner = hidden.split(width, -1)
        if not inner:
            return F.pad(torch.cat((embedded, final), -1), (0, len(norms) * width))
        eps = self.config.rms_norm_eps
        scaled = [self.backend.rms_norm(x, norm, eps) for x, norm in zip(inner, norms, strict=True)]
        return torch.cat((embedded, final, *scaled), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, C] -> [R, N] float32 over the draft vocabulary."""
        return self.backend.logits(hidden, self.weights.head, None)

    def greedy(self, hidden: Tensor) -> Tensor:
        """The likeliest token after each row: [R, C] -> [R] ids of the target's vocabulary."""
        return self.weights.token_ids[self.logits(hidden).argmax(-1)]


def _decoder_weights(weights: EagleWeights[Linear], embedding: Linear) -> DecoderWeights[Linear]:
    return DecoderWeights(embedding=embedding, layers=[weights.layer], final_norm=weights.final_norm, head=weights.head)
