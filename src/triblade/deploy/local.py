"""`deploy --target local --run`: vLLM engines as processes of this host, and a front where there are several.

1. each engine gets its cores or devices and starts; 2. all have loaded; 3. the front answers and the address is printed;
4. a signal, or the end of any engine, ends all of them. One engine has no front: it listens at the address itself.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from triblade import host
from triblade.config import DeployConfig, Plan, ServerConfig
from triblade.config.environment import visible_devices
from triblade.deploy.accepted import Accepted
from triblade.deploy.hand_off import HandOff
from triblade.deploy.translation import ServedRole, Translation
from triblade.deploy.vllm_processes import (
    LOCAL,
    ServerStart,
    VLLMServer,
    check_alive,
    end_all,
    free_port,
    wait_until_ready,
)
from triblade.disagg.placement import place_cores
from triblade.errors import UnsupportedError
from triblade.serve.run import bind

log = logging.getLogger(__name__)

WATCH_S = 0.5
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """What is to be started."""

    plan: Plan
    config: DeployConfig
    translation: Translation
    accepted: Accepted
    python: Path

    @property
    def has_front(self) -> bool:
        """Whether clients talk to several engines through one address."""
        return self.translation.is_disaggregated or self.translation.roles[0].replicas > 1

    def starts(self) -> list[ServerStart]:
        """All engines, prefill before decode, each with its part of the machine.

        Raises:
            UnsupportedError: an engine is for more than one host.
        """
        for role in self.translation.roles:
            if role.nodes > 1:
                raise UnsupportedError(
                    f"an engine of {role.devices} devices is for {role.nodes} nodes, and this is one",
                    hint="write files for --target ray or kubernetes",
                )
        places = iter(self._places())
        return [
            self._start(role, number, next(places))
            for role in self.translation.roles
            for number in range(role.replicas)
        ]

    def _start(self, role: ServedRole, number: int, place: dict[str, str]) -> ServerStart:
        options = dict(role.options)
        options["shutdown_timeout"] = round(self.config.drain_timeout_s)
        variables = dict(place)
        if self.translation.is_disaggregated:
            variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        name = "vllm" if role.role == "whole" else f"vllm-{role.role}"
        return ServerStart(
            name=f"{name}-{number}",
            role=role.role,
            options=options,
            variables=variables,
            host=LOCAL if self.has_front else self.config.host,
            port=free_port() if self.has_front else self.config.port,
        )

    def _places(self) -> Iterator[dict[str, str]]:
        """Variables that bind each engine to cores or devices."""
        counts = {role.role: role.replicas for role in self.translation.roles}
        if self.accepted.device == "cpu":
            yield from self._cores(counts.get("prefill", 0), counts.get("decode", counts.get("whole", 0)))
            return
        visible = visible_devices() or range(self.plan.devices)
        wanted = sum(role.replicas * role.devices for role in self.translation.roles)
        first = 0
        for role in self.translation.roles:
            for _ in range(role.replicas):
                own = [visible[(first + offset) % len(visible)] for offset in range(role.devices)]
                yield {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
                first += role.devices
        if wanted > len(visible):
            log.warning("%d devices for engines that want %d: they share", len(visible), wanted)

    def _cores(self, prefill: int, decode: int) -> Iterator[dict[str, str]]:
        """vLLM starts a thread on each core it is given."""
        engine = self.plan.decode
        allowed = engine.cpu_cores or host.allowed_cores()[: engine.threads]
        topology = type(self.plan.topology)(
            prefill_workers=prefill, decode_workers=decode, prefill_threads=self.plan.topology.prefill_threads
        )
        placement = place_cores(topology, allowed)
        placement.report()
        for cores in (*placement.shares["prefill"], *placement.shares["decode"]):
            yield {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}


def run_local(run: LocalRun, say_ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        run: what to start.
        say_ready: gets the address of the API once everything answers.

    Returns:
        The exit code, 0.

    Raises:
        EngineDeadError: an engine did not load, or ended.
        ConfigError: the address cannot be listened on.
    """
    starts = run.starts()
    with bind(ServerConfig(host=run.config.host, port=run.config.port)) as listener:
        if not run.has_front:
            listener.close()  # it was free; the engine takes it
        servers: list[VLLMServer] = []
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            servers.extend(VLLMServer(run.python, start) for start in starts)
            wait_until_ready(servers, run.config.ready_timeout_s)
            asyncio.run(_serve(run, servers, listener if run.has_front else None, say_ready))
        except KeyboardInterrupt:
            log.info("ending")
        finally:
            end_all(servers, run.config.drain_timeout_s)
    return 0


async def _serve(
    run: LocalRun, servers: Sequence[VLLMServer], listener: socket.socket | None, say_ready: Callable[[str], None]
) -> None:
    """Until a signal, with a front where there is a listener for one."""
    watch = asyncio.create_task(_watch(servers))
    say_ready(f"http://{run.config.host}:{run.config.port}/v1")
    if listener is None:
        await watch
        return
    urls = {role: [server.url for server in servers if server.role == role] for role in ("prefill", "decode", "whole")}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http:
        front = HandOff(
            urls["prefill"],
            urls["decode"] or urls["whole"],
            http,
            direct_tokens=run.plan.transfer.remote_prefill_tokens,
            policy=run.config.kv_load_failure_policy,
        )
        drain_s = round(run.config.drain_timeout_s)
        settings = uvicorn.Config(front, lifespan="off", log_config=None, timeout_graceful_shutdown=drain_s)
        server = uvicorn.Server(settings)
        watch.add_done_callback(lambda _: setattr(server, "should_exit", True))
        await server.serve(sockets=[listener])
    if watch.done():
        watch.result()
    watch.cancel()


async def _watch(servers: Sequence[VLLMServer]) -> None:
    """For ever.

    Raises:
        EngineDeadError: an engine ended.
    """
    while True:
        check_alive(servers)
        await asyncio.sleep(WATCH_S)
