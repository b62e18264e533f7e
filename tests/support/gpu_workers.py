"""A prefill worker in a process of its own, on the last GPU of the machine, for a decode worker in this process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from cuda_engines import cuda_open
from disaggregated import Pair
from tiny_engine import open_tiny, tiny_llm

from triblade.config import TransferConfig
from triblade.disagg.cuda_ipc import CudaIpcConnector
from triblade.disagg.placed_rows import row_memory_of
from triblade.disagg.prefill import PrefillService
from triblade.disagg.remote import connect_prefill
from triblade.engine.local import LocalClient
from triblade.models.loader import OpenModel

START_S = 120.0


@dataclass(frozen=True)
class Kind:
    """What both workers build.

    Attributes:
        is_float32: by the reference backend, else in bfloat16 by the CUDA kernels.
        prefill: what differs on the prefill worker.
    """

    is_float32: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    codec: str = "raw"

    @property
    def transfer(self) -> TransferConfig:
        return TransferConfig(connector="cuda-ipc", wire_codec=self.codec, remote_prefill_tokens=1)

    @property
    def settings(self) -> dict[str, Any]:
        return {"device": "cuda", "deterministic": False, "block_size": 16, "num_kv_blocks": 512, **self.options}

    def model(self) -> OpenModel:
        return (
            open_tiny("llama", max_position_embeddings=8192)
            if self.is_float32
            else cuda_open("qwen2", max_position_embeddings=8192)
        )


def serve(kind: Kind, address: str) -> None:
    """The other process."""
    engine = tiny_llm(kind.model(), **{**kind.settings, **kind.prefill}).engine
    connector = CudaIpcConnector()
    service = PrefillService(engine, kind.transfer, None, row_memory_of(connector, engine.runner.executor.cache.pool))
    connector.listen(address, service.accept)
    time.sleep(3600)


class Workers:
    """A decode worker here, with one prefill worker elsewhere that can be killed."""

    def __init__(self, kind: Kind, address: str, process: BaseProcess) -> None:
        self.process = process
        self.engine = tiny_llm(kind.model(), **kind.settings).engine
        self.client = LocalClient(self.engine)
        self.remote, self.fetcher = connect_prefill(
            self.engine, self.client.call_between_steps, kind.transfer, CudaIpcConnector(), [address]
        )

    generate = Pair.generate

    def check_idle(self) -> None:
        """Nothing is left here, within a moment."""
        Pair.eventually(lambda: self.client.load().num_running + self.client.load().num_waiting == 0)
        Pair.eventually(lambda: self.engine.pool.num_free == self.engine.pool.num_blocks)
        self.engine.check_idle()

    def close(self) -> None:
        self.fetcher.close()
        self.client.close()


@contextmanager
def workers(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Both, ready; in the end nothing may be left."""
    count = torch.cuda.device_count()
    with TemporaryDirectory() as folder, monkeypatch.context() as environment:
        address = str(Path(folder, "p"))
        # All devices are visible to each, its own one first.
        environment.setenv("CUDA_VISIBLE_DEVICES", ",".join(str((number - 1) % count) for number in range(count)))
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, address), daemon=True)
        process.start()
        made = Workers(kind, address, process)
        try:
            Pair.eventually(lambda: bool(made.fetcher.num_ready or made.fetcher.refusals), START_S)
            assert not made.fetcher.refusals
            yield made
            made.check_idle()
        finally:
            made.close()
            process.kill()
            process.join()
