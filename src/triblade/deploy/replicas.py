"""Replicas of one model, and which of them serves a request. Pure: knows no HTTP, no clock and no task.

Life of a replica: unknown -> up -> (draining) -> ejected -> up ... It is ejected after some failures in a row, at once if it
refuses connections, and comes back after as many good answers; what it had cached is forgotten then. Invariant: `work_bytes` and
`num_running` are sums over its open leases.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from triblade.config import RouteConfig
from triblade.deploy.replicas_affinity import PrefixMap
from triblade.deploy.replicas_prompt import BLOCK_BYTES, BYTES_PER_TOKEN, Prompt

log = logging.getLogger(__name__)

Role = Literal["any", "prefill", "decode"]


class Waiting(Protocol):
    """A request whose client got nothing yet."""

    def lost(self, replica: Replica) -> None:
        """Its replica was ejected."""
        ...


@dataclass(eq=False, slots=True)
class Replica:
    """One server.

    Attributes:
        number: its place in the list.
        url: without /v1 and slash.
        fault: why it is not up.
        work_bytes: of prompts that it was given and gave no token for, and of running answers what they weigh.
        waiting: requests to tell when it is lost.
    """

    number: int
    url: str
    role: Role = "any"
    is_up: bool = False
    is_draining: bool = False
    fault: str = "not asked yet"
    was_up: bool = False
    num_failures: int = 0  # in a row
    num_successes: int = 0  # in a row
    num_running: int = 0
    work_bytes: int = 0
    waiting: set[Waiting] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        """Whether it may be given requests."""
        return self.is_up and not self.is_draining


@dataclass(eq=False, slots=True)
class Lease:
    """A request's place at a replica, from the choice to the end of its answer.

    Attributes:
        missing_bytes: of the prompt that the replica has to compute.
        work_bytes: what the replica's work grew by.
    """

    replica: Replica
    prompt: Prompt
    missing_bytes: int
    work_bytes: int
    stream_bytes: int

    def begun(self) -> None:
        """The prompt is computed; only the answer is left."""
        self.replica.work_bytes += self.stream_bytes - self.work_bytes
        self.work_bytes = self.stream_bytes

    def end(self) -> None:
        """Nothing is left."""
        self.replica.num_running -= 1
        self.replica.work_bytes -= self.work_bytes
        self.work_bytes = 0


class Fleet:
    """All replicas.

    Args:
        urls: of replicas that do everything.
        config: policy, weights and limits, and the replicas with one role.
        ejected: is told of every ejection.
    """

    def __init__(
        self, urls: Sequence[str], config: RouteConfig, ejected: Callable[[Replica], None] = lambda _: None
    ) -> None:
        roles: list[tuple[str, Role]] = [(url, "any") for url in urls]
        roles += [(url, "prefill") for url in config.prefill]
        roles += [(url, "decode") for url in config.decode]
        self.replicas = [Replica(number, url, role) for number, (url, role) in enumerate(roles)]
        self._config = config
        self._ejected = ejected
        self._prefixes = PrefixMap(config.affinity_entries)
        self._turn = itertools.count()
        self._random = random.Random(0)

    def ready(self, roles: Collection[Role], apart_from: Collection[Replica] = ()) -> list[Replica]:
        """Those that may be given requests."""
        return [r for r in self.replicas if r.role in roles and r.is_ready and r not in apart_from]

    def lease(self, prompt: Prompt, ready: Sequence[Replica]) -> Lease:
        """A place at the best of these replicas, of which there is at least one.

        `prefix` takes the one that would be done first: work it has, plus what it lacks of this prompt.
        """
        warm = self._prefixes.depths(prompt.blocks)
        best = self._best(prompt, ready, warm)
        missing, weight = _missing(prompt, best, warm), self._config.stream_weight_tokens * BYTES_PER_TOKEN
        lease = Lease(best, prompt, missing, missing + weight, weight)
        best.num_running += 1
        best.work_bytes += lease.work_bytes
        self._prefixes.add(prompt.blocks, best.number)
        return lease

    def missing(self, prompt: Prompt, replica: Replica) -> int:
        """Bytes of a prompt that a replica has not cached."""
        return _missing(prompt, replica, self._prefixes.depths(prompt.blocks))

    def is_short(self, size_bytes: int) -> bool:
        """Whether so much of a prompt is computed anywhere in no time."""
        return size_bytes < self._config.short_prompt_tokens * BYTES_PER_TOKEN

    def succeeded(self, replica: Replica) -> None:
        """It answered."""
        replica.num_failures, replica.num_successes = 0, replica.num_successes + 1
        if not replica.is_up and (not replica.was_up or replica.num_successes >= self._config.eject_after):
            replica.is_up = replica.was_up = True
            log.info("%s takes requests", replica.url)

    def failed(self, replica: Replica, fault: str, *, is_gone: bool = False) -> None:
        """It did not answer; `is_gone`: and will not, before it is started again."""
        replica.num_failures, replica.num_successes = replica.num_failures + 1, 0
        replica.fault = fault
        if replica.is_up and (is_gone or replica.num_failures >= self._config.eject_after):
            self._eject(replica)

    def _eject(self, replica: Replica) -> None:
        replica.is_up = False
        log.warning("%s gets no requests: %s", replica.url, replica.fault)
        self._prefixes.forget(replica.number)
        self._ejected(replica)
        for request in list(replica.waiting):
            request.lost(replica)

    def _best(self, prompt: Prompt, ready: Sequence[Replica], warm: Mapping[int, int]) -> Replica:
        policy = self._config.policy
        if policy == "random":
            return self._random.choice(ready)
        turn = next(self._turn)
        if policy == "round-robin":
            return ready[turn % len(ready)]
        # Among equals they take turns.
        order = [ready[(turn + at) % len(ready)] for at in range(len(ready))]
        if policy == "least-load" or self.is_short(prompt.size_bytes):
            return min(order, key=lambda replica: replica.num_running)
        return min(order, key=lambda replica: replica.work_bytes + _missing(prompt, replica, warm))


def _missing(prompt: Prompt, replica: Replica, warm: Mapping[int, int]) -> int:
    """Bytes of a prompt that a replica lacks, given how many blocks each of them has."""
    return prompt.size_bytes - BLOCK_BYTES * warm.get(replica.number, 0)
