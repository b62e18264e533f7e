"""triblade makes open-weight LLMs fast on the hardware people have.

`LLM` and `SamplingParams` are here for scripts; they are imported when first used, so that `import triblade` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {"LLM": "triblade.llm", "EngineConfig": "triblade.config", "SamplingParams": "triblade.sampling_params"}


def __getattr__(name: str) -> Any:
    """Import one of the names above."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'triblade' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
