"""Servers as targets: ours over sockets with a fake engine, and the answers of others as they come."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Script
from live_server import live_server

from triblade import cli
from triblade.bench.http_target import HTTPTarget, api_url, parse_readings
from triblade.bench.metrics import Usage
from triblade.bench.result import load_result
from triblade.bench.target import Ask, Piece, TargetError
from triblade.config import BenchConfig
from triblade.errors import ConfigError

ASK = Ask(messages=[{"role": "user", "content": "hi"}], max_tokens=3, temperature=0.5, ignore_eos=True)


def ask(answer: httpx.Response | Exception, *, chat: bool = True, ask: Ask = ASK) -> tuple[list[Piece], dict[str, Any]]:
    """The pieces made of a server's answer, and the body that was sent."""
    sent: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def collect() -> list[Piece]:
        target = HTTPTarget("http://x", "m", chat=chat, http=httpx.AsyncClient(transport=httpx.MockTransport(handle)))
        try:
            return [piece async for piece in target.answer(ask)]
        finally:
            await target.close()

    pieces = asyncio.run(collect())
    return pieces, {"path": sent[0].url.path, **json.loads(sent[0].content)}


def events(*bodies: Any) -> httpx.Response:
    text = "".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + ": a comment\n\ndata: [DONE]\n\n"
    return httpx.Response(200, text=text)


def test_a_chat_stream() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    pieces, body = ask(
        events(
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "a"}}]},
            {"choices": [{"delta": {"reasoning_content": "b"}}]},
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            {"choices": [], "usage": usage},
        )
    )
    assert [(p.text, p.has_tokens) for p in pieces] == [("", False), ("a", True), ("b", True), ("", False), ("", False)]
    assert pieces[3].finish_reason == "length"
    assert pieces[4].usage == Usage(5, 4, 3)
    assert body == {
        "path": "/v1/chat/completions",
        "model": "m",
        "max_tokens": 3,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hi"}],
    }


def test_a_completion_stream_with_sparse_usage() -> None:
    two = Ask(messages=[{"role": "user", "content": w} for w in "ab"], max_tokens=1, temperature=0, ignore_eos=False)
    pieces, body = ask(
        events({"choices": [{"text": "x"}]}, {"choices": [], "usage": {"prompt_tokens": 1}}), chat=False, ask=two
    )
    assert pieces == [Piece("x", True), Piece("", False, Usage(1, 0, 0))]
    assert (body["path"], body["prompt"], "ignore_eos" in body) == ("/v1/completions", "a\n\nb", False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(500, json={"error": {"message": "out of luck"}}), "status 500: out of luck"),
        (httpx.Response(429, json={"detail": "slow down"}), "status 429: {'detail': 'slow down'}"),
        (httpx.Response(502, text="bad gateway"), "status 502: bad gateway"),
        (events({"error": {"message": "it broke"}}), "an error within the answer: it broke"),
        (events([1]), "an event that is no completion"),
        (httpx.Response(200, text="data: {half\n\n"), "an event that is no completion"),
        (httpx.ReadTimeout("x"), "timed out (ReadTimeout)"),
        (httpx.RemoteProtocolError("x"), "the connection failed (RemoteProtocolError)"),
    ],
)
def test_failures_have_a_reason(answer: httpx.Response | Exception, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        ask(answer)
    assert str(caught.value) == message


def test_addresses() -> None:
    assert {api_url(u) for u in ("http://x", "http://x/", "http://x/v1", "http://x/v1/")} == {"http://x/v1"}


def test_readings_of_any_prefix() -> None:
    page = (
        '# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{engine="0"} 2\n'
        'vllm:num_preemptions_total{engine="1"} 3\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0.5\nother 1\n'
    )
    assert parse_readings(page) == {"num_preemptions_total": 5.0, "kv_cache_usage_perc": 0.5}
    assert parse_readings("<html>not found</html>") == {}


def test_our_server_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIBLADE_API_KEY", "secret")
    out = tmp_path / "r.json"
    options = [
        "--workload",
        "fixed",
        "--num-requests",
        "6",
        "--prompt-tokens",
        "20",
        "--output-tokens",
        "8",
        "--concurrency",
        "2",
    ]
    with live_server(FakeClient(max_model_len=5000), api_key=("secret",)) as live:
        code = cli.main(["bench", live.url, *options, "--output", str(out), "--html", str(tmp_path / "r.html")])
        assert code == 0
        assert len(live.engine.records) == 6 + 2 + 2  # warm-up and measuring the words
        assert cli.main(["bench", live.url, *options, "--baseline", str(out), "--server-pid", str(os.getpid())]) == 0
        monkeypatch.delenv("TRIBLADE_API_KEY")
        assert cli.main(["bench", live.url]) == 2
    printed, said = capsys.readouterr()
    assert "6 requests in" in printed
    assert "before" in printed
    assert "lists no models: status 401" in said
    result = load_result(out)
    assert result.summary["output_tokens"] == 6 * 8
    assert result.config["concurrency"] == 2
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert cli.main(["compare", str(out), str(out)]) == 0
    assert "same" in capsys.readouterr().out


def test_a_failing_server_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    broken = FakeClient(max_model_len=5000)
    with live_server(broken) as live:
        broken.dead = ConfigError("it is dead")
        assert cli.main(["bench", live.url, "--num-requests", "3"]) == 1
    assert "does not answer: status" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["http://127.0.0.1:9", "--dtype", "float32"], "dtype belongs to an engine in this process"),
        (["http://127.0.0.1:9", "--workload", "replay"], "replay needs a dataset"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_slow_script_is_measured() -> None:
    script = Script(b"abcd", pause_s=0.01)
    with live_server(FakeClient(max_model_len=5000, scripts={"user: hi\nassistant: ": script})) as live:

        async def pieces() -> list[Piece]:
            target = await HTTPTarget.connect(live.url, BenchConfig(), None)
            found = [piece async for piece in target.answer(ASK)]
            readings = await target.readings()
            await target.close()
            assert "kv_cache_usage_perc" in readings
            return found

        found = asyncio.run(pieces())
    assert "".join(piece.text for piece in found) == "abc"
    assert [p.usage.output_tokens for p in found if p.usage] == [3]
