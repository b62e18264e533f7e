"""A prefill and a decode engine in one process around tiny models, as `triblade serve --pd-isolation thread` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from disaggregated import Pair

from triblade.config import EngineConfig, TopologyConfig, TransferConfig
from triblade.config.worker import WorkerRole
from triblade.disagg.launch import Deployment
from triblade.disagg.one_process import Lane, TwoEngines, joined
from triblade.engine.engine import Engine
from triblade.engine.executor import TorchExecutor
from triblade.engine.transfers import TransferCounts
from triblade.models.loader import OpenModel

SETTINGS: dict[str, Any] = {"deterministic": True, "block_size": 4, "num_kv_blocks": 256, "device": "cpu"}
ONE_EACH = TopologyConfig(prefill_workers=1, decode_workers=1, pd_isolation="thread", pd_memory="50:50")
WAIT_S = 20.0


class Roles:
    """Both engines.

    Attributes:
        client: of the decode engine.
    """

    def __init__(self, client: TwoEngines) -> None:
        self.client = client

    generate = Pair.generate

    @property
    def decode(self) -> Engine:
        return self.client._engine

    @property
    def prefill(self) -> Engine:
        """The present one."""
        return self.client.prefill.service.engine

    @property
    def counts(self) -> TransferCounts:
        counts = self.client.load().transfers
        assert counts is not None
        return counts

    def check_idle(self) -> None:
        """Nothing is left on either side, within a moment."""
        Pair.eventually(lambda: self.client.prefill.service.num_jobs == 0 and not self.prefill.has_work)
        Pair.eventually(lambda: self.client.load().num_running + self.client.load().num_waiting == 0)
        for engine in (self.prefill, self.decode):
            Pair.eventually(lambda: engine.pool.num_free == engine.pool.num_blocks)  # noqa: B023
            engine.check_idle()


def deployment(model: OpenModel, topology: TopologyConfig = ONE_EACH, **options: Any) -> Deployment:
    transfer = TransferConfig(**{"remote_prefill_tokens": 1, **options.pop("transfer", {})})
    return Deployment(EngineConfig(model=model.name, **{**SETTINGS, **options}), topology, transfer, 10.0, "info")


def lanes() -> dict[WorkerRole, Lane]:
    """The first core for one, the last for the other."""
    cores = sorted(os.sched_getaffinity(0))
    return {"prefill": Lane((cores[0],)), "decode": Lane((cores[-1],))}


@contextmanager
def two_engines(model: OpenModel, topology: TopologyConfig = ONE_EACH, **options: Any) -> Iterator[Roles]:
    """Both, ready; in the end nothing may be left."""
    client = joined(deployment(model, topology, **options), model, torch.device("cpu"), lanes())
    try:
        client.wait(WAIT_S)
        roles = Roles(client)
        yield roles
        roles.check_idle()
    finally:
        client.close()


def storages(engine: Engine) -> set[int]:
    """Where the weights of all layers and tables lie."""
    executor: Any = engine.runner.executor
    holder = executor.decoder if isinstance(executor, TorchExecutor) else getattr(executor, "_decoder", executor)
    weights = getattr(holder, "weights", None) or holder._weights
    return set(addresses(weights))


def addresses(value: Any) -> Iterator[int]:
    """Of all tensors in dataclasses and lists."""
    if isinstance(value, torch.Tensor):
        yield value.data_ptr()
    elif isinstance(value, list):
        for item in value:
            yield from addresses(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from addresses(getattr(value, name))
