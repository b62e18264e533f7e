"""What an engine gives back: one `RequestOutput` per choice and step, with its new text, ids and log-probabilities.

Joined in order, the deltas of a choice are the whole answer: text, token ids and logprobs always agree. Knows no
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from triblade.sampling_params import TokenLogprobs
from triblade.spec.record import Speculation

__all__ = ["FinishReason", "RequestOutput", "TokenLogprobs"]


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # an end or stop token, or a stop string
    LENGTH = "length"  # max_tokens, the context length, or no KV block left
    ABORT = "abort"  # the client went away or cancelled
    ERROR = "error"  # a fault of ours; `RequestOutput.error` says which


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """News of one choice."""

    request_id: str
    index: int = 0  # which of the `n` choices
    text: str = ""  # new text; never half a character, never part of a stop string
    token_ids: list[int] = field(default_factory=list)  # new tokens; a stop token is included
    logprobs: list[TokenLogprobs] | None = None  # one per new token, when asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for the model's end token
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far, this choice
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    queue_time_s: float | None = None  # from arrival to the first step that computed something for it
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first output; None for the first token
    embedding: list[float] | None = None  # with `SamplingParams.pooling`: of length one
    speculation: Speculation | None = None  # with the last output, where drafts are made; the choice's whole record
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
