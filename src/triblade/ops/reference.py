"""Every op in plain torch: the oracle that faster backends are compared with, and the backend that runs anywhere.

Attention is one of two functions (see `attention.py`), chosen when the backend is made.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.ops.attention import AttentionFunction, sdpa_attention
from triblade.ops.backend import Activation, AttentionMask, Backend, Linear


class ReferenceBackend(Backend):
    """Plain torch on any device; shapes and formulas stand in `Backend`.

    Args:
        attention: computes `Backend.attention`.
    """

    name = "reference"

    def __init__(self, attention: AttentionFunction = sdpa_attention) -> None:
        self._attention = attention

    def embed(self, weight: Tensor, ids: Tensor, scale: float) -> Tensor:
        rows = F.embedding(ids, weight)  # [T, C]
        # The scale is rounded to the weights' type first, as the models that have one were trained.
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        cos, sin = cos[:, None], sin[:, None]  # [T, 1, R]
        first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
        return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), -1)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float | None
    ) -> Tensor:
        return self._attention(q, k, v, mask, scale, softcap)

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up

    def logits(self, hidden: Tensor, head: Linear, softcap: float | None) -> Tensor:
        plain = head.bias is None and not torch.is_grad_enabled()
        if plain and hidden.is_cuda and hidden.dtype.itemsize == 2:  # sums need not be rounded to 16 bits
            logits: Tensor = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
        else:
            logits = self.linear(hidden, head).float()
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap
