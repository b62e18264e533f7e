"""What protects the server and the other clients: keys, limits, labels, clients that leave, requests that take too long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient, Script
from live_server import Live, eventually, live_server

from triblade.serve.errors import RateLimitError
from triblade.serve.middleware import clean_request_id
from triblade.serve.rate_limit import MAX_CLIENTS, RateLimiter

CHAT = [{"role": "user", "content": "hi"}]
COMPLETIONS = "/v1/completions"


@pytest.fixture
def engine() -> FakeClient:
    engine = FakeClient(max_model_len=5000)
    engine.scripts["endless"] = Script(b"x" * 4000, pause_s=0.005)
    return engine


@pytest.fixture
def live(engine: FakeClient) -> Iterator[Live]:
    with live_server(engine) as server:
        yield server


def raw_request(live: Live, body: bytes) -> socket.socket:
    """Send a completion request and keep the connection."""
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


# Clients that leave


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("prompt", ['"endless"', '["endless", "endless"]'])
def test_a_client_that_leaves_ends_its_request(live: Live, stream: str, prompt: str) -> None:  # D08
    body = f'{{"prompt": {prompt}, "max_tokens": 4000, "stream": {stream}, "n": 2}}'
    connection = raw_request(live, body.encode())
    eventually(lambda: live.engine.running > 0 and live.engine.records[-1].num_tokens > 4)
    if stream == "true":
        assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    eventually(lambda: live.engine.running == 0, within_s=2)
    assert all(record.dropped for record in live.engine.records)
    assert live.metric("request_success_total", finished_reason="abort") == 2 * prompt.count("endless")
    assert live.metric("request_success_total") == 2 * prompt.count("endless")


def test_a_client_that_leaves_the_queue_costs_nothing(live: Live) -> None:  # D09
    live.engine.scripts["queued"] = Script(hold=threading.Event())
    connection = raw_request(live, b'{"prompt": "queued"}')
    eventually(lambda: live.engine.running == 1)
    connection.close()
    eventually(lambda: live.engine.running == 0, within_s=2)
    assert live.engine.records[-1].num_tokens == 0
    assert live.metric("prompt_tokens_total") == 0


def test_a_client_that_leaves_changes_no_other_answer(live: Live) -> None:  # D10
    connection = raw_request(live, b'{"prompt": "endless", "max_tokens": 4000, "stream": true}')
    eventually(lambda: live.engine.running == 1)
    connection.close()
    assert live.post(COMPLETIONS, {"prompt": "x"}).json()["choices"][0]["text"] == "Hello, world!"


def test_a_client_that_leaves_in_the_middle_of_its_body(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert live.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
    assert len(live.engine.records) == 1


def test_the_official_client_closing_a_stream(live: Live) -> None:  # D08
    with live.client() as client:
        stream = client.completions.create(model="fake", prompt="endless", max_tokens=4000, stream=True)
        next(iter(stream))
        stream.close()
        eventually(lambda: live.engine.running == 0, within_s=2)


# Connections


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("pause_s", [0, 0.05])
def test_an_offer_to_upgrade_is_ignored(live: Live, protocol: str, pause_s: float) -> None:
    """Java's HTTP client offers h2c with every first request; its body must not be lost."""
    host, port = live.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x"}'
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\n"
        f"HTTP2-Settings: AAMAAABk\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for _ in range(2):  # the connection stays usable
            connection.sendall(head.encode())
            time.sleep(pause_s)
            connection.sendall(body)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"Hello, world!" in answer


def test_a_silent_connection_does_not_keep_the_server_up(engine: FakeClient) -> None:
    with live_server(engine) as live:
        host, port = live.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=10)
        eventually(lambda: len(live.server.server_state.connections) > 0)
    with connection:  # live_server asserts that the server has ended
        assert connection.recv(1) == b""


# Time and queue limits


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long(engine: FakeClient, stream: bool) -> None:
    engine.scripts["queued"] = Script(hold=threading.Event())
    with live_server(engine, request_timeout_s=0.1) as live:
        response = live.post(COMPLETIONS, {"prompt": "queued", "stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "request_timeout"
        eventually(lambda: engine.running == 0)
        assert engine.records[-1].dropped


def test_a_stream_that_takes_too_long(engine: FakeClient) -> None:  # D06
    with live_server(engine, request_timeout_s=0.1) as live:
        text = live.post(COMPLETIONS, {"prompt": "endless", "stream": True, "max_tokens": 4000}).text
        assert '"code":"request_timeout"' in text
        assert text.endswith("data: [DONE]\n\n")
        eventually(lambda: engine.running == 0)


def test_no_time_limit(engine: FakeClient) -> None:
    with live_server(engine, request_timeout_s=0.0) as live:
        assert live.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_the_queue_is_bounded(engine: FakeClient) -> None:  # D04
    released = threading.Event()
    engine.scripts["queued"] = Script(hold=released)
    with live_server(engine, max_num_seqs=1, max_queued_requests=2) as live, ThreadPoolExecutor(3) as pool:
        accepted = [pool.submit(live.post, COMPLETIONS, {"prompt": "queued"}) for _ in range(3)]
        eventually(lambda: engine.running == 3)
        refused = live.post(COMPLETIONS, {"prompt": "queued", "stream": True})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        released.set()
        assert [future.result().status_code for future in accepted] == [200] * 3
        assert live.post(COMPLETIONS, {"prompt": "queued"}).status_code == 200


def test_what_waits_in_the_engine_counts(engine: FakeClient) -> None:
    with live_server(engine, max_queued_requests=5) as live:
        engine.num_waiting = 5
        assert live.post(COMPLETIONS, {"prompt": "x"}).status_code == 503
        engine.num_waiting = 4
        assert live.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_rate_limit_by_key(engine: FakeClient) -> None:  # D04
    with live_server(engine, rate_limit_per_minute=2, api_key=("a", "b")) as live:

        def post(key: str) -> httpx.Response:
            return live.post(COMPLETIONS, {"prompt": "x"}, headers={"Authorization": f"Bearer {key}"})

        assert [post("a").status_code for _ in range(3)] == [200, 200, 429]
        refused = post("a")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert post("b").status_code == 200
        assert live.get("/v1/models", headers={"Authorization": "Bearer a"}).status_code == 200  # costs nothing


def test_rate_limiter_refills() -> None:
    now = 0.0
    limiter = RateLimiter(60, clock=lambda: now)
    for _ in range(60):
        limiter.take("a")
    with pytest.raises(RateLimitError) as refused:
        limiter.take("a")
    assert refused.value.retry_after_s == 1
    now = 2.5
    limiter.take("a")
    limiter.take("a")
    with pytest.raises(RateLimitError):
        limiter.take("a")


def test_rate_limiter_is_bounded() -> None:
    limiter = RateLimiter(1, clock=lambda: 0.0)
    for number in range(MAX_CLIENTS + 10):
        limiter.take(str(number))
    limiter.take("0")  # forgotten long ago
    with pytest.raises(RateLimitError):
        limiter.take(str(MAX_CLIENTS))


# Keys


def test_a_key_is_asked_for_everywhere_but_at_the_probes() -> None:
    with live_server(api_key=("secret", "schlüssel")) as live:
        paths = ["/v1/models", "/v1/models/fake", "/metrics", "/version", "/openapi.json", "/docs", "/nothing"]
        for path in paths:
            refused = live.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert live.post(path, {}).status_code == 401
        assert live.get("/health").status_code == live.get("/ping").status_code == 200
        for wrong in ("Bearer secre", "Bearer secrets", "Basic secret", "secret", "Bearer", "Bearer \xff"):
            assert live.get("/v1/models", headers={"Authorization": wrong.encode("latin-1")}).status_code == 401
        for right in ("Bearer secret", "bearer secret", "Bearer schlüssel"):
            assert live.get("/v1/models", headers={"Authorization": right.encode()}).status_code == 200
        with live.client() as client, pytest.raises(openai.AuthenticationError, match="API key"):
            client.models.list()


# Labels


@pytest.mark.parametrize(
    ("given", "expected"),
    [("abc-1.2_3:4/5", "abc-1.2_3:4/5"), ("a b\r\nc\x00d", "abcd"), ("x" * 10**6, "x" * 128), ("ü" * 300 + "z", None)],
)
def test_request_ids_are_cleaned(given: str, expected: str | None) -> None:  # D12
    cleaned = clean_request_id(given)
    assert cleaned == expected if expected else (len(cleaned) == 32 and cleaned.isalnum())


def test_request_ids_are_sent_back(live: Live) -> None:  # D12
    for response in (live.get("/v1/models"), live.get("/nothing"), live.post(COMPLETIONS, {})):
        assert len(response.headers["x-request-id"]) == 32
    labelled = live.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert labelled.headers["x-request-id"] == "mine"
    big = live.post(COMPLETIONS, {"prompt": "x", "stream": True}, headers={"X-Request-Id": "y" * 10**6})
    assert big.status_code == 200
    assert big.headers["x-request-id"] == "y" * 128
    assert "yyy" not in big.text


# Bodies


def test_body_limit(engine: FakeClient) -> None:  # D04
    with live_server(engine, max_body_bytes=1000) as live:

        def announced(size: int) -> httpx.Response:
            return live.post(COMPLETIONS, {"prompt": "x" * size})

        def chunked(size: int) -> httpx.Response:
            pieces = (piece for piece in [b'{"prompt": "', *[b"x" * 100] * (size // 100), b'"}'])
            return live.http.post(COMPLETIONS, content=pieces, headers={"Content-Type": "application/json"})

        for send in (announced, chunked):
            assert send(900).status_code == 200
            for size in (1000, 200_000):
                refused = send(size)
                assert refused.status_code == 413
                assert "at most 1000 bytes" in refused.json()["error"]["message"]
        assert announced(900).status_code == 200
        assert [len(record.prompt_token_ids) for record in engine.records] == [901] * 3


def test_a_key_is_checked_before_the_body_is_read() -> None:
    with live_server(api_key=("secret",), max_body_bytes=10) as live:
        response: Any = live.post(COMPLETIONS, {"prompt": "long enough"})
        assert response.status_code == 401


# Web pages of others


def test_pages_of_allowed_origins_only() -> None:
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with live_server(allowed_origins=("https://a.example",), api_key=("secret",)) as live:
        for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
            asked = live.http.options(
                COMPLETIONS, headers={"Origin": origin, **asking}
            )  # a browser sends no key with it
            assert asked.status_code == status
            assert asked.headers.get("Access-Control-Allow-Origin") == ("https://a.example" if status == 200 else None)
        headers = {"Origin": "https://a.example", "Authorization": "Bearer secret"}
        answer = live.post(COMPLETIONS, {"prompt": "x"}, headers=headers)
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
    with live_server() as live:
        answer = live.post(COMPLETIONS, {"prompt": "x"}, headers={"Origin": "https://a.example"})
        assert "Access-Control-Allow-Origin" not in answer.headers
