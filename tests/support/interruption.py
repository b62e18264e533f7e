"""A conversion that ends in the middle, as a killed process does: layers that were noted stay, the next one is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from triblade.config import ConvertConfig
from triblade.quant.convert import convert
from triblade.quant.run_state import RunState


class KilledError(Exception):
    pass


def interrupt(config: ConvertConfig, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends when so many layers are done, as if killed just before it notes the next one."""
    finish: Callable[..., None] = RunState.finish_layer

    def die(state: RunState, *arguments: Any) -> None:
        if len(state.layers) == layers:
            raise KilledError
        finish(state, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "finish_layer", die)
        with pytest.raises(KilledError):
            convert(config)
