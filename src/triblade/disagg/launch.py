"""`triblade serve` with workers: what each of them gets of the machine, and a router over all of them.

The memory that one engine would give to its KV cache is split by `pd_memory`, the cores by role. Knows how workers are told what
to do (command line options), nothing of what they do.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from triblade.config import EngineConfig, LogLevel, TopologyConfig, TransferConfig, WorkerConfig, to_flags
from triblade.config.worker import WorkerRole
from triblade.disagg.processes import Supervisor, WorkerProcess
from triblade.disagg.remote_client import RemoteClient
from triblade.disagg.router import Router
from triblade.disagg.rpc import CLIENT_PROTOCOL
from triblade.disagg.sockets import SocketLink, connected
from triblade.engine.build import Preparation, prepare
from triblade.errors import ConfigError, EngineDeadError
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_device

log = logging.getLogger(__name__)

POLL_S = 0.05
WAIT_FOR_PREFILL_S = 60.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is served by whom.

    Attributes:
        engine: as for one engine; its memory and cores are those of all workers together.
        topology: how many.
        transfer: between them.
        drain_timeout_s: of the decode workers.
        log_level: of all.
    """

    engine: EngineConfig
    topology: TopologyConfig
    transfer: TransferConfig
    drain_timeout_s: float
    log_level: LogLevel


def start_workers(deployment: Deployment) -> Router:
    """Start the processes and wait until they serve.

    Raises:
        TribladeError: the options contradict each other or the machine, or a worker did not start.
    """
    model = open_model(deployment.engine)
    processes = planned(deployment, model)
    supervisor = Supervisor(processes, deployment.topology.worker_restarts)
    dials = [partial(_dial, process.address) for process in processes if process.role == "decode"]
    router = Router(model, dials, supervisor.close)
    try:
        _wait(router, supervisor, deployment.topology)
    except BaseException:
        router.close()
        raise
    return router


def planned(deployment: Deployment, model: OpenModel) -> list[WorkerProcess]:
    """The processes to start, prefill workers first, each with its share; their sockets are bound."""
    topology, engine = deployment.topology, deployment.engine
    counts: dict[WorkerRole, int] = {"prefill": topology.prefill_workers, "decode": topology.decode_workers}
    device, _ = select_device(engine.device)
    whole = prepare(engine, model, device, copies=sum(counts.values()))
    cores = split_cores(topology, engine.cpu_cores or sorted(os.sched_getaffinity(0)))
    processes: list[WorkerProcess] = []
    for role, share in zip(counts, topology.shares, strict=True):
        own = _engine_of(role, engine, whole, share / max(1, counts[role]))
        for number in range(counts[role]):
            addresses = tuple(process.address for process in processes if process.role == "prefill")
            process = WorkerProcess(role, number, by_path=role == "decode" or deployment.transfer.connector != "tcp")
            worker = WorkerConfig(
                role=role,
                address=process.inherited,
                prefill_address=addresses if role == "decode" else (),
                cores=cores[role][number],
                drain_timeout_s=deployment.drain_timeout_s,
                parent_pipe=process.pipe,
            )
            process.options = [
                *to_flags(own),
                *to_flags(worker),
                *to_flags(deployment.transfer),
                f"--log-level={deployment.log_level}",
            ]
            processes.append(process)
    return processes


def split_cores(topology: TopologyConfig, cores: Sequence[int]) -> dict[WorkerRole, list[tuple[int, ...]]]:
    """Cores of each worker. Who computes prompts never shares one with who streams, where there are enough.

    Raises:
        ConfigError: the prefill workers are to have all cores.
    """
    if not topology.prefill_workers:
        return {"prefill": [], "decode": _dealt(cores, topology.decode_workers)}
    count = topology.prefill_threads or max(1, len(cores) // 2)
    if len(cores) > 1 and count >= len(cores):
        raise ConfigError(
            f"prefill_threads must leave a core to the decode workers, got {count} of {len(cores)}",
            hint=f"use at most --prefill-threads {len(cores) - 1}",
        )
    rest = cores[: len(cores) - count] or cores
    return {
        "prefill": _dealt(cores[-count:], topology.prefill_workers),
        "decode": _dealt(rest, topology.decode_workers),
    }


def _dealt(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Cores in equal parts side by side; with fewer cores than workers some share one."""
    size = len(cores) // workers
    if size == 0:
        return [(cores[number % len(cores)],) for number in range(workers)]
    return [tuple(cores[number * size : (number + 1) * size]) for number in range(workers)]


def _engine_of(role: WorkerRole, engine: EngineConfig, whole: Preparation, share: float) -> EngineConfig:
    """One worker's engine: its share of the KV cache. A prefill worker drafts only to fill a drafter's part of the rows."""
    blocks = max(1, int(whole.plan.num_kv_blocks * share))
    own = replace(engine, num_kv_blocks=blocks, kv_cache_memory_bytes=None, cpu_cores=())
    if role == "prefill" and whole.layout.draft is None:
        own = replace(own, drafter=None, draft_model=None)
    if own.max_model_len is not None:
        context = min(own.max_model_len, blocks * own.block_size)
        if role == "decode" and context < own.max_model_len:
            raise ConfigError(
                f"a context of {own.max_model_len} tokens does not fit the {blocks} KV blocks of a decode worker",
                hint="give it more with --pd-memory, or lower --max-model-len",
            )
        own = replace(own, max_model_len=context)
    return own


def _dial(address: str) -> RemoteClient:
    return RemoteClient(SocketLink(connected(address), address, CLIENT_PROTOCOL))


def _wait(router: Router, supervisor: Supervisor, topology: TopologyConfig) -> None:
    """Until every decode worker serves, and knows its prefill workers.

    Raises:
        EngineDeadError: one ended instead.
    """
    since_s: float | None = None
    while True:
        if (failure := supervisor.failure) is not None:
            raise EngineDeadError(failure, hint="its own message stands above")
        loads = [worker.load() for worker in router.ready]
        if len(loads) == topology.decode_workers:
            known = [0 if load.transfers is None else load.transfers.num_prefill_workers for load in loads]
            if not topology.prefill_workers or min(known) == topology.prefill_workers:
                supervisor.all_started()
                return
            since_s = since_s or time.monotonic()
            if time.monotonic() - since_s > WAIT_FOR_PREFILL_S:
                raise EngineDeadError("the prefill workers do not answer", hint="see the log above")
        time.sleep(POLL_S)
