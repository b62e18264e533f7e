"""From a drafter's name to a drafter: what it takes of memory before anything is loaded, then the drafter itself.

A plan is made first (KV layers and weights count in the memory plan), the drafter when the target's executor and cache exist. What
drafters share with their target stands in `TargetParts`; nobody reaches into the target otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from triblade.config import EngineConfig
from triblade.engine.executor import StepExecutor
from triblade.engine.weights import SharedWeights
from triblade.kv.cache import KVCache
from triblade.kv.layout import LayerGroup
from triblade.models.config import ModelConfig
from triblade.models.loader import OpenModel
from triblade.registry import DRAFTERS
from triblade.spec.drafter import Drafter

Kernels = Literal["native", "cuda", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """What a drafter may use of its target.

    Attributes:
        executor: of the target, whose hidden states of the last step a head reads.
        cache: the pool; `cache.draft()` holds the drafter's layers where its plan asked for some.
        context_length: tokens of the longest sequence.
        team: threads of the native backend; None on others.
        weights: where those of the drafter are kept, for engines that share them.
    """

    executor: StepExecutor
    cache: KVCache
    context_length: int
    team: Any | None
    weights: SharedWeights = field(default_factory=SharedWeights)


class DrafterPlan(Protocol):
    """A drafter that is not loaded yet."""

    @property
    def layers(self) -> LayerGroup | None:
        """KV layers it keeps in the target's rows; None keeps none."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights, none of them the target's."""
        ...

    def build(self, target: TargetParts) -> Drafter:
        """Load it."""
        ...


def kv_layers(model: ModelConfig, fingerprint: str) -> LayerGroup:
    """The KV layers of a drafter that is a decoder of this shape with the weights of that fingerprint."""
    return LayerGroup(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        model_hash=fingerprint,
    )


def plan_drafter(config: EngineConfig, model: OpenModel, *, kernels: Kernels) -> DrafterPlan | None:
    """The plan of the drafter that is asked for; None decodes plainly.

    Raises:
        TribladeError: the drafter does not fit the model, with the first reason.
    """
    if config.drafter is None:
        return None
    plan: DrafterPlan = DRAFTERS[config.drafter](config, model, kernels=kernels)
    return plan
