"""Pages that must not fall behind the code: the option reference, the guide to clients, and the two READMEs with their commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from triblade.cli import app

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, content) of the code blocks of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def headings(name: str) -> list[int]:
    """The levels of a page's headings, in order, code blocks left out."""
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def links(name: str) -> list[str]:
    return re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("tool", ["reference_docs.py", "clients_page.py"])
def test_written_pages_are_current(tool: str) -> None:
    page = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True, check=False
    )
    assert page.returncode == 0, page.stdout


def test_the_readmes_have_the_same_shape() -> None:
    english, chinese = READMES
    assert headings(english) == headings(chinese)
    assert blocks(english) == blocks(chinese)
    assert sorted(set(links(english)) - {chinese}) == sorted(set(links(chinese)) - {english})


@pytest.mark.parametrize("page", [*READMES, "docs/architecture.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    local = [link for link in links(page) if "://" not in link]
    assert not [link for link in local if not (ROOT / page).parent.joinpath(link).exists()]


def test_readme_commands_exist() -> None:
    lines = [line for language, block in blocks("README.md") if language == "bash" for line in block.splitlines()]
    used = {match[1] for line in lines if (match := re.match(r"triblade ([a-z]+)", line))}
    targets = {match[1] for line in lines if (match := re.match(r"make ([a-z]+)", line))}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"pull", "generate", "serve"} <= used <= set(app)
    assert {"demo", "test"} <= targets <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
