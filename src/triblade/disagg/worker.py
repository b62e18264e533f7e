"""One worker process: load, listen, serve, drain, end. What it serves stands in `disagg.prefill` and `disagg.client_port`.

Its socket listens before the model is loaded, so who connects early waits and is not refused. The first SIGTERM or SIGINT drains,
the second ends at once. A worker that belongs to a server ends with it: it is told by a pipe that closes, and by the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from triblade import host
from triblade.config import EngineConfig, TransferConfig, WorkerConfig
from triblade.disagg.client_port import ClientPort
from triblade.disagg.fetcher import Fetcher
from triblade.disagg.links import Connector
from triblade.disagg.placed_rows import row_memory_of
from triblade.disagg.prefill import LEAST_CHUNK_TOKENS, PrefillService
from triblade.disagg.remote import RemotePrefill, connect_prefill
from triblade.disagg.rpc import CLIENT_PROTOCOL, Welcome
from triblade.disagg.shared_rows import SharedPool
from triblade.disagg.sockets import is_path, listening
from triblade.engine.build import build_engine
from triblade.engine.client import EngineLoad
from triblade.engine.engine import Engine
from triblade.engine.local import LocalClient
from triblade.errors import ConfigError, EngineDeadError, MemoryBudgetError, UnsupportedError
from triblade.ops.select import select_device
from triblade.registry import CONNECTORS

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
WATCH_INTERVAL_S = 0.5


def run_worker(engine: EngineConfig, worker: WorkerConfig, transfer: TransferConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code.

    Raises:
        TribladeError: whatever loading the model raises, an address that cannot be listened on, or an engine that died.
    """
    check_addresses(transfer, (worker.address,) if worker.role == "prefill" else worker.prefill_address)
    check_device(transfer, select_device(engine.device)[0])
    follow_parent(worker.parent_pipe)
    if worker.cores:
        host.compute_on(worker.cores)
        engine = replace(engine, threads=min(engine.threads or len(worker.cores), len(worker.cores)))
    serve = _serve_prefill if worker.role == "prefill" else _serve_decode
    asyncio.run(serve(engine, worker, transfer))
    log.info("%s worker stopped", worker.role)
    return 0


def check_addresses(transfer: TransferConfig, addresses: Iterable[str]) -> None:
    """Whether the connector can be used at addresses of prefill workers.

    Raises:
        ConfigError: shared memory, and an address that may be another host's.
    """
    for address in addresses:
        if transfer.connector != "tcp" and not (is_path(address) or address.startswith("fd:")):
            raise ConfigError(
                f"connector {transfer.connector} needs paths of sockets on this host, got: {address}",
                hint="add --connector tcp",
            )


def check_device(transfer: TransferConfig, device: torch.device) -> None:
    """Whether the connector can be used by workers on this device.

    Raises:
        UnsupportedError: rows are to go from GPU to GPU, and there is none.
    """
    if transfer.connector == "cuda-ipc" and device.type != "cuda":
        raise UnsupportedError(
            f"connector cuda-ipc writes rows from GPU to GPU, the workers would run on: {device.type}",
            hint="use --connector shm, or install a CUDA build of torch where there is a GPU",
        )


def follow_parent(pipe: int | None) -> None:
    """End when the process at the other end of a pipe does, even if it is killed."""
    if pipe is None:
        return
    with suppress(AttributeError):  # Linux alone has it; the pipe is enough where nothing hangs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, name="triblade-parent", daemon=True).start()


async def _serve_prefill(engine: EngineConfig, worker: WorkerConfig, transfer: TransferConfig) -> None:
    connector: Connector = CONNECTORS[transfer.connector]()
    pools: list[SharedPool] = []

    def make_pool(num_blocks: int, row_bytes: int) -> torch.Tensor:
        pools.append(SharedPool(num_blocks, row_bytes))
        return pools[-1].rows

    build = partial(build_engine, make_pool=make_pool if connector.carries_files else None)
    built = await asyncio.to_thread(with_smaller_chunks, engine, build)
    host.keep_objects()
    memory = row_memory_of(connector, built.runner.executor.cache.pool)
    service = PrefillService(built, transfer, pools[-1] if pools else None, memory)
    listener = connector.listen(worker.address, service.accept)
    log.info("prefill worker at %s", listener.address)
    try:
        await _until_stopped(lambda: service.is_alive)
    finally:
        listener.close()
        service.close()


async def _serve_decode(engine: EngineConfig, worker: WorkerConfig, transfer: TransferConfig) -> None:
    built = await asyncio.to_thread(build_engine, engine)
    host.keep_objects()
    client = LocalClient(built)
    connector: Connector = CONNECTORS[transfer.connector]()
    prefillers = Prefillers(built, client, transfer, connector, worker.prefill_address)
    port = ClientPort(client, welcome(built), lambda: prefillers.added_to(client.load()))
    listener = listening(worker.address, port.accept, CLIENT_PROTOCOL)
    log.info("decode worker at %s", listener.address)
    try:
        await _until_stopped(lambda: client.is_alive)
        listener.close()
        await port.drain(worker.drain_timeout_s)
    finally:
        listener.close()
        await port.close()
        prefillers.close()
        await asyncio.to_thread(client.close)


class Prefillers:
    """A decode engine's prefill workers, if it has some."""

    def __init__(
        self,
        engine: Engine,
        client: LocalClient,
        transfer: TransferConfig,
        connector: Connector,
        addresses: Sequence[str],
    ) -> None:
        self._remote: RemotePrefill | None = None
        self._fetcher: Fetcher | None = None
        if addresses:
            self._remote, self._fetcher = connect_prefill(
                engine, client.call_between_steps, transfer, connector, list(addresses)
            )

    @property
    def num_ready(self) -> int:
        """That can be asked."""
        return 0 if self._fetcher is None else self._fetcher.num_ready

    @property
    def refusals(self) -> list[str]:
        """Why some cannot."""
        return [] if self._fetcher is None else self._fetcher.refusals

    def added_to(self, load: EngineLoad) -> EngineLoad:
        """The engine's, with what became of transfers and how the prefill workers are."""
        if self._remote is None or self._fetcher is None:
            return load
        states = self._fetcher.states
        counts = replace(
            self._remote.counts,
            num_prefill_workers=len(states),
            prefill_backlog_tokens=sum(state.backlog_tokens for state in states),
            prefill_queue_s=max((state.queue_s for state in states), default=0.0),
            prefill_kv_usage=max((state.kv_usage for state in states), default=0.0),
            num_slow=self._fetcher.num_slow,
            num_expired_leases=sum(state.num_expired for state in states),
            num_fallbacks=sum(state.num_fallbacks for state in states),
            num_prefill_faults=sum(state.num_faults for state in states),
        )
        return replace(load, transfers=counts)

    def close(self) -> None:
        """Leave them."""
        if self._fetcher is not None:
            self._fetcher.close()


def welcome(engine: Engine) -> Welcome:
    """What a decode worker says of itself."""
    limits = engine.admission
    return Welcome(
        model=engine.model.name,
        model_hash=engine.model.checkpoint.fingerprint(),
        vocab_size=limits.vocab_size,
        context_length=limits.context_length,
        kv_tokens=limits.kv_tokens,
        max_logprobs=limits.max_logprobs,
    )


def with_smaller_chunks(config: EngineConfig, build: Callable[[EngineConfig], Engine]) -> Engine:
    """An engine whose steps are as small as its memory asks for (row P6).

    Raises:
        MemoryBudgetError: even the smallest do not help.
    """
    while True:
        try:
            return build(config)
        except MemoryBudgetError as error:
            chunk = config.max_num_batched_tokens // 2
            if chunk < LEAST_CHUNK_TOKENS:
                raise
            log.warning("prefill chunks of %d tokens: %s", chunk, error.message)
            config = replace(config, max_num_batched_tokens=chunk, max_num_seqs=min(config.max_num_seqs, chunk))


async def _until_stopped(is_alive: Callable[[], bool]) -> None:
    """Wait for a signal.

    Raises:
        EngineDeadError: the engine gave up before.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopped.is_set():
            os._exit(1)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    while not stopped.is_set():
        if not is_alive():
            raise EngineDeadError("the engine stopped", hint="see the log above")
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), WATCH_INTERVAL_S)
