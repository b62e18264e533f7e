"""Calls and reasoning in the text of answers: examples of every format, cut at every position, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from triblade.errors import ConfigError
from triblade.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from triblade.serve.message import MessageReader, Reading
from triblade.serve.pieces import Message, Piece
from triblade.serve.tools.formats import find_format
from triblade.serve.tools.reader import CallReading

NAMES = ("get_weather", "add")
PARIS = ("get_weather", {"city": 'Paris } ] " <tool_call> </tool_call>', "days": [1, {"a": None}]})
SUM = ("add", {"a": 1, "b": -2.5})
NOTHING = ("add", {})
Calls = list[tuple[str, dict[str, object]]]


def written(call: tuple[str, dict[str, object]], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


def tagged(*calls: tuple[str, dict[str, object]]) -> str:
    return "\n".join(f"<tool_call>\n{written(call)}\n</tool_call>" for call in calls)


BRACKETED = "[" + ", ".join(map(written, (PARIS, SUM))) + "]"
# (format, text, content, calls)
EXAMPLES: list[tuple[str, str, str | None, Calls]] = [
    ("hermes", tagged(PARIS), None, [PARIS]),
    ("hermes", f"Let me look.\n{tagged(PARIS, SUM)}\n", "Let me look.", [PARIS, SUM]),
    ("hermes", f"{tagged(SUM)}\nDone: a < b.", "\nDone: a < b.", [SUM]),
    ("hermes", f"<tool_call>{written(SUM)}{written(PARIS)}</tool_call>", None, [SUM, PARIS]),
    ("hermes", f"<tool_call>\n{written(SUM)}", None, [SUM]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', None, [NOTHING]),
    ("llama3_json", written(SUM, "parameters"), None, [SUM]),
    ("llama3_json", f"\n{written(SUM, 'parameters')}; {written(PARIS, 'parameters')}", None, [SUM, PARIS]),
    ("llama3_json", f"<|python_tag|>{written(PARIS, 'parameters')}", None, [PARIS]),
    ("llama3_json", f"I call <|python_tag|>{written(SUM, 'parameters')}", "I call", [SUM]),
    ("mistral", f"[TOOL_CALLS] {BRACKETED}", None, [PARIS, SUM]),
    ("mistral", f"Sure. [TOOL_CALLS]{BRACKETED}", "Sure.", [PARIS, SUM]),
    ("mistral", f"[TOOL_CALLS]add{json.dumps(SUM[1])}", None, [SUM]),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{json.dumps(SUM[1])}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{{}}", None, [SUM, NOTHING]),
    ("json", BRACKETED, None, [PARIS, SUM]),
    ("json", f"  {written(PARIS)}", None, [PARIS]),
]
BROKEN = [
    ("hermes", "  Just text, with < and <tool and { in it.\n"),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call> so'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_call></tool_call> and <tool_call"),
    ("hermes", '{"name": "add", "arguments": {}}'),
    ("llama3_json", '{"name": "Ada", "born": 1815}'),
    ("llama3_json", '{"name": "add", "born": 1815} and more'),
    ("llama3_json", 'See {"name": "add", "parameters": {}}'),
    ("llama3_json", "{ not JSON } at all"),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, 3] x'),
    ("mistral", '[TOOL_CALLS]unknown{"a": 1}'),
    ("mistral", "[TOOL_CALLS]" + "a" * 400),
    ("json", "[1, 2]"),
    ("json", "[" * 3000 + "]" * 3000),
]


def reading(name: str, *, single: bool = False, is_held: bool = False) -> Reading:
    form = find_format(name, None)
    assert form is not None
    return Reading(CallReading(form, NAMES, single, is_held))


def read(wanted: Reading, texts: Iterable[str]) -> tuple[list[Piece], Message]:
    """Pieces as they come, and joined."""
    reader, message = MessageReader(wanted), Message()
    pieces = [piece for text in texts for piece in reader.feed(text, is_last=False)]
    pieces += reader.feed("", is_last=True)
    message.add(pieces)
    return pieces, message


def summary(message: Message) -> tuple[str | None, str, Calls]:
    told = message.as_json()
    calls = [call["function"] for call in told.get("tool_calls", [])]
    return (
        told["content"],
        told.get("reasoning_content", ""),
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


def cuts(text: str) -> Iterable[list[str]]:
    """The text cut in two at every position, in three at many, and into characters."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield from ([text[:at], text[at : at + 3], text[at + 3 :]] for at in range(0, len(text), 2))
    yield list(text)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
def test_calls_of_every_format(name: str, text: str, content: str | None, calls: Calls) -> None:  # D18
    pieces, message = read(reading(name), [text])
    assert summary(message) == (content, "", calls)
    begun = [piece for piece in pieces if piece.kind == "call"]
    assert [piece.call for piece in begun] == list(range(len(calls)))
    assert len({piece.call_id for piece in begun}) == len(calls)
    assert all(piece.call_id.isalnum() and len(piece.call_id) == 9 for piece in begun) == (name == "mistral")
    deltas = [call for piece in pieces for call in piece.delta().get("tool_calls", [])]
    for number in range(len(calls)):
        first, *rest = (delta for delta in deltas if delta["index"] == number)
        assert first.keys() == {"index", "id", "type", "function"}
        assert first["function"]["name"] == calls[number][0]
        assert all(delta.keys() == {"index", "function"} and "name" not in delta["function"] for delta in rest)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
def test_how_the_text_comes_changes_nothing(name: str, text: str, content: str | None, calls: Calls) -> None:  # D18
    for texts in cuts(text):
        assert summary(read(reading(name), texts)[1]) == (content, "", calls), texts


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_comes_back_as_content(name: str, text: str) -> None:
    for texts in cuts(text) if len(text) < 1000 else [[text]]:
        assert summary(read(reading(name), texts)[1]) == (text, "", []), texts


def test_text_is_told_as_it_comes() -> None:  # C15
    reader = MessageReader(reading("hermes"))
    told = [
        [piece.text for piece in reader.feed(text, is_last=False)] for text in ("Some", " text <", "b", "<tool", "s>")
    ]
    assert told == [["Some"], [" text"], [" <b"], [], ["<tools>"]]


def test_one_call_only() -> None:
    message = read(reading("hermes", single=True), [tagged(PARIS, SUM) + " end"])[1]
    assert summary(message) == (" end", "", [PARIS])


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_arguments_come_in_pieces_where_a_grammar_holds_them(name: str) -> None:
    key = "parameters" if name == "llama3_json" else "arguments"
    written_calls = [written(call, key) for call in (PARIS, SUM)]
    text = tagged(PARIS, SUM) if name == "hermes" else "; ".join(written_calls)
    text = f"[{', '.join(written_calls)}]" if name in ("mistral", "json") else text
    pieces, message = read(reading(name, is_held=True), list(text))
    assert summary(message) == (None, "", [PARIS, SUM])
    assert len(pieces) > 60
    for texts in cuts(text):
        assert summary(read(reading(name, is_held=True), texts)[1]) == (None, "", [PARIS, SUM]), texts
    cut = read(reading(name, is_held=True), [text[: text.index("Paris") + 3]])[1].as_json()
    assert cut["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'  # what max_tokens leaves of a call


THOUGHTS = [
    (
        "<think>\nSo <b> and </thin.\n</think>\n\nAnswer <think>x</think>",
        False,
        "So <b> and </thin.\n",
        "Answer <think>x</think>",
    ),
    ("So.</think>Answer", True, "So.", "Answer"),
    ("Never ends </thi", True, "Never ends </thi", ""),
    ("<think></think>A", False, "", "A"),
    (" <thing> no thought", False, "", " <thing> no thought"),
    ("<thi", False, "", "<thi"),
]


@pytest.mark.parametrize(("text", "is_thinking", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_told_apart(text: str, is_thinking: bool, reasoning: str, content: str) -> None:
    wanted = Reading(None, REASONING_PARSERS["qwen3"](), is_thinking)
    for texts in [[text], *cuts(text)]:
        pieces, message = read(wanted, texts)
        assert summary(message) == (content, reasoning, []), texts
        assert all(piece.text for piece in pieces)


def test_calls_behind_reasoning() -> None:
    text = f"<think>I call <tool_call>?</think>\n{tagged(SUM)}"
    wanted = Reading(reading("hermes").calls, REASONING_PARSERS["deepseek_r1"]())
    for texts in cuts(text):
        assert summary(read(wanted, texts)[1]) == (None, "I call <tool_call>?", [SUM])


@pytest.mark.parametrize(
    ("template", "opener"),
    [
        ("{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}", "<tool_call>\n"),
        ("{{ tools }} [AVAILABLE_TOOLS] [TOOL_CALLS]", "[TOOL_CALLS]"),
        ('{{ tools }} <|start_header_id|> {"name": ..., "parameters": ...}', "<|python_tag|>"),
        ("{{ tools }} <tool_call><function=f>", None),  # Qwen3-Coder writes XML
        ("{{ tools }} <tool_call> [TOOL_CALLS]", None),
        ("<tool_call> but is given no t00ls", None),
        ("{{ tools }}", None),
        (None, None),
    ],
)
def test_formats_are_found_where_that_is_safe(template: str | None, opener: str | None) -> None:
    found = find_format("auto", template)
    assert (found.opener if found else None) == opener


def test_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        find_format("hermse", None)
