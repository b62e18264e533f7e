"""Several workers as one `EngineClient`: who serves which request, and what happens when one is lost. Knows no HTTP and no
process.

A request goes to the worker that served the longest beginning of its prompt last, unless that one is much busier than the least
busy. Where a worker is lost before it gave a token, the request is tried again elsewhere, a limited number of times; afterwards
it ends with an error, because nobody could go on where a sampler stopped. Workers that drain get no new requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from triblade.disagg.remote_client import RemoteClient
from triblade.disagg.rpc import Welcome
from triblade.engine.admission import Admission
from triblade.engine.block_pool import hash_block
from triblade.engine.client import EngineLoad
from triblade.engine.outputs import RequestOutput
from triblade.engine.transfers import TransferCounts
from triblade.errors import WorkerLostError
from triblade.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triblade.models.loader import OpenModel
    from triblade.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
WAIT_FOR_WORKER_S = 10.0  # for one that is started again
TEND_INTERVAL_S = 0.2
AFFINITY_TOKENS = 64  # of a prompt's beginning that stand for one worker
AFFINITY_ENTRIES = 4096
MUCH_BUSIER_SEQUENCES = 8

_Counts = TypeVar("_Counts")


class Router:
    """Implements `serve.state.ServedEngine` over workers.

    Args:
        model: opened, for its tokenizer.
        dials: one function per worker that connects to it; OSError while it is not there.
        close: called last.
    """

    def __init__(
        self, model: OpenModel, dials: Sequence[Callable[[], RemoteClient]], close: Callable[[], None] = lambda: None
    ) -> None:
        self._model = model
        self._dials = dials
        self._workers: list[RemoteClient | None] = [None] * len(dials)
        self._faults: list[str] = ["not dialled yet"] * len(dials)  # why a worker is not there
        self._model_hash = model.checkpoint.fingerprint()
        self._on_close = close
        self._affinity: OrderedDict[bytes, int] = OrderedDict()
        self._admission: Admission | None = None  # of the smallest worker, as last seen
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tend, name="triblade-router", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """See `ServedEngine`."""
        return self._model.tokenizer

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """See `ServedEngine`."""
        return self._model.generation_config

    @property
    def max_model_len(self) -> int:
        """See `ServedEngine`."""
        return self._limits().context_length

    @property
    def ready(self) -> list[RemoteClient]:
        """Workers that take requests."""
        return [worker for worker in self._workers if worker is not None and self._is_ready(worker)]

    @property
    def missing(self) -> dict[int, str]:
        """Numbers of the workers that take no requests, and why."""
        return {
            number: self._why_not(worker, fault)
            for number, (worker, fault) in enumerate(zip(self._workers, self._faults, strict=True))
            if worker is None or not self._is_ready(worker)
        }

    @property
    def strangers(self) -> list[int]:
        """Numbers of the workers that serve another model, and never will take a request."""
        return [
            number for number, worker in enumerate(self._workers) if worker is not None and self._is_strange(worker)
        ]

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """See `ServedEngine`."""
        self._limits().check(prompt_token_ids, params)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """See `EngineClient.generate`."""
        self.check(prompt_token_ids, params)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            worker = await self._choose(prompt_token_ids)
            has_begun = False
            outputs = worker.generate(prompt_token_ids, params, request_id=request_id, priority=priority)
            try:
                async with aclosing(outputs):  # type: ignore[type-var]
                    async for output in outputs:
                        has_begun = True
                        yield output
                return
            except WorkerLostError as error:
                if has_begun or attempt == MAX_ATTEMPTS:
                    raise
                log.warning("%s: tried again: %s", request_id, error.message)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        for worker in self.ready:
            await worker.abort(request_id)

    def load(self) -> EngineLoad:
        """All workers together."""
        loads = [worker.load() for worker in self.ready]
        total = summed(EngineLoad, [replace(load, transfers=None) for load in loads])
        transfers = [load.transfers for load in loads if load.transfers is not None]
        return replace(total, transfers=_summed_transfers(transfers)) if transfers else total

    def loads(self, numbers: Sequence[int]) -> list[EngineLoad]:
        """Of single workers, as far as they are there."""
        return [worker.load() for number in numbers if (worker := self._workers[number]) is not None]

    def close(self) -> None:
        """Leave the workers."""
        self._closed.set()
        self._thread.join()
        for worker in self._workers:
            if worker is not None:
                worker.close()
        self._on_close()

    def _limits(self) -> Admission:
        """What every worker can serve.

        Raises:
            WorkerLostError: none was ever there.
        """
        welcomes = [worker.welcome for worker in self.ready if worker.welcome is not None]
        if welcomes:
            self._admission = Admission(
                vocab_size=self._model.vocab_size,
                context_length=_least(welcomes, "context_length"),
                kv_tokens=_least(welcomes, "kv_tokens"),
                max_logprobs=_least(welcomes, "max_logprobs"),
            )
        if self._admission is None:
            raise WorkerLostError("no worker is there", hint="try again in a moment")
        return self._admission

    async def _choose(self, prompt: Sequence[int]) -> RemoteClient:
        """The worker for a prompt; waits a while for one to come back.

        Raises:
            WorkerLostError: none did.
        """
        deadline = time.monotonic() + WAIT_FOR_WORKER_S
        while not (ready := self.ready):
            if time.monotonic() > deadline:
                raise WorkerLostError("no worker is there", hint="try again later")
            await asyncio.sleep(TEND_INTERVAL_S)
        least = min(ready, key=lambda worker: worker.num_calls)
        digests = _beginnings(prompt)
        last = next((self._affinity[digest] for digest in reversed(digests) if digest in self._affinity), None)
        chosen = least
        if last is not None and (known := self._workers[last]) in ready and known is not None:
            chosen = known if known.num_calls - least.num_calls < MUCH_BUSIER_SEQUENCES else least
        self._remember(digests, self._workers.index(chosen))
        return chosen

    def _remember(self, digests: list[bytes], worker: int) -> None:
        for digest in digests:
            self._affinity[digest] = worker
            self._affinity.move_to_end(digest)
        while len(self._affinity) > AFFINITY_ENTRIES:
            self._affinity.popitem(last=False)

    def _tend(self) -> None:
        """Connect to workers that are not connected, and leave those that are silent."""
        while not self._closed.wait(TEND_INTERVAL_S):
            for number, worker in enumerate(self._workers):
                self._tend_one(number, worker)

    def _tend_one(self, number: int, worker: RemoteClient | None) -> None:
        try:
            if worker is None or not worker.is_alive:
                self._workers[number] = self._dials[number]()
            else:
                worker.tend(time.monotonic())
        except Exception as error:  # mostly nobody is there; whatever it is, the others are tended, too
            reason = error.strerror if isinstance(error, OSError) else None
            self._workers[number], self._faults[number] = None, reason or str(error)

    def _is_ready(self, worker: RemoteClient) -> bool:
        has_begun = worker.is_alive and worker.welcome is not None
        return has_begun and not worker.is_draining and not self._is_strange(worker)

    def _is_strange(self, worker: RemoteClient) -> bool:
        return worker.welcome is not None and worker.welcome.model_hash != self._model_hash

    def _why_not(self, worker: RemoteClient | None, fault: str) -> str:
        if worker is None:
            return fault
        if worker.welcome is None:
            return "it says nothing: it loads its model, or is no decode worker"
        if self._is_strange(worker):
            return f"it serves another checkpoint: {worker.welcome.model}"
        return "it is ending"


def _least(welcomes: list[Welcome], name: str) -> int:
    values: list[int] = [getattr(welcome, name) for welcome in welcomes]
    return min(values)


def _beginnings(prompt: Sequence[int]) -> list[bytes]:
    """Digests of the prompt's first 64, 128, ... tokens."""
    digests: list[bytes] = []
    for end in range(AFFINITY_TOKENS, len(prompt) + 1, AFFINITY_TOKENS):
        digests.append(hash_block(digests[-1] if digests else b"", prompt[end - AFFINITY_TOKENS : end]))
    return digests


def summed(kind: type[_Counts], parts: Sequence[_Counts]) -> _Counts:
    """Counts of several workers: numbers are added, also those in lists and within."""
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        found = [getattr(part, field.name) for part in parts]
        values[field.name] = _sum(found)
    return kind(**{name: value for name, value in values.items() if value is not None})


def _sum(found: list[Any]) -> Any:
    if not found or found[0] is None:
        return None
    if is_dataclass(found[0]):
        return summed(type(found[0]), found)
    if isinstance(found[0], list):
        length = max(map(len, found))
        return [sum(part[at] for part in found if at < len(part)) for at in range(length)]
    return sum(found)


def _summed_transfers(parts: list[TransferCounts]) -> TransferCounts:
    """Every decode worker sees the same prefill workers: what is said of those is not added."""
    total = summed(TransferCounts, parts)
    total.prefill_queue_s = max(part.prefill_queue_s for part in parts)
    total.prefill_backlog_tokens = max(part.prefill_backlog_tokens for part in parts)
    total.num_prefill_workers = max(part.num_prefill_workers for part in parts)
    total.prefill_kv_usage = max(part.prefill_kv_usage for part in parts)
    total.num_expired_leases = max(part.num_expired_leases for part in parts)
    total.num_prefill_faults = max(part.num_prefill_faults for part in parts)
    return total
