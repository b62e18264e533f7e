"""A prefill and a decode worker around tiny models in one process, joined by any connector, with every way to disturb them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from emulated_device import EmulatedIpcConnector
from tiny_engine import tiny_llm

from triblade.config import EngineConfig, TransferConfig
from triblade.disagg.cuda_ipc import RowMemory
from triblade.disagg.frames import Message
from triblade.disagg.links import Connector, Link, Listener, Receiver
from triblade.disagg.placed_rows import row_memory_of
from triblade.disagg.prefill import PrefillService
from triblade.disagg.remote import connect_prefill
from triblade.disagg.shared_rows import SharedPool
from triblade.engine.build import assemble
from triblade.engine.engine import Engine
from triblade.engine.local import LocalClient
from triblade.llm import Completion
from triblade.models.loader import OpenModel
from triblade.registry import CONNECTORS
from triblade.sampling_params import SamplingParams

PATIENCE_S = 20.0
PLACED = "placed"  # rows are written into the other worker's pool, by an emulated device


class Pair:
    """One prefill and one decode worker.

    Attributes:
        prefill: the service with its engine.
        client: of the decode engine.
        remote: its side of the transfers.
    """

    def __init__(
        self,
        model: OpenModel,
        connector: Connector,
        address: str,
        *,
        transfer: dict[str, Any] | None = None,
        prefill: dict[str, Any] | None = None,
        prefill_model: OpenModel | None = None,
        prepare: Callable[[Engine], object] | None = None,
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {"remote_prefill_tokens": 1, "transfer_timeout_s": 10.0, **(transfer or {})}
        self.config = TransferConfig(**settings)
        self.connector = connector
        self.pool: SharedPool | None = None
        self.prefill_engine = self._prefill_engine(prefill_model or model, {**options, **(prefill or {})})
        self.engine = tiny_llm(model, **options).engine
        if prepare is not None:
            prepare(self.engine)
        self.prefill = PrefillService(
            self.prefill_engine,
            self.config,
            self.pool,
            row_memory_of(connector, self.prefill_engine.runner.executor.cache.pool),
        )
        self.listener = connector.listen(address, self.prefill.accept)
        self.client = LocalClient(self.engine)
        self.remote, self.fetcher = connect_prefill(
            self.engine, self.client.call_between_steps, self.config, connector, [self.listener.address]
        )

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[Completion]]:
        """As `LLM.generate`, through the client."""

        async def one(ids: list[int]) -> list[Completion]:
            completions = [Completion(index) for index in range(params.n)]
            async for output in self.client.generate(ids, params):
                completions[output.index].add(output)
            return completions

        async def every() -> list[list[Completion]]:
            return list(await asyncio.gather(*(one(ids) for ids in prompts)))

        return asyncio.run(every())

    def check_idle(self) -> None:
        """Nothing is left on either side, within a moment."""
        self.eventually(lambda: self.prefill.num_jobs == 0 and not self.prefill_engine.has_work)
        self.eventually(lambda: self.client.load().num_running + self.client.load().num_waiting == 0)
        self.eventually(lambda: self.prefill_engine.pool.num_free == self.prefill_engine.pool.num_blocks)
        self.eventually(lambda: self.engine.pool.num_free == self.engine.pool.num_blocks)
        self.engine.check_idle()
        self.prefill_engine.check_idle()

    def close(self) -> None:
        self.listener.close()
        self.fetcher.close()
        self.client.close()
        self.prefill.close()

    @staticmethod
    def eventually(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.002)

    def _prefill_engine(self, model: OpenModel, options: dict[str, Any]) -> Engine:
        if not self.connector.carries_files:
            return tiny_llm(model, **options).engine
        settings: dict[str, Any] = {"deterministic": True, "block_size": 4, "num_kv_blocks": 128, "device": "cpu"}
        config = EngineConfig(model=model.name, **{**settings, **options})
        return assemble(config, model, torch.device(config.device), self._make_pool)

    def _make_pool(self, num_blocks: int, row_bytes: int) -> torch.Tensor:
        self.pool = SharedPool(num_blocks, row_bytes)
        return self.pool.rows


@contextmanager
def pair(
    model: OpenModel,
    connector: str = "local",
    *,
    way: Connector | None = None,
    change: Callable[[Link, Message], Iterable[Message]] | None = None,
    refused: bool = False,
    **options: Any,
) -> Iterator[Pair]:
    """Two workers, ready (or `refused`); in the end nothing may be left. `change` disturbs what the decode worker hears.

    `way` takes the place of the connector of that name.
    """
    with TemporaryDirectory() as folder:
        way = way or (EmulatedIpcConnector() if connector == PLACED else CONNECTORS[connector]())
        address = {"local": "prefill", "tcp": "127.0.0.1:0"}.get(connector, str(Path(folder, "p")))
        made = Pair(model, way if change is None else Disturbed(way, change), address, **options)
        try:
            made.eventually(lambda: bool(made.fetcher.refusals) if refused else made.fetcher.num_ready == 1)
            yield made
            made.check_idle()
        finally:
            made.close()


class Disturbed:
    """A connector whose links, on the decode worker's end, show what comes in to `change` first: it returns what to deliver."""

    def __init__(self, inner: Connector, change: Callable[[Link, Message], Iterable[Message]]) -> None:
        self._inner, self._change = inner, change
        self.carries_files = inner.carries_files

    def listen(self, address: str, accept: Callable[[Link], None]) -> Listener:
        return self._inner.listen(address, accept)

    def connect(self, address: str) -> Link:
        link = self._inner.connect(address)
        start = link.start
        link.start = lambda receiver: start(_Changing(receiver, self._change))  # type: ignore[method-assign]
        return link

    def row_memory(self, pool: torch.Tensor) -> RowMemory | None:
        return self._inner.row_memory(pool)


class _Changing:
    def __init__(self, receiver: Receiver, change: Callable[[Link, Message], Iterable[Message]]) -> None:
        self._receiver, self._change = receiver, change

    def received(self, link: Link, message: Message) -> None:
        for each in self._change(link, message):
            self._receiver.received(link, each)

    def writable(self, link: Link) -> None:
        self._receiver.writable(link)

    def lost(self, link: Link, reason: str) -> None:
        self._receiver.lost(link, reason)
