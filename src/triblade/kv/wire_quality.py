"""What a wire codec costs in quality: a text goes on after a prefix whose keys and values were sent and rebuilt.

The prefix is computed once, stored in a sender's cache, sent to a receiver's, and the rest of the window attends to what arrived;
its predictions are compared with those of the model that never sent anything. Knows codecs and decoders, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.kv.cache import KVCache
from triblade.kv.calibration_collect import Taps
from triblade.kv.layout import KVLayout
from triblade.kv.wire import WireCodec
from triblade.kv.wire_frame import WireSpan
from triblade.models.decoder import Decoder, window_mask

LOGITS_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True)
class Route:
    """A codec between two caches."""

    codec: WireCodec
    sender: KVLayout
    receiver: KVLayout


@dataclass(slots=True)
class CodecQuality:
    """Sums over windows; perplexity, KL and agreement are of the tokens behind the prefixes."""

    nll: float = 0.0
    kl: float = 0.0
    agreed: float = 0.0
    num_tokens: int = 0
    payload_bytes: int = 0
    prefix_tokens: int = 0
    error: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))  # squared, of keys and values
    total: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    @property
    def kl_nats(self) -> float:
        """From the model's own predictions, per token."""
        return self.kl / self.num_tokens

    @property
    def top1_agreement(self) -> float:
        return self.agreed / self.num_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.payload_bytes / self.prefix_tokens

    @property
    def relative_errors(self) -> tuple[float, float]:
        """Squared length of the error of keys, and of values, as a share of theirs."""
        keys, values = (self.error / self.total.clamp_min(1e-30)).tolist()
        return keys, values


class ReceivedAttend:
    """Attention of the tokens behind a prefix that a cache holds.

    Args:
        decoder: whose attention this is.
        cache: holds the prefix in its first blocks.
        prefix: tokens.
        length: tokens behind it.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, prefix: int, length: int) -> None:
        self._decoder, self._cache, self._prefix = decoder, cache, prefix
        self._table = torch.arange(cache.layout.blocks_for(prefix), device=decoder.device)[None]
        positions = torch.arange(prefix, prefix + length, device=decoder.device)[None]
        windows = {layer.window for layer in decoder.config.layers}
        self._masks = {window: window_mask(positions, prefix + length, window) for window in windows}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.decoder.Attend`."""
        config = self._decoder.config
        sent = (x[:, : self._prefix].to(k.dtype) for x in self._cache.read(layer, self._table))
        keys, values = (torch.cat((old, new[None]), 1) for old, new in zip(sent, (k, v), strict=True))
        mask = self._masks[config.layers[layer].window]
        scale, cap = config.attention_scale, config.attention_softcap
        return self._decoder.backend.attention(q[None], keys, values, mask, scale, cap)[0]


@torch.inference_mode()
def measure_codecs(
    decoder: Decoder, windows: Iterable[Tensor], prefix: int, routes: Mapping[str, Route]
) -> dict[str, CodecQuality]:
    """Send the first `prefix` tokens of every window [S] by every route, and compare the rest.

    Returns:
        By route, and under "" the model itself: KL 0.
    """
    found = {name: CodecQuality() for name in ("", *routes)}
    for window in windows:
        ids = window.to(decoder.device)
        taps = Taps(decoder, len(ids))
        hidden = decoder.forward(ids, torch.arange(len(ids), device=decoder.device), taps)[prefix:]
        vectors = taps.vectors()[:, :, :prefix]
        _add_predictions(found[""], decoder, hidden, hidden, ids[prefix:])
        for name, route in routes.items():
            received = _sent(route, vectors, decoder, found[name])
            attend = ReceivedAttend(decoder, received, prefix, len(ids) - prefix)
            positions = torch.arange(prefix, len(ids), device=decoder.device)
            _add_predictions(
                found[name], decoder, decoder.forward(ids[prefix:], positions, attend), hidden, ids[prefix:]
            )
    return found


def _sent(route: Route, vectors: Tensor, decoder: Decoder, quality: CodecQuality) -> KVCache:
    """The receiver's cache after a transfer of keys and values [L, 2, T, G, D], and what it cost."""
    tokens = vectors.shape[2]
    blocks = range(route.sender.blocks_for(tokens))
    sender, receiver = (
        KVCache(layout, len(blocks), torch.float32, decoder.device) for layout in (route.sender, route.receiver)
    )
    slots = torch.arange(tokens, device=decoder.device)
    for layer, (keys, values) in enumerate(vectors):
        sender.write(layer, slots, keys, values)
    span = WireSpan(0, tokens, tokens)
    payload = route.codec.encode(sender, blocks, span)
    route.codec.decode(receiver, blocks, span, payload)
    quality.payload_bytes += len(payload)
    quality.prefix_tokens += tokens
    table = torch.tensor([list(blocks)], device=decoder.device)
    for layer, pair in enumerate(vectors):
        for kind, back in enumerate(receiver.read(layer, table)):
            quality.error[kind] += (back[0, :tokens] - pair[kind]).double().square().sum().cpu()
            quality.total[kind] += pair[kind].double().square().sum().cpu()
    return receiver


def _add_predictions(quality: CodecQuality, decoder: Decoder, hidden: Tensor, original: Tensor, ids: Tensor) -> None:
    """Hidden states [R, C] of tokens ids [R], by what arrived and by the model alone; each predicts the next token."""
    rows = max(1, LOGITS_AT_ONCE // decoder.config.vocab_size)
    for mine, theirs, targets in zip(
        hidden[:-1].split(rows), original[:-1].split(rows), ids[1:].split(rows), strict=True
    ):
        log_q, log_p = (decoder.logits(piece).log_softmax(-1) for piece in (mine, theirs))
        quality.nll += float(F.nll_loss(log_q, targets, reduction="sum"))
        quality.kl += float((log_p.exp() * (log_p - log_q)).sum())
        quality.agreed += float((log_q.argmax(-1) == log_p.argmax(-1)).sum())
        quality.num_tokens += len(targets)
