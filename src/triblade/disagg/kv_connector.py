"""What a decode engine knows of where its rows come from: a connector that fetches, and what arrives. Knows no peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from triblade.disagg.links import Link
from triblade.disagg.wire import End, Fetch, Rows


@dataclass(frozen=True, slots=True)
class Settled:
    """After `cancel` of a transfer that named blocks: nobody writes into them any more."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came; of rows and ends that a peer sent itself with its link. Rows by reference lie in the pool of that peer."""

    message: Rows | End | Settled
    link: Link | None = None


class KVConnector(Protocol):
    """Where a decode engine gets rows from."""

    def accepts(self, num_tokens: int) -> bool:
        """Whether somebody is there and not too busy to compute so many tokens."""
        ...

    def fetch(self, request: Fetch) -> None:
        """Ask for rows; what comes of it is told by `poll`."""
        ...

    def cancel(self, transfer: int) -> None:
        """Nothing of this transfer is wanted any more, or it is over."""
        ...

    def poll(self) -> Arrival | None:
        """What came, in order."""
        ...

    def close(self) -> None:
        """Leave all peers."""
        ...
