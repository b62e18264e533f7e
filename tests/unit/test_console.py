"""Streams, log lines and progress."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from triblade import console


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    package = logging.getLogger("triblade")
    state = (package.handlers[:], package.level, package.propagate)
    yield
    package.handlers[:], package.level, package.propagate = state


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_streams_replace_what_they_cannot_encode(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:  # H16
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("h\u00e9 \U0001f600\n".encode()), encoding=encoding))
    console.prepare_streams()
    sys.stdout.write("fine \U0001f600 \u4f60 \u2588")
    sys.stdout.flush()
    assert raw.getvalue() == b"fine ? ? ?"
    assert sys.stdin.readline().startswith("h")


def test_progress_off_a_terminal_is_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # H17
    now = iter(range(10_000))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now) * 0.05)
    console.setup_logging("info")
    with console.progress("loading", 272, unit="tensors") as advance:
        for _ in range(272):
            advance(1)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert 2 < len(lines) < 50
    assert lines[0].endswith("INFO loading")
    assert lines[-1].endswith("loading: 272 tensors, done")
    assert "\r" not in err
    assert "\x1b" not in err


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:  # H17
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with console.progress("downloading", 2_000_000) as advance:
        advance(2_000_000)
    assert "downloading" in terminal.getvalue()
    assert "2.0/2.0 MB" in terminal.getvalue()


def test_a_failure_inside_progress_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    console.setup_logging("info")
    with pytest.raises(ValueError, match="broken"), console.progress("loading"):
        raise ValueError("broken")
    assert "done" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("done", "total", "unit", "text"),
    [(34_000_000, 92_000_000, "B", "34 of 92 MB"), (3, 30, "layers", "3 of 30 layers"), (5_000_000, None, "B", "5 MB")],
)
def test_describe(done: int, total: int | None, unit: str, text: str) -> None:
    assert console.describe(done, total, unit) == text


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "text"),
    [
        (10, 30, 20.0, ", about 40 s left"),
        (1, 30, 12.0, ", about 6 min left"),
        (30, 30, 9.0, ""),
        (0, 30, 9.0, ""),
        (5, None, 9.0, ""),
    ],
)
def test_remaining(done: int, total: int | None, elapsed_s: float, text: str) -> None:
    assert console.remaining(done, total, elapsed_s) == text


def test_logging_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    console.setup_logging("debug")
    console.setup_logging("warning")
    logging.getLogger("triblade.models").info("not shown")
    logging.getLogger("triblade.models").warning("shown")
    assert capsys.readouterr().err.count("shown") == 1
