"""Which technique helps, alone and in company, and why one hurts: from measured trials only. Pure.

The corners around a combination are all smaller sets of its techniques. A technique's effect alone is that corner against none; its
effect in company is the whole combination against the corner without it. Effects are of the time of a request (or of the machine):
-0.2 is a fifth less. They are compared beyond noise only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from triblade.config.plan import Objective
from triblade.tune.measured import Trial, badness, noise
from triblade.tune.points import NO_DRAFTER, Point, Space, only, without

FEW_TOKENS = 1.3  # a step with guesses that gives fewer is hardly worth its guesses
WORSE_ACCEPTANCE = 0.05  # of the share of guesses that are right
MANY = 3  # requests at once, from which on guesses compete with other requests for the arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One technique of a combination.

    Attributes:
        alone: effect on nothing else; None: not measured.
        together: effect beside the others.
        limit: effects up to this are noise.
        causes: what the figures say about why, where it hurts or brings less than alone.
    """

    technique: str
    alone: float | None
    together: float
    limit: float
    causes: tuple[str, ...] = ()

    @property
    def hurts(self) -> bool:
        """It makes the combination slower."""
        return self.together > self.limit

    @property
    def is_weakened(self) -> bool:
        """It brings less than alone: the techniques are in each other's way."""
        return self.alone is not None and self.together - self.alone > 2 * self.limit

    def __str__(self) -> str:
        """In a sentence."""
        parts = [f"{self.technique}: {_change(self.together)} in company"]
        if self.alone is not None:
            parts.append(f"{_change(self.alone)} alone")
        if self.hurts:
            parts.append("it hurts here")
        elif self.is_weakened:
            parts.append("the others take some of its gain")
        return "; ".join([", ".join(parts), *self.causes])


@dataclass(frozen=True, slots=True)
class Corners:
    """Measured trials around a combination.

    Args:
        whole: the combination.
        others: trials, of which those at the corners count.
    """

    whole: Trial
    others: Sequence[Trial]
    space: Space
    objective: Objective

    def verdicts(self) -> list[Verdict]:
        """One for each technique whose corner was measured, in the order of the techniques."""
        return [found for name in self.whole.point.techniques if (found := self._verdict(name)) is not None]

    def at(self, point: Point) -> Trial | None:
        """The measured trial of a point."""
        found = (trial for trial in self.others if trial.point.plain == point.plain and trial.measurement is not None)
        return next(found, None)

    def _verdict(self, technique: str) -> Verdict | None:
        whole, rest = self.whole, self.at(without(self.whole.point, technique, self.space))
        if rest is None:
            return None
        none, single = self.at(self.space.none), self.at(only(whole.point, [technique], self.space))
        is_known = none is not None and single is not None and none is not rest
        found = Verdict(
            technique=technique,
            alone=self._effect(single, none) if is_known and single and none else None,
            together=self._effect(whole, rest),
            limit=noise(whole, rest),
        )
        if not (found.hurts or found.is_weakened):
            return found
        return replace(found, causes=tuple(self._causes(technique, rest)))

    def _effect(self, after: Trial, before: Trial) -> float:
        return badness(after, self.objective) / badness(before, self.objective) - 1

    def _causes(self, technique: str, rest: Trial) -> Iterator[str]:
        causes = {"drafts": self._of_drafts, "workers": self._of_workers, "quantization": self._of_quantization}
        yield from causes[technique](rest)

    def _of_drafts(self, rest: Trial) -> Iterator[str]:
        whole = self.whole
        assert whole.measurement is not None
        if not whole.measurement.knows("acceptance_rate"):
            yield "hardly anything was guessed, so there was nothing to gain"
            return
        right, tokens = whole.mean("acceptance_rate"), whole.mean("tokens_per_step")
        dense = self.at(without(whole.point, "quantization", self.space)) if whole.point.is_quantized else None
        if dense is not None and dense.mean("acceptance_rate") - right > WORSE_ACCEPTANCE:
            yield (
                f"{right:.0%} of the guesses are right, {dense.mean('acceptance_rate'):.0%} with {dense.point.weights} "
                "weights: what drafts does not fit the quantized model"
            )
        if tokens < FEW_TOKENS:
            yield f"a step with guesses gives {tokens:.2f} tokens, too few to pay for the guesses"
        elif (at_once := _in_flight(whole)) >= MANY:
            yield (
                f"{at_once:.1f} requests at once fill the arithmetic units, so that a guess costs about what a token costs"
            )
        short = whole.mean("prompt_tokens")
        if self.whole.point.drafter == "suffix" and tokens < FEW_TOKENS:
            yield f"prompts of {short:.0f} tokens have little that answers repeat"

    def _of_workers(self, rest: Trial) -> Iterator[str]:
        prompt, least = self.whole.mean("prompt_tokens"), self.whole.point.remote_prefill_tokens
        if not self.whole.mean("sent_bytes"):
            yield (
                f"no prompt was computed by the prefill worker (prompts have {prompt:.0f} tokens on average, sent are "
                f"those with {least} new ones and more), and its share of the machine was idle"
            )
        else:
            yield (
                "each role has its part of the machine, and one waits while the other works; what it buys is even "
                f"streaming (time per further token {self.whole.mean('tpot_ms'):.1f} ms, {rest.mean('tpot_ms'):.1f} without)"
            )

    def _of_quantization(self, rest: Trial) -> Iterator[str]:
        if _in_flight(self.whole) >= MANY:
            yield "with many requests at once operations count more than bytes, and fewer bits save bytes"
        lost = rest.mean("acceptance_rate") - self.whole.mean("acceptance_rate")
        if self.whole.point.drafter != NO_DRAFTER and lost > WORSE_ACCEPTANCE:
            yield (
                f"fewer guesses are right: {self.whole.mean('acceptance_rate'):.0%} instead of "
                f"{rest.mean('acceptance_rate'):.0%}"
            )


def repairs(verdict: Verdict, point: Point, space: Space, *, can_smooth: bool) -> list[tuple[Point, str]]:
    """What to try where a technique hurts, with its name; leaving it off was measured already.

    Args:
        can_smooth: conversions have a text, and their method does not rescale channels anyway.
    """
    found: list[tuple[Point, str]] = []
    if verdict.technique == "drafts":
        if can_smooth and point.is_quantized and not point.smoothed:
            found.append((replace(point, smoothed=True), "smoothing before rounding"))
        shorter = [length for length in (*space.draft_lengths, 1) if length < point.draft_length]
        found += [(replace(point, draft_length=max(shorter)), "shorter drafts")] if shorter else []
        others = [name for name in space.drafters if name != point.drafter]
        found += [(replace(point, drafter=name), "another drafter") for name in others]
    elif verdict.technique == "workers":
        shares = [split for split in space.splits if split != point.placement]
        found += [(replace(point, placement=split), "another split") for split in shares]
        found.append((replace(point, remote_prefill_tokens=512), "only long prompts for the prefill worker"))
    else:
        scheme = {"int3": "int4", "int4": "int8"}.get(point.weights)
        found += [(replace(point, weights=scheme), "more bits")] if scheme is not None else []
    return [(changed.plain, name) for changed, name in found]


def _in_flight(trial: Trial) -> float:
    """Requests at once, by Little's law."""
    return trial.mean("requests_per_s") * trial.mean("e2el_ms") / 1e3


def _change(effect: float) -> str:
    """The effect on the time of a request."""
    return f"{effect:+.0%} time"
