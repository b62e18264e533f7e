"""Options that every long run over one model has: `ConvertConfig` and `AlignConfig` end with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triblade.config.checks import require_at_least
from triblade.config.engine import DeviceName, EngineConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run goes on after an interruption, and how it opens its model."""

    resume: bool = False
    """Continue a run that was interrupted."""

    overwrite: bool = False
    """Replace what is there."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the model's own."""

    device: DeviceName = "auto"
    """Where to compute."""

    threads: int | None = None
    """CPU threads; default: the cores this process may use."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("threads", self.threads, 1)

    def opened(self, model: str) -> EngineConfig:
        """How a model is opened with these options."""
        return EngineConfig(
            model=model,
            revision=self.revision,
            chat_template=self.chat_template,
            device=self.device,
            threads=self.threads,
        )
