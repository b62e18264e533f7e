"""An engine in another process, as an `EngineClient`: one link, calls by number. Knows no other worker.

Life of a call: generate -> Generate -> outputs, from the link's thread into the caller's loop -> the last one of every choice. If
the caller leaves, an Abort; if the link breaks, every open call ends with WorkerLostError and `is_alive` is false from then on.
A worker that serves says how busy it is ten times a second; `tend` leaves one that says nothing any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from triblade.disagg.frames import Message
from triblade.disagg.links import Link
from triblade.disagg.pace import Silence
from triblade.disagg.rpc import (
    Abort,
    AbortLabel,
    Fault,
    Generate,
    Outputs,
    Report,
    Welcome,
    packed_params,
    unpacked_error,
    unpacked_load,
    unpacked_outputs,
)
from triblade.disagg.wire import token_payload
from triblade.engine.client import EngineLoad
from triblade.engine.outputs import RequestOutput
from triblade.errors import TribladeError, WorkerLostError
from triblade.sampling_params import SamplingParams

log = logging.getLogger(__name__)

SILENCE_S = 30.0  # longer than prefill workers get: with a worker that answers, its streams are lost


@dataclass(eq=False, slots=True)
class _Call:
    """The caller's end."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | TribladeError] = field(default_factory=asyncio.Queue)

    def put(self, news: RequestOutput | TribladeError) -> None:
        """From any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, news)


class RemoteClient:
    """Implements `EngineClient` over a link, which it owns.

    Attributes:
        welcome: what the worker said of itself; None until it has loaded its model.
    """

    def __init__(self, link: Link) -> None:
        self.welcome: Welcome | None = None
        self.is_draining = False
        self._link = link
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        self._load = EngineLoad()
        self._lost: WorkerLostError | None = None
        self._num_words = 0
        self._silence = Silence(time.monotonic())
        self._left_because: str | None = None
        link.start(self)

    @property
    def is_alive(self) -> bool:
        """Whether calls may succeed."""
        return self._lost is None

    @property
    def num_calls(self) -> int:
        """That are open; newer than what `load` says."""
        return len(self._calls)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """See `EngineClient.generate`.

        Raises:
            WorkerLostError: at any time.
        """
        number, call = next(self._numbers), _Call(asyncio.get_running_loop())
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._calls[number] = call
        unfinished = params.n
        try:
            self._link.send(
                Generate(
                    call=number,
                    params=packed_params(params),
                    request_id=request_id or f"request-{number}",
                    priority=priority,
                    payload=token_payload(list(prompt_token_ids)),
                )
            )
            while unfinished:
                output = await call.outputs.get()
                if isinstance(output, TribladeError):
                    unfinished = 0
                    raise output
                unfinished -= output.finished
                yield output
        finally:
            self._calls.pop(number, None)
            if unfinished:
                self._link.send(Abort(call=number))

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        self._link.send(AbortLabel(request_id=request_id))

    def load(self) -> EngineLoad:
        """What the worker said last."""
        return self._load

    def tend(self, now_s: float) -> None:
        """Leave a worker that served and is silent: its process was stopped, or its host is gone. To be called often."""
        silent_s = self._silence.look(self._num_words, now_s)
        if self.welcome is not None and silent_s > SILENCE_S and self._left_because is None:
            self._left_because = f"silent for {SILENCE_S:g} s"
            log.warning("the worker at %s is left: %s", self._link.peer, self._left_because)
            self._link.close()

    def close(self) -> None:
        """Leave the worker; it aborts what it computes for this client."""
        self._link.close()
        self._link.join()

    def received(self, link: Link, message: Message) -> None:
        """See `links.Receiver`."""
        self._num_words += 1
        match message:
            case Welcome():
                self.welcome = message
            case Outputs():
                for number, output in unpacked_outputs(message):
                    if (call := self._calls.get(number)) is not None:
                        call.put(output)
            case Fault(call=number):
                if (call := self._calls.get(number)) is not None:
                    call.put(unpacked_error(message))
            case Report():
                self._load, self.is_draining = unpacked_load(message), message.is_draining

    def writable(self, link: Link) -> None:
        """See `links.Receiver`."""

    def lost(self, link: Link, reason: str) -> None:
        """See `links.Receiver`."""
        with self._lock:
            reason = self._left_because or reason
            self._lost = WorkerLostError(f"the worker at {link.peer} is gone: {reason}", hint="try again")
            calls = list(self._calls.values())
        for call in calls:
            call.put(self._lost)
