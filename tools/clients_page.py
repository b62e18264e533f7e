"""Write docs/guides/clients.md: what to type is taken from the tested scripts, what works from the last results.

Run: python tools/clients_page.py [--check]

A test runs the check, so the page says what the scripts do. It needs no client and no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from client_programs import Client, clients, guide_lines, recorded

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "clients.md"
INTRODUCTION = """\
# Clients

Written by `make docs` from `tests/clients`; change the scripts there, not this page.

Whatever speaks the OpenAI API speaks to triblade: give it the address with `/v1` and any key. These programs are run against
the real model, each in an environment of its own; their answers are checked, not only that they came. The lines below are the
beginnings of those scripts, for a server that was started so:

```bash
triblade serve smollm2-135m
```

Schemas and forced tool calls need `pip install "triblade[structured]"` beside the server. `make clients` runs all of
them, as CI does.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *("\n".join(section(client)) for client in clients()), "\n".join(results())]
    return "\n".join(parts)


def section(client: Client) -> Iterator[str]:
    """What a user of one client types."""
    yield f"## {client.title}\n\n{client.about}\n"
    yield f"```bash\n{install_line(client)}\n```\n"
    for language, lines in guide_lines(client):
        yield f"```{language}\n{lines}```\n"


def install_line(client: Client) -> str:
    """How a user installs it, in whatever version is the newest."""
    if client.npm:
        return "npm install " + " ".join(package.rpartition("@")[0] for package in client.npm)
    names = (package.partition("==")[0] for package in client.pip)
    return "pip install " + " ".join(f'"{name}"' if "[" in name else name for name in names)


def results() -> Iterator[str]:
    """The table of what was found."""
    yield "## Results\n\n| client | versions | found right | |\n|---|---|---|---|"
    for client in clients():
        result = recorded()[client.name]
        verdict = "all" if result["right"] else "then failed"
        found = "; ".join([*result["checks"], *result["measured"]])
        yield f"| {client.title} | {', '.join(result['installed'])} | {found} | {verdict} |"
    yield ""


def main() -> int:
    """Write the page, or say whether it is current."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
    print(f"{PAGE}: {'current' if current else 'not what the scripts say; run make docs'}")
    return int(not current)


if __name__ == "__main__":
    sys.exit(main())
