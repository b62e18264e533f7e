"""An engine in a thread of this process, as an `EngineClient` for asyncio.

One thread owns the engine; everybody else talks to it through an inbox. Requests are checked in the caller's thread, so a bad one
fails at once and costs the others nothing. Outputs of a step reach each event loop in one wake-up.

Life of a request: generate (caller) -> prepare -> inbox -> add (engine thread) -> step ... -> outbox of its loop -> its queue ->
generate yields. If the caller stops listening, an abort goes through the same inbox.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from triblade import host
from triblade.config import EngineConfig
from triblade.engine.build import build_engine
from triblade.engine.client import EngineClient, EngineLoad
from triblade.engine.engine import Engine
from triblade.engine.outputs import RequestOutput
from triblade.engine.request import Request
from triblade.errors import EngineDeadError, MemoryBudgetError
from triblade.models.config import ModelConfig
from triblade.models.tokenizer import Tokenizer
from triblade.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# A fault ends the requests that were running. This many in a row, with no good step between, and the engine is given up.
MAX_FAULTS_IN_A_ROW = 3


@dataclass(eq=False, slots=True)
class _Stream:
    """The caller's end of one client request."""

    requests: list[Request]
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | EngineDeadError] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True, slots=True)
class _Add:
    stream: _Stream


@dataclass(frozen=True, slots=True)
class _Abort:
    requests: list[Request]


@dataclass(frozen=True, slots=True)
class _Call:
    call: Callable[[], None]


class LocalClient(EngineClient):
    """Owns an engine and its thread; `close` ends both."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Call | None] = queue.SimpleQueue()
        self._streams: dict[Request, _Stream] = {}  # engine thread only
        self._by_label: dict[str, list[Request]] = {}  # event loop only
        self._dead: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="triblade-engine", daemon=True)
        self._thread.start()
        # Also when the process ends: one whose threads are in torch or in native code by then is aborted.
        self._closing = weakref.finalize(self, end_thread, self._inbox, self._thread)

    @classmethod
    def start(cls, config: EngineConfig) -> LocalClient:
        """Load the model (seconds) and start the engine's thread. Call it in a worker thread from asynchronous code."""
        engine = build_engine(config)
        host.keep_objects()
        return cls(engine)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self._engine.model.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._engine.model.generation_config

    @property
    def max_model_len(self) -> int:
        return self._engine.context_length

    @property
    def weight_bytes(self) -> int:
        return self._engine.runner.executor.weight_bytes

    @property
    def num_kv_blocks(self) -> int:
        return self._engine.pool.num_blocks

    @property
    def is_alive(self) -> bool:
        return self._dead is None and self._thread.is_alive()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """See `EngineClient.generate`."""
        if self._dead is not None:
            raise self._dead
        prepare = partial(self._engine.prepare, prompt_token_ids, params, request_id=request_id, priority=priority)
        # A grammar may take seconds to compile.
        requests = prepare() if params.structured_outputs is None else await asyncio.to_thread(prepare)
        stream = _Stream(requests, asyncio.get_running_loop())
        label = requests[0].request_id
        self._by_label.setdefault(label, []).extend(requests)
        self._inbox.put(_Add(stream))
        unfinished = len(requests)
        try:
            while unfinished:
                output = await stream.outputs.get()
                if isinstance(output, EngineDeadError):
                    raise output
                unfinished -= output.finished
                yield output
        finally:
            if unfinished:
                self._inbox.put(_Abort(requests))
            left = [request for request in self._by_label[label] if request not in requests]
            self._by_label[label] = left
            if not left:
                del self._by_label[label]

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        self._inbox.put(_Abort(list(self._by_label.get(request_id, ()))))

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `generate` would raise for this request; nothing is computed. Safe to call from any thread."""
        self._engine.prepare(prompt_token_ids, params)

    def load(self) -> EngineLoad:
        """See `EngineClient.load`."""
        return self._engine.load()

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """Have the engine's thread call this before its next step, also when it has none to compute. From any thread."""
        self._inbox.put(_Call(call))

    def close(self) -> None:
        """End the thread after the current step; open streams end with an error."""
        self._closing()
        gc.unfreeze()  # the engine may go now

    def _run(self) -> None:
        """The engine's thread."""
        faults = 0
        while self._dead is None:
            self._read_inbox()
            if self._dead is not None or not self._engine.has_work:
                continue
            try:
                self._deliver(self._engine.step())
                faults = 0
            except Exception as error:
                faults += 1
                log.exception("a step failed; its requests end with an error")
                reason = error.message if isinstance(error, MemoryBudgetError) else type(error).__name__
                self._deliver(self._engine.fail(f"internal error: {reason}"))
                if faults == MAX_FAULTS_IN_A_ROW:
                    self._die(EngineDeadError("the engine failed too often in a row and stopped", hint="see the log"))

    def _read_inbox(self) -> None:
        """Take what waits; block when there is nothing else to do."""
        block = not self._engine.has_work
        while self._dead is None:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            match message:
                case None:
                    self._die(EngineDeadError("the engine was closed"))
                case _Add(stream):
                    self._streams.update(dict.fromkeys(stream.requests, stream))
                    self._engine.add(stream.requests)
                case _Abort(requests):
                    self._deliver(self._engine.abort(request for request in requests if request in self._streams))
                case _Call(call):
                    self._call(call)

    def _call(self, call: Callable[[], None]) -> None:
        """What others do between steps does not end the thread."""
        try:
            call()
        except Exception:
            log.exception("a call between two steps failed")

    def _deliver(self, outputs: list[tuple[Request, RequestOutput]]) -> None:
        """Hand a step's outputs to the event loops that wait for them, one wake-up each."""
        per_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for request, output in outputs:
            stream = self._streams.pop(request) if output.finished else self._streams[request]
            per_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, news in per_loop.items():
            _wake(loop, news)

    def _die(self, reason: EngineDeadError) -> None:
        """Refuse new requests and end the open ones."""
        self._dead = reason
        self._engine.abort(list(self._streams))
        for stream in dict.fromkeys(self._streams.values()):
            _wake(stream.loop, [(stream, reason)])
        self._streams.clear()


def end_thread(inbox: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    """Tell a thread by its inbox to end, and wait until it has."""
    inbox.put(None)
    thread.join()


def _wake(loop: asyncio.AbstractEventLoop, news: Sequence[tuple[_Stream, RequestOutput | EngineDeadError]]) -> None:
    """Put outputs into their queues, in the loop's thread."""

    def put() -> None:
        for stream, output in news:
            stream.outputs.put_nowait(output)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop was closed with its callers; nobody listens any more
        log.debug("a closed event loop missed %d outputs", len(news))
