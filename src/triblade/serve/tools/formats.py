"""How families of models write tool calls, as data: one `ToolFormat` per family, found by name or by a chat template.

Knows no request and no text of an answer; `reader.py` reads calls by these descriptions and `grammar.py` writes grammars from
them. Names are those of vLLM's `--tool-call-parser`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from triblade.registry import TOOL_CALL_PARSERS

ID_LENGTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls are written: `opener {"name": ..., "arguments": ...} closer`, with the differences between families.

    Attributes:
        opener: begins calls anywhere in an answer; empty where only an answer that begins with JSON holds calls.
        closer: ends a call; a model may leave the last one out.
        starts_bare: an answer that begins with JSON holds calls, too.
        has_bare_names: the name may stand between opener and arguments, outside of the JSON.
        arguments_key: what the arguments are called.
        separator: stands between calls when a grammar writes them.
        in_list: a grammar writes calls as a JSON list, without the opener, which is a special token.
        short_ids: ids of calls are nine letters and digits, as the family's chat templates demand.
    """

    opener: str = ""
    closer: str = ""
    starts_bare: bool = False
    has_bare_names: bool = False
    arguments_key: str = "arguments"
    separator: str = "\n"
    in_list: bool = False
    short_ids: bool = False

    def call_id(self) -> str:
        """A new id for a call."""
        letters = uuid.uuid4().hex
        return letters[:9] if self.short_ids else f"call_{letters[:ID_LENGTH]}"


def hermes() -> ToolFormat:
    """Hermes 2 and 3, Qwen2.5 and Qwen3: `<tool_call>` around a JSON object."""
    return ToolFormat(opener="<tool_call>\n", closer="\n</tool_call>")


def llama3_json() -> ToolFormat:
    """Llama 3.1 and later: the answer is JSON objects with `parameters`, sometimes after `<|python_tag|>`."""
    return ToolFormat(opener="<|python_tag|>", starts_bare=True, arguments_key="parameters", separator="; ")


def mistral() -> ToolFormat:
    """Mistral: `[TOOL_CALLS]` and a JSON list; newer models write `[TOOL_CALLS]name{...}` or `name[ARGS]{...}`."""
    return ToolFormat(opener="[TOOL_CALLS]", has_bare_names=True, separator=", ", in_list=True, short_ids=True)


def plain_json() -> ToolFormat:
    """An answer that is one JSON object, or a list of them, and nothing else before it."""
    return ToolFormat(starts_bare=True, separator=", ", in_list=True)


def find_format(name: str, template: str | None) -> ToolFormat | None:
    """The format of this name; for `auto`, the one that a chat template speaks of, or None where that is not sure."""
    found = _spoken_of(template or "") if name == "auto" else name
    if found is None:
        return None
    made: ToolFormat = TOOL_CALL_PARSERS[found]()
    return made


def _spoken_of(template: str) -> str | None:
    """The format whose marks stand in a template that is given tools; None if there are several, or dialects of others."""
    if "tools" not in template:
        return None
    marks = {
        "hermes": "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template,
        "mistral": "[TOOL_CALLS]" in template,
        "llama3_json": "<|start_header_id|>" in template and '"parameters"' in template,
    }
    found = [name for name, is_there in marks.items() if is_there]
    return found[0] if len(found) == 1 else None
