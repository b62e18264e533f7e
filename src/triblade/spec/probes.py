"""Steps that are run to learn from them: drafts where none are made, a token more or less than chosen, or none at all.

Knows numbers of requests and of steps, no cost and no acceptance. Invariant: what is learned in vain is tried ever more rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triblade.spec.outcomes import Verified


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How often, and how long."""

    probe_steps: int = 4  # with drafts verified
    probe_patience: int = 32  # steps after which a probe ends, drafts or not
    probe_after: int = 32  # steps until the first probe; doubles with every probe in vain
    probe_after_at_most: int = 2048
    plain_every: int = 128  # at least one step in so many is plain, in the beginning
    plain_first: int = 8  # one in so many; and
    detour_every: int = (
        32  # one in so many plain, or with a token more or less than chosen, where that is nearly as good;
    )
    detour_first: int = 3  # in the beginning one in so many, then by and by fewer
    detour_growth: int = 4


class Probes:
    """Drafts for one request that has none, a few steps long, to see whether that is still right.

    Fruitless probes double the pause to the next one, so that they cost less and less; a probe after which the request drafts
    sets it back.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self._settings = settings
        self._pause = settings.probe_after
        self.due_at = settings.probe_after  # step of the next probe
        self.request: int | None = None  # being probed
        self._steps_left = 0
        self._began_at = 0
        self._awaits_verdict: int | None = None
        self._probed: dict[int, int] = {}  # request -> step of its last probe

    def choose(self, idle: Sequence[int], step: int) -> int | None:
        """The request to probe in the next step, of those that get no drafts."""
        if self.request is not None and self.request not in idle:
            self._finish(step)
        if self.request is None and idle and step >= self.due_at:
            self.request = min(idle, key=lambda number: (self._probed.get(number, -1), -number))
            self._probed[self.request] = step
            self._steps_left = self._settings.probe_steps
            self._began_at = step
        return self.request

    def observe(self, outcome: Verified, step: int) -> None:
        """A step of a request is over."""
        if outcome.number != self.request:
            return
        self._steps_left -= outcome.proposed > 0
        if self._steps_left <= 0 or step >= self._began_at + self._settings.probe_patience:
            self._finish(step)

    def decided(self, number: int, length: int) -> None:
        """A length was chosen for a request; after a probe this is its verdict."""
        if number == self._awaits_verdict:
            self._awaits_verdict = None
            if length > 0:
                self.due_at -= self._pause - self._settings.probe_after
                self._pause = self._settings.probe_after

    def forget(self, number: int) -> None:
        """The request ended; a probe of it ends too, without a verdict, and the next one waits as long as this one did."""
        self._probed.pop(number, None)
        if number == self.request:
            self.request = None
            self.due_at = self._began_at + self._pause
        if number == self._awaits_verdict:
            self._awaits_verdict = None

    def _finish(self, step: int) -> None:
        """Pause; longer than the last time unless the verdict says otherwise."""
        self._awaits_verdict, self.request = self.request, None
        self._pause = min(2 * self._pause, self._settings.probe_after_at_most)
        self.due_at = step + self._pause


PLAIN = None  # a step without drafts
Detour = int | None  # what is added to all lengths, or PLAIN


class Detours:
    """When a step is not run as chosen, so that its neighbours stay known: plain, or with another length."""

    def __init__(self, settings: ProbeSettings) -> None:
        self._settings = settings
        self._plain_at = self._detour_at = 0
        self._count = 0

    def observe(self, step: int, *, is_plain: bool) -> None:
        """What step was run."""
        if is_plain:
            self._plain_at = step

    def choose(self, worth: Sequence[Detour], step: int) -> Detour:
        """What to do in this step, one after the other of what is worth trying; mostly to add 0."""
        settings = self._settings
        if step - self._plain_at >= min(settings.plain_every, settings.plain_first + step // settings.detour_growth):
            return PLAIN
        if not worth or step - self._detour_at < min(
            settings.detour_every, settings.detour_first + step // settings.detour_growth
        ):
            return 0
        self._detour_at = step
        self._count += 1
        return worth[self._count % len(worth)]
