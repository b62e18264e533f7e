"""Lines of code per package: lines that hold a token of code, without comments, blank lines and docstrings.

Run: python tools/lines_of_code.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Number of lines of `source` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def docstring_lines(source: str) -> set[int]:
    """Lines of strings that stand alone as statements: docstrings of modules, classes, functions and fields."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def count(folder: Path) -> Counter[str]:
    """Code lines per top-level package (or module) below `folder`."""
    lines: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        part = path.relative_to(folder).parts[0]
        lines[part.removesuffix(".py")] += code_lines(path.read_text(encoding="utf-8"))
    return lines


def main() -> None:
    """Print one table per folder."""
    for name in sys.argv[1:] or ["src/triblade", "tests"]:
        lines = count(Path(name))
        print(f"{name}: {lines.total()}")
        for package, number in sorted(lines.items(), key=lambda item: -item[1]):
            print(f"  {number:6d}  {package}")


if __name__ == "__main__":
    main()
