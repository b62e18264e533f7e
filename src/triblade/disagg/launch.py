"""`triblade serve` with workers: what each of them gets of the machine, and a router over all of them, those that were started
elsewhere included.

Where there are enough devices each worker has its own; else the memory that one engine would give to its KV cache is split by
`pd_memory`. Cores are split by role. Knows how workers are told what to do (command line options), nothing of what they do.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial

from triblade import host
from triblade.config import EngineConfig, LogLevel, TopologyConfig, TransferConfig, WorkerConfig, to_flags
from triblade.config.environment import visible_devices
from triblade.config.worker import WorkerRole
from triblade.disagg.placement import Placement, place_cores, place_devices
from triblade.disagg.processes import Supervisor, WorkerProcess
from triblade.disagg.remote_client import RemoteClient
from triblade.disagg.router import Router
from triblade.disagg.rpc import CLIENT_PROTOCOL
from triblade.disagg.sockets import SocketLink, connected
from triblade.disagg.worker import check_addresses, check_device
from triblade.engine.build import Preparation, prepare
from triblade.engine.client import EngineLoad
from triblade.errors import ConfigError, EngineDeadError
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_device

log = logging.getLogger(__name__)

POLL_S = 0.05


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
    """Start the processes, attach to those that run elsewhere, and wait until they serve.

    Raises:
        TribladeError: the options contradict each other or the machine, or a worker did not start or answer, or serves
            something else.
    """
    topology = deployment.topology
    check_addresses(deployment.transfer, topology.prefill_address)
    model = open_model(deployment.engine)
    processes = planned(deployment, model) if topology.decode_workers else []
    supervisor = Supervisor(processes, topology.worker_restarts)
    addresses = [process.address for process in processes if process.role == "decode"]
    router = Router(model, [partial(_dial, each) for each in (*addresses, *topology.decode_address)], supervisor.close)
    try:
        _attach(router, topology)
        _wait(router, supervisor, topology)
    except BaseException:
        router.close()
        raise
    # This process only tokenizes from now on.
    model.checkpoint.release()
    host.return_free_memory()
    host.return_code_pages()
    return router


def planned(deployment: Deployment, model: OpenModel) -> list[WorkerProcess]:
    """The processes to start, prefill workers first, each with its share; their sockets are bound."""
    topology, engine = deployment.topology, deployment.engine
    counts: dict[WorkerRole, int] = {"prefill": topology.prefill_workers, "decode": topology.decode_workers}
    device, _ = select_device(engine.device)
    check_device(deployment.transfer, device)
    devices = place_devices(topology, visible_devices()) if device.type == "cuda" else Placement({}, "no device")
    cores = place_cores(topology, engine.cpu_cores or host.allowed_cores())
    (devices if device.type == "cuda" else cores).report()
    whole = prepare(engine, model, device, copies=1 if devices.shares else sum(counts.values()))
    processes: list[WorkerProcess] = []
    for role, share in zip(counts, topology.shares, strict=True):
        own = engine_of(role, engine, whole, 1.0 if devices.shares else share / max(1, counts[role]))
        for number in range(counts[role]):
            addresses = tuple(process.address for process in processes if process.role == "prefill")
            addresses += topology.prefill_address
            process = WorkerProcess(role, number, by_path=role == "decode" or deployment.transfer.connector != "tcp")
            worker = WorkerConfig(
                role=role,
                address=process.inherited,
                prefill_address=addresses if role == "decode" else (),
                cores=cores.shares[role][number],
                drain_timeout_s=deployment.drain_timeout_s,
                parent_pipe=process.pipe,
            )
            process.devices = devices.shares[role][number] if devices.shares else ()
            process.options = [
                *to_flags(own),
                *to_flags(worker),
                *to_flags(deployment.transfer),
                f"--log-level={deployment.log_level}",
            ]
            processes.append(process)
    return processes


def engine_of(role: WorkerRole, engine: EngineConfig, whole: Preparation, share: float) -> EngineConfig:
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


def _attach(router: Router, topology: TopologyConfig) -> None:
    """Wait until the decode workers that were started elsewhere serve.

    Raises:
        EngineDeadError: one does not answer.
        ConfigError: one serves another model.
    """
    addresses = dict(enumerate(topology.decode_address, start=topology.decode_workers))
    deadline = time.monotonic() + topology.attach_timeout_s
    while missing := {number: why for number, why in router.missing.items() if number in addresses}:
        strange = [number for number in router.strangers if number in missing]
        number = (strange or list(missing))[0]
        fault = f"decode worker at {addresses[number]}: {missing[number]}"
        if strange:
            raise ConfigError(fault, hint="give `triblade serve` the model that the worker was started with")
        if time.monotonic() > deadline:
            hint = (
                f"triblade worker MODEL --role decode --address {addresses[number]} starts one; see --attach-timeout-s"
            )
            raise EngineDeadError(fault, hint=hint)
        time.sleep(POLL_S)


def _wait(router: Router, supervisor: Supervisor, topology: TopologyConfig) -> None:
    """Until every decode worker that is started here serves, and knows its prefill workers.

    Raises:
        EngineDeadError: one ended instead, or the prefill workers do not answer.
    """
    own, wanted = range(topology.decode_workers), topology.num_prefill_workers
    if not own:
        return
    deadline: float | None = None
    while True:
        if (failure := supervisor.failure) is not None:
            raise EngineDeadError(failure, hint="its own message stands above")
        if not router.missing.keys() & set(own):
            known = min((_num_prefill_workers(load) for load in router.loads(own)), default=0)
            if known == wanted:
                supervisor.all_started()
                return
            deadline = deadline or time.monotonic() + topology.attach_timeout_s
            if time.monotonic() > deadline:
                names = ", ".join(topology.prefill_address) or "started here"
                raise EngineDeadError(f"{known} of {wanted} prefill workers answer ({names})", hint="see the log above")
        time.sleep(POLL_S)


def _num_prefill_workers(load: EngineLoad) -> int:
    return 0 if load.transfers is None else load.transfers.num_prefill_workers
