"""Drafter `eagle`: a trained head, computed by the kernels of its target: torch's, the native ones, or those of `cuda_eagle`.

Both read and write the head's layer in the target's KV rows and share the target's embedding. Knows no scheduler; which tokens the
head must compute is `spec.eagle_drafter`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from triblade import spec
from triblade.config import EngineConfig, forced_isa
from triblade.engine.attend import PagedAttend
from triblade.engine.batch import Batch
from triblade.engine.cuda import CudaExecutor
from triblade.engine.cuda_eagle import CudaEagle
from triblade.engine.drafters import Kernels, TargetParts, kv_layers
from triblade.engine.executor import TorchExecutor
from triblade.engine.native import NativeExecutor
from triblade.engine.native_program import NativeOptions, NativeProgram, start_of
from triblade.errors import ConfigError, UnsupportedError
from triblade.kv.cache import KVCache
from triblade.kv.layout import LayerGroup
from triblade.models.loader import OpenModel
from triblade.ops.packing import PackedMatrix, QuantizedMatrix, interleaved_halves, pack_quantized
from triblade.spec.drafter import DraftItem
from triblade.spec.eagle import EagleHead, EagleWeights
from triblade.spec.eagle_drafter import EagleDrafter, GuessRun, HeadLimits
from triblade.spec.eagle_files import EagleCheckpoint, fits, load_eagle
from triblade.spec.state_memory import StateMemory

log = logging.getLogger(__name__)


class TorchEagle:
    """Implements `GuessingHead` op by op.

    Args:
        head: with the target's backend and device.
        cache: the drafter's layers.
        states: the target's states float32 [R, D] of rows of its last step.
        least_chance: guesses end where the head holds it less likely that all so far are right; 0: nowhere.
    """

    def __init__(
        self, head: EagleHead, cache: KVCache, states: Callable[[Sequence[int]], Tensor], least_chance: float = 0.0
    ) -> None:
        config = head.config
        self._head = head
        self._cache = cache
        self._states = states
        self._least_chance = least_chance
        self.memory = StateMemory(head.weights.state_size, config.layers[0].window or config.context_length)

    @property
    def num_requests(self) -> int:
        """See `GuessingHead`."""
        return self.memory.num_requests

    def remember(self, items: Sequence[DraftItem]) -> list[int]:
        """See `GuessingHead`."""
        sizes = [item.stop - item.start for item in items]
        spans = [range(item.first_row, item.first_row + size) for item, size in zip(items, sizes, strict=True)]
        rows = self._states([row for span in spans for row in span])  # [R, D]
        for item, part in zip(items, rows.split(sizes), strict=True):
            self.memory.extend(item.request.number, item.start, part)
        return [self.memory.first(item.request.number) for item in items]

    def forget(self, request: int) -> None:
        """See `GuessingHead`."""
        self.memory.forget(request)

    @torch.inference_mode()
    def guess(self, runs: Sequence[GuessRun]) -> list[list[int]]:
        """See `GuessingHead`."""
        order = sorted(range(len(runs)), key=lambda n: runs[n].num_tokens)  # equal lengths stand together
        found: list[list[int]] = [[] for _ in runs]
        taken = [self.memory.take(r.request.number, r.start - 1, r.num_tokens) for r in runs]
        states = torch.cat([taken[n] for n in order])  # [T, D]
        current = self._forward([runs[n] for n in order], states)
        ends = torch.tensor([runs[n].num_tokens for n in order]).cumsum(0) - 1
        current = current[ends.to(current.device)]  # [S, C]
        chances = [1.0] * len(runs)
        while True:
            tokens, likely = (part.tolist() for part in self._head.best(current))
            going_on = list[int]()
            for place, n in enumerate(order):
                chances[n] *= likely[place]
                if len(found[n]) >= runs[n].length or not chances[n] >= self._least_chance:
                    continue
                found[n].append(tokens[place])
                if len(found[n]) < runs[n].length:
                    going_on.append(place)
            if not going_on:
                return found
            order, current = [order[place] for place in going_on], current[going_on]
            current = self._forward([_next(runs[n], found[n]) for n in order], current)

    def _forward(self, items: Sequence[GuessRun], states: Tensor) -> Tensor:
        backend, config = self._head.backend, self._head.config
        batch = Batch.build(items, self._cache.layout.block_size, self._cache.pool.device)
        attend = PagedAttend(batch, self._cache, config, backend)
        return self._head.forward(batch.input_ids, states.to(batch.input_ids.device), batch.positions, attend)


def _next(run: GuessRun, guessed: Sequence[int]) -> GuessRun:
    """The newest guess, to compute."""
    return replace(run, start=run.start + run.num_tokens + len(guessed) - 1, token_ids=[guessed[-1]])


class NativeEagle(NativeProgram):
    """Implements `GuessingHead` with a recorded program: one native call for a run and all its guesses.

    Args:
        checkpoint: the head.
        target: whose embedding, team and cache it shares.
        options: sizes.
        least_chance: see `TorchEagle`.
    """

    def __init__(
        self, checkpoint: EagleCheckpoint, target: TargetParts, options: NativeOptions, least_chance: float = 0.0
    ) -> None:
        assert isinstance(target.executor, NativeExecutor)
        super().__init__(checkpoint.config, target.cache.draft(), target.context_length, options)
        self._weights = target.weights.once("draft", lambda: _native_weights(checkpoint))
        self._target = target.executor.program
        self._least_chance = least_chance
        config = checkpoint.config
        window = config.layers[0].window or target.context_length
        self.memory = self._native.StateMemory(width=self._weights.state_size, window=window)
        self._token_ids = checkpoint.weights.token_ids.to(torch.int32).contiguous()
        matrices = self._weights.matrices()
        self._open([target.executor.embedding, *matrices.values()], target.team)
        self._record(target.executor.embedding)

    @property
    def weight_bytes(self) -> int:
        """Memory of the head's own matrices."""
        return sum(matrix.nbytes for matrix in self._weights.matrices().values())

    @property
    def num_requests(self) -> int:
        """See `GuessingHead`."""
        number: int = self.memory.num_requests
        return number

    def remember(self, items: Sequence[DraftItem]) -> list[int]:
        """See `GuessingHead`; the states go from one program to the other and never through Python."""
        computed = [(item.request.number, item.first_row, item.start, item.stop) for item in items]
        firsts: list[int] = self._target.remember(self.memory, computed)
        return firsts

    def forget(self, request: int) -> None:
        """See `GuessingHead`."""
        self.memory.forget(request)

    def guess(self, runs: Sequence[GuessRun]) -> list[list[int]]:
        """See `GuessingHead`."""
        guesses: list[list[int]] = self._program.draft(
            self.memory,
            [run.request.number for run in runs],
            [run.token_ids for run in runs],
            [run.start for run in runs],
            [start_of(run.request.block_table) for run in runs],
            [max(0, run.length) for run in runs],
            self._token_ids.data_ptr(),
            self._least_chance,
        )
        return guesses

    def _record(self, embedding: PackedMatrix) -> None:
        config, weights, program = self._config, self._weights, self._program
        program.embed(self._matrix(embedding), config.embedding_scale)
        norms = weights.inner_norms
        program.fuse(self._matrix(weights.fc), self._keep(norms), len(norms), config.rms_norm_eps)
        self._record_layer(0, weights.layer, self._rope_tables()[0])
        program.head(self._keep(weights.final_norm), config.rms_norm_eps, self._matrix(weights.head), 0.0)


def _native_weights(checkpoint: EagleCheckpoint) -> EagleWeights[PackedMatrix]:
    weights = checkpoint.weights.mapped(_packed)
    return replace(weights, layer=replace(weights.layer, gate_up=_interleaved(checkpoint)))


def _packed(matrix: QuantizedMatrix) -> PackedMatrix:
    return pack_quantized(replace(matrix, scales=matrix.scales.half()))


def _interleaved(checkpoint: EagleCheckpoint) -> PackedMatrix:
    gate_up = checkpoint.weights.layer.gate_up
    return _packed(gate_up.rows(interleaved_halves(gate_up.codes.shape[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class EaglePlan:
    """Implements `DrafterPlan`."""

    config: EngineConfig
    checkpoint: EagleCheckpoint

    @property
    def layers(self) -> LayerGroup:
        """See `DrafterPlan`."""
        return kv_layers(self.checkpoint.config, self.checkpoint.digest)

    @property
    def weight_bytes(self) -> int:
        """See `DrafterPlan`."""
        matrices = self.checkpoint.weights.matrices().values()
        return sum(matrix.codes.numel() * matrix.bits // 8 + matrix.scales.nbytes for matrix in matrices)

    def build(self, target: TargetParts) -> EagleDrafter:
        """Load the head beside its target."""
        model, executor = self.checkpoint.config, target.executor
        assert isinstance(executor, (TorchExecutor, NativeExecutor, CudaExecutor))
        if self.checkpoint.inner_layers or isinstance(executor, CudaExecutor):
            executor.keep_layers(self.checkpoint.inner_layers)
        head: TorchEagle | NativeEagle | CudaEagle
        if isinstance(executor, CudaExecutor):
            head = CudaEagle(self.checkpoint, target, self.config.draft_confidence)
        elif isinstance(executor, NativeExecutor):
            options = NativeOptions(
                vocab_size=len(self.checkpoint.weights.token_ids),
                max_tokens=self.config.max_num_batched_tokens,
                max_rows=self.config.max_num_seqs,
                isa=self.config.isa or forced_isa(),
            )
            head = NativeEagle(self.checkpoint, target, options, self.config.draft_confidence)
        else:
            decoder = executor.decoder
            embedding = decoder.weights.embedding
            dense = target.weights.once("draft", lambda: self.checkpoint.dense(embedding.weight))
            own = EagleHead(model, dense, embedding, decoder.backend, target.context_length)
            head = TorchEagle(own, target.cache.draft(), executor.states, self.config.draft_confidence)
        limits = HeadLimits(
            max_tokens=self.config.max_num_batched_tokens,
            window=model.layers[0].window or target.context_length,
            context_length=target.context_length,
        )
        return EagleDrafter(head, self.config.block_size, limits)


def eagle_head(config: EngineConfig, model: OpenModel, *, kernels: Kernels) -> EaglePlan:
    """The plan of drafter `eagle`: the head that is named, or one that comes with the package and fits.

    Raises:
        CheckpointError: the folder holds no sound head.
        ConfigError: the head is of another model, or none fits.
    """
    folder = config.draft_model
    checkpoint = _shipped_head(model) if folder is None else load_eagle(Path(folder), model)
    if kernels == "native" and any(matrix.group % 16 for matrix in checkpoint.weights.matrices().values()):
        raise UnsupportedError(
            "the head's groups are not whole lanes of the native kernels", hint="use --backend reference"
        )
    return EaglePlan(config=config, checkpoint=checkpoint)


def _shipped_head(model: OpenModel) -> EagleCheckpoint:
    for folder in sorted((Path(spec.__file__).parent / "heads").iterdir()):
        if fits(folder, model):
            log.info("eagle head: %s, from the package", folder.name)
            return load_eagle(folder, model)
    raise ConfigError(
        f"no eagle head in the package fits {model.name}",
        hint="make one: triblade align MODEL --output DIR, then --draft-model DIR",
        param="draft_model",
    )
