"""What the answer to a chat request may hold, and the form that the model is held to for it: reasoning, then calls or content.

Puts together what the request says about tools and forms and what the server knows about its model. Knows no token but how marks
are spelled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from triblade.config import ServerConfig
from triblade.registry import REASONING_PARSERS
from triblade.sampling_params import SamplingParams
from triblade.serve.message import Reading
from triblade.serve.tools.grammar import calls_part
from triblade.serve.tools.reader import CallReading
from triblade.serve.tools.request import ToolUse
from triblade.structured.composed import Part, composed, one_of, part_of, sequence, until, white_space

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer


def chat_reading(use: ToolUse | None, config: ServerConfig, prompt: str, *, has_form: bool) -> Reading:
    """How to read the answers to a prompt."""
    calls = None
    if use is not None:
        is_held = use.is_held or has_form
        calls = CallReading(use.format, [tool.name for tool in use.tools], use.single, is_held)
    if config.reasoning_parser == "none":
        return Reading(calls)
    markers = REASONING_PARSERS[config.reasoning_parser]()
    return Reading(calls, None if markers.is_done_in(prompt) else markers, markers.is_open_in(prompt))


def held(params: SamplingParams, use: ToolUse | None, reading: Reading, tokenizer: Tokenizer) -> SamplingParams:
    """Parameters with the form of the whole answer, and with the marks that are to be read shown in its text.

    Raises:
        RequestError: a schema asks for what no grammar can promise.
    """
    marks = [] if reading.calls is None else [reading.calls.format.opener]
    marks += [] if reading.markers is None else [reading.markers.closer]
    if any(_is_hidden(mark.strip(), tokenizer) for mark in marks):
        params = replace(params, skip_special_tokens=False)
    form = params.structured_outputs
    calling = use if reading.calls is not None and reading.calls.is_held else None
    if calling is None and (form is None or reading.markers is None):
        return params
    part = None if form is None else part_of(form)
    if calling is not None:
        part = calls_part(calling, part)
    assert part is not None
    return replace(params, structured_outputs=composed(_behind_reasoning(part, reading)))


def _behind_reasoning(part: Part, reading: Reading) -> Part:
    """The model may think before it answers; it must, where the prompt ends inside of reasoning."""
    if reading.markers is None:
        return part
    thought = until("" if reading.is_thinking else reading.markers.opener, reading.markers.closer)
    behind = sequence(thought, white_space(), part)
    return behind if reading.is_thinking else one_of(behind, part)


def _is_hidden(mark: str, tokenizer: Tokenizer) -> bool:
    """Whether a text without special tokens leaves the mark out."""
    ids = tokenizer.encode(mark, add_special_tokens=False) if mark else []
    return bool(ids) and mark not in tokenizer.decode(ids, skip_special_tokens=True)
