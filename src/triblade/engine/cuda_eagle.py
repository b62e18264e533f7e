"""The eagle head on the CUDA kernels: committed tokens and all guesses that follow them are one recorded graph.

Runs of few tokens go together, padded to a recorded size; a long one, of a prompt, is launched alone. The states of the target stay
on the device from its step to the head. Which tokens are computed is `spec.eagle_drafter`'s business; `engine.eagle.TorchEagle` is
the twin. Invariant: a guess is written to the cache only below its run's limit, where the request has blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.engine.cuda import BUCKETS, MOST_ROWS, QUERIES, CudaExecutor, bucket_of
from triblade.engine.cuda_decoder import CudaDecoder, Group
from triblade.engine.cuda_steps import NO_SLOT, Shape, blocks_of, recording, slots_of
from triblade.engine.drafters import TargetParts
from triblade.models.decoder import DecoderWeights
from triblade.ops.backend import Linear
from triblade.ops.cuda.attention import Sequences
from triblade.ops.cuda.linear import ROWS, Activations
from triblade.ops.cuda.packing import DeviceMatrix, pack_codes, pack_dense, why_not_packed
from triblade.ops.packing import QuantizedMatrix
from triblade.spec.drafter import DraftItem
from triblade.spec.eagle import EagleWeights
from triblade.spec.eagle_drafter import GuessRun
from triblade.spec.eagle_files import EagleCheckpoint
from triblade.spec.state_memory import StateMemory

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # guesses of a recorded chain


class HeadDecoder(CudaDecoder):
    """The head's layer as launches.

    Args:
        checkpoint: the head.
        weights: packed, on the device.
        target: whose embedding and cache it shares.
    """

    def __init__(self, checkpoint: EagleCheckpoint, weights: EagleWeights[DeviceMatrix], target: TargetParts) -> None:
        assert isinstance(target.executor, CudaExecutor)
        self._head = weights
        own: DecoderWeights[DeviceMatrix] = DecoderWeights(
            embedding=target.executor.embedding,
            layers=[weights.layer],
            final_norm=weights.final_norm,
            head=weights.head,
        )
        cache, device = target.cache.draft(), target.executor.device
        super().__init__(checkpoint.config, own, cache, target.context_length, device, MOST_ROWS)
        self._buffers = self.buffers(MOST_ROWS)
        self.reserve(MOST_ROWS, 1)

    def matrices(self) -> list[DeviceMatrix]:
        """See `CudaDecoder`."""
        return [*super().matrices(), self._head.fc]

    def step(self, ids: Tensor, states: Tensor, group: Group) -> Tensor:
        """The head's own states [T, C] of tokens [T]; `states` of those before are the target's [T, F * C] or its own [T, C]."""
        tokens, sequences = len(ids), group.sequences
        buffers = self.part_of(self._buffers, tokens) if tokens <= MOST_ROWS else self.buffers(tokens)
        x = self._inputs(ids, states)
        inputs = self._linear.inputs(tokens, x.shape[1])
        self._vectors.arrange(x, inputs)
        self._linear.multiply(inputs, self._head.fc, buffers.x)
        out = torch.empty(tokens, self.config.hidden_size, dtype=self.dtype, device=self.memory)
        self.compute(sequences, [group], buffers, Activations(out, tokens, ROWS))
        return out

    def score(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """After each of the head's states [S, C]: its likeliest token's id [S] in the target's vocabulary, and the chance."""
        logits = torch.empty(len(states), self._head.head.rows, dtype=torch.float32, device=self.memory)
        everyone = torch.arange(len(states), device=self.memory)
        self.logits(self.rows(Activations(states, len(states), ROWS), everyone), logits)
        top, rows = logits.max(-1)
        return self._head.token_ids[rows], (top - logits.logsumexp(-1)).exp()

    def _inputs(self, ids: Tensor, states: Tensor) -> Tensor:
        """[T, (1 + F) C]: what `fc` multiplies."""
        norms, width = self._head.inner_norms, self.config.hidden_size
        embedded = F.embedding(ids, self.weights.embedding.codes) * self._embedding_scale
        final, *inner = states.split(width, -1)
        if not inner:
            return F.pad(torch.cat((embedded, final), -1), (0, len(norms) * width))
        eps = self.config.rms_norm_eps
        scaled = [
            F.rms_norm(x.float(), (width,), norm, eps).to(self.dtype) for x, norm in zip(inner, norms, strict=True)
        ]
        return torch.cat((embedded, final, *scaled), -1)


@dataclass(frozen=True, slots=True)
class Guessing:
    """A recorded, or launched, run of S sequences with Q tokens each and guesses: places of inputs and results on the device."""

    shape: Shape
    numbers: Tensor  # int32, all of the following
    tokens: Tensor  # [3, S * Q]: ids, positions, slots
    last: Tensor  # [S] rows of the newest tokens
    limits: Tensor  # [S] positions from which on guesses are not computed
    tables: Tensor  # [S, width]
    states: Tensor  # [S * Q, F * C]
    results: Tensor  # int32 [2, guesses, S]: tokens, bits of chances

    @property
    def length(self) -> int:
        return self.results.shape[1]


class CudaEagle:
    """Implements `GuessingHead`.

    Args:
        checkpoint: the head.
        target: on CUDA kernels; its executor keeps the layers that the head reads.
        least_chance: guesses end where the head holds it less likely that all so far are right; 0: nowhere.
    """

    def __init__(self, checkpoint: EagleCheckpoint, target: TargetParts, least_chance: float = 0.0) -> None:
        assert isinstance(target.executor, CudaExecutor)
        self._target = target.executor
        self._device = target.cache.pool.device
        dtype = self._target.embedding.codes.dtype
        weights = target.weights.once("draft", lambda: device_weights(checkpoint, self._device, dtype))
        self._decoder = HeadDecoder(checkpoint, weights, target)
        self._block_size = target.cache.layout.block_size
        self._width = target.cache.layout.blocks_for(target.context_length)
        self._least_chance = least_chance
        config, like = checkpoint.config, self._target.embedding.codes
        self.memory = StateMemory(weights.state_size, config.layers[0].window or config.context_length, like)
        self._state_size = weights.state_size
        self._is_cuda = self._device.type == "cuda"
        self._recorded: dict[tuple[Shape, int], tuple[Guessing, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None

    @property
    def num_requests(self) -> int:
        """See `GuessingHead`."""
        return self.memory.num_requests

    def remember(self, items: Sequence[DraftItem]) -> list[int]:
        """See `GuessingHead`."""
        sizes = [item.stop - item.start for item in items]
        rows = [
            row for item, size in zip(items, sizes, strict=True) for row in range(item.first_row, item.first_row + size)
        ]
        for item, part in zip(items, self._target.states(rows).split(sizes), strict=True):
            self.memory.extend(item.request.number, item.start, part)
        return [self.memory.first(item.request.number) for item in items]

    def forget(self, request: int) -> None:
        """See `GuessingHead`."""
        self.memory.forget(request)

    @torch.inference_mode()
    def guess(self, runs: Sequence[GuessRun]) -> list[list[int]]:
        """See `GuessingHead`."""
        found: list[list[int]] = [[] for _ in runs]
        for part in _parts(runs):
            chosen = [runs[number] for number in part]
            for number, guesses in zip(part, self._guess_together(chosen), strict=True):
                found[number] = guesses
        return found

    def _guess_together(self, runs: Sequence[GuessRun]) -> list[list[int]]:
        length = max(0, *(run.length for run in runs))
        most = max(run.num_tokens for run in runs)
        shape = _shape_of(runs)
        if shape is None:
            guessing, graph = self._places(Shape(len(runs), most), length), None
        else:
            length = bucket_of(LENGTHS, length) or length
            guessing, graph = self._recorded_run(shape, length)
        self._fill(guessing, runs)
        if graph is None:
            self._run(guessing, most if shape is None else 0)
        else:
            graph.replay()
        if length == 0:
            return [[] for _ in runs]
        tokens, chances = guessing.results.cpu().numpy()
        return [self._kept(run, tokens[:, n], chances[:, n].view(np.float32)) for n, run in enumerate(runs)]

    def _kept(self, run: GuessRun, tokens: Any, chances: Any) -> list[int]:
        """A run's guesses up to where they are too unlikely."""
        found, chance = list[int](), 1.0
        for token, likely in zip(tokens[: max(0, run.length)].tolist(), chances.tolist(), strict=False):
            chance *= likely
            if not chance >= self._least_chance:
                break
            found.append(token)
        return found

    def _recorded_run(self, shape: Shape, length: int) -> tuple[Guessing, Any]:
        """Places of a size, and its graph; None where nothing is recorded."""
        key = (shape, length)
        if key not in self._recorded:
            guessing, graph = self._places(shape, length), None
            guessing.tokens[1:].fill_(NO_SLOT)
            if self._is_cuda:
                self._decoder.reserve(shape.size, shape.queries)
                self._run(guessing)  # compiles and loads
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with recording(graph, self._pool):
                    self._run(guessing)
            self._recorded[key] = guessing, graph
        return self._recorded[key]

    def _places(self, shape: Shape, length: int) -> Guessing:
        size, rows = shape.size, shape.size * shape.queries
        parts = [3 * rows, size, size, size * self._width]
        numbers = torch.zeros(sum(parts), dtype=torch.int32, device=self._device)
        tokens, last, limits, tables = numbers.split(parts)
        return Guessing(
            shape=shape,
            numbers=numbers,
            tokens=tokens.view(3, rows),
            last=last,
            limits=limits,
            tables=tables.view(size, -1),
            states=self.memory.zeros(rows).clone(),
            results=torch.zeros(2, length, size, dtype=torch.int32, device=self._device),
        )

    def _fill(self, guessing: Guessing, runs: Sequence[GuessRun]) -> None:
        """Inputs of runs, in the first places."""
        shape = guessing.shape
        rows = shape.size * shape.queries
        numbers = np.zeros(guessing.numbers.numel(), dtype=np.int32)
        tokens, last, limits, tables = np.split(numbers, np.cumsum([3 * rows, shape.size, shape.size]))
        tokens, tables = tokens.reshape(3, rows), tables.reshape(shape.size, -1)
        tokens[1:].fill(NO_SLOT)
        pieces = list[Tensor]()
        for number, run in enumerate(runs):
            first, count, table = number * shape.queries, run.num_tokens, blocks_of(run)
            positions = np.arange(run.start, run.start + count, dtype=np.int32)
            taken = slice(first, first + count)
            tokens[0, taken], tokens[1, taken] = run.token_ids, positions
            tokens[1, first + count : first + shape.queries] = positions[-1]
            tokens[2, taken] = slots_of(table, positions, self._block_size)
            tables[number, : len(table)] = table[: self._width]
            last[number], limits[number] = first + count - 1, run.start + count + max(0, run.length - 1)
            pieces += self.memory.pieces(run.request.number, run.start - 1, count)
            pieces.append(self.memory.zeros(shape.queries - count))
        pieces.append(self.memory.zeros(rows - len(runs) * shape.queries))
        guessing.numbers.copy_(torch.from_numpy(numbers))
        torch.cat(pieces, out=guessing.states)

    def _run(self, guessing: Guessing, num_keys: int = 0) -> None:
        """Committed tokens, then guess after guess."""
        ids, positions, slots = guessing.tokens.unbind(0)
        sequences = Sequences(positions=positions, slots=slots, tables=guessing.tables, queries=guessing.shape.queries)
        current = self._decoder.step(ids, guessing.states, self._group(sequences, num_keys))
        last = guessing.last.long()
        current, at = current[last], positions[last]
        for number in range(guessing.length):
            tokens, chances = self._decoder.score(current)
            guessing.results[0, number] = tokens
            guessing.results[1, number] = chances.view(torch.int32)
            if number + 1 == guessing.length:
                break
            at = torch.where(at + 1 < guessing.limits, at + 1, NO_SLOT)
            current = self._decoder.step(tokens, current, self._group(self._one_each(at, guessing.tables)))

    def _one_each(self, positions: Tensor, tables: Tensor) -> Sequences:
        """A token of each sequence; negative positions have no slot."""
        block = (positions // self._block_size).clamp(0, self._width - 1).long()
        slots = tables.gather(1, block[:, None])[:, 0] * self._block_size + positions % self._block_size
        slots = torch.where(positions < 0, NO_SLOT, slots)
        return Sequences(positions=positions, slots=slots.int(), tables=tables, queries=1)

    def _group(self, sequences: Sequences, num_keys: int = 0) -> Group:
        """A group; `num_keys` other than 0 where it is launched and its length is to be known."""
        if num_keys == 0:
            return Group(sequences, 0, 0)
        lengths = (sequences.positions.view(-1, sequences.queries)[:, -1] + 1).int()
        most = int(lengths.max())
        tables = sequences.tables[:, : -(-most // self._block_size)].contiguous()
        return Group(replace(sequences, tables=tables), 0, most, lengths)


def device_weights(checkpoint: EagleCheckpoint, memory: torch.device, dtype: torch.dtype) -> EagleWeights[DeviceMatrix]:
    """The head packed for the kernels; matrices whose groups they do not take are spelled out."""

    def packed(name: str, matrix: QuantizedMatrix) -> DeviceMatrix:
        is_gated = name == "gate_up"
        on_device = QuantizedMatrix(
            codes=matrix.codes.to(memory), scales=matrix.scales.to(memory), offsets=None, bits=matrix.bits
        )
        if why_not_packed(matrix.codes.shape[1], matrix.group) is None:
            return pack_codes(on_device, dtype, is_gated=is_gated)
        return pack_dense(Linear(on_device.dequantize().to(dtype)), is_gated=is_gated)

    weights = checkpoint.weights
    matrices = {name: packed(name, matrix) for name, matrix in weights.matrices().items()}
    norms = {name: norm.to(memory) for name, norm in weights.norms().items()}
    return EagleWeights.from_parts(matrices, norms, weights.token_ids.to(memory))


def _shape_of(runs: Sequence[GuessRun]) -> Shape | None:
    """Of a recorded run that takes these; None: it is launched."""
    queries = bucket_of(QUERIES, max(run.num_tokens for run in runs))
    size = bucket_of(BUCKETS, len(runs))
    return None if queries is None or size is None or size * queries > MOST_ROWS else Shape(size, queries)


def _parts(runs: Sequence[GuessRun]) -> Iterator[list[int]]:
    """Numbers of runs that are computed together: those of few tokens while a recorded size takes them, each long one alone."""
    together = list[int]()
    for number, run in enumerate(runs):
        if run.num_tokens > QUERIES[-1]:
            yield [number]
            continue
        if together and _shape_of([runs[n] for n in (*together, number)]) is None:
            yield together
            together = []
        together.append(number)
    if together:
        yield together
