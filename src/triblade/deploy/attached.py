"""A program that ends with this process, and everything that it started ends with it.

It is a session of its own, so that the terminal's interrupt reaches this process alone, which passes on what it wants to; it gets a
signal when this process is gone, however that went (`tether`). Knows no engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import resources

from triblade.config.environment import extended_environment

log = logging.getLogger(__name__)


class AttachedProcess:
    """A running program; what it prints goes to standard error.

    Args:
        name: for messages.
        command: the words; the first is a path.
        variables: of its environment, beside this process's own.
    """

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.name = name
        log.debug("starting %s: %s", name, " ".join(command))
        with resources.as_file(resources.files("triblade.deploy") / "tether.py") as tether:
            self._process = subprocess.Popen(
                [sys.executable, str(tether), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                start_new_session=True,
                env=extended_environment(variables),
            )
        log.info("%s: process %d", name, self._process.pid)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end."""
        if self._process.poll() is None:
            self._process.send_signal(how)

    def wait(self, timeout_s: float | None) -> int:
        """Until it has ended, and everything in its session; whoever takes longer is killed.

        Args:
            timeout_s: None: for ever.

        Returns:
            The exit code.
        """
        try:
            self._process.wait(None if timeout_s is None else max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            log.warning("%s does not end and is killed", self.name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()
