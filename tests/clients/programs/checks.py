"""What every program here says about what it found. Runs in environments of others: the standard library is all there is."""

import sys


def check(what: str, holds: object) -> None:
    """Say that something holds, or end the program because it does not."""
    if not holds:
        sys.exit(f"wrong: {what}")
    print(f"ok: {what}", flush=True)


def measured(what: str) -> None:
    """A figure for the table of results."""
    print(f"measured: {what}", flush=True)
