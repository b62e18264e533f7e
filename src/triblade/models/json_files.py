"""Reading the JSON objects beside a model's weights.

Knows no key. What cannot be read, or is not an object, is a CheckpointError that names the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triblade.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: when the file cannot be read or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", hint="it may be cut short; fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got: {type(value).__name__}")
    return value


def read_json_object_if_present(path: Path) -> dict[str, Any]:
    """Like `read_json_object`; an absent file is an empty object."""
    return read_json_object(path) if path.is_file() else {}
