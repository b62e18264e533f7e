"""The decoder as CUDA kernel launches: the same steps as `models.decoder`, in seven kernels per layer.

Everything is written into buffers that the caller holds, so that a step can be recorded and replayed. Knows no request. Tokens are
those of groups of sequences with equally many queries each. Invariant: what a kernel reads was written earlier in the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triblade.engine.attend import StepAttention
from triblade.engine.batch import AttentionGroup
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights, LayerWeights
from triblade.models.rope import rope_table
from triblade.ops.cuda.attention import AttentionKernels, Chunks, PagedLayer, Rotation, Scoring, Sequences
from triblade.ops.cuda.device import Device
from triblade.ops.cuda.humming import HummingProducts
from triblade.ops.cuda.linear import ROWS, Activations, LinearKernels
from triblade.ops.cuda.packing import DeviceMatrix
from triblade.ops.cuda.vectors import VectorKernels

LONG_CHUNK = 64  # queries per sequence from which on attention is bound by arithmetic
MOST_KEYS = 2**17  # of long chunks that attend together: where keys must be copied for that, it bounds the copies


@dataclass(frozen=True, slots=True)
class Group:
    """S sequences of equally many tokens, which are rows [first_row, first_row + S * queries) of the step."""

    sequences: Sequences
    first_row: int
    num_keys: int  # of the longest sequence, this step's included; 0 where it is not known to the host
    lengths: Tensor | None = None  # [S] int32 keys of each sequence, where it is known

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.sequences.positions.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class LongChunks:
    """Long chunks in neighbouring rows of the step, which attend together."""

    rows: slice
    chunks: Chunks
    most_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Activations of one step."""

    x: Tensor  # [T, C], the residual stream
    projected: Tensor  # [T, C] where norms follow projections
    qkv: Tensor  # [T, (H + 2 G) * D]
    normed: Activations  # [T, C]
    mixed: Activations  # [T, H * D]
    inner: Activations  # [T, I]
    hidden: Activations  # [T, C] for the head, in the memory of `normed`
    states: Tensor | None = (
        None  # [1 + kept layers, T, C]: final-norm hidden states, and what the kept layers left behind them
    )

    def first(self, tokens: int, layout: int, head_layout: int) -> Buffers:
        """The same memory for fewer tokens."""
        return Buffers(
            x=self.x[:tokens],
            projected=self.projected[:tokens],
            qkv=self.qkv[:tokens],
            normed=self.normed.first(tokens, layout),
            mixed=self.mixed.first(tokens, layout),
            inner=self.inner.first(tokens, layout),
            hidden=self.normed.first(tokens, head_layout),
            states=self.states,
        )


class CudaDecoder:
    """Token ids in, hidden states and logits out.

    Args:
        config: the model.
        weights: packed; the embedding and the norms are dense.
        cache: keys and values, arrangement "tokens".
        context_length: positions of the rope tables.
        device: runs kernels.
        max_rows: most rows of `choose`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights[DeviceMatrix],
        cache: KVCache,
        context_length: int,
        device: Device,
        max_rows: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.memory = cache.pool.device
        self.dtype = weights.embedding.codes.dtype
        self._cache = cache
        self._ropes = [rope_table(rope, context_length, self.memory) for rope in config.ropes]
        self._layers = [paged_layer(cache, index) for index in range(config.num_layers)]
        self._linear = LinearKernels(device, self.dtype, self.memory)
        self._linear.reserve(self.matrices())
        self._attention = AttentionKernels(device, self.dtype, self.memory)
        self._vectors = VectorKernels(device, self.dtype, self.memory, max_rows)
        self._vectors.reserve_draws(config.vocab_size)
        self.keeps_states = False  # in `Buffers.states`
        self.kept_layers: tuple[int, ...] = ()
        self.other_attention: StepAttention | None = None  # in place of the kernels' own
        # The scale is rounded to the weights' type first, as the models that have one were trained.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))

    def matrices(self) -> list[DeviceMatrix]:
        """All of them, the head included."""
        layers = [m for layer in self.weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*layers, self.weights.head]

    def buffers(self, tokens: int) -> Buffers:
        """Room for a step of `tokens`."""
        config, inputs = self.config, self._linear.inputs

        def rows(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=self.dtype, device=self.memory)

        normed = inputs(tokens, config.hidden_size)
        return Buffers(
            x=rows(config.hidden_size),
            projected=rows(config.hidden_size if config.post_norms else 0),
            qkv=rows(config.q_size + 2 * config.kv_size),
            normed=normed,
            mixed=inputs(tokens, config.q_size),
            inner=inputs(tokens, config.intermediate_size),
            hidden=normed.first(tokens, self._linear.head_layout(tokens)),
            states=self._states(tokens) if self.keeps_states else None,
        )

    def _states(self, tokens: int) -> Tensor:
        shape = (1 + len(self.kept_layers), tokens, self.config.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.memory)

    def part_of(self, buffers: Buffers, tokens: int) -> Buffers:
        """The same memory for a smaller step."""
        return buffers.first(tokens, self._linear.layout(tokens), self._linear.head_layout(tokens))

    def multiply_by(self, products: HummingProducts) -> None:
        """See `LinearKernels.multiply_by`."""
        self._linear.multiply_by(products)

    def reserve(self, num_sequences: int, queries: int) -> None:
        """Scratch for recorded steps of up to this size."""
        group = self.config.num_heads // self.config.num_kv_heads
        self._attention.reserve(num_sequences, queries, self._layers[0], group)

    def forward(
        self, ids: Tensor, all_tokens: Sequences, groups: Sequence[Group], buffers: Buffers, hidden: Activations
    ) -> None:
        """Final-norm hidden states [T, C] of tokens [T] int32 into `hidden`; `all_tokens` has every position and slot."""
        self._vectors.embed(self.weights.embedding.codes, ids, self._embedding_scale, buffers.x)
        self.compute(all_tokens, groups, buffers, hidden)

    def compute(self, all_tokens: Sequences, groups: Sequence[Group], buffers: Buffers, hidden: Activations) -> None:
        """The same, from what stands in `buffers.x` on."""
        config, vectors = self.config, self._vectors
        x, normed = buffers.x, buffers.normed
        if self.other_attention is not None:
            self.other_attention.begin([_attention_group(group) for group in groups])
        parts = self._parts(groups) if buffers.mixed.tiles == 0 else groups
        added: tuple[Tensor, Tensor] | None = None
        for index, layer in enumerate(self.weights.layers):
            vectors.rms_norm(x, layer.input_norm, config.rms_norm_eps, normed, added)
            self._keep(index - 1, x, buffers)
            self._attend(index, layer, all_tokens, parts, buffers)
            added = self._project(buffers.mixed, layer.output, layer.attention_post_norm, buffers)
            vectors.rms_norm(x, layer.mlp_norm, config.rms_norm_eps, normed, added)
            self._linear.multiply(normed, layer.gate_up, buffers.inner, activation=config.activation)
            added = self._project(buffers.inner, layer.down, layer.mlp_post_norm, buffers)
        rows = hidden if buffers.states is None else Activations(buffers.states[0], len(x), ROWS)
        vectors.rms_norm(x, self.weights.final_norm, config.rms_norm_eps, rows, added)
        if buffers.states is not None:
            vectors.arrange(buffers.states[0, : len(x)], hidden)
        self._keep(len(self.weights.layers) - 1, x, buffers)

    def _keep(self, layer: int, x: Tensor, buffers: Buffers) -> None:
        """What a layer left behind it, once the norm that follows has added all of it."""
        if buffers.states is not None and layer in self.kept_layers:
            buffers.states[1 + self.kept_layers.index(layer), : len(x)] = x

    def rows(self, hidden: Activations, rows: Tensor) -> Activations:
        """Some rows [R] of hidden states that lie row after row, as inputs of the head."""
        picked = hidden.values[rows]
        layout = self._linear.head_layout(len(picked))
        inputs = Activations.empty(len(picked), picked.shape[1], layout, self.dtype, self.memory)
        self._vectors.arrange(picked, inputs)
        return inputs

    def logits(self, hidden: Activations, out: Tensor) -> None:
        """out [R, V] float32 of hidden states [R, C], not capped yet (`choose` does that)."""
        self._linear.multiply(hidden, self.weights.head, out)

    def choose(self, logits: Tensor, vocabulary: int, out: Tensor, draws: Tensor | None = None) -> None:
        """out [R] int32: of the first `vocabulary` tokens the best, or one drawn as `draws` [5, R] say; caps logits in place."""
        self._vectors.best_token(logits, vocabulary, self.config.logits_softcap, out)
        if draws is not None:
            self._vectors.draw_token(logits, vocabulary, draws, out)

    def advance(
        self, best: Tensor, inputs: Tensor, tables: Tensor, num_blocks: Tensor, drawn: Tensor | None = None
    ) -> None:
        """See `VectorKernels.advance`."""
        self._vectors.advance(best, inputs, tables, num_blocks, self._cache.layout.block_size, drawn)

    def _project(
        self, inputs: Activations, matrix: DeviceMatrix, post_norm: Tensor | None, buffers: Buffers
    ) -> tuple[Tensor, Tensor] | None:
        """Add a projection to the residual stream, or leave its norm and addition to the next norm."""
        if post_norm is None:
            self._linear.multiply(inputs, matrix, buffers.x, residual=buffers.x)
            return None
        self._linear.multiply(inputs, matrix, buffers.projected)
        return buffers.projected, post_norm

    def _attend(
        self,
        index: int,
        layer: LayerWeights[DeviceMatrix],
        all_tokens: Sequences,
        parts: Sequence[Group | LongChunks],
        buffers: Buffers,
    ) -> None:
        config, place = self.config, self._layers[index]
        self._linear.multiply(buffers.normed, layer.qkv, buffers.qkv)
        cosines, sines = self._ropes[config.layers[index].rope]
        rotation = Rotation(cosines=cosines, sines=sines, norm=layer.qk_norm, eps=config.rms_norm_eps)
        self._attention.rotate_and_write(buffers.qkv, all_tokens, place, rotation)
        if self.other_attention is not None:
            heads = buffers.qkv.unflatten(1, (-1, config.head_dim))[:, : config.num_heads]  # [T, H, D]
            mixed = self.other_attention.attend(index, heads).flatten(1)
            self._vectors.arrange(mixed.contiguous(), buffers.mixed)
            return
        scoring = Scoring(
            scale=config.attention_scale, softcap=config.attention_softcap, window=config.layers[index].window
        )
        for part in parts:
            if isinstance(part, LongChunks):
                self._attend_long(index, buffers.qkv[part.rows], part, scoring, buffers.mixed.values[part.rows])
            else:
                qkv = buffers.qkv[part.rows]
                self._attention.attend(qkv, part.sequences, place, scoring, buffers.mixed, part.first_row)

    def _parts(self, groups: Sequence[Group]) -> list[Group | LongChunks]:
        """Groups, with neighbours of long chunks made one: a launch for each of many prompts would cost more than its work."""
        parts, run, num_keys = list[Group | LongChunks](), list[Group](), 0
        for group in groups:
            keys = group.sequences.tables.numel() * self._cache.layout.block_size
            if run and (not self._is_long(group) or num_keys + keys > MOST_KEYS):
                parts.append(self._together(run))
                run, num_keys = [], 0
            if self._is_long(group):
                run.append(group)
                num_keys += keys
            else:
                parts.append(group)
        return [*parts, self._together(run)] if run else parts

    def _is_long(self, group: Group) -> bool:
        is_long = group.sequences.queries >= LONG_CHUNK and group.lengths is not None
        return is_long and self.config.attention_softcap is None and self.memory.type == "cuda"

    def _together(self, groups: Sequence[Group]) -> LongChunks:
        queries, keys = [0], [0]
        for group in groups:
            count, width = group.sequences.tables.shape
            queries += [group.sequences.queries] * count
            keys += [width * self._cache.layout.block_size] * count
        starts = np.cumsum((queries, keys), axis=1, dtype=np.int32)
        query_starts, key_starts = torch.from_numpy(starts).to(self.memory)
        lengths = [group.lengths for group in groups if group.lengths is not None]
        chunks = Chunks(
            query_starts=query_starts,
            key_starts=key_starts,
            lengths=torch.cat(lengths),
            blocks=torch.cat([group.sequences.tables.flatten() for group in groups]),
            most_queries=max(queries),
        )
        rows = slice(groups[0].first_row, groups[-1].rows.stop)
        return LongChunks(rows=rows, chunks=chunks, most_keys=max(group.num_keys for group in groups))

    def _attend_long(self, index: int, qkv: Tensor, part: LongChunks, scoring: Scoring, out: Tensor) -> None:
        if self._attention.takes_chunks(self._layers[index], scoring):
            self._attention.attend_chunks(qkv, part.chunks, self._layers[index], scoring, out)
        else:
            self._attend_gathered(index, qkv, part, scoring, out)

    def _attend_gathered(self, index: int, qkv: Tensor, part: LongChunks, scoring: Scoring, out: Tensor) -> None:
        """Keys and values of the chunks' blocks, decoded, through torch's flash attention."""
        config, chunks = self.config, part.chunks
        keys, values = self._cache.read(index, chunks.blocks.long().unsqueeze(0))  # [1, B * block_size, G, D]
        attended = torch.ops.aten._flash_attention_forward(
            qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads],
            keys[0],
            values[0],
            chunks.query_starts,
            chunks.key_starts,
            chunks.most_queries,
            part.most_keys,
            0.0,
            True,
            False,
            scale=scoring.scale,
            window_size_left=-1 if scoring.window is None else scoring.window - 1,
            window_size_right=0,
            seqused_k=chunks.lengths,
        )[0]
        out.copy_(attended.flatten(1))


def _attention_group(group: Group) -> AttentionGroup:
    """The same sequences for an attention of torch or of a package."""
    sequences = group.sequences
    positions = sequences.positions.view(-1, sequences.queries).long()
    keys = torch.arange(group.num_keys, device=positions.device)
    foreign = keys > positions[:, -1:] if len(positions) > 1 else None
    return AttentionGroup(group.first_row, positions, sequences.tables.long(), group.num_keys, foreign)


def paged_layer(cache: KVCache, index: int) -> PagedLayer:
    """Where a layer lies in the pool."""
    layout, index = cache.layout, cache.first_layer + index
    keys, values = layout.planes(index)
    group = layout.group(index)
    is_int8 = len(keys) > 1
    return PagedLayer(
        pool=cache.pool,
        keys=keys[0].offset_bytes,
        values=values[0].offset_bytes,
        key_scales=keys[1].offset_bytes if is_int8 else 0,
        value_scales=values[1].offset_bytes if is_int8 else 0,
        block_size=layout.block_size,
        num_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        is_int8=is_int8,
    )
