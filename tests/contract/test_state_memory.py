"""The memory of states in C++ and its twin: the same rows whatever is added, taken and forgotten in whatever order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from triblade.engine.native_program import native_module
from triblade.spec.state_memory import StateMemory

WIDTH, WINDOW = 3, 8


class NativeMemory:
    """The native one behind the twin's methods."""

    def __init__(self) -> None:
        native = native_module()
        assert native is not None
        self._memory: Any = native.StateMemory(width=WIDTH, window=WINDOW)

    @property
    def num_requests(self) -> int:
        return int(self._memory.num_requests)

    def extend(self, request: int, start: int, rows: Tensor) -> None:
        self._memory.extend(request, start, len(rows), rows.contiguous().data_ptr())

    def first(self, request: int) -> int:
        return int(self._memory.first(request))

    def take(self, request: int, start: int, count: int) -> Tensor:
        found = torch.full((count, WIDTH), torch.nan)
        self._memory.take(request, start, count, found.data_ptr())
        return found

    def forget(self, request: int) -> None:
        self._memory.forget(request)


@pytest.fixture(params=["torch", "native"])
def memory(request: pytest.FixtureRequest) -> Any:
    return StateMemory(WIDTH, WINDOW) if request.param == "torch" else NativeMemory()


def state(token: int) -> list[float]:
    """Nothing that could be taken for another token's, or for zero."""
    return [token + 0.25, -token - 0.5, 1.0]


def states(start: int, count: int) -> Tensor:
    return torch.tensor([state(token) for token in range(start, start + count)]).view(count, WIDTH)


def test_what_was_added_is_taken_once(memory: Any) -> None:
    memory.extend(7, 0, states(0, 3))
    memory.extend(7, 3, states(3, 1))
    assert memory.take(7, -1, 3).tolist() == [[0.0] * WIDTH, state(0), state(1)]
    assert memory.first(7) == 2
    assert memory.take(7, 0, 4).tolist() == [[0.0] * WIDTH] * 2 + [state(2), state(3)]
    assert memory.take(7, 2, 3).tolist() == [[0.0] * WIDTH] * 3


def test_a_request_computed_anew_forgets_what_was(
    memory: Any,
) -> None:  # after a preemption, or a prefix from the cache
    memory.extend(1, 0, states(0, 5))
    memory.extend(1, 2, states(102, 2))
    assert memory.first(1) == 2
    assert memory.take(1, 0, 4).tolist() == [[0.0] * WIDTH] * 2 + [state(102), state(103)]


def test_no_more_than_a_window_is_kept(memory: Any) -> None:
    for token in range(50):
        memory.extend(1, token, states(token, 1))
    assert memory.first(1) == 50 - WINDOW
    memory.extend(1, 50, states(50, 20))  # a step's own are kept, however many
    assert memory.first(1) == 50
    memory.extend(1, 70, states(70, 1))
    assert memory.first(1) == 71 - WINDOW


@pytest.mark.parametrize("seed", range(5))
def test_both_hold_the_same(seed: int) -> None:
    randomness = random.Random(seed)
    torch_memory, native_memory = StateMemory(WIDTH, WINDOW), NativeMemory()
    ends = dict.fromkeys(range(4), 0)
    for _ in range(400):
        request, count = randomness.randrange(4), randomness.randint(1, 12)
        match randomness.choice(["extend", "extend", "jump", "take", "forget"]):
            case "extend" | "jump" as kind:
                start = ends[request] if kind == "extend" else randomness.randrange(30)
                for memory in (torch_memory, native_memory):
                    memory.extend(request, start, states(start, count))
                assert torch_memory.first(request) == native_memory.first(request)
                ends[request] = start + count
            case "take" if ends[request]:
                start = ends[request] - count - randomness.randrange(-3, 4)
                expected = torch_memory.take(request, start, count)
                assert native_memory.take(request, start, count).equal(expected)
            case _:
                torch_memory.forget(request)
                native_memory.forget(request)
                ends[request] = 0
        assert torch_memory.num_requests == native_memory.num_requests
