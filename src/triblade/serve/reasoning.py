"""What a model thinks before it answers, told apart from the answer by the marks around it.

Knows no tool and no request. Only what stands first in an answer is reasoning; marks further on are content. Invariant: how the
text is cut into pieces changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triblade.engine.stop_strings import StopStrings

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Markers:
    """What stands around reasoning."""

    opener: str
    closer: str

    def is_open_in(self, prompt: str) -> bool:
        """Whether a prompt ends inside of reasoning, as those of models that always think do."""
        return prompt.rstrip().endswith(self.opener)

    def is_done_in(self, prompt: str) -> bool:
        """Whether a prompt ends behind reasoning, as those that tell a model not to think do."""
        return prompt.rstrip().endswith(self.closer)


def think() -> Markers:
    """Qwen3, DeepSeek-R1 and many others."""
    return Markers("<think>", "</think>")


def mistral_think() -> Markers:
    """Magistral."""
    return Markers("[THINK]", "[/THINK]")


class ReasoningReader:
    """Reads one choice.

    Args:
        markers: around the reasoning.
        is_open: the prompt has the opening mark already.
    """

    def __init__(self, markers: Markers, *, is_open: bool) -> None:
        self._markers = markers
        self._closers = StopStrings([markers.closer])
        self._text = ""  # came, not told yet
        self._state: Callable[[], tuple[str, str]] = self._inside if is_open else self._before
        self._is_fresh = True  # white space at the beginning of a part is not told

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends inside of the reasoning."""
        return self._state == self._inside

    def feed(self, text: str) -> tuple[str, str]:
        """What can be told now: (reasoning, answer)."""
        self._text += text
        return self._state()

    def finish(self) -> tuple[str, str]:
        """What was held back, when nothing follows."""
        rest, self._text = self._text, ""
        return (rest, "") if self._state == self._inside else ("", rest)

    def _before(self) -> tuple[str, str]:
        said = self._text.lstrip(SPACE)
        if said.startswith(self._markers.opener):
            self._text = said.removeprefix(self._markers.opener)
            self._state = self._inside
            return self._inside()
        if self._markers.opener.startswith(said):
            return "", ""
        self._state, self._is_fresh = self._behind, False
        return self._behind()

    def _inside(self) -> tuple[str, str]:
        self._strip()
        at = self._text.find(self._markers.closer)
        if at < 0:
            return self._take(len(self._text) - self._closers.held_length(self._text)), ""
        reasoning = self._take(at)
        self._take(len(self._markers.closer))
        self._state, self._is_fresh = self._behind, True
        return reasoning, self._behind()[1]

    def _behind(self) -> tuple[str, str]:
        self._strip()
        return "", self._take(len(self._text))

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _strip(self) -> None:
        if self._is_fresh:
            self._text = self._text.lstrip(SPACE)
            self._is_fresh = not self._text
