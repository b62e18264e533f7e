"""A server that answers as vLLM does, without a model: steps take a set time, prompts are cached by blocks, tokens are "word ".

Four bytes are a token. A step computes one token of every running answer and a chunk of prompts, and takes
`step_ms + decode_us x answers + prefill_us x prompt tokens`. In a process of its own (`python fake_replica.py PORT [OPTIONS]`) or
in a thread of the test's (`replica()`), where it can be told to fail. Imports nothing of the project: eight of them start quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

OPENAI_ROUTES = ("/v1/models", "/v1/completions", "/v1/chat/completions")
OPENAI_FIELDS = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "seed",
    "stream",
    "stream_options",
    "echo",
    "logprobs",
}
BLOCK_TOKENS = 16
TOKEN_BYTES = 4


@dataclass(eq=False)
class Sequence:
    """One answer that is being computed."""

    prompt_tokens: int
    max_tokens: int
    blocks: list[int]
    tokens: asyncio.Queue[int]
    is_received: bool = False  # the KV of its prompt came from a prefill server
    cached_tokens: int = 0
    computed: int = 0
    generated: int = 0
    left: bool = False


@dataclass
class Settings:
    """How quick, and how well, a replica is."""

    step_ms: float = 0.0
    decode_us: float = 0.0
    prefill_us: float = 0.0
    transfer_ms: float = 0.0  # from a prefill server, and `transfer_us` for each token that is not cached here
    transfer_us: float = 0.0
    chunk_tokens: int = 512
    max_running: int = 64
    cache_blocks: int = 4096
    max_model_len: int = 32768
    status: int = 200  # of every answer
    health: int = 200
    dies_after: int | None = None  # tokens after which the connection breaks
    hangs: bool = False  # takes requests and says nothing
    fails_in_stream: bool = False  # the first event is an error
    is_foreign: bool = False  # has the routes and fields of the OpenAI API, and refuses others
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Engine:
    """Continuous batching with a prefix cache."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.prompt_tokens = self.cached_tokens = self.steps = 0
        self._wake = asyncio.Event()

    def add(self, text: bytes, max_tokens: int, *, is_received: bool = False) -> Sequence:
        blocks = _digests(text)
        sequence = Sequence(max(1, len(text) // TOKEN_BYTES), max_tokens, blocks, asyncio.Queue(), is_received)
        self.waiting.append(sequence)
        self._wake.set()
        return sequence

    def transfer_s(self, text: bytes) -> float:
        """What the KV of a prompt takes to come from a prefill server."""
        lacking = len(text) // TOKEN_BYTES - BLOCK_TOKENS * self._hits(_digests(text))
        return self.settings.transfer_ms * 1e-3 + self.settings.transfer_us * 1e-6 * lacking

    async def run(self) -> None:
        """Steps, as long as there is something to compute; each begins when the one before was to end."""
        due_s = 0.0
        while True:
            while not (self.waiting or self.running):
                self._wake.clear()
                await self._wake.wait()
                due_s = time.monotonic()
            done, seconds = self._step()
            due_s += seconds
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            for sequence in done:
                sequence.generated += 1
                sequence.tokens.put_nowait(sequence.generated)
            self.running = [s for s in self.running if s.generated < s.max_tokens and not s.left]

    def _step(self) -> tuple[list[Sequence], float]:
        """The sequences that get a token, and the time it takes."""
        self.steps += 1
        settings = self.settings
        self.waiting = deque(s for s in self.waiting if not s.left)
        while self.waiting and len(self.running) < settings.max_running:
            self.running.append(self._admitted(self.waiting.popleft()))
        done = [s for s in self.running if s.computed >= s.prompt_tokens]
        budget = settings.chunk_tokens
        for sequence in self.running:
            chunk = min(budget, sequence.prompt_tokens - sequence.computed)
            budget -= chunk
            sequence.computed += chunk
            if chunk and sequence.computed >= sequence.prompt_tokens:
                done.append(sequence)
                self._remember(sequence.blocks)
        prefilled = settings.chunk_tokens - budget
        micro = settings.decode_us * (len(done)) + settings.prefill_us * prefilled
        return done, settings.step_ms * 1e-3 + micro * 1e-6

    def _admitted(self, sequence: Sequence) -> Sequence:
        """What is cached of its prompt is found when its turn comes, and at least one token is computed."""
        last = sequence.prompt_tokens - 1
        sequence.cached_tokens = min(self._hits(sequence.blocks) * BLOCK_TOKENS, last)
        sequence.computed = last if sequence.is_received else sequence.cached_tokens
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += sequence.cached_tokens
        return sequence

    def _hits(self, blocks: list[int]) -> int:
        """Blocks from the beginning that are cached."""
        return next((at for at, block in enumerate(blocks) if block not in self.cache), len(blocks))

    def _remember(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.settings.cache_blocks:
            self.cache.popitem(last=False)


def _digests(text: bytes) -> list[int]:
    """Of the blocks of a prompt, each with all before it."""
    size, last, found = BLOCK_TOKENS * TOKEN_BYTES, 0, []
    for begin in range(0, len(text) - size + 1, size):
        last = hash((last, text[begin : begin + size]))
        found.append(last)
    return found


class App:
    """The ASGI application."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.requests: list[dict[str, Any]] = []  # bodies, with headers and whether the client left
        self.engine: Engine | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.engine is None:
            self.engine, self.loop = Engine(self.settings), asyncio.get_running_loop()
            self._task = asyncio.create_task(self.engine.run())
        path, body = scope["path"], b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self.settings.is_foreign and path not in OPENAI_ROUTES:
            await _answer(send, 404, _error("no such route", 404))
        elif path == "/health":
            while self.settings.hangs:
                await asyncio.sleep(0.01)
            await _answer(send, self.settings.health, b"")
        elif path == "/v1/models":
            card: dict[str, Any] = {"id": "fake", "object": "model"}
            card |= {} if self.settings.is_foreign else {"max_model_len": self.settings.max_model_len}
            await _answer(send, 200, json.dumps({"object": "list", "data": [card]}).encode())
        elif path == "/metrics":
            await _answer(send, 200, self._metrics().encode(), b"text/plain; version=0.0.4")
        elif path == "/echo":
            kept = [[name.decode(), value.decode()] for name, value in scope["headers"]]
            sent = {"path": path, "query": scope["query_string"].decode(), "headers": kept, "body": body.decode()}
            self.requests.append(sent)
            twice = [(b"X-Other", b"1"), (b"X-Other", b"2")]
            await _answer(send, self.settings.status, json.dumps(sent).encode(), b"application/json", twice)
        else:
            await self._generate(scope, body, receive, send)

    async def _generate(self, scope: Any, content: bytes, receive: Any, send: Any) -> None:
        body = json.loads(content)
        record = {"path": scope["path"], "headers": dict(scope["headers"]), "left": False, **body}
        self.requests.append(record)
        if self.settings.is_foreign and (unknown := sorted(set(body) - OPENAI_FIELDS)):
            return await _answer(send, 400, _error(f"Unrecognized request argument: {unknown[0]}", 400))
        if self.settings.status != 200:
            return await _answer(send, self.settings.status, _error("it cannot", self.settings.status))
        while self.settings.hangs:
            await asyncio.sleep(0.01)
        text = _text(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if len(text) // TOKEN_BYTES + limit > self.settings.max_model_len:
            words = f"This model's maximum context length is {self.settings.max_model_len} tokens."
            return await _answer(send, 400, _error(words, 400))
        engine = self.engine
        assert engine is not None, "the first request makes it"
        is_received = bool((body.get("kv_transfer_params") or {}).get("do_remote_prefill"))
        if is_received:
            await asyncio.sleep(engine.transfer_s(text))
        sequence = engine.add(text, limit, is_received=is_received)
        leaving = asyncio.create_task(_until_left(receive, sequence, record))
        try:
            pieces = self._pieces(scope["path"], body, sequence)
            await (_stream(send, pieces) if body.get("stream") else self._whole(send, body, sequence, pieces))
        finally:
            sequence.left = True
            leaving.cancel()

    async def _pieces(self, path: str, body: dict[str, Any], sequence: Sequence) -> AsyncIterator[bytes]:
        """Server-sent events, as vLLM writes them."""
        chat = path.endswith("chat/completions")
        frame = {"id": f"cmpl-{self.settings.id}", "object": "chat.completion.chunk" if chat else "text_completion"}
        frame |= {"created": 1, "model": "fake"}

        def event(choice: dict[str, Any]) -> bytes:
            return f"data: {json.dumps({**frame, 'choices': [{'index': 0, 'logprobs': None, **choice}]})}\n\n".encode()

        if self.settings.fails_in_stream:
            yield b"data: " + _error("EngineCore died", 500, "InternalServerError") + b"\n\ndata: [DONE]\n\n"
            return
        if chat:
            yield event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for number in range(1, sequence.max_tokens + 1):
            if self.settings.dies_after == number - 1:
                raise ConnectionResetError
            await sequence.tokens.get()
            reason = "length" if number == sequence.max_tokens else None
            said = {"delta": {"content": "word "}} if chat else {"text": "word "}
            ids = {"token_ids": [number]} if body.get("return_token_ids") else {}
            scores = {"logprobs": _logprobs(number)} if body.get("logprobs") is not None and not chat else {}
            yield event({**said, **ids, **scores, "finish_reason": reason, "stop_reason": None})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield f"data: {json.dumps({**frame, 'choices': [], 'usage': _usage(sequence)})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def _whole(self, send: Any, body: dict[str, Any], sequence: Sequence, pieces: AsyncIterator[bytes]) -> None:
        async for _ in pieces:
            pass
        text = "word " * sequence.max_tokens
        said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        answer: dict[str, Any] = {"id": self.settings.id, "usage": _usage(sequence)}
        answer["choices"] = [{"index": 0, "finish_reason": "length", **said}]
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.settings.id,
                "remote_block_ids": [1, 2],
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
            }
        await _answer(send, 200, json.dumps(answer).encode())

    def _metrics(self) -> str:
        engine = self.engine
        values = {"prefix_cache_queries_total": 0, "prefix_cache_hits_total": 0, "num_requests_running": 0}
        if engine is not None:
            values = {
                "prefix_cache_queries_total": engine.prompt_tokens,
                "prefix_cache_hits_total": engine.cached_tokens,
                "num_requests_running": len(engine.running),
            }
        return "".join(f'vllm:{name}{{model_name="fake"}} {value}\n' for name, value in values.items())


async def _stream(send: Any, pieces: AsyncIterator[bytes]) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _answer(send: Any, status: int, body: bytes, kind: bytes = b"application/json", headers: Any = ()) -> None:
    sent = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


async def _until_left(receive: Any, sequence: Sequence, record: dict[str, Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    sequence.left = record["left"] = True


def _text(body: dict[str, Any]) -> bytes:
    prompt = body.get("prompt", body.get("messages"))
    return prompt.encode() if isinstance(prompt, str) else json.dumps(prompt).encode()


def _error(message: str, status: int, kind: str = "BadRequestError") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def _usage(sequence: Sequence) -> dict[str, Any]:
    return {
        "prompt_tokens": sequence.prompt_tokens,
        "completion_tokens": sequence.generated,
        "total_tokens": sequence.prompt_tokens + sequence.generated,
        "prompt_tokens_details": {"cached_tokens": sequence.cached_tokens},
    }


def _logprobs(number: int) -> dict[str, Any]:
    return {
        "tokens": ["word "],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"word ": -0.5, "other ": -1.5}],
        "text_offset": [0],
    }


@dataclass
class Running:
    """A replica in a thread."""

    url: str
    settings: Settings
    app: App
    server: uvicorn.Server

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Of this replica so far, but those for its health."""
        return self.app.requests

    def kill(self) -> None:
        """As SIGKILL: no more connections, and those there are break."""
        assert self.app.loop is not None, "nobody asked it yet"
        self.app.loop.call_soon_threadsafe(self._kill)

    def _kill(self) -> None:
        for listener in self.server.servers:
            listener.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()


def make_server(settings: Settings) -> tuple[App, uvicorn.Server]:
    """An application and what serves it."""
    app = App(settings)
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none")
    config.timeout_graceful_shutdown = 1
    return app, uvicorn.Server(config)


@contextmanager
def replica(**settings: Any) -> Iterator[Running]:
    """A replica on a free port until the block ends."""
    made = Settings(**settings)
    app, server = make_server(made)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", made, app, server)
        finally:
            made.hangs = False
            server.should_exit = True
            thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    for name in ("step_ms", "decode_us", "prefill_us", "transfer_ms", "transfer_us"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=0.0)
    for name, value in (("chunk_tokens", 512), ("max_running", 64), ("cache_blocks", 4096)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = vars(parser.parse_args())
    port = options.pop("port")
    _, server = make_server(Settings(**options))
    with socket.create_server(("127.0.0.1", port)) as listener:
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
