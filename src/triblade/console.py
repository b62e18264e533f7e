"""The terminal side of the package: text streams that cannot fail on a character, log lines, and progress.

Data goes to standard output, everything else to standard error. Progress is a moving bar on a terminal only; elsewhere
it is one log line every few seconds, so that a container's log stays short. Knows nothing of what makes progress.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 5.0

logger = logging.getLogger(__name__)

Advance = Callable[[int], None]


def prepare_streams() -> None:
    """Let the standard streams replace what their encoding lacks, instead of raising in the middle of an answer."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def setup_logging(level: str) -> None:
    """Send the package's log lines of at least `level` to standard error; calling it again replaces the setting."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    package = logging.getLogger("triblade")
    package.handlers[:] = [handler]
    package.setLevel(level.upper())
    package.propagate = False


@contextmanager
def progress(label: str, total: int | None = None, *, unit: str = "B") -> Iterator[Advance]:
    """Report on a task while the `with` block runs; call the yielded function with each amount done.

    Args:
        label: what is being done, such as "downloading model.gguf".
        total: the whole amount, when known.
        unit: "B" shows bytes in MB; any other word is a plain count.
    """
    reporter = _bar if sys.stderr.isatty() else _log_lines
    with reporter(label, total, unit) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, advance=done)


@contextmanager
def _log_lines(label: str, total: int | None, unit: str) -> Iterator[Advance]:
    started = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if (now := time.monotonic()) - last >= SECONDS_BETWEEN_LINES:
            last = now
            logger.info("%s: %s%s", label, describe(done, total, unit), remaining(done, total, now - started))

    logger.info("%s", label)
    yield advance
    logger.info("%s: %s, done", label, describe(done, None, unit))


def remaining(done: int, total: int | None, elapsed_s: float) -> str:
    """The time that the rest will take if it goes on like this, in words; empty where nobody can know."""
    if not total or not 0 < done < total:
        return ""
    left_s = elapsed_s * (total - done) / done
    return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"


def describe(done: int, total: int | None, unit: str) -> str:
    """`done` of `total` in words: "34 of 92 MB", "3 of 30 layers"."""
    if unit == "B":
        done, total, unit = round(done / 1e6), total and round(total / 1e6), "MB"
    return f"{done} of {total} {unit}" if total else f"{done} {unit}"
