"""A worker's signs of life, from a thread that waits for nothing else. Knows no engine and no message by name.

A step may take longer than a peer bears silence, and nobody can speak in the middle of one; so the thread that computes does not
speak for itself. Invariant: nothing is said for a thread that has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from triblade.disagg.frames import Message
from triblade.disagg.links import Link

log = logging.getLogger(__name__)


class Heartbeat:
    """Tells every link something at regular intervals, until `close` or the end of the thread that it speaks for.

    Args:
        thread: does the work; runs already.
        say: what a link is told.
        interval_s: seconds between two signs.
    """

    def __init__(self, thread: threading.Thread, say: Callable[[Link], Message], interval_s: float) -> None:
        self._worker, self._say, self._interval_s = thread, say, interval_s
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="triblade-heartbeat", daemon=True)
        self._thread.start()

    def join(self, link: Link) -> None:
        """Speak to this link, too."""
        with self._lock:
            self._links.add(link)

    def leave(self, link: Link) -> None:
        """Speak to it no more."""
        with self._lock:
            self._links.discard(link)

    def close(self) -> None:
        """End."""
        self._closed.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closed.wait(self._interval_s) and self._worker.is_alive():
            with self._lock:
                links = list(self._links)
            for link in links:
                self._tell(link)

    def _tell(self, link: Link) -> None:
        """A link that fails does not keep others from hearing."""
        try:
            link.send(self._say(link))
        except Exception:
            log.exception("%s is not told that this worker lives", link.peer)
            link.close()
