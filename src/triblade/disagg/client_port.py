"""The side of a worker that answers requests: calls that come over links, served by the worker's engine. Knows no transport.

Everything runs in one event loop; links hand their messages over to it. Outputs that come in one turn of the loop, those of a
step, leave in one message. Invariant: every call ends in a finished output of each choice or in one Fault, unless its link is
gone or it was aborted; then its requests are.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from contextlib import suppress

from triblade.disagg.frames import Message
from triblade.disagg.links import Link
from triblade.disagg.rpc import (
    Abort,
    AbortLabel,
    Generate,
    Numbered,
    Welcome,
    packed_error,
    packed_load,
    packed_outputs,
    unpacked_params,
)
from triblade.engine.client import EngineClient, EngineLoad
from triblade.errors import TribladeError, WorkerLostError

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.1


class ClientPort:
    """Serves calls; made and used in a running event loop.

    Args:
        client: the engine.
        welcome: what every new link hears first.
        load: how busy the worker is.
    """

    def __init__(self, client: EngineClient, welcome: Welcome, load: Callable[[], EngineLoad]) -> None:
        self._client, self._welcome, self._load = client, welcome, load
        self._loop = asyncio.get_running_loop()
        self._calls: dict[tuple[Link, int], asyncio.Task[None]] = {}
        self._links: set[Link] = set()
        self._news: dict[Link, list[Numbered]] = {}
        self._is_draining = False
        self._reporter = asyncio.create_task(self._report())

    @property
    def num_calls(self) -> int:
        """That are not over."""
        return len(self._calls)

    def accept(self, link: Link) -> None:
        """Serve a new link; called from any thread."""
        self._soon(self._begin, link)

    def received(self, link: Link, message: Message) -> None:
        """See `links.Receiver`."""
        self._soon(self._heed, link, message)

    def writable(self, link: Link) -> None:
        """See `links.Receiver`."""

    def lost(self, link: Link, reason: str) -> None:
        """See `links.Receiver`."""
        log.info("a client left: %s", reason)
        self._soon(self._forget, link)

    async def drain(self, seconds: float) -> None:
        """Take no new calls, and give those that run some time."""
        self._is_draining = True
        for link in self._links:
            self._send_load(link)
        if self._calls:
            await asyncio.wait(self._calls.values(), timeout=seconds)

    async def close(self) -> None:
        """End what runs."""
        tasks = [self._reporter, *self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links):
            link.close()
            await asyncio.to_thread(link.join)

    def _soon(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is over, and so is everything
            self._loop.call_soon_threadsafe(call, *arguments)

    def _begin(self, link: Link) -> None:
        self._links.add(link)
        link.start(self)
        link.send(self._welcome)
        self._send_load(link)

    def _heed(self, link: Link, message: Message) -> None:
        match message:
            case Generate(call=call) if (link, call) not in self._calls:
                self._calls[link, call] = asyncio.create_task(self._serve(link, message))
            case Abort(call=call) if (link, call) in self._calls:
                self._calls[link, call].cancel()
            case AbortLabel(request_id=request_id):
                self._loop.create_task(self._client.abort(request_id))
            case _:
                log.debug("unexpected: %r", message)

    def _forget(self, link: Link) -> None:
        self._links.discard(link)
        self._news.pop(link, None)
        for (owner, _), task in self._calls.items():
            if owner is link:
                task.cancel()

    async def _serve(self, link: Link, call: Generate) -> None:
        try:
            if self._is_draining:
                raise WorkerLostError("the worker is shutting down")
            prompt = array("I", bytes(call.payload)).tolist()
            params = unpacked_params(call.params)
            outputs = self._client.generate(prompt, params, request_id=call.request_id, priority=call.priority)
            async for output in outputs:
                self._tell(link, (call.call, output))
        except Exception as error:
            if not isinstance(error, TribladeError):
                log.exception("%s ends with an error", call.request_id)
                error = TribladeError(f"internal error: {type(error).__name__}")
            self._flush(link)
            link.send(packed_error(call.call, error))
        finally:
            del self._calls[link, call.call]

    def _tell(self, link: Link, numbered: Numbered) -> None:
        if link not in self._news:
            self._news[link] = []
            self._loop.call_soon(self._flush, link)
        self._news[link].append(numbered)

    def _flush(self, link: Link) -> None:
        if news := self._news.pop(link, None):
            link.send(packed_outputs(news))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            try:
                for link in self._links:
                    self._send_load(link)
            except Exception:
                log.exception("clients are not told how busy this worker is")

    def _send_load(self, link: Link) -> None:
        link.send(packed_load(self._load(), is_draining=self._is_draining))
