"""The page at `/`: what the server does now, its plan, and a chat box. Three static files, no build step, nothing from outside.

The page reads `/metrics`, `/plan` and the API like any other client, so it needs no state of its own in the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

MEDIA_TYPES: Mapping[str, str] = {
    "index.html": "text/html",
    "live.css": "text/css",
    "live.js": "text/javascript",
    "chat.js": "text/javascript",
    "charts.js": "text/javascript",
}
PAGE_PATHS = frozenset({"/", *(f"/live/{name}" for name in MEDIA_TYPES)})


def read(name: str) -> str:
    """The content of one of the files."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
