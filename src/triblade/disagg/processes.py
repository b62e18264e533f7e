"""Worker processes: started, watched, started again a limited number of times, ended. Knows none of their options.

A worker's listening socket belongs to the parent and is inherited, so an address stays the same across restarts and nobody who
connects early is refused. A worker ends with its parent, however that ends: a pipe closes, and Linux sends a signal when the
thread that started it is gone; that thread lives as long as the workers do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from triblade.config.environment import worker_environment
from triblade.disagg.sockets import bound, name_of

log = logging.getLogger(__name__)

POLL_S = 0.1
RESTART_DELAY_S = 0.5
END_TIMEOUT_S = 10.0  # beyond the drain time, until a worker is killed


class WorkerProcess:
    """One worker with its socket.

    Args:
        role: for names.
        number: among those of the role.
        by_path: its address is a Unix socket in a folder of its own; else a free port of this host.

    Attributes:
        options: of `triblade worker`.
        devices: that it sees, its own first; empty: all.
    """

    def __init__(self, role: str, number: int, *, by_path: bool) -> None:
        self.role, self.name = role, f"{role}-{number}"
        self.options: Sequence[str] = ()
        self.devices: Sequence[int] = ()
        self._folder = tempfile.mkdtemp(prefix="triblade-") if by_path else None
        self._listener: socket.socket = bound(str(Path(self._folder, self.name)) if self._folder else "127.0.0.1:0")
        self.address = name_of(self._listener)
        self.pipe, self._parent_end = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def inherited(self) -> str:
        """Its own address as it gets it."""
        return f"fd:{self._listener.fileno()}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, or start it again."""
        command = [sys.executable, "-m", "triblade", "worker", *self.options]
        log.debug("starting %s: %s", self.name, " ".join(command))
        inherited = (self._listener.fileno(), self.pipe)
        self._process = subprocess.Popen(
            command,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=worker_environment(self.devices),
        )
        log.info("%s worker %s: process %d", self.role, self.name, self._process.pid)

    def end(self) -> None:
        """Ask it to drain and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; then nothing is left of it."""
        if self._process is not None:
            try:
                self._process.wait(max(0.0, timeout_s))
            except subprocess.TimeoutExpired:
                log.warning("%s does not end and is killed", self.name)
                self._process.kill()
                self._process.wait()
            if self._process.returncode:
                log.warning("%s ended with exit code %d", self.name, self._process.returncode)
        self._listener.close()
        for descriptor in (self.pipe, self._parent_end):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Supervisor:
    """Starts and watches workers in a thread of its own.

    Args:
        processes: not started yet.
        restarts: of each.

    Attributes:
        failure: why the workers are not complete and will not be; None while all is well.
    """

    def __init__(self, processes: Sequence[WorkerProcess], restarts: int) -> None:
        self.failure: str | None = None
        self._processes = processes
        self._left = {process.name: restarts for process in processes}
        self._is_starting = True
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="triblade-supervisor", daemon=True)
        self._thread.start()

    def all_started(self) -> None:
        """From now on a worker that ends is started again."""
        self._is_starting = False

    def close(self) -> None:
        """End all workers, those that do not listen by force."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        for process in self._processes:
            self._start(process)
        while not self._closed.wait(POLL_S):
            for process in self._processes:
                if process.exit_code is not None and self.failure is None:
                    self._ended(process)
        for process in self._processes:
            process.end()
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self._processes:
            process.wait(deadline - time.monotonic())

    def _ended(self, process: WorkerProcess) -> None:
        code = process.exit_code
        if self._is_starting or self._left[process.name] == 0:
            self.failure = f"{process.name} ended with exit code {code}"
            log.error("%s", self.failure)
            return
        self._left[process.name] -= 1
        log.error("%s ended with exit code %s; it is started again", process.name, code)
        if not self._closed.wait(RESTART_DELAY_S):
            self._start(process)

    def _start(self, process: WorkerProcess) -> None:
        """The kernel ends workers with the thread that started them, so this one outlives what it cannot start."""
        try:
            process.start()
        except Exception as error:
            self.failure = f"{process.name} could not be started: {error}"
            log.error("%s", self.failure)
