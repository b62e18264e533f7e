"""A process that measures on command: one JSON line in, one out.

Every engine of a comparison stays loaded in its own process and works only while it is asked, so that engines alternate quickly and
never run at the same time. Knows no engine; needs the standard library only, since peers live in other environments. Invariant:
an answer is the only thing on the pipe, whatever the libraries of a worker print.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
Figures = dict[str, float]


class Worker:
    """The asking side.

    Args:
        python: interpreter to run.
        module: below benchmarks/; its `main` ends in `answer`.
        arguments: its command line.
    """

    def __init__(self, python: str | Path, module: str, arguments: Sequence[str]) -> None:
        self._name = module
        command = [str(python), "-m", module, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE)
        self.versions: dict[str, str] = self._read()  # waits until it is loaded

    def ask(self, name: str, **arguments: Any) -> Figures:
        """Run one measurement and wait for its figures.

        Raises:
            RuntimeError: the worker ended.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        figures: Figures = self._read()
        return figures

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self._name} ended with {self.process.wait()}; its message is above")
        return json.loads(line)


def answer(versions: Mapping[str, str], commands: Mapping[str, Callable[..., Figures]]) -> None:
    """The answering side: say that the worker is loaded, then run commands until the pipe closes."""
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)  # what anybody prints goes to standard error
        print(json.dumps(versions), file=channel, flush=True)
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(commands[name](**arguments)), file=channel, flush=True)
