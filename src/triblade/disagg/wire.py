"""What prefill and decode workers say to each other. docs/reference/pd-protocol.md is the description for readers.

Life of a transfer, decode worker (D) on the left:
    Hello     ->             what rows I take; once per connection
              <-  Table      what the codec decodes with, if it needs that; again, whenever it changes
              <-  Hello      what rows I make, with a canary row; or Refusal, naming the field that differs
    Fetch     ->             these tokens, I have the rows before `first_token`
              <-  Rows ...   ranges in order, each once; only blocks that are complete, and at last the rest
              <-  End        nothing more comes, and why if it is not all
    Taken     ->             where rows came by reference: these were copied, they may go
    Cancel    ->             forget it
              <-  End        where rows are placed, also after Cancel: nothing is being written any more
              <-  State      every now and then, whatever else is done: how much work waits here; also the sign of life

A transfer is named by (`transfer`, `attempt`): a number that D never uses twice. What comes for a name that D does not know any
more is dropped, so late and duplicate messages are harmless. Rows are ranges of tokens, never counts, so prefix hits on either
side change nothing. Token 1 belongs to D: P computes all tokens but the last and samples none. Loads no torch and no numpy.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from triblade.disagg.frames import Message, Vocabulary
from triblade.errors import WireError

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Who speaks. Of a prefill worker the payload is a canary row, see `disagg.identity`."""

    role: str  # "prefill" or "decode"
    layout: dict[str, Any]  # fields of its KVLayout
    codec: str  # on the wire
    by_reference: bool = False  # offers, or asks for, rows by reference instead of by value
    num_blocks: int = 0  # of the pool that references point into, or rows are placed in
    memory: dict[str, Any] | None = None  # of D: where rows may be placed, see `disagg.placed_rows`
    places: bool = False  # of P: it will place them there
    places_not: str = ""  # of P: why not


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Message):
    """What rows will be encoded with from now on; payload: the table as its file. Before a Hello, or whenever it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Message):
    """Why these two cannot work together; the last message of a connection."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Message):
    """Compute the rows of all tokens but the last; payload: the token ids, 4 bytes little-endian each."""

    transfer: int
    attempt: int = 0
    first_token: int  # D has the rows before it; a multiple of the block size
    priority: int = 0
    blocks: tuple[int, ...] = ()  # ids in D's pool, from `first_token` on, where rows may be placed

    @property
    def token_ids(self) -> list[int]:
        """The tokens.

        Raises:
            WireError: the payload is no list of tokens.
        """
        if len(self.payload) % TOKEN_BYTES:
            raise WireError(f"{len(self.payload)} bytes are no token ids")
        return array("I", bytes(self.payload)).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """D does not want the rest."""

    transfer: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Message):
    """Rows of tokens [first_token, first_token + num_tokens), which begin a block; payload: what the wire codec made of them."""

    transfer: int
    attempt: int = 0
    first_token: int
    num_tokens: int
    num_prompt_tokens: int  # of the whole request, the last token included
    num_draft_tokens: int = 0  # of these tokens, leading ones whose rows have the drafter's part
    blocks: tuple[int, ...] = ()  # by reference: ids in P's pool, and no payload
    checksum: int = 0  # of rows by reference: CRC-32; of placed ones their sum
    expires_s: float = 0.0  # of rows by reference: until when they stand, on the host's monotonic clock
    is_placed: bool = False  # they lie in D's pool already, and no payload
    queue_s: float = 0.0  # that the request had waited at P to be computed
    errors: tuple[
        float, ...
    ] = ()  # of sampled rows of the request so far: squared, as a share of its keys and of its values

    @property
    def stop(self) -> int:
        return self.first_token + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Message):
    """No more rows come."""

    transfer: int
    attempt: int = 0
    error: str | None = None  # why not all did


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Message):
    """Rows by reference up to token `stop` were copied."""

    transfer: int
    attempt: int = 0
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Message):
    """How busy a prefill worker is."""

    backlog_tokens: int  # to compute, of all requests
    num_requests: int = 0
    queue_s: float = 0.0  # that the request begun last had waited
    kv_usage: float = 0.0  # used share of its blocks, 0 to 1
    num_expired: int = 0  # leases, since the start
    num_fallbacks: int = 0  # requests that the codec would have harmed, to this peer
    num_faults: int = 0  # transfers that errors of this worker ended, since the start
    step_s: float = 0.0  # that the present step has taken so far


WORKER_PROTOCOL = Vocabulary(
    b"TBPD", 1, {1: Hello, 2: Refusal, 3: Fetch, 4: Cancel, 5: Rows, 6: End, 7: Taken, 8: State, 9: Table}
)


def token_payload(token_ids: list[int]) -> bytes:
    """Token ids as a `Fetch` carries them."""
    return array("I", token_ids).tobytes()
