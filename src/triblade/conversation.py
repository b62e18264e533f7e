"""Answers as a person reads them: piece by piece on standard output, and `triblade chat`, which reads lines and answers them.

Knows no option. A failed turn is forgotten and the conversation goes on; Ctrl-C ends an answer, never a step of the engine.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any

from triblade.errors import NumericalError, TribladeError
from triblade.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triblade.llm import LLM


def print_error(message: str, hint: str | None) -> None:
    """What happened and what to do about it, on standard error."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def messages(system: str | None, user: str | None = None) -> list[dict[str, str]]:
    """The opening of a conversation; what is None is left out."""
    turns = (("system", system), ("user", user))
    return [{"role": role, "content": content} for role, content in turns if content is not None]


def write(text: str) -> None:
    """Show a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Generator[str, None, None]:
    """Pieces of the answer as they come.

    Raises:
        NumericalError: when the engine gives up on the request.
    """
    for output in llm.stream(prompt, params):
        yield output.text
        if output.error:
            raise NumericalError(output.error)


def converse(llm: LLM, history: list[dict[str, Any]], params: SamplingParams) -> None:
    """Read lines and answer them until end of input; a failed turn is forgotten, the conversation goes on."""
    opening = list(history)
    for line in _lines():
        if line == "/exit":
            return
        if line == "/reset":
            history = list(opening)
            print("conversation forgotten", file=sys.stderr)
        elif line.startswith("/"):
            print(f"unknown command: {line}\nhint: /reset, /exit", file=sys.stderr)
        elif line:
            history = _turn(llm, history, line, params)


def _turn(llm: LLM, history: list[dict[str, Any]], line: str, params: SamplingParams) -> list[dict[str, Any]]:
    """One question and answer; the history after it. Ctrl-C ends the answer early and keeps what was said."""
    asked = [*history, {"role": "user", "content": line}]
    said = ""
    try:
        with _interruption() as interrupted, closing(stream(llm, llm.tokenizer.encode_chat(asked), params)) as pieces:
            for piece in pieces:
                said += piece
                write(piece)
                if interrupted.is_set():
                    break
    except TribladeError as error:
        print_error(error.message, "; ".join(filter(None, (error.hint, "/reset forgets the conversation"))))
        return history
    write("\n")
    return [*asked, {"role": "assistant", "content": said}]


@contextmanager
def _interruption() -> Iterator[Event]:
    """Turn the first Ctrl-C into an event, so that it cannot hit the engine in the middle of a step; a second ends."""
    interrupted = Event()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            signal.default_int_handler(number, frame)
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Lines typed or piped in, stripped; the prompt sign is shown to a person only."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        if not line and not sys.stdin.isatty():
            return
        yield line.strip()
