"""Frames and messages between workers: what is sent is what arrives, and what is no message raises WireError, whatever it is."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triblade.disagg.frames import MAX_PAYLOAD_BYTES, PREFIX_BYTES, Message, Vocabulary
from triblade.disagg.rpc import (
    CLIENT_PROTOCOL,
    packed_error,
    packed_load,
    packed_outputs,
    packed_params,
    unpacked_error,
    unpacked_load,
    unpacked_outputs,
    unpacked_params,
)
from triblade.disagg.wire import (
    WORKER_PROTOCOL,
    Cancel,
    End,
    Fetch,
    Hello,
    Refusal,
    Rows,
    State,
    Table,
    Taken,
    token_payload,
)
from triblade.engine.client import EngineLoad
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.engine.transfers import Spread, TransferCounts
from triblade.errors import ContextLengthError, RequestError, WireError, WorkerLostError
from triblade.sampling_params import SamplingParams, TokenLogprobs
from triblade.spec.record import Speculation, SpeculationCounts

MESSAGES: list[Message] = [
    Hello(role="decode", layout={"num_layers": 3, "draft": None}, codec="raw", by_reference=True),
    Refusal(reason="block_size: 8, 4"),
    Fetch(transfer=3, first_token=16, priority=-1, payload=token_payload([5, 0, 2**31])),
    Cancel(transfer=3),
    Rows(transfer=3, first_token=16, num_tokens=8, num_prompt_tokens=40, payload=b"\0\1" * 100),
    Rows(
        transfer=3, first_token=16, num_tokens=8, num_prompt_tokens=40, blocks=(7, 9), checksum=2**32 - 1, expires_s=1.5
    ),
    End(transfer=3, error="no"),
    Taken(transfer=3, stop=24),
    State(backlog_tokens=7),
    Table(payload=b"table"),
]


def framed(message: Message, protocol: Vocabulary = WORKER_PROTOCOL) -> bytes:
    head, payload = protocol.encode(message)
    return head + bytes(payload)


def parsed(data: bytes, protocol: Vocabulary = WORKER_PROTOCOL) -> Message:
    prefix = protocol.prefix(data[:PREFIX_BYTES])
    end = PREFIX_BYTES + prefix.header_bytes
    return protocol.decode(prefix, data[PREFIX_BYTES:end], data[end:])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_sent_arrives(message: Message) -> None:
    assert parsed(framed(message)) == message


def test_token_ids_survive() -> None:
    found = parsed(framed(MESSAGES[2]))
    assert isinstance(found, Fetch)
    assert found.token_ids == [5, 0, 2**31]
    with pytest.raises(WireError, match="no token ids"):
        _ = replace(found, payload=b"abc").token_ids


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_head_is_noticed(at: int, value: int) -> None:
    data = bytearray(framed(MESSAGES[4]))
    head = PREFIX_BYTES + len(data) - PREFIX_BYTES - 200
    at %= head
    is_same = data[at] == value
    data[at] = value
    if is_same:
        assert parsed(bytes(data)) == MESSAGES[4]
    else:
        with pytest.raises(WireError):
            parsed(bytes(data))


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_bytes_that_are_no_frame(data: bytes) -> None:
    with pytest.raises(WireError):
        WORKER_PROTOCOL.prefix(data)


def test_other_versions_and_endless_payloads_are_refused() -> None:
    newer = Vocabulary(b"TBPD", 2, {4: Cancel})
    with pytest.raises(WireError, match="version 2, this is 1"):
        parsed(framed(Cancel(transfer=1), newer))
    data = bytearray(framed(Cancel(transfer=1)))
    data[12:20] = (MAX_PAYLOAD_BYTES + 1).to_bytes(8, "little")
    with pytest.raises(WireError, match="no such frame"):
        WORKER_PROTOCOL.prefix(bytes(data[:PREFIX_BYTES]))


@pytest.mark.parametrize("values", [{}, {"transfer": "x"}, {"transfer": None}, {"transfer": [1]}, [1], None])
def test_fields_that_a_message_does_not_have(values: Any) -> None:
    header = json.dumps(values).encode()
    start = framed(Cancel(transfer=1))[:8] + len(header).to_bytes(4, "little") + bytes(8)
    data = start + zlib.crc32(header, zlib.crc32(start)).to_bytes(4, "little") + header
    with pytest.raises(WireError, match="malformed"):
        parsed(data)


def test_sampling_parameters_survive() -> None:
    params = SamplingParams(
        n=2, max_tokens=5, logit_bias={3: -2.5}, stop=("a", "b"), allowed_token_ids=(1, 2), seed=2**64 - 1, logprobs=2
    )
    assert unpacked_params(packed_params(params)) == params
    with pytest.raises(RequestError):
        unpacked_params({"temperature": -1.0})
    with pytest.raises(WireError):
        unpacked_params({"temperature": "warm"})


def test_outputs_and_loads_survive() -> None:
    record = Speculation(trace=[(3, 2)], spent_s=0.5, plain_s=1.0)
    scored = TokenLogprobs(5, -0.25, 1, ((5, -0.25), (7, -3.0)))
    output = RequestOutput(
        request_id="r",
        index=1,
        text="é",
        token_ids=[5],
        logprobs=[scored],
        finish_reason=FinishReason.STOP,
        stop_reason=5,
        prompt_logprobs=[None, scored],
        speculation=record,
    )
    sent = parsed(framed(packed_outputs([(3, output)]), CLIENT_PROTOCOL), CLIENT_PROTOCOL)
    assert unpacked_outputs(sent) == [(3, output)]  # type: ignore[arg-type]
    counts = SpeculationCounts(num_steps=3, drafted_per_position=[2, 1])
    load = EngineLoad(
        num_running=2, speculation=counts, transfers=TransferCounts(num_fetches=4, seconds=Spread([1, 3], 0.5))
    )
    assert unpacked_load(packed_load(load, is_draining=False)) == load
    with pytest.raises(WireError):
        unpacked_outputs(replace(packed_outputs([]), payload=b"[[1]]"))


@pytest.mark.parametrize("kind", [ContextLengthError, WorkerLostError])
def test_errors_keep_their_class(kind: type[RequestError]) -> None:
    error = unpacked_error(packed_error(7, kind("too long", hint="shorten", param="prompt")))
    assert type(error) is kind
    assert (error.message, error.hint, error.param) == ("too long", "shorten", "prompt")
