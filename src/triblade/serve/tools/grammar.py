"""Calls as a form of the answer: what `reader.py` reads, written so that a grammar can hold the model to it.

Knows no token. A forced answer is calls and nothing else; a free one may be text, in which every call is well formed.
"""

from __future__ import annotations

from triblade.serve.tools.formats import ToolFormat
from triblade.serve.tools.reader import call_head
from triblade.serve.tools.request import Tool, ToolUse
from triblade.structured.composed import Part, anything_but, constant, json_part, one_of, sequence


def calls_part(use: ToolUse, form: Part | None) -> Part:
    """The answer to a request with these tools, and with `form` for what is no call.

    Raises:
        RequestError: a schema asks for what no grammar can promise.
    """
    calls = _calls(use)
    if use.is_forced:
        return calls
    if form is not None:
        return one_of(calls, form)
    opener = use.format.opener.strip()
    if use.format.starts_bare:
        return one_of(calls, anything_but(r"\s{\["))
    tags = [_tag(use.format, tool) for tool in use.tools]
    return {"type": "triggered_tags", "triggers": [opener], "tags": tags, "stop_after_first": use.single}


def _calls(use: ToolUse) -> Part:
    """One call or several, and nothing else."""
    calls: Part = {
        "type": "tags_with_separator",
        "tags": [_tag(use.format, tool) for tool in use.tools],
        "separator": use.format.separator,
        "at_least_one": True,
        "stop_after_first": use.single,
    }
    return sequence(constant("["), calls, constant("]")) if use.format.in_list else calls


def _tag(format: ToolFormat, tool: Tool) -> Part:
    has_opener = not (format.starts_bare or format.in_list)
    begin = (format.opener if has_opener else "") + call_head(format, tool.name)
    end = "}" + (format.closer if has_opener else "")
    return {"type": "tag", "begin": begin, "content": json_part(tool.schema), "end": end}
