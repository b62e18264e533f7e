"""Errors that nobody expected, in every thread of both workers: one job or one link ends with a word, the thread goes on (G05)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from functools import cache, partial
from typing import Any

import pytest
from disaggregated import PLACED, Pair, pair
from emulated_device import EmulatedMemory
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.config import EngineConfig
from triblade.disagg import peer, prefill, prefill_transfers, sockets
from triblade.disagg.client_port import ClientPort
from triblade.disagg.codecs import Sender
from triblade.disagg.fetcher import Fetcher
from triblade.disagg.frames import Message
from triblade.disagg.links import Link, LocalLink
from triblade.disagg.processes import Supervisor
from triblade.disagg.remote_client import RemoteClient
from triblade.disagg.rpc import Welcome
from triblade.disagg.sockets import SocketLink, connected, listening
from triblade.disagg.wire import Cancel, State
from triblade.disagg.worker import with_smaller_chunks
from triblade.engine.client import EngineLoad
from triblade.engine.local import LocalClient
from triblade.errors import MemoryBudgetError, TribladeError, UnsupportedError
from triblade.kv.wire import RawWire
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IDS, OTHER = prompt(57, seed=21), prompt(50, seed=3)
OPTIONS: dict[str, Any] = {"prefill": {"max_num_batched_tokens": 4}}


@cache
def model() -> OpenModel:
    return open_tiny("llama")


@cache
def alone(ids: tuple[int, ...]) -> list[int]:
    return tiny_llm(model()).generate([list(ids)], GREEDY)[0][0].token_ids


def failing(call: Callable[..., Any], number: int, error: Exception | None = None) -> Callable[..., Any]:
    """`call`, but for its n-th use."""
    uses = iter(range(1, 1 << 30))

    def replacement(*arguments: Any, **options: Any) -> Any:
        if next(uses) == number:
            raise error or RuntimeError("injected")
        return call(*arguments, **options)

    return replacement


def check_one_lost(workers: Pair) -> None:
    """The prompt that the fault hits is computed by the decode worker; the next one comes from the prefill worker again."""
    assert workers.generate([IDS], GREEDY)[0][0].token_ids == alone(tuple(IDS))
    assert workers.remote.counts.num_failed == 1
    workers.eventually(lambda: workers.fetcher.num_ready == 1)
    assert workers.generate([OTHER], GREEDY)[0][0].token_ids == alone(tuple(OTHER))
    assert (workers.remote.counts.num_failed, workers.remote.counts.num_complete) == (1, 1)
    assert workers.prefill.is_alive


SENDING: dict[str, tuple[Any, str]] = {  # connector -> what makes its rows, and nobody else calls
    "local": (RawWire, "encode"),
    "tcp": (RawWire, "encode"),
    "shm": (prefill_transfers.Transfers, "_rows"),
    PLACED: (EmulatedMemory, "mark"),
}


@pytest.mark.parametrize("connector", SENDING)
def test_rows_that_cannot_be_made_end_their_transfer_alone(
    connector: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name = SENDING[connector]
    with pair(model(), connector, **OPTIONS) as workers:  # greeted by now
        monkeypatch.setattr(owner, name, failing(getattr(owner, name), 7))
        check_one_lost(workers)
        workers.eventually(lambda: [state.num_faults for state in workers.fetcher.states] == [1])
    assert "57 tokens" not in caplog.text
    assert "internal error: RuntimeError" in caplog.text  # said by the decode worker, too
    assert any(record.exc_info is not None for record in caplog.records)


def test_two_transfers_at_once_and_one_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(model(), "tcp", **OPTIONS) as workers:
        monkeypatch.setattr(RawWire, "encode", failing(RawWire.encode, 5))
        found = workers.generate([IDS, OTHER], GREEDY)
        assert [choices[0].token_ids for choices in found] == [alone(tuple(IDS)), alone(tuple(OTHER))]
        assert (workers.remote.counts.num_failed, workers.remote.counts.num_complete) == (1, 1)


def test_a_prompt_that_cannot_be_begun_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(model(), "tcp", **OPTIONS) as workers:
        engine = workers.prefill_engine
        monkeypatch.setattr(engine, "prepare", failing(engine.prepare, 1))
        check_one_lost(workers)


def test_a_message_that_cannot_be_handled_costs_its_link_and_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(model(), "tcp", **OPTIONS) as workers:
        transfers = prefill_transfers.Transfers
        monkeypatch.setattr(transfers, "begin", failing(transfers.begin, 1))
        check_one_lost(workers)


@pytest.mark.parametrize("connector", ["local", "tcp"])
def test_a_greeting_that_fails_is_tried_again(connector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "REDIAL_S", 0.05)
    monkeypatch.setattr(prefill, "canary", failing(prefill.canary, 1))
    with pair(model(), connector, **OPTIONS) as workers:
        assert workers.generate([IDS], GREEDY)[0][0].token_ids == alone(tuple(IDS))
        assert workers.remote.counts.num_complete == 1


def test_a_table_that_cannot_be_made_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "refresh", failing(Sender.refresh, 1))
    with pair(model(), "tcp") as workers:
        workers.eventually(lambda: [state.num_faults for state in workers.fetcher.states] == [1])
        assert workers.generate([IDS], GREEDY)[0][0].token_ids == alone(tuple(IDS))
        assert workers.remote.counts.num_complete == 1


@pytest.mark.parametrize("error", [RuntimeError("injected"), MemoryError()])
def test_rows_that_cannot_be_stored_are_computed_here(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(model(), "tcp", **OPTIONS) as workers:
        monkeypatch.setattr(RawWire, "decode", failing(RawWire.decode, 5, error))
        check_one_lost(workers)
        assert (workers.remote.counts.num_faults, workers.remote.counts.num_damaged) == (1, 0)


def test_memory_that_cannot_be_closed_does_not_end_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(model(), PLACED, **OPTIONS) as workers:
        monkeypatch.setattr(EmulatedMemory, "close", failing(EmulatedMemory.close, 1))
        monkeypatch.setattr(peer, "REDIAL_S", 0.05)
        workers.fetcher._peers[0].hang_up("a test")
        workers.eventually(lambda: workers.fetcher.num_ready == 0)
        workers.eventually(lambda: workers.fetcher.num_ready == 1)
        assert workers.generate([IDS], GREEDY)[0][0].token_ids == alone(tuple(IDS))
        assert workers.remote.counts.num_complete == 1


def test_a_call_between_steps_that_fails_does_not_end_the_engine() -> None:
    with closing(LocalClient(tiny_llm(model()).engine)) as client:
        client.call_between_steps(partial(failing(print, 1), "never"))

        async def collect() -> list[int]:
            return [token async for output in client.generate(IDS, GREEDY) for token in output.token_ids]

        assert asyncio.run(collect()) == alone(tuple(IDS))
        assert client.is_alive


class Dialled:
    """A connector that counts, raises for one address, and hangs up at once for the other."""

    carries_files = False

    def __init__(self) -> None:
        self.dials: list[str] = []

    def connect(self, address: str) -> Link:
        self.dials.append(address)
        if address == "bad":
            raise RuntimeError("injected")
        ours, theirs = LocalLink.pair()
        theirs.close()
        return ours


class Speechless:
    """`peer.Terms` of a worker that has nothing to say of itself."""

    def hello(self, link: Link) -> Message:
        raise UnsupportedError("injected")


@pytest.mark.parametrize("number", [1, 2])
def test_a_peer_that_cannot_be_dialled_does_not_keep_others_from_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "REDIAL_S", 0.0)
    monkeypatch.setattr(peer, "REDIAL_REFUSED_S", 0.0)
    way: Any = Dialled()
    terms: Any = Speechless()
    with closing(Fetcher(way, ["bad", "good"][:number], terms, lambda: None, max_backlog=9, timeout_s=9.0)):
        Pair.eventually(lambda: all(way.dials.count(address) > 2 for address in ["bad", "good"][:number]))


class Ear:
    """A receiver that remembers."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.losses: list[str] = []

    def received(self, link: Link, message: Message) -> None:
        self.messages.append(message)

    def writable(self, link: Link) -> None:
        raise RuntimeError("injected")

    def lost(self, link: Link, reason: str) -> None:
        self.losses.append(reason)


@pytest.fixture
def ends() -> Iterator[tuple[SocketLink, Ear, Ear]]:
    """A link, what its own end hears, and what the other one does."""
    ear, other = Ear(), Ear()
    links: list[Link] = []

    def accept(link: Link) -> None:
        links.append(link)
        link.start(other)

    with closing(listening("127.0.0.1:0", accept)) as listener:
        link = SocketLink(connected(listener.address), "other")
        link.start(ear)
        yield link, ear, other
        for each in (link, *links):
            each.close()
            each.join()


class Unspeakable(Message):
    """In no vocabulary."""


@pytest.mark.parametrize("message", [Unspeakable(), State(backlog_tokens=1, payload=b"x")])
def test_a_writer_that_fails_ends_its_link_at_both_ends(message: Message, ends: tuple[SocketLink, Ear, Ear]) -> None:
    """The second one fails where the receiver is told that there is room."""
    link, ear, other = ends
    link.send(Cancel(transfer=1))
    link.send(message)
    Pair.eventually(lambda: len(ear.losses) == len(other.losses) == 1)
    assert ear.losses[0].startswith("internal error: ")
    assert other.messages[0] == Cancel(transfer=1)


def test_a_link_that_fails_at_once_does_not_end_the_listener() -> None:
    begun: list[Link] = []
    with closing(listening("127.0.0.1:0", failing(begun.append, 1))) as listener:
        for _ in range(2):
            connected(listener.address).close()
        Pair.eventually(lambda: len(begun) == 1)
        begun[0].close()


def test_a_listener_without_descriptors_waits_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ACCEPT_AGAIN_S", 0.01)
    listener_socket = sockets.socket.socket
    begun: list[Link] = []
    monkeypatch.setattr(
        listener_socket, "accept", failing(listener_socket.accept, 1, OSError(24, "Too many open files"))
    )
    with closing(listening("127.0.0.1:0", begun.append)) as listener:
        connected(listener.address).close()
        Pair.eventually(lambda: len(begun) == 1)
        begun[0].close()


class Stumbling:
    """An engine whose first answer fails."""

    def __init__(self) -> None:
        self._fail = failing(lambda: None, 1)

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self._fail()
        return
        yield

    async def abort(self, request_id: str) -> None: ...


def test_an_answer_that_fails_is_told_and_a_load_that_fails_does_not_end_the_reports() -> None:
    welcome = Welcome(model="m", model_hash="h", vocab_size=9, context_length=9, kv_tokens=9, max_logprobs=0)
    load = failing(lambda: EngineLoad(num_running=3), 2)

    async def scenario() -> str:
        engine: Any = Stumbling()
        port = ClientPort(engine, welcome, load)
        ours, theirs = LocalLink.pair()
        port.accept(theirs)
        client = RemoteClient(ours)
        reason = ""
        try:
            async for _ in client.generate([1], GREEDY):
                pass
        except TribladeError as error:
            reason = error.message
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                while client.load().num_running != 3:
                    await asyncio.sleep(0.01)
        assert client.load().num_running == 3
        await port.close()
        return reason

    assert asyncio.run(scenario()) == "internal error: RuntimeError"


class Unstartable:
    """`WorkerProcess` that the machine has no room for, or that runs."""

    def __init__(self, name: str, start: Callable[[], None]) -> None:
        self.name, self.start = name, start
        self.exit_code = None

    def end(self) -> None: ...

    def wait(self, timeout_s: float) -> None: ...


def test_a_worker_that_cannot_be_started_does_not_take_the_others_with_it() -> None:
    """The kernel ends workers with the thread that started them."""
    started = threading.Event()
    processes: Any = [
        Unstartable("prefill-0", failing(started.set, 1, OSError(12, "Cannot allocate memory"))),
        Unstartable("decode-0", started.set),
    ]
    with closing(Supervisor(processes, restarts=1)) as supervisor:
        assert started.wait(10)
        Pair.eventually(lambda: supervisor.failure is not None)
        assert supervisor._thread.is_alive()
        assert supervisor.failure == "prefill-0 could not be started: [Errno 12] Cannot allocate memory"


def test_a_step_without_memory_makes_the_next_ones_smaller(monkeypatch: pytest.MonkeyPatch) -> None:  # row P6
    """Down to the least; other faults change nothing."""
    with pair(model(), "tcp", prefill={"max_num_batched_tokens": 50}) as workers:
        engine, sizes, ids = workers.prefill_engine, list[int](), iter(range(100, 200))
        execute = engine.runner.execute

        def short_of_memory(items: Any) -> Any:
            sizes.append(sum(item.num_tokens for item in items))
            if sizes[-1] > 30:
                raise RuntimeError("CUDA out of memory. Tried 2 GiB")
            return execute(items)

        monkeypatch.setattr(engine.runner, "execute", short_of_memory)
        check_one_lost(workers)
        assert (sizes[:2], engine.scheduler.max_num_batched_tokens) == ([50, 25], 25)
        for error, taken in [(RuntimeError("other"), 25), (MemoryError(), 16), (MemoryError(), 16)]:
            monkeypatch.setattr(engine.runner, "execute", failing(execute, 1, error))
            workers.generate([prompt(40, seed=next(ids))], GREEDY)
            assert engine.scheduler.max_num_batched_tokens == taken


@pytest.mark.parametrize(("fits", "taken"), [(512, 512), (200, 128), (16, 16)])
def test_chunks_that_do_not_fit_are_halved_before_anything_is_loaded(
    fits: int, taken: int, caplog: pytest.LogCaptureFixture
) -> None:  # row P6
    def build(config: EngineConfig) -> Any:
        if config.max_num_batched_tokens > fits:
            raise MemoryBudgetError("too little")
        return config

    config = EngineConfig(model="m", max_num_batched_tokens=512, max_num_seqs=64)
    made: Any = with_smaller_chunks(config, build)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (taken, min(64, taken))
    assert (f"prefill chunks of {taken} tokens" in caplog.text) == (taken < 512)


def test_a_prefill_worker_without_room_for_the_least_chunk_says_so() -> None:
    build: Any = failing(print, 1, MemoryBudgetError("too little"))
    with pytest.raises(MemoryBudgetError, match="too little"):
        with_smaller_chunks(EngineConfig(model="m", max_num_batched_tokens=16, max_num_seqs=8), build)
