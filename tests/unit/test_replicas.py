"""Which replica serves a request: beliefs about caches, load, policies, ejection and return. No HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triblade.config import RouteConfig
from triblade.deploy.replicas import Fleet, Replica
from triblade.deploy.replicas_affinity import PrefixMap
from triblade.deploy.replicas_handoff import TO_PREFILL, decode_body, prefill_body, transfer_of
from triblade.deploy.replicas_prompt import BLOCK_BYTES, CHAT, COMPLETION, Prompt, read_prompt
from triblade.deploy.replicas_upstream import begins, end_to_end, outgoing_headers
from triblade.errors import ConfigError


def fleet(size: int = 3, **options: Any) -> Fleet:
    made = Fleet([f"http://r{number}" for number in range(size)], RouteConfig(**options))
    for one in made.replicas:
        made.succeeded(one)
    return made


def prompt(text: str, path: str = COMPLETION) -> Prompt:
    return read_prompt(path, json.dumps({"prompt": text}).encode())


def chosen(one: Fleet, asked: Prompt) -> Replica:
    lease = one.lease(asked, one.ready(("any",)))
    lease.end()
    return lease.replica


def chat(*texts: str, **more: Any) -> Prompt:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return read_prompt(CHAT, json.dumps({"messages": messages, **more}).encode())


def test_the_blocks_of_a_longer_conversation_begin_with_those_of_a_shorter_one() -> None:
    one, two = chat("a" * 2000), chat("a" * 2000, "b" * 900, "c")
    assert len(one.blocks) >= 3
    assert two.blocks[: len(one.blocks)] == one.blocks
    assert len(two.blocks) > len(one.blocks)


@pytest.mark.parametrize(
    "other", [chat("b" + "a" * 1999), chat("a" * 2000, model="m"), chat("a" * 2000, tools=[{"type": "function"}])]
)
def test_another_beginning_has_no_block_in_common(other: Prompt) -> None:
    assert not set(other.blocks) & set(chat("a" * 2000).blocks)


def test_what_is_no_request_is_no_prompt() -> None:
    for content in (b"", b"{", b"[1]", b'{"prompt": {"a": 1}}', b'{"messages": 3}'):
        assert read_prompt(CHAT, content).blocks == ()
    assert read_prompt("/v1/files", b'{"prompt": "a"}').body is None


def test_token_ids_and_texts_are_prompts() -> None:
    ids = [*range(1000)]
    short, long = (read_prompt(COMPLETION, json.dumps({"prompt": p}).encode()) for p in (ids[:500], ids))
    assert short.blocks
    assert long.blocks[: len(short.blocks)] == short.blocks


def test_a_conversation_stays_where_it_is_cached() -> None:
    one = fleet()
    first = chosen(one, chat("a" * 4000))
    others = [chosen(one, chat("b" * 4000)), chosen(one, chat("c" * 4000))]
    assert chosen(one, chat("a" * 4000, "answer", "next")) is first
    assert chosen(one, chat("b" * 4000, "answer", "next")) is others[0]


def test_load_goes_before_a_warm_cache_when_it_is_larger() -> None:
    one = fleet(2, stream_weight_tokens=100)
    warm = chosen(one, prompt("a" * 4096))
    leases = [one.lease(prompt("a" * 4096), [warm]) for _ in range(9)]
    for lease in leases:
        lease.begun()
    assert chosen(one, prompt("a" * 4096)) is warm  # nine answers weigh 3,600 bytes, the other lacks 4,096
    leases += [one.lease(prompt("a" * 4096), [warm]) for _ in range(3)]
    assert chosen(one, prompt("a" * 4096)) is not warm
    for lease in leases:
        lease.end()
    assert (warm.num_running, warm.work_bytes) == (0, 0)


def test_equal_replicas_take_turns() -> None:
    one = fleet()
    assert len({chosen(one, prompt(f"{number}" * 600)).number for number in range(3)}) == 3


def test_short_prompts_go_where_the_least_runs() -> None:
    one = fleet(2)
    busy = one.lease(prompt("hi"), one.replicas[:1])
    assert {chosen(one, prompt("hi")).number for _ in range(4)} == {1}
    busy.end()


@pytest.mark.parametrize(
    ("policy", "expected"), [("round-robin", {0, 1, 2}), ("random", {0, 1, 2}), ("least-load", {1, 2})]
)
def test_other_policies_ignore_caches(policy: Any, expected: set[int]) -> None:
    one = fleet(policy=policy)
    one.lease(prompt("a" * 4096), one.replicas[:1])
    assert {chosen(one, prompt("a" * 4096)).number for _ in range(30)} == expected


def test_the_map_is_bounded_and_forgets_the_oldest() -> None:
    found = PrefixMap(4)
    old, new = [bytes([n]) for n in range(3)], [bytes([n]) for n in range(10, 13)]
    found.add(old, 0)
    found.add(new, 1)
    assert len(found) == 4
    assert found.depths(new) == {1: 3}
    assert found.depths(old) == {0: 1}  # the end of a prompt goes first: its beginning is of use alone


def test_each_owner_has_its_own_depth() -> None:
    found, blocks = PrefixMap(9), [bytes([n]) for n in range(3)]
    found.add(blocks, 0)
    found.add(blocks[:2], 5)
    found.add(blocks[1:], 7)  # without the first block nothing is of use
    assert found.depths(blocks) == {0: 3, 5: 2}
    assert found.depths([]) == found.depths([b"x"]) == {}
    found.forget(0)
    assert found.depths(blocks) == {5: 2}


def test_a_replica_that_is_lost_is_forgotten_with_its_cache() -> None:
    one = fleet(2, eject_after=2)
    first = chosen(one, prompt("a" * 4096))
    one.failed(first, "it broke")
    assert first.is_ready
    one.failed(first, "it broke")
    assert not first.is_ready
    assert one.missing(prompt("a" * 4096), first) == prompt("a" * 4096).size_bytes
    one.succeeded(first)
    assert not first.is_ready  # one good answer is not enough
    one.succeeded(first)
    assert first.is_ready


def test_a_refused_connection_ejects_at_once_and_tells_who_waits() -> None:
    told: list[Replica] = []

    class Request:
        def lost(self, replica: Replica) -> None:
            told.append(replica)

    ejected: list[Replica] = []
    one = Fleet(["http://a"], RouteConfig(), ejected.append)
    (replica,) = one.replicas
    assert one.ready(("any",)) == []
    one.succeeded(replica)
    replica.waiting.add(Request())
    one.failed(replica, "no connection", is_gone=True)
    assert told == ejected == [replica]
    one.failed(replica, "no connection", is_gone=True)
    assert ejected == [replica]


def test_a_draining_replica_gets_nothing() -> None:
    one = fleet(2)
    one.replicas[0].is_draining = True
    assert {chosen(one, prompt("a" * 600)).number for _ in range(4)} == {1}


def test_a_prefix_of_eight_thousand_bytes_is_one_depth() -> None:
    one = fleet(1)
    asked = prompt("a" * (16 * BLOCK_BYTES))
    one.lease(asked, one.replicas)
    assert one.missing(asked, one.replicas[0]) < BLOCK_BYTES


@pytest.mark.parametrize(
    ("body", "can"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": [1, 2]}, True),
        ({"messages": [], "n": 1}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": "a", "n": 2}, False),  # G14
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "prompt_logprobs": 0}, False),
    ],
)
def test_what_can_be_handed_over(body: dict[str, Any], can: bool) -> None:
    assert read_prompt(COMPLETION, json.dumps(body).encode()).can_hand_over is can


def test_bodies_of_the_hand_over() -> None:
    body = {
        "messages": [{}],
        "stream": True,
        "stream_options": {},
        "max_completion_tokens": 9,
        "min_tokens": 3,
        "seed": 1,
    }
    asked = prefill_body(body)
    assert asked == {
        "messages": [{}],
        "seed": 1,
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": dict(TO_PREFILL),
    }
    assert decode_body(body, {"remote_port": 1}) == {**body, "kv_transfer_params": {"remote_port": 1}}
    assert transfer_of(b'{"kv_transfer_params": {"a": 1}}') == {"a": 1}
    assert [transfer_of(content) for content in (b"{}", b"[]", b"<", b'{"kv_transfer_params": null}')] == [None] * 4


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', False),
        (b'data: {"choices": [{"delta": {"role": "assistant", "content": "a"}}]}\n\n', True),
        (b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}\n\n', True),
        (b'data: {"choices": [{"text": ""}]}\n\n', False),
        (b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n', True),
        (b'data: {"choices": [{"text": "a"}]}', False),  # half an event
        (b'data: {"choices": []}\n\n', True),
        (b": ping\n\n", False),
        (b"data: [DONE]\n\n", True),
        (b'event: response.created\ndata: {"type": "response.created"}\n\n', True),
    ],
)
def test_where_a_stream_says_something(held: bytes, says: bool) -> None:
    assert begins(held) is says


def test_headers_of_the_connection_stay_behind() -> None:
    came = [(b"Connection", b"keep-alive, X-Hop"), (b"X-Hop", b"1"), (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b")]
    assert end_to_end(came) == [(b"set-cookie", b"a"), (b"set-cookie", b"b")]
    sent = outgoing_headers([(b"host", b"router"), (b"authorization", b"Bearer k"), (b"content-length", b"3")], "id")
    assert sent == (("authorization", "Bearer k"), ("X-Request-Id", "id"))


@pytest.mark.parametrize("options", [{"port": -1}, {"max_attempts": 0}, {"prefill": ("http://a",)}, {"wait_s": -1.0}])
def test_wrong_options(options: Any) -> None:
    with pytest.raises(ConfigError):
        RouteConfig(**options)
