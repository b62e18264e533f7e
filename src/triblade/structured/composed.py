"""Forms inside of other forms: what may come before or instead of a form, as one form of kind `structural_tag`.

The parts are written in the grammar library's own description of composed outputs. Knows no token and no tool. Invariant: every
JSON schema in a composed form went through `narrowed`.
"""

from __future__ import annotations

import json
from typing import Any

from triblade.sampling_params import StructuredOutputs
from triblade.structured.json_schema import ANY_OBJECT, MAX_WHITESPACE, narrowed

Part = dict[str, Any]

WHITE_SPACE = r"[ \n]{0,4}"


def composed(part: Part) -> StructuredOutputs:
    """A part as the form of a whole answer."""
    return StructuredOutputs("structural_tag", json.dumps({"type": "structural_tag", "format": part}))


def part_of(form: StructuredOutputs) -> Part:
    """A form as a part of others.

    Raises:
        RequestError: a JSON schema asks for what no grammar can promise.
    """
    if form.kind == "structural_tag":
        part: Part = json.loads(form.text)["format"]
        return part
    if form.kind == "regex":
        return {"type": "regex", "pattern": form.text}
    if form.kind == "grammar":
        return {"type": "grammar", "grammar": form.text}
    if form.kind == "choice":
        return one_of(*(constant(text) for text in json.loads(form.text)))
    return json_part(ANY_OBJECT if form.kind == "json_object" else form.text)


def json_part(schema: str) -> Part:
    """A JSON value of this schema, given as text."""
    wanted = json.loads(narrowed(schema))
    return {"type": "json_schema", "json_schema": wanted, "max_whitespace_cnt": MAX_WHITESPACE}


def constant(text: str) -> Part:
    """This text."""
    return {"type": "const_string", "value": text}


def one_of(*parts: Part) -> Part:
    """Any of these."""
    return {"type": "or", "elements": list(parts)}


def sequence(*parts: Part) -> Part:
    """These, one behind the other."""
    return {"type": "sequence", "elements": list(parts)}


def until(opener: str, closer: str) -> Part:
    """`opener`, any text, and the first `closer`."""
    return {"type": "tag", "begin": opener, "content": {"type": "any_text"}, "end": closer}


def anything_but(first: str) -> Part:
    """Text that does not begin with one of the characters `first`, which are spelled as in a regular expression."""
    return sequence({"type": "regex", "pattern": f"[^{first}]"}, {"type": "any_text"})


def white_space() -> Part:
    """As much of it as models put between the parts of an answer."""
    return {"type": "regex", "pattern": WHITE_SPACE}
