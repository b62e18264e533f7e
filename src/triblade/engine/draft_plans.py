"""Drafters that are a second decoder: a small model of its own (`draft`), or the target with fewer bits or layers (`self`).

Opened and compared with the target when planned, loaded when built. The draft computes with the target's kernels, threads, dtype
and KV codec, in extra layers of the target's rows; its tokens are the target's. Knows no scheduler.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import cast

from triblade.config import DType, EngineConfig
from triblade.engine.build import native_executor, torch_executor
from triblade.engine.drafters import TargetParts, kv_layers
from triblade.engine.native_program import why_not_native
from triblade.errors import ConfigError, UnsupportedError
from triblade.kv.layout import LayerGroup
from triblade.models.loader import OpenModel, open_model
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
        is_native: whether the target runs on native kernels.
    """

    config: EngineConfig
    draft: OpenModel
    is_native: bool

    @property
    def layers(self) -> LayerGroup:
        """See `DrafterPlan`."""
        return kv_layers(self.draft.config)

    @property
    def weight_bytes(self) -> int:
        """See `DrafterPlan`."""
        if not self.is_native:
            return self.draft.weight_bytes
        return packed_bytes(self.draft.checkpoint, self.draft.config, self.draft.dtype, self.config.quantization)

    def build(self, target: TargetParts) -> ModelDrafter:
        """Load the draft."""
        config, draft, cache = self.config, self.draft, target.cache.draft()
        context_length = min(target.context_length, draft.config.context_length)
        executor = (
            native_executor(config, draft, cache, context_length, target.team)
            if self.is_native
            else torch_executor(config, draft, cache, context_length)
        )
        draft.checkpoint.release()
        limits = DraftLimits(
            context_length=context_length,
            max_tokens=config.max_num_batched_tokens,
            temperature=config.draft_temperature,
        )
        return ModelDrafter(executor, config.block_size, limits)


def draft_model(config: EngineConfig, model: OpenModel, *, is_native: bool) -> ModelDraftPlan:
    """The plan of drafter `draft`.

    Raises:
        UnsupportedError: the draft does not fit the target, or not its kernels.
    """
    assert config.draft_model is not None
    own = _own_options(config, model, config.draft_model)
    fit = fit_of_draft(model, open_model(own))
    _log(fit)
    fit.check()
    draft = fit.repaired
    if own.quantization is not None and not is_native:
        draft = rounded(draft, SCHEME_BITS[own.quantization])
    return _plan(own, model, draft, is_native)


def self_draft(config: EngineConfig, model: OpenModel, *, is_native: bool) -> ModelDraftPlan:
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
    if own.quantization is not None and not is_native:
        draft = rounded(draft, SCHEME_BITS[own.quantization])
    return _plan(own, model, draft, is_native)


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


def _plan(own: EngineConfig, model: OpenModel, draft: OpenModel, is_native: bool) -> ModelDraftPlan:
    codec = own.dtype if own.kv_cache_dtype == "auto" else own.kv_cache_dtype
    reason = why_not_native(draft.config, codec, own.block_size) if is_native else None
    if reason is not None:
        raise UnsupportedError(
            f"the draft cannot run on the target's native kernels: {reason}", hint="use --backend reference"
        )
    draft = replace(
        draft, tokenizer=model.tokenizer, token_limit=model.vocab_size
    )  # it proposes the target's tokens only
    return ModelDraftPlan(config=own, draft=draft, is_native=is_native)


def _log(fit: DraftFit) -> None:
    """What was compared; loud only where something is not as it should be."""
    for finding in fit.findings:
        level = logging.WARNING if finding.severity in ("fixed", "warning") else logging.INFO
        log.log(level, "draft %s: %s", finding.severity, f"{finding.subject}: {finding.message}")
