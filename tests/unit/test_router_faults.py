"""What a network or a dying server does to an answer, byte by byte: the client gets the whole answer of another replica.

Health of the faulty replica is good, so it is chosen again and again; see test_replica_router.py for what its own faults do.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fake_replica import replica
from live_server import eventually
from routed import router
from scripted import black_hole, scripted

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
STREAM = {**CHAT, "stream": True}
PATH = "/v1/chat/completions"
ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "word "}}]}\n\n'
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


FAULTS = {
    "nothing": b"",
    "half of the headers": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "headers alone": EVENTS + b"transfer-encoding: chunked\r\n\r\n",
    "no HTTP": b"220 mail.example.org ESMTP\r\n",
    "half of a body": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n{",
    "a role": EVENTS + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE),
    "half of a token": EVENTS + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE) + chunk(TOKEN[:30]),
    "half of a chunk": EVENTS + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE)[:-20],
    "a stream without a length": EVENTS + b"connection: close\r\n\r\n" + ROLE,
    "a stream that ends in good order": EVENTS + b"transfer-encoding: chunked\r\n\r\n" + chunk(ROLE) + chunk(b""),
}


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "closed"])
@pytest.mark.parametrize("sent", FAULTS.values(), ids=FAULTS)
def test_an_answer_that_breaks_before_its_first_token_comes_from_another_replica(sent: bytes, resets: bool) -> None:
    with scripted(sent, resets=resets) as broken, replica() as good:
        with router(broken.url, good.url, policy="round-robin") as routed:
            answers = [routed.http.post(PATH, json=STREAM) for _ in range(2)]
        assert broken.asked >= 1
        whole = [{"delta": {"role": "assistant", "content": ""}}, *[{"delta": {"content": "word "}}] * 4]
        for answer in answers:
            told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert [{"delta": event["choices"][0]["delta"]} for event in told] == whole
            assert answer.text.endswith("data: [DONE]\n\n")


def test_a_body_of_the_right_length_is_not_looked_into() -> None:
    content = b'{"choices": []}'
    sent = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n" + content
    with scripted(sent, resets=False) as odd, router(odd.url) as routed:
        assert routed.http.post(PATH, json=CHAT).content == content


def test_a_host_that_drops_packets_is_given_up_soon() -> None:
    with black_hole() as nowhere, replica() as good:
        options: dict[str, Any] = {"connect_timeout_s": 0.2, "health_interval_s": 60.0, "health_timeout_s": 0.2}
        with router(nowhere, good.url, policy="round-robin", **options) as routed:
            routed.server.fleet.succeeded(routed.server.fleet.replicas[0])  # it was well before its cable was cut
            assert {routed.http.post(PATH, json=CHAT).status_code for _ in range(4)} == {200}
            assert not routed.server.fleet.replicas[0].is_up


def test_no_request_fails_while_health_comes_and_goes() -> None:
    with replica(step_ms=2) as flapping, replica(step_ms=2) as good:
        with router(flapping.url, good.url, health_interval_s=0.02, eject_after=1) as routed:
            ended = threading.Event()

            def flap() -> None:
                while not ended.wait(0.05):
                    flapping.settings.health = 703 - flapping.settings.health  # 200, 503, 200 ...

            flapper = threading.Thread(target=flap)
            flapper.start()
            answers = [routed.http.post(PATH, json=STREAM) for _ in range(40)]
            eventually(lambda: routed.metric("replica_ejections_total", replica=flapping.url) >= 2)
            ended.set()
            flapper.join()
            flapping.settings.health = 200
            eventually(lambda: routed.server.fleet.replicas[0].is_up)
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        assert not any("error" in answer.text for answer in answers)
