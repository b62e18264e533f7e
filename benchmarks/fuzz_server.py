"""Send malformed requests to a running server and check that it stands: no 5xx, no hang, and the next good request works.

    triblade serve smollm2-135m &
    python benchmarks/fuzz_server.py --url http://127.0.0.1:8000 --requests 2000

Requests are made from a seed, so a finding can be repeated. Field names come from the server's own OpenAPI document. Most
requests are wrong in one place; some are right by accident, and may be answered with 200.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

TIMEOUT_S = 60.0
GOOD = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
# Valid bodies that cost the engine next to nothing.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "n": 1},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
# A missing limit is right, and would fill the context.
KEEP = frozenset({"max_tokens", "max_completion_tokens"})
REFUSED = ("tools", "response_format", "suffix", "guided_json", "functions", "audio", "best_of", "logits_processors")
NASTY: tuple[Any, ...] = (
    None, True, False, "", "x", "\u0000", "\U0001f600" * 50, "1", "NaN", "x" * 50_000,
    0, -1, 1, 5, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 0.0, -0.0, 1.5, 1e-320, 1e308, -1e308,
    [], {}, [[]], [None], [1, "a"], ["a", 1], [-1], [2**40], [[1], "a"], [True], [1.5], [""], ["\u0000"], [[1], []],
    {"": ""}, {"a": 1}, {"1": "x"}, {"-1": 1}, {"99999999999999999999": 1}, {"1": 1e300}, {"type": "json_object"},
    [{"role": "user"}], [{"content": "x"}], [{"role": 5, "content": []}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": {"a": 1}}], [{"role": "tool", "content": "x"}], [{"role": "\u0000", "content": "x"}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "assistant", "tool_calls": [{}]}],
)  # fmt: skip
BROKEN_TEXT: tuple[bytes, ...] = (
    b"", b"\x00", b"null", b"[]", b"5", b'"x"', b"{", b"}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"NaN", b"{'prompt': 'x'}",
    b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"x": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "prompt": 5}', b"{" * 10_000,
)  # fmt: skip
RAW: tuple[bytes, ...] = (
    b"GARBAGE\r\n\r\n",
    b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: \x00\x01\r\n\r\n",
    b"GET /%00%ff%2e%2e HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
)
HEADERS: tuple[dict[str, str], ...] = (
    {"Content-Type": "text/plain"}, {"Content-Type": "application/xml"}, {"Content-Type": ";;;"}, {"Accept": "image/png"},
    {"X-Request-Id": "x" * 5000}, {"X-Request-Id": "a\tb"}, {"Authorization": "Bearer"}, {"Authorization": "Basic \"\""},
    {"Content-Encoding": "gzip"}, {"Expect": "100-continue"}, {"Upgrade": "websocket", "Connection": "Upgrade"},
    {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"},
)  # fmt: skip
PATHS = ("/", "/v1", "/v1/completions/", "/v1/models/%00", "/v1/models/" + "x" * 3000, "//", "/v1/../metrics", "/%ff")


@dataclass(frozen=True)
class Attempt:
    """One request. `raw` bytes go to a bare socket instead."""

    method: str = "POST"
    path: str = "/"
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""

    def __str__(self) -> str:
        return f"{self.method} {self.path[:80]} {self.headers} {self.content[:300]!r}{self.raw[:100]!r}"


@dataclass
class Report:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def attempts(seed: int, count: int, fields: dict[str, list[str]]) -> Iterator[Attempt]:
    """`count` requests made from a seed."""
    source = random.Random(seed)
    kinds: list[Callable[[random.Random, dict[str, list[str]]], Attempt]] = [wrong_values] * 12
    kinds += [broken_text] * 3 + [torn, torn, odd_headers, odd_routes, bare]
    for _ in range(count):
        yield source.choice(kinds)(source, fields)


def wrong_values(source: random.Random, fields: dict[str, list[str]]) -> Attempt:
    """One to three fields of a valid body hold nasty values."""
    path = source.choice(list(BODIES))
    body = dict(BODIES[path])
    for name in source.sample([*fields[path], *REFUSED], source.choice((1, 1, 1, 2, 3))):
        body[name] = source.choice([value for value in NASTY if value is not None or name not in KEEP])
    if source.random() < 0.1:
        del body[source.choice([name for name in body if name not in KEEP])]
    return Attempt(path=path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})


def broken_text(source: random.Random, fields: dict[str, list[str]]) -> Attempt:
    """Text that is no JSON, or not of an object."""
    path = source.choice(list(BODIES))
    return Attempt(path=path, content=source.choice(BROKEN_TEXT), headers={"Content-Type": "application/json"})


def torn(source: random.Random, fields: dict[str, list[str]]) -> Attempt:
    """A valid body, cut or with a changed byte."""
    path = source.choice(list(BODIES))
    text = bytearray(json.dumps(BODIES[path]).encode())
    where = source.randrange(len(text))
    if source.random() < 0.5:
        del text[where:]
    else:
        text[where] = source.randrange(256)
    return Attempt(path=path, content=bytes(text), headers={"Content-Type": "application/json"})


def odd_headers(source: random.Random, fields: dict[str, list[str]]) -> Attempt:
    """A valid body under strange headers."""
    path = source.choice(list(BODIES))
    headers = {"Content-Type": "application/json", **source.choice(HEADERS)}
    return Attempt(path=path, content=json.dumps(BODIES[path]).encode(), headers=headers)


def odd_routes(source: random.Random, fields: dict[str, list[str]]) -> Attempt:
    """Wrong methods and paths."""
    method = source.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "PROPFIND"))
    return Attempt(method=method, path=source.choice((*PATHS, *BODIES)), content=b"{}")


def bare(source: random.Random, fields: dict[str, list[str]]) -> Attempt:
    """Bytes that are no HTTP, or half of it."""
    return Attempt(raw=source.choice(RAW))


def field_names(client: httpx.Client) -> dict[str, list[str]]:
    """The fields of each body, from the server's OpenAPI document."""
    document = client.get("/openapi.json").json()
    names = {}
    for path in BODIES:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rsplit("/", 1)[1]
        names[path] = list(document["components"]["schemas"][name]["properties"])
    return names


def send(client: httpx.Client, attempt: Attempt) -> tuple[str, str | None]:
    """Send one request; its status, and what is wrong with the answer."""
    if attempt.raw:
        return "raw", send_raw(client.base_url, attempt.raw)
    if "Connection" not in attempt.headers:
        return exchange(client, attempt)
    with httpx.Client(base_url=client.base_url, headers=client.headers, timeout=TIMEOUT_S) as fresh:
        return exchange(fresh, attempt)  # the headers are about the connection, so it gets one of its own


def exchange(client: httpx.Client, attempt: Attempt) -> tuple[str, str | None]:
    """Send one request over this client's connections."""
    try:
        response = client.request(attempt.method, attempt.path, content=attempt.content, headers=attempt.headers)
    except httpx.TimeoutException:
        return "timeout", "no answer"
    except httpx.HTTPError as error:
        return "broken", repr(error)
    return str(response.status_code), judge(attempt, response)


def judge(attempt: Attempt, response: httpx.Response) -> str | None:
    """What is wrong with an answer, if anything."""
    if response.status_code >= 500:
        return f"status {response.status_code}: {response.text[:300]}"
    if response.status_code >= 400 and attempt.method != "HEAD":
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"not the error shape: {response.text[:300]}"
        if not message:
            return "no message"
    return None


def send_raw(url: httpx.URL, data: bytes) -> str | None:
    """Send bytes and leave; the server may answer or hang up."""
    parts = urlsplit(str(url))
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=0.2) as connection:
            connection.sendall(data)
            answer = connection.recv(200)
    except TimeoutError:
        return None
    except OSError as error:
        return None if isinstance(error, ConnectionResetError) else repr(error)
    return f"status line {answer[:60]!r}" if answer.startswith(b"HTTP/1.1 5") else None


def fuzz(url: str, *, requests: int, seed: int = 0, concurrency: int = 8, api_key: str | None = None) -> Report:
    """Send malformed requests; the report's `findings` is empty when the server stood."""
    report = Report()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with (
        httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        expected = good_answer(client)

        def run(attempt: Attempt) -> tuple[Attempt, str, str | None, float]:
            began = time.monotonic()
            status, finding = send(client, attempt)
            return attempt, status, finding, time.monotonic() - began

        for number, (attempt, status, finding, seconds) in enumerate(
            pool.map(run, attempts(seed, requests, field_names(client)))
        ):
            report.statuses[status] += 1
            report.slowest_s = max(report.slowest_s, seconds)
            if finding is not None:
                report.findings.append(f"request {number}: {finding}\n  {attempt}")
        if (answer := good_answer(client)) != expected:
            report.findings.append(f"the good request changed: {answer!r} instead of {expected!r}")
    return report


def good_answer(client: httpx.Client) -> str:
    """The text of the good request."""
    response = client.post("/v1/completions", json=GOOD)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["text"]
    return text


def main() -> int:
    """Run from the command line; 1 when something was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--api-key")
    options = parser.parse_args()
    report = fuzz(**vars(options))
    print(f"{options.requests} requests, by status: {dict(report.statuses.most_common())}")
    print(f"slowest answer: {report.slowest_s:.2f} s; findings: {len(report.findings)}")
    for finding in report.findings[:20]:
        print(finding)
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
