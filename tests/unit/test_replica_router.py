"""The router over sockets, in front of servers that fail in every way they can: what reaches the client, and who was asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fake_replica import Running, replica
from live_server import eventually
from openai import OpenAI
from routed import Routed, router

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
LONG = {"model": "fake", "prompt": "a" * 4096, "max_tokens": 3}
PATH = "/v1/chat/completions"
NOBODY = "http://127.0.0.1:9"
ADMIN = {"Authorization": "Bearer admin"}


def bad(**settings: Any) -> tuple[ExitStack, Running, Running]:
    """A replica with these settings, and a good one."""
    stack = ExitStack()
    return stack, stack.enter_context(replica(**settings)), stack.enter_context(replica())


def events(response: httpx.Response) -> list[Any]:
    data = [line[5:].strip() for line in response.text.splitlines() if line.startswith("data:")]
    return [json.loads(one) if one != "[DONE]" else one for one in data]


@pytest.fixture
def one() -> Iterator[tuple[Running, Routed]]:
    with replica() as server, router(server.url) as routed:
        yield server, routed


def test_everything_passes_byte_for_byte(one: tuple[Running, Routed]) -> None:
    server, routed = one
    content = b'{"a" : 1,\xc3\xa9}'
    answer = routed.http.post(
        "/echo?x=%2F&y=a+b", content=content, headers={"X-Request-Id": "mine", "Authorization": "Bearer k"}
    )
    sent = server.requests[-1]
    headers = dict(sent["headers"])
    assert (sent["query"], sent["body"].encode(), headers["authorization"]) == ("x=%2F&y=a+b", content, "Bearer k")
    assert headers["x-request-id"].startswith("mine-")  # D11: another one for each request
    assert answer.headers.get_list("X-Other") == ["1", "2"]
    assert answer.headers.get_list("X-Request-Id") == ["mine"]
    assert answer.json() == sent


def test_a_stream_is_the_same_as_without_router(one: tuple[Running, Routed]) -> None:
    server, routed = one
    direct = httpx.post(server.url + PATH, json=STREAM)
    assert routed.http.post(PATH, json=STREAM).content == direct.content
    assert direct.headers["content-type"] == routed.http.post(PATH, json=STREAM).headers["content-type"]
    assert httpx.post(server.url + PATH, json=CHAT).content == routed.http.post(PATH, json=CHAT).content


def test_the_official_client_works_through_it(one: tuple[Running, Routed]) -> None:
    client = OpenAI(base_url=f"{one[1].url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["fake"]
    pieces = client.chat.completions.create(**STREAM)  # type: ignore[call-overload]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "word " * 4


def test_a_conversation_comes_back_to_its_cache() -> None:
    with replica() as a, replica() as b, router(a.url, b.url) as routed:
        for _turn in range(4):
            for name in "xyz":
                body = {**CHAT, "messages": [{"role": "user", "content": name * 3000}]}
                assert routed.http.post(PATH, json=body).status_code == 200
        served = [{request["messages"][0]["content"][0] for request in server.requests} for server in (a, b)]
        assert not served[0] & served[1]
        assert all(served)
        assert routed.metric("prompt_warm_bytes_total") > 0.6 * routed.metric("prompt_bytes_total")


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 503},
        {"status": 429},
        {"dies_after": 0},
        {"dies_after": 2},
        {"fails_in_stream": True},
    ],
    ids=str,
)
def test_another_replica_answers_as_long_as_nothing_was_sent(body: dict[str, Any], fault: dict[str, Any]) -> None:
    if (body is STREAM and fault == {"dies_after": 2}) or (body is CHAT and "fails_in_stream" in fault):
        return  # see the next test; only a stream fails in its first event
    stack, broken, good = bad(**fault)
    with stack, router(broken.url, good.url, policy="round-robin") as routed:
        answers = [routed.http.post(PATH, json=body) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert broken.requests
    for answer in answers:
        if body is STREAM:
            roles = [
                e for e in events(answer) if e != "[DONE]" and e["choices"] and e["choices"][0]["delta"].get("role")
            ]
            assert len(roles) == 1  # nothing of the first attempt
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["choices"][0]["message"]["content"] == "word " * 4


def test_after_a_token_the_stream_ends_with_an_error() -> None:  # D06
    stack, broken, good = bad(dies_after=2)
    with stack, router(broken.url) as routed:
        found = events(routed.http.post(PATH, json=STREAM))
        assert found[-1] == "[DONE]"
        assert found[-2]["error"]["code"] == "replica_lost"
        assert sum(e["choices"][0]["delta"].get("content") == "word " for e in found[:-2]) == 2
    assert not good.requests
    assert len(broken.requests) == 1


def test_a_wrong_request_is_not_asked_twice() -> None:
    with replica(max_model_len=8) as a, replica(max_model_len=8) as b, router(a.url, b.url) as routed:
        answer = routed.http.post(PATH, json=CHAT)
        assert answer.status_code == 400
        assert answer.content == httpx.post(a.url + PATH, json=CHAT).content
        assert len(a.requests) + len(b.requests) == 2


def test_when_all_refuse_the_last_refusal_is_the_answer() -> None:
    with replica(status=503) as a, replica(status=503) as b, router(a.url, b.url) as routed:
        answer = routed.http.post(PATH, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "it cannot")
        assert (len(a.requests), len(b.requests)) == (1, 1)


def test_what_is_not_known_to_be_harmless_is_sent_once() -> None:
    stack, broken, good = bad(status=500)
    with stack, router(broken.url, good.url, policy="round-robin") as routed:
        assert {routed.http.post("/echo", json={}).status_code for _ in range(4)} == {200, 500}
        assert len(broken.requests) == len(good.requests) == 2


def test_a_killed_replica_is_ejected_and_comes_back() -> None:
    with replica() as a, replica() as b, router(a.url, b.url, policy="round-robin") as routed:
        a.kill()
        assert {routed.http.post(PATH, json=CHAT).status_code for _ in range(6)} == {200}
        eventually(lambda: not routed.server.fleet.replicas[0].is_up)
        assert routed.metric("replica_up", replica=a.url) == 0
        assert routed.metric("replica_ejections_total", replica=a.url) == 1
        assert routed.http.get("/health").json() == {"status": "ok", "replicas": 1}


def test_a_sick_replica_is_ejected_and_comes_back() -> None:
    with replica() as a, router(a.url) as routed:
        a.settings.health = 503
        eventually(lambda: routed.http.get("/health").status_code == 503)
        answer = routed.http.post(PATH, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert answer.headers["Retry-After"] == "1"
        a.settings.health = 200
        eventually(lambda: routed.http.get("/health").status_code == 200)
        assert routed.http.post(PATH, json=CHAT).status_code == 200


def test_servers_without_a_health_route_are_well() -> None:
    with replica(health=404) as a, router(a.url) as routed:
        assert routed.http.post(PATH, json=CHAT).status_code == 200


def test_requests_that_wait_for_a_stuck_replica_go_elsewhere() -> None:
    stack, stuck, good = bad()
    with stack, router(stuck.url, good.url, policy="round-robin") as routed:
        stuck.settings.hangs = True
        assert {routed.http.post(PATH, json=CHAT).status_code for _ in range(2)} == {200}
        eventually(lambda: not routed.server.fleet.replicas[0].waiting)


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
def test_a_client_that_leaves_ends_the_request_at_the_replica(body: dict[str, Any]) -> None:  # D08
    with replica(step_ms=20) as a, router(a.url) as routed:
        asked = {**body, "max_tokens": 4000}
        with (
            contextlib.suppress(httpx.TimeoutException),
            httpx.stream("POST", routed.url + PATH, json=asked, timeout=0.3) as got,
        ):
            next(got.iter_raw())
        eventually(lambda: a.requests[0]["left"])
        eventually(lambda: routed.server.fleet.replicas[0].num_running == 0)
        assert routed.metric("clients_left_total") == 1


def test_an_operator_drains_a_replica() -> None:
    with replica() as a, replica() as b, router(a.url, b.url) as routed:
        assert routed.http.get("/replicas").status_code == 401
        body = {"url": a.url, "drain": True}
        states = routed.http.post("/replicas", json=body, headers=ADMIN).json()["replicas"]
        assert [state["is_draining"] for state in states] == [True, False]
        for _ in range(4):
            routed.http.post(PATH, json=CHAT)
        assert (len(a.requests), len(b.requests)) == (0, 4)
        routed.http.post("/replicas", json={"url": a.url, "drain": False}, headers=ADMIN)
        for wrong in ({"url": "http://x", "drain": True}, {"url": a.url}, [1], {"url": a.url, "drain": 1}):
            assert routed.http.post("/replicas", json=wrong, headers=ADMIN).status_code == 400
        for _ in range(4):
            routed.http.post(PATH, json=CHAT)
        assert a.requests


def test_limits(one: tuple[Running, Routed]) -> None:
    server, _ = one
    with router(server.url, max_body_bytes=100, admin_key="") as routed:
        assert routed.http.post(PATH, content=b"x" * 101).status_code == 413
        assert routed.http.get("/replicas", headers=ADMIN).status_code == 401
    with replica(step_ms=50) as slow, router(slow.url, request_timeout_s=0.3) as routed:
        answer = routed.http.post(PATH, json={**CHAT, "max_tokens": 100})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_timeout")
        found = events(routed.http.post(PATH, json={**STREAM, "max_tokens": 100}))
        assert (found[-2]["error"]["code"], found[-1]) == ("request_timeout", "[DONE]")
        eventually(lambda: all(request["left"] for request in slow.requests))


def test_a_silent_replica_is_given_up() -> None:
    with replica(step_ms=600) as slow, router(slow.url, idle_timeout_s=0.2, max_attempts=1) as routed:
        answer = routed.http.post(PATH, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")


def test_counters_of_routes(one: tuple[Running, Routed]) -> None:
    _, routed = one
    routed.http.post(PATH, json=CHAT)
    routed.http.get("/v1/unknown")
    assert routed.metric("http_requests_total", route=PATH, status="200") == 1
    assert routed.metric("http_requests_total", route="other") == 1
    assert routed.metric("time_to_first_byte_seconds_count") == 1
    assert routed.metric("replica_requests_running") == 0


class TestHandOver:
    """vLLM's prefill and decode servers."""

    def test_the_prompt_is_computed_by_one_and_the_answer_by_the_other(self) -> None:
        with replica() as p, replica() as d, router(prefill=(p.url,), decode=(d.url,)) as routed:
            answer = routed.http.post("/v1/completions", json={**LONG, "stream": True, "min_tokens": 2})
            assert answer.text.endswith("data: [DONE]\n\n")
            (asked,), (decoded,) = p.requests, d.requests
            assert (asked["max_tokens"], asked["stream"], "min_tokens" in asked) == (1, False, False)
            assert asked["kv_transfer_params"]["do_remote_decode"] is True
            assert decoded["kv_transfer_params"]["remote_engine_id"] == p.settings.id
            assert (decoded["max_tokens"], decoded["prompt"]) == (3, LONG["prompt"])
            assert routed.metric("prefills_total", by="prefill") == 1

    def test_short_and_warm_prompts_and_those_with_choices_are_not(self) -> None:
        with replica() as p, replica() as d, router(prefill=(p.url,), decode=(d.url,)) as routed:
            routed.http.post(PATH, json=CHAT)
            routed.http.post("/v1/completions", json={**LONG, "n": 2})
            assert not p.requests
            assert routed.http.get("/v1/models").status_code == 200
            assert routed.metric("prefills_total", by="decode") == 1

    def test_without_its_prefill_server_a_decode_server_does_all(self) -> None:
        with replica(dies_after=0) as p, replica() as d:
            with router(prefill=(NOBODY,), decode=(d.url,)) as routed:
                assert routed.http.post("/v1/completions", json=LONG).status_code == 200
            with router(prefill=(p.url,), decode=(d.url,)) as routed:
                assert routed.http.post("/v1/completions", json=LONG).status_code == 200
            assert p.requests
            assert not any("kv_transfer_params" in request for request in d.requests)

    def test_what_the_prefill_server_refuses_is_refused(self) -> None:
        with replica(max_model_len=8) as p, replica() as d, router(prefill=(p.url,), decode=(d.url,)) as routed:
            answer = routed.http.post("/v1/completions", json=LONG)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
            assert not d.requests

    def test_a_decode_server_that_was_never_reached_leaves_its_kv_to_the_next(self) -> None:
        with replica() as p, replica() as gone, replica() as d:
            options: dict[str, Any] = {"prefill": (p.url,), "decode": (gone.url, d.url), "policy": "round-robin"}
            with router(**options, health_interval_s=60.0) as routed:
                gone.kill()
                answers = [routed.http.post("/v1/completions", json={**LONG, "prompt": c * 4096}) for c in "abc"]
                assert {answer.status_code for answer in answers} == {200}
                assert len(d.requests) == 3
                assert len(p.requests) == 3  # no prompt was computed twice

    def test_one_that_broke_off_has_seen_it_so_the_prompt_is_computed_again(self) -> None:
        with replica() as p, replica(dies_after=0) as broken, replica() as d:
            with router(prefill=(p.url,), decode=(broken.url, d.url), policy="round-robin") as routed:
                for letter in "ab":
                    body = {**LONG, "prompt": letter * 4096}
                    assert routed.http.post("/v1/completions", json=body).status_code == 200
            assert broken.requests
            assert len(p.requests) == 2 + len(broken.requests)

    @pytest.mark.parametrize("slow", ["prefill", "decode"])
    def test_a_client_that_leaves_ends_it_on_either_side(self, slow: str) -> None:
        steps = {"prefill": 0, "decode": 0, slow: 400}
        with replica(step_ms=steps["prefill"]) as p, replica(step_ms=steps["decode"]) as d:
            with router(prefill=(p.url,), decode=(d.url,)) as routed:
                with pytest.raises(httpx.TimeoutException):
                    httpx.post(f"{routed.url}/v1/completions", json={**LONG, "max_tokens": 50}, timeout=0.2)
                eventually(lambda: (p if slow == "prefill" else d).requests[0]["left"])
                eventually(lambda: not any(one.num_running for one in routed.server.fleet.replicas))
            assert len(d.requests) == (slow == "decode")
