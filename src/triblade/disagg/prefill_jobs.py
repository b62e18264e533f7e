"""What a prefill worker remembers of those who get its rows: readers behind links, their transfers, and blocks that are being read.

Only data; `disagg.prefill_transfers` says how it changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from triblade.disagg.codecs import RequestWire, Sender
from triblade.disagg.links import Link
from triblade.disagg.pace import Window
from triblade.disagg.placed_rows import Target, Ticket
from triblade.disagg.wire import Fetch
from triblade.engine.request import Request

JobKey = tuple[Link, int, int]  # with the transfer and its attempt


@dataclass(slots=True)
class Lease:
    """Blocks that a peer reads."""

    stop: int  # tokens of the request that end there
    blocks: list[int]
    expires_s: float


@dataclass(slots=True, eq=False)
class Reader:
    """Who gets rows over a link."""

    link: Link
    sender: Sender
    by_reference: bool
    window: Window
    target: Target | None  # where rows are placed


@dataclass(slots=True, eq=False)
class Job:
    """A transfer as the prefill worker sees it."""

    reader: Reader
    fetch: Fetch
    request: Request
    num_prompt_tokens: int  # whose rows are wanted
    stop: int  # tokens to compute: these, or as many as there is room for
    sent: int  # tokens whose rows are with the peer
    progress_s: float
    wire: RequestWire
    ticket: Ticket | None = None  # its rows are placed
    leases: deque[Lease] = field(default_factory=deque)
    has_ended: bool = False  # its End is sent; only leases are left

    @property
    def link(self) -> Link:
        return self.reader.link

    @property
    def shortage(self) -> str | None:
        """Why not all rows that are wanted will come."""
        if self.stop == self.num_prompt_tokens:
            return None
        return f"the prefill worker has room for {self.stop} of {self.num_prompt_tokens} tokens"

    @property
    def key(self) -> JobKey:
        return (self.link, self.fetch.transfer, self.fetch.attempt)
