"""Prefill and decode as two engines in one process: the weights once, a thread each, rows that go from pool to pool.

The decode engine is the `ServedEngine`, and asks its prefill engine as it would ask a worker: by links, within the process. On a
CPU each engine keeps to cores of its own; on a GPU both share the device, and what the decode engine computes goes first. A prefill
engine that gives up is made again when it is next dialled; when the decode engine does, nobody is served. Knows no HTTP.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from triblade import host
from triblade.config import EngineConfig, TransferConfig
from triblade.config.worker import WorkerRole
from triblade.disagg.cuda_ipc import HIGH_PRIORITY, CudaIpc, RowMemory
from triblade.disagg.launch import Deployment, engine_of
from triblade.disagg.links import Link, LocalConnector
from triblade.disagg.placed_rows import row_memory_of
from triblade.disagg.placement import place_cores
from triblade.disagg.prefill import PrefillService
from triblade.disagg.shared_rows import SharedPool
from triblade.disagg.worker import Prefillers, with_smaller_chunks
from triblade.engine.build import assemble, prepare
from triblade.engine.client import EngineLoad
from triblade.engine.engine import Engine
from triblade.engine.local import LocalClient
from triblade.engine.weights import SharedWeights
from triblade.errors import ConfigError, EngineDeadError
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_device

log = logging.getLogger(__name__)

T = TypeVar("T")

ADDRESS = "prefill"
SWITCH_S = 0.0005  # the engines share the interpreter: who waits for it gets it soon
POLL_S = 0.02


class OneProcess(LocalConnector):
    """Links within the process; rows are read where they lie, or on a GPU written where they belong."""

    carries_files = True

    def row_memory(self, pool: Tensor) -> RowMemory | None:
        """See `Connector`."""
        return CudaIpc(pool.device) if pool.device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Lane:
    """Where the threads of one engine compute: on some cores, and on a GPU in a stream; None is the default one."""

    cores: tuple[int, ...]
    stream: torch.cuda.Stream | None = None

    def enter(self) -> None:
        """The calling thread computes here from now on, and so do threads that it starts (but for their streams)."""
        host.compute_on(self.cores)
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def run(self, call: Callable[[], T]) -> T:
        """Call in a thread of this lane; what it launched is done afterwards, since other lanes may use it."""

        def run() -> T:
            self.enter()
            found = call()
            if self.stream is not None:
                self.stream.synchronize()
            return found

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """What a prefill engine is made of, again if need be; `weights` are those of the decode engine."""

    config: EngineConfig
    model: OpenModel
    device: torch.device
    weights: SharedWeights
    transfer: TransferConfig
    lane: Lane

    def build(self, connector: LocalConnector) -> PrefillService:
        """An engine in its lane and its service; its rows lie in memory that the decode engine reads."""
        return self.lane.run(lambda: self._service(connector))

    def _service(self, connector: LocalConnector) -> PrefillService:
        pools: list[SharedPool] = []

        def make_pool(num_blocks: int, row_bytes: int) -> Tensor:
            pools.append(SharedPool(num_blocks, row_bytes))
            return pools[-1].rows

        engine = with_smaller_chunks(
            self.config, lambda config: assemble(config, self.model, self.device, make_pool, self.weights)
        )
        memory = row_memory_of(connector, engine.runner.executor.cache.pool)
        return PrefillService(engine, self.transfer, pools[-1] if pools else None, memory)


class PrefillThread:
    """The prefill engine's service, made again if its thread gives up.

    Args:
        plan: of the engine.
        connector: to the decode engine.
        restarts: how many times it may be made again.

    Attributes:
        service: the present one.
    """

    def __init__(self, plan: PrefillPlan, connector: LocalConnector, restarts: int) -> None:
        self._plan, self._connector, self._left = plan, connector, restarts
        self.service = plan.build(connector)
        self._listener = connector.listen(ADDRESS, self.accept)

    def accept(self, link: Link) -> None:
        """Serve a new link.

        Raises:
            ConnectionRefusedError: the engine gave up, and too often.
        """
        if not self.service.is_alive:
            self._restart()
        self.service.accept(link)

    def close(self) -> None:
        """End the thread."""
        self._listener.close()
        self.service.close()

    def _restart(self) -> None:
        if self._left == 0:
            raise ConnectionRefusedError("the prefill engine gave up too often")
        self._left -= 1
        log.error("the prefill engine gave up; it is started again")
        self.service.close()
        gc.unfreeze()  # what it was made of may go
        self.service = self._plan.build(self._connector)
        host.keep_objects()


class TwoEngines(LocalClient):
    """The decode engine, with the prefill engine that computes long prompts for it.

    Args:
        engine: decodes.
        lane: of its thread.
        prefill: beside it.
        transfer: when prompts are left to it.
        connector: to it.
    """

    def __init__(
        self,
        engine: Engine,
        lane: Lane,
        prefill: PrefillThread,
        transfer: TransferConfig,
        connector: LocalConnector,
    ) -> None:
        super().__init__(engine)
        self.call_between_steps(lane.enter)
        self.prefill = prefill
        self._prefillers = Prefillers(engine, self, transfer, connector, [ADDRESS])

    def load(self) -> EngineLoad:
        """See `EngineClient.load`; of the decode engine, with what became of transfers."""
        return self._prefillers.added_to(super().load())

    def wait(self, seconds: float) -> None:
        """Until the prefill engine can be asked.

        Raises:
            EngineDeadError: it cannot.
        """
        deadline = time.monotonic() + seconds
        while self._prefillers.num_ready == 0:
            if self._prefillers.refusals or time.monotonic() > deadline:
                reasons = "; ".join(self._prefillers.refusals) or "it does not answer"
                raise EngineDeadError(f"the prefill engine cannot be used: {reasons}", hint="see the log above")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End both engines after their current steps; open streams end with an error."""
        self._prefillers.close()
        super().close()
        self.prefill.close()


def start_threads(deployment: Deployment) -> TwoEngines:
    """Load the model once and start both engines.

    Raises:
        TribladeError: the options contradict each other or the machine, or the model cannot be loaded.
    """
    transfer = deployment.transfer
    if transfer.connector == "tcp":
        raise ConfigError(
            "connector tcp is between processes, and pd_isolation thread has one",
            hint="leave out --connector, or use --pd-isolation process",
            param="connector",
        )
    engine, (device, reason) = deployment.engine, select_device(deployment.engine.device)
    log.info("device %s: %s; two engines in this process", device, reason)
    model = open_model(engine)
    placement = place_cores(deployment.topology, engine.cpu_cores or host.allowed_cores())
    placement.report()
    (prefill_cores,), (decode_cores,) = placement.shares["prefill"], placement.shares["decode"]
    stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY) if device.type == "cuda" else None
    lanes: dict[WorkerRole, Lane] = {"prefill": Lane(prefill_cores), "decode": Lane(decode_cores, stream)}
    sys.setswitchinterval(SWITCH_S)
    client = joined(deployment, model, device, lanes)
    try:
        client.wait(deployment.topology.attach_timeout_s)
    except BaseException:
        client.close()
        raise
    host.keep_objects()
    return client


def joined(
    deployment: Deployment, model: OpenModel, device: torch.device, lanes: Mapping[WorkerRole, Lane]
) -> TwoEngines:
    """Both engines around an opened model; lanes of prefill, then decode.

    Raises:
        TribladeError: see `assemble`.
    """
    whole = prepare(deployment.engine, model, device)
    configs: dict[WorkerRole, EngineConfig] = {}
    for role, share in zip(lanes, deployment.topology.shares, strict=True):
        own, cores = engine_of(role, deployment.engine, whole, share), len(lanes[role].cores)
        configs[role] = replace(own, threads=min(own.threads or cores, cores))
    if device.type == "cpu":
        torch.set_num_threads(configs["decode"].threads or 1)
    weights, connector = SharedWeights(), OneProcess()
    engine = lanes["decode"].run(lambda: assemble(configs["decode"], model, device, None, weights))
    plan = PrefillPlan(
        config=configs["prefill"],
        model=model,
        device=device,
        weights=weights,
        transfer=deployment.transfer,
        lane=lanes["prefill"],
    )
    prefill = PrefillThread(plan, connector, deployment.topology.worker_restarts)
    return TwoEngines(engine, lanes["decode"], prefill, deployment.transfer, connector)
