"""The HTTP answer to a generation request, as a stream or as one body, from admission to the last byte.

Life of an answer: admitted -> outputs of the engine -> headers with the first output -> chunks or body. Until the
headers are sent every failure has its own HTTP status; afterwards it is an error event, then [DONE]. Whatever ends an
answer early (the client leaves, time runs out, the server shuts down) stops the engine's work for it within a step.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.serve.errors import ClientGoneError, EngineFaultError, RequestTimeoutError, ServeError
from triblade.serve.jobs import Job
from triblade.serve.metrics import ServerMetrics
from triblade.serve.outputs import open_outputs
from triblade.serve.problems import log_fault, problem
from triblade.serve.recorder import RequestRecorder
from triblade.serve.render.base import Envelope, Renderer, StreamRenderer
from triblade.serve.state import ServerState
from triblade.serve.stoppable import Stoppable

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MakeRenderer = Callable[[Job, Envelope, "Tokenizer"], Renderer]

LAST_WORDS_S = 5.0  # a client that does not read gets this long to take the error event
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold chunks back
]


class GenerationResponse(Response):
    """Generates while it answers."""

    _recorder: RequestRecorder

    def __init__(self, job: Job, state: ServerState, metrics: ServerMetrics, make_renderer: MakeRenderer) -> None:
        super().__init__()
        self._job = job
        self._state = state
        self._label = f"{job.id_prefix}{uuid.uuid4().hex}"
        self._engine = state.require_ready()
        envelope = Envelope(self._label, int(time.time()), job.model)
        self._renderer = make_renderer(job, envelope, self._engine.tokenizer)
        self._events = self._renderer if job.stream and isinstance(self._renderer, StreamRenderer) else None
        self._metrics = metrics
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request.

        Raises:
            TribladeError: before the first byte; the application turns it into a status.
        """
        arrival_s = scope.get("state", {}).get("arrival_s", time.perf_counter())
        self._recorder = RequestRecorder(self._metrics, len(self._job.prompts), self._job.n, arrival_s)
        work = Stoppable()
        with self._state.admit(work, self._job.num_sequences):
            leftover = FinishReason.ABORT
            try:
                await self._watched(work, receive, send)
                self._recorder.complete()
            except ClientGoneError:
                logger.debug("%s: the client left", self._label)
            except Exception as error:
                leftover = FinishReason.ABORT if isinstance(error, ServeError) else FinishReason.ERROR
                if self._events is None or not self._started:
                    raise
                await self._last_words(error, self._events, send)
            finally:
                self._recorder.close(leftover)

    async def _watched(self, work: Stoppable, receive: Receive, send: Send) -> None:
        """Generate, until done, gone or late."""
        limit_s = self._state.config.request_timeout_s
        late = RequestTimeoutError(f"the request took longer than {limit_s:g} s and was aborted")
        timer = asyncio.get_running_loop().call_later(limit_s, work.stop, late) if limit_s else None
        watcher = asyncio.create_task(_stop_when_gone(receive, work))
        try:
            await work.run(self._generate(send))
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()

    async def _generate(self, send: Send) -> None:
        async with open_outputs(self._engine, self._job, self._label) as outputs:
            async for prompt, output in outputs:
                self._note(prompt, output)
                if self._events is not None:
                    await self._send_chunk(send, self._events.chunk(prompt, output))
                else:
                    self._renderer.collect(prompt, output)
        if self._recorder.num_open:
            raise EngineFaultError(f"the engine ended without finishing {self._recorder.num_open} choices")
        await self._finish(send)

    def _note(self, prompt: int, output: RequestOutput) -> None:
        """Count an output.

        Raises:
            EngineFaultError: its choice ended with an error, or was aborted inside the engine.
        """
        self._recorder.note(prompt, output)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise EngineFaultError(output.error or "the request was aborted")

    async def _send_chunk(self, send: Send, events: bytes) -> None:
        if not events:
            return
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _finish(self, send: Send) -> None:
        usage = self._recorder.usage
        if self._events is not None:
            last = self._events.ending(usage)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return
        body = self._renderer.body(usage)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _last_words(self, error: Exception, events: StreamRenderer, send: Send) -> None:
        """Tell a client that already has a status and some chunks that the rest is missing."""
        log_fault(error, self._label)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                words = events.failure(problem(error))
                await send({"type": "http.response.body", "body": words, "more_body": False})
        except TimeoutError:
            logger.warning("%s: the client does not read; connection dropped", self._label)


async def _stop_when_gone(receive: Receive, work: Stoppable) -> None:
    """Wait for the client to leave. Bytes it sends after its request are not ours to read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    work.stop(ClientGoneError("the client closed the connection"))
