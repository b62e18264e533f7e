"""The router's ASGI application: a request is passed to a replica, and to another one as long as the client got nothing.

1. choose a replica (and let a prefill server compute the prompt, where there are some) -> 2. hold its answer until the first
token -> 3. pass all bytes. A failure before 3 begins again with a replica that was not tried; after it a stream ends with an error
event. A client that leaves, or waits too long, ends the request wherever it is. Knows no sockets. Invariant: every lease ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from triblade.config import RouteConfig
from triblade.deploy.replicas import Fleet, Lease, Replica, Role
from triblade.deploy.replicas_handoff import decode_body, prefill_body, transfer_of
from triblade.deploy.replicas_metrics import RouterMetrics
from triblade.deploy.replicas_prompt import CHAT, COMPLETION, COMPUTING, Prompt, read_prompt
from triblade.deploy.replicas_upstream import (
    Answer,
    BrokenOff,
    Headers,
    Outgoing,
    Refusal,
    Refused,
    Unanswered,
    Upstream,
    outgoing_headers,
    with_body,
)
from triblade.serve.errors import (
    RETRY_SOON_S,
    ClientGoneError,
    DrainingError,
    RequestTimeoutError,
    ServeError,
    UnavailableError,
)
from triblade.serve.problems import problem
from triblade.serve.stoppable import Stoppable

log = logging.getLogger(__name__)

SERVING: tuple[Role, ...] = ("any", "decode")
PREFILLING: tuple[Role, ...] = ("prefill",)
LOOK_S = 0.05  # between two looks for a replica that takes requests
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
UNIQUE_CHARACTERS = 12


class NoReplicaError(UnavailableError):
    """No replica takes requests."""

    code = "no_replica"
    retry_after_s = RETRY_SOON_S


class ReplicaLostError(ServeError):
    """A replica was lost while it computed an answer."""

    http_status = 502
    error_type = "bad_gateway_error"
    code = "replica_lost"


@dataclass(eq=False, slots=True)
class Call:
    """One request of a client, and how far it is.

    Attributes:
        has_begun: whether the client got a part of the answer, so that nobody else may be asked.
        attempt: what is being done for it now.
        transfer: KV that a prefill server keeps for it, and that no decode server has seen.
    """

    path: str
    request: Outgoing
    prompt: Prompt
    send: Send
    arrival_s: float
    has_begun: bool = False
    is_stream: bool = False
    attempt: Stoppable = field(default_factory=Stoppable)
    transfer: Mapping[str, Any] | None = None
    tried: list[Replica] = field(default_factory=list)

    def lost(self, replica: Replica) -> None:
        """See `replicas.Waiting`."""
        self.attempt.stop(ReplicaLostError(f"{replica.url} was lost: {replica.fault}"))

    def may_repeat(self, error: Exception) -> bool:
        """Whether asking again does no harm."""
        was_asked = not isinstance(error, Unanswered) or error.was_asked
        return not was_asked or self.path in COMPUTING or self.request.method in SAFE

    async def begin(self, status: int, headers: Headers, content: bytes, *, is_whole: bool = False) -> None:
        """Send the first part of the answer."""
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.go_on(content, is_whole=is_whole)

    async def go_on(self, content: bytes, *, is_whole: bool = False) -> None:
        """Send another part."""
        await self.send({"type": "http.response.body", "body": content, "more_body": not is_whole})


class Proxy:
    """Passes requests to replicas.

    Args:
        fleet: the replicas.
        upstream: connections to them.
        config: attempts and times.
        metrics: counts what happens.
    """

    def __init__(self, fleet: Fleet, upstream: Upstream, config: RouteConfig, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._config = config
        self._metrics = metrics
        self._clients: set[Stoppable] = set()
        self._is_draining = False

    @property
    def num_in_flight(self) -> int:
        """Requests that are being answered."""
        return len(self._clients)

    def drain(self) -> None:
        """Take no more requests."""
        self._is_draining = True

    def stop_all(self, reason: ServeError) -> None:
        """End what is being answered."""
        for client in list(self._clients):
            client.stop(reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, whose body comes in one piece.

        Raises:
            ServeError: nobody could answer; the client got nothing yet.
        """
        if self._is_draining:
            raise DrainingError("the router is shutting down")
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        call = _call(scope, message.get("body", b""), send)
        try:
            await self._until_left(call, receive)
        except ClientGoneError:
            self._metrics.left()
        except Refused as error:
            refusal = error.refusal
            await call.begin(refusal.status, refusal.headers, refusal.content, is_whole=True)
        except (Unanswered, BrokenOff, ServeError) as error:
            await _broken(call, _told(error))

    async def _until_left(self, call: Call, receive: Receive) -> None:
        """Answer, unless the client leaves or it takes too long."""
        client = Stoppable()
        leaving = asyncio.create_task(_stop_when_left(receive, client))
        seconds = self._config.request_timeout_s
        self._clients.add(client)
        try:
            async with asyncio.timeout(seconds or None):
                await client.run(self._answer(call))
        except TimeoutError as error:
            raise RequestTimeoutError(f"the request took longer than {seconds:g} s") from error
        finally:
            self._clients.discard(client)
            leaving.cancel()

    async def _answer(self, call: Call) -> None:
        """Ask replicas until one answers."""
        while True:
            lease = self._fleet.lease(call.prompt, await self._candidates(call))
            call.tried.append(lease.replica)
            self._metrics.routed(lease, len(call.tried))
            try:
                return await self._attempt(call, lease)
            except (Unanswered, Refused, ReplicaLostError) as error:
                if not self._may_try_again(call, error):
                    raise
                log.warning("%s: %s; another replica is asked", lease.replica.url, error)
            finally:
                lease.end()

    def _may_try_again(self, call: Call, error: Exception) -> bool:
        if call.has_begun or len(call.tried) >= self._config.max_attempts or not call.may_repeat(error):
            return False
        if isinstance(error, Refused):  # the same replica would refuse again
            return not error.is_final and bool(self._fleet.ready(SERVING, call.tried))
        return True

    async def _candidates(self, call: Call) -> list[Replica]:
        """Replicas that take requests and were not tried, else those that were; waits a while for one.

        Raises:
            NoReplicaError: none came.
        """
        late = time.monotonic() + self._config.wait_s
        while not (ready := self._fleet.ready(SERVING, call.tried) or self._fleet.ready(SERVING)):
            if time.monotonic() >= late:
                raise NoReplicaError("no replica takes requests")
            await asyncio.sleep(LOOK_S)
        return ready

    async def _attempt(self, call: Call, lease: Lease) -> None:
        """Ask one replica; while the client has nothing, its loss ends the attempt."""
        call.attempt = Stoppable()
        lease.replica.waiting.add(call)
        try:
            await call.attempt.run(self._pass(call, lease))
        finally:
            lease.replica.waiting.discard(call)

    async def _pass(self, call: Call, lease: Lease) -> None:
        replica = lease.replica
        request = call.request if replica.role == "any" else await self._handed_over(call, lease)
        try:
            async with self._upstream.ask(replica.url, request) as answer:
                call.transfer = None
                replica.waiting.discard(call)
                self._fleet.succeeded(replica)
                lease.begun()
                await self._send(call, answer)
        except Unanswered as error:
            self._failed(call, replica, error)
            call.transfer = None if error.was_asked else call.transfer
            raise
        except Refused:
            call.transfer = None
            raise

    async def _send(self, call: Call, answer: Answer) -> None:
        """All of an answer, byte for byte."""
        call.is_stream = answer.is_stream
        self._metrics.first_byte(time.perf_counter() - call.arrival_s)
        await call.begin(answer.status, answer.headers, answer.first)
        async for piece in answer.rest():
            await call.go_on(piece)
        await call.go_on(b"", is_whole=True)

    async def _handed_over(self, call: Call, decode: Lease) -> Outgoing:
        """The request for a decode server, after a prefill server computed its prompt if that is worth it.

        Raises:
            Refused: the prefill server says that the request is wrong.
        """
        body, ready = call.prompt.body, self._fleet.ready(PREFILLING)
        if body is None or call.path not in (CHAT, COMPLETION) or not call.prompt.can_hand_over:
            return call.request
        if call.transfer is None and ready and not self._fleet.is_short(decode.missing_bytes):
            call.transfer = await self._prefilled(call, body, self._fleet.lease(call.prompt, ready))
        self._metrics.handed_over(has_transfer=call.transfer is not None)
        return call.request if call.transfer is None else with_body(call.request, decode_body(body, call.transfer))

    async def _prefilled(self, call: Call, body: Mapping[str, Any], lease: Lease) -> Mapping[str, Any] | None:
        """Where a prefill server has the prompt's KV; None if it fails, so that the decode server computes it."""
        replica = lease.replica
        replica.waiting.add(call)
        try:
            async with self._upstream.ask(replica.url, with_body(call.request, prefill_body(body))) as answer:
                content = answer.first + b"".join([piece async for piece in answer.rest()])
        except Unanswered as error:
            self._failed(call, replica, error)
            return None
        except (Refused, BrokenOff):
            return None
        finally:
            replica.waiting.discard(call)
            lease.end()
        if answer.status != 200:
            raise Refused(Refusal(answer.status, answer.headers, content), is_final=True)
        self._fleet.succeeded(replica)
        return transfer_of(content)

    def _failed(self, call: Call, replica: Replica, error: Unanswered) -> None:
        replica.waiting.discard(call)  # it knows already
        self._metrics.failed(replica)
        self._fleet.failed(replica, str(error), is_gone=not error.was_asked)


def _call(scope: Scope, content: bytes, send: Send) -> Call:
    """A client's request, under an id of its own: two may bear the same label."""
    state, path = scope["state"], scope["path"]
    query = scope["query_string"]
    target = scope.get("raw_path", path.encode()).decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
    request_id = f"{state['request_id']}-{uuid.uuid4().hex[:UNIQUE_CHARACTERS]}"
    request = Outgoing(scope["method"], target, outgoing_headers(scope["headers"], request_id), content)
    return Call(path, request, read_prompt(path, content), send, state["arrival_s"])


async def _stop_when_left(receive: Receive, client: Stoppable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.stop(ClientGoneError("the client left"))


def _told(error: Exception) -> ServeError:
    """What a client is told; its own words do for errors of ours."""
    if isinstance(error, ServeError):
        return error
    return ReplicaLostError(f"the replica was lost: {error}")


async def _broken(call: Call, error: ServeError) -> None:
    """End an answer that has no good end.

    Raises:
        ServeError: the client got nothing yet, or no stream, in which an error could be told.
    """
    if not (call.has_begun and call.is_stream):
        raise error
    log.warning("an answer broke off: %s", error)
    body = orjson.dumps(problem(error).body())
    await call.go_on(b"\n\ndata: " + body + b"\n\ndata: [DONE]\n\n", is_whole=True)
