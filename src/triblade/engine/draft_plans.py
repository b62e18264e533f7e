"""Drafters that are a second decoder: a small model of its own (`draft`), or the target with fewer bits or layers (`self`).

Opened and compared with the target when planned, loaded when built. The draft computes with the target's kernels, threads, dtype
and KV codec, in extra layers of the target's rows; its tokens are the target's. Knows no scheduler.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import cast

from triblade.config import DType, EngineConfig
from triblade.engine.build import cuda_executor, cuda_weights, native_executor, native_weights, torch_executor
from triblade.engine.cuda import why_not_cuda
from triblade.engine.drafters import Kernels, TargetParts, kv_layers
from triblade.engine.executor import StepExecutor
from triblade.engine.native_program import why_not_native
from triblade.errors import ConfigError, UnsupportedError
from triblade.kv.layout import LayerGroup
from triblade.models.loader import OpenModel, open_model
from triblade.quant.device_weights import device_bytes
from triblade.quant.packed_weights import SCHEME_BITS, packed_bytes
from triblade.spec.draft_fit import DraftFit
from triblade.spec.draft_model import DraftLimits, ModelDrafter
from triblade.spec.rope_trial import fit_of_draft
from triblade.spec.self_draft import first_layers, rounded

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDraftPlan:
    """Implements `DrafterPlan`.

    Attributes:
        config: options of the draft's executor.
        draft: opened, and repaired where it had to be.
        kernels: that compute the draft: the target's, or torch beside CUDA kernels that do not take it.
    """

    config: EngineConfig
    draft: OpenModel
    kernels: Kernels

    @property
    def layers(self) -> LayerGroup:
        """See `DrafterPlan`."""
        return kv_layers(self.draft.config, self.draft.checkpoint.fingerprint())

    @property
    def weight_bytes(self) -> int:
        """See `DrafterPlan`."""
        if self.kernels == "reference":
            return self.draft.weight_bytes
        count = packed_bytes if self.kernels == "native" else device_bytes
        return count(self.draft.checkpoint, self.draft.config, self.draft.dtype, self.config.quantization)

    def build(self, target: TargetParts) -> ModelDrafter:
        """Load the draft."""
        config, draft, cache = self.config, self.draft, target.cache.draft()
        context_length = min(target.context_length, draft.config.context_length)
        executor: StepExecutor
        if self.kernels == "native":
            packed = target.weights.once("draft", lambda: native_weights(config, draft))
            executor = native_executor(config, draft, packed, cache, context_length, target.team)
        elif self.kernels == "cuda":
            on_device = target.weights.once("draft", lambda: cuda_weights(config, draft, cache.pool.device))
            executor = cuda_executor(config, draft, on_device, cache, context_length)
        else:
            dense = target.weights.once("draft", lambda: draft.read(cache.pool.device))
            executor = torch_executor(config, draft, dense, cache, context_length)
        draft.checkpoint.release()
        limits = DraftLimits(
            context_length=context_length,
            max_tokens=config.max_num_batched_tokens,
            temperature=config.draft_temperature,
        )
        return ModelDrafter(executor, config.block_size, limits)


def draft_model(config: EngineConfig, model: OpenModel, *, kernels: Kernels) -> ModelDraftPlan:
    """The plan of drafter `draft`.

    Raises:
        UnsupportedError: the draft does not fit the target, or not its kernels.
    """
    assert config.draft_model is not None
    own = _own_options(config, model, config.draft_model)
    fit = fit_of_draft(model, open_model(own))
    _log(fit)
    fit.check()
    return _plan(own, model, fit.repaired, kernels)


def self_draft(config: EngineConfig, model: OpenModel, *, kernels: Kernels) -> ModelDraftPlan:
    """The plan of drafter `self`: 4 bits unless told otherwise, and the first layers if told so.

    Raises:
        ConfigError: the draft would be the target itself, or has layers that the target has not.
        UnsupportedError: it does not fit the kernels.
    """
    own = _own_options(config, model, config.model)
    if own.quantization is None and config.draft_layers is None:
        own = replace(own, quantization="int4")
    if own.quantization == config.quantization and config.draft_layers is None:
        raise ConfigError(
            f"the draft would be the target itself, both in {own.quantization}",
            hint="use --draft-layers, or a target with more bits",
            param="draft_quantization",
        )
    draft = model if config.draft_layers is None else first_layers(model, config.draft_layers)
    return _plan(own, model, draft, kernels)


def _own_options(config: EngineConfig, model: OpenModel, name: str) -> EngineConfig:
    """The options by which the draft is opened and run: the engine's, but for the model and its weights."""
    return replace(
        config,
        model=name,
        dtype=cast("DType", str(model.dtype).removeprefix("torch.")),
        quantization=config.draft_quantization,
        drafter=None,
        draft_model=None,
        revision=None,
        tokenizer=None,
        chat_template=None,
    )


def _plan(own: EngineConfig, model: OpenModel, draft: OpenModel, kernels: Kernels) -> ModelDraftPlan:
    codec = own.dtype if own.kv_cache_dtype == "auto" else own.kv_cache_dtype
    reason = why_not_native(draft.config, codec, own.block_size) if kernels == "native" else None
    if reason is not None:
        raise UnsupportedError(
            f"the draft cannot run on the target's native kernels: {reason}", hint="use --backend reference"
        )
    if kernels == "cuda" and (reason := why_not_cuda(draft.config, draft.dtype, codec)) is not None:
        log.info("the draft is computed by torch: %s", reason)
        kernels = "reference"
    if own.quantization is not None and kernels == "reference":
        draft = rounded(draft, SCHEME_BITS[own.quantization])
    draft = replace(
        draft, tokenizer=model.tokenizer, token_limit=model.vocab_size
    )  # it proposes the target's tokens only
    return ModelDraftPlan(config=own, draft=draft, kernels=kernels)


def _log(fit: DraftFit) -> None:
    """What was compared; loud only where something is not as it should be."""
    for finding in fit.findings:
        level = logging.WARNING if finding.severity in ("fixed", "warning") else logging.INFO
        log.log(level, "draft %s: %s", finding.severity, f"{finding.subject}: {finding.message}")
