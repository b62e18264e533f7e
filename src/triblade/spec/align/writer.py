"""Writing text with a dense model, many sequences in lock step: for devices that are wide and where no engine is faster.

All sequences compute position t together; a prompt is read one token a step as well. Those that are finished are thrown out when
enough have gathered. Knows no chat: prompts are token ids. `Writer` is the seam; an engine is another one (see `triblade.writing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from triblade.models.config import ModelConfig
from triblade.models.decoder import Decoder
from triblade.ops.attention import unplanned
from triblade.ops.backend import AttentionMask

LOOK_EVERY = 32  # steps between looks at who is finished
KEEP_ABOVE = 0.7  # share of live sequences under which the finished ones are thrown out
_LEAST_NOISE = 1e-20


class Writer(Protocol):
    """Continues prompts as a model would."""

    at_once: int  # prompts that are best given together

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], seed: int
    ) -> list[list[int]]:
        """For each prompt up to `max_tokens` more tokens, an end token included, at its own temperature (0 is greedy).

        The same call gives the same tokens, whatever was called before.
        """
        ...


class BatchWriter:
    """Implements `Writer` with a decoder and keys and values as plain tensors.

    Args:
        decoder: the model.
        vocab_size: valid ids are below this.
        end_token_ids: tokens that end a text.
        at_once: sequences in lock step.
    """

    def __init__(self, decoder: Decoder, vocab_size: int, end_token_ids: frozenset[int], at_once: int) -> None:
        self.at_once = at_once
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._end = torch.tensor(sorted(end_token_ids), dtype=torch.long, device=decoder.device)

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], seed: int
    ) -> list[list[int]]:
        """See `Writer`."""
        written: list[list[int]] = []
        for begin in range(0, len(prompts), self.at_once):
            part = slice(begin, begin + self.at_once)
            generator = torch.Generator(self._decoder.device).manual_seed(seed + begin)
            with unplanned():
                written += self._write(prompts[part], max_tokens, temperatures[part], generator)
        return written

    @torch.inference_mode()
    def _write(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperatures: Sequence[float],
        generator: torch.Generator,
    ) -> list[list[int]]:
        decoder = self._decoder
        lanes = _Lanes(prompts, max_tokens, temperatures, decoder.device)
        attend = _LockStep(decoder, len(prompts), lanes.tokens.shape[1])
        for position in range(lanes.tokens.shape[1] - 1):
            attend.position = position
            input_ids = lanes.tokens[lanes.live, position]
            hidden = decoder.forward(input_ids, torch.full_like(input_ids, position), attend)  # [S, C]
            if position + 1 >= lanes.shortest_prompt:
                logits = decoder.logits(hidden)[:, : self._vocab_size]
                lanes.put(position + 1, _draw(logits, lanes.temperatures[lanes.live], generator), self._end)
            if position % LOOK_EVERY == LOOK_EVERY - 1 and (kept := lanes.drop_finished(position + 2)) is not None:
                if not kept.numel():
                    break
                attend.keep(kept)
        return lanes.continuations()


class _Lanes:
    """The tokens of all sequences, and which are still written."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], device: torch.device
    ) -> None:
        self._lengths = [len(prompt) for prompt in prompts]
        self.shortest_prompt = min(self._lengths)
        width = max(self._lengths) + max_tokens
        rows = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        self.tokens = torch.tensor(rows, device=device)  # [N, W]
        self.temperatures = torch.tensor(list(temperatures), device=device)  # [N]
        self._starts = torch.tensor(self._lengths, device=device)
        self._ends = self._starts + max_tokens  # [N] one behind the last token
        self.live = torch.arange(len(prompts), device=device)  # [S]

    def put(self, position: int, drawn: Tensor, end: Tensor) -> None:
        """Take tokens drawn for `position` [S], where they are asked for."""
        starts, ends = self._starts[self.live], self._ends[self.live]
        wanted = (position >= starts) & (position < ends)
        self.tokens[self.live, position] = torch.where(wanted, drawn, self.tokens[self.live, position])
        ended = wanted & torch.isin(drawn, end)
        self._ends[self.live] = torch.where(ended, position + 1, ends)

    def drop_finished(self, position: int) -> Tensor | None:
        """Rows of the live ones to keep, if enough want no token at `position` or behind it."""
        going = self._ends[self.live] > position
        if going.float().mean() > KEEP_ABOVE:
            return None
        kept = going.nonzero()[:, 0]
        self.live = self.live[kept]
        return kept

    def continuations(self) -> list[list[int]]:
        """What was written behind each prompt."""
        rows, ends = self.tokens.tolist(), self._ends.tolist()
        return [row[start:end] for row, start, end in zip(rows, self._lengths, ends, strict=True)]


class _LockStep:
    """Attention of sequences that are all at `position`."""

    def __init__(self, decoder: Decoder, sequences: int, width: int) -> None:
        config = decoder.config
        shape = (sequences, width, config.num_kv_heads, config.head_dim)
        self._decoder = decoder
        self._keys = [torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in config.layers]
        self._values = [torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in config.layers]
        self.position = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S, H, D], k and v [S, G, D] -> [S, H, D]."""
        config, end = self._decoder.config, self.position + 1
        keys, values = self._keys[layer], self._values[layer]
        keys[:, self.position], values[:, self.position] = k, v
        window = config.layers[layer].window
        seen = slice(0 if window is None else max(0, end - window), end)
        mask = AttentionMask(None)
        scale, softcap = config.attention_scale, config.attention_softcap
        return self._decoder.backend.attention(q[:, None], keys[:, seen], values[:, seen], mask, scale, softcap)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the sequences."""
        for layer in range(len(self._keys)):
            self._keys[layer], self._values[layer] = self._keys[layer][rows], self._values[layer][rows]


def lane_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Memory of one of the sequences in lock step: keys, values, logits and the noise that draws from them."""
    cache = config.num_layers * 2 * config.kv_size * tokens * dtype.itemsize
    return cache + 4 * config.vocab_size * torch.float32.itemsize


def _draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """[S, V] float32 -> [S]: argmax of logits + temperature * Gumbel noise, which draws from softmax(logits / temperature)."""
    noise = torch.empty_like(logits).exponential_(generator=generator).clamp_min_(_LEAST_NOISE).log_()
    return torch.addcmul(logits, temperatures[:, None], noise, value=-1).argmax(-1)
