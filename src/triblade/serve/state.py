"""What the routes share: the configuration, the engine once it is loaded, and the requests in flight.

One object per server, made at start and passed to whoever needs it. It knows no HTTP. A request counts against the
queue limit from `admit` until the block ends, whatever happens inside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from triblade.config import EngineConfig, Plan, ServerConfig
from triblade.engine.client import EngineClient
from triblade.errors import ModelNotFoundError, RequestError
from triblade.sampling_params import SamplingParams
from triblade.serve.errors import DrainingError, LoadingError, OverloadedError, ServeError
from triblade.serve.sampling import model_defaults
from triblade.serve.stoppable import Stoppable

if TYPE_CHECKING:
    from triblade.models.tokenizer import Tokenizer


class ServedEngine(EngineClient, Protocol):
    """An engine with what a server must know about its model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; safe to use from several threads."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's own sampling defaults, in Hugging Face form."""
        ...

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the RequestError that `generate` would raise for this prompt; computes nothing."""
        ...

    def close(self) -> None:
        """Stop the engine and free its memory."""
        ...


class Phase(StrEnum):
    """The life of a server, in order."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class ServerState:
    """One server.

    Attributes:
        names: the names of the model, the reported one first.
        created: Unix time of the start, seconds.
        defaults: sampling defaults of requests.
        plan: what is served, if a plan says so.
    """

    def __init__(self, engine_config: EngineConfig, config: ServerConfig, plan: Plan | None = None) -> None:
        self.engine_config = engine_config
        self.config = config
        self.plan = plan
        self.names = config.served_model_name or (engine_config.model,)
        self.created = int(time.time())
        self.defaults: Mapping[str, Any] = {}
        self._phase = Phase.LOADING
        self._engine: ServedEngine | None = None
        self._in_flight: dict[Stoppable, int] = {}  # -> sequences

    @property
    def phase(self) -> Phase:
        """Where in its life the server is."""
        return self._phase

    @property
    def loaded_engine(self) -> ServedEngine | None:
        """The engine, for those who can do without."""
        return self._engine

    @property
    def num_in_flight(self) -> int:
        """Requests admitted and not ended."""
        return len(self._in_flight)

    def loaded(self, engine: ServedEngine) -> None:
        """The model is in memory: requests may come."""
        self._engine = engine
        if self.config.generation_config == "auto":
            self.defaults = model_defaults(engine.generation_config)
        if self._phase is Phase.LOADING:
            self._phase = Phase.READY

    def drain(self) -> None:
        """Take no more requests."""
        self._phase = Phase.DRAINING

    def stop_all(self, reason: ServeError) -> None:
        """End every request in flight with this error."""
        for request in list(self._in_flight):
            request.stop(reason)

    def require_ready(self) -> ServedEngine:
        """The engine.

        Raises:
            LoadingError, DrainingError: it takes no requests yet, or no more.
        """
        if self._phase is Phase.DRAINING:
            raise DrainingError("the server is shutting down")
        if self._engine is None:
            raise LoadingError(f"the model is loading: {self.names[0]}")
        return self._engine

    def resolve_name(self, name: str | None) -> str:
        """The model name to report for a request that asked for `name`.

        Raises:
            ModelNotFoundError: this server has no model of that name.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            raise ModelNotFoundError(f"unknown model: {name[:200]!r}", hint=f"this server has: {known}", param="model")
        return name

    def check_size(self, num_sequences: int) -> None:
        """Refuse a request that the queue could never hold.

        Raises:
            RequestError: with the limit.
        """
        if num_sequences > self._capacity:
            raise RequestError(
                f"prompts x n must be at most {self._capacity} on this server, got: {num_sequences}",
                hint="split the request",
                param="prompt",
            )

    @contextmanager
    def admit(self, request: Stoppable, num_sequences: int) -> Iterator[None]:
        """Count a request against the queue limit while the block runs.

        Raises:
            OverloadedError: too many wait already.
        """
        limit = self.config.max_queued_requests
        waiting = self.require_ready().load().num_waiting
        if waiting >= limit or sum(self._in_flight.values()) + num_sequences > self._capacity:
            raise OverloadedError(f"too many requests are waiting: the limit is {limit}")
        self._in_flight[request] = num_sequences
        try:
            yield
        finally:
            del self._in_flight[request]

    @property
    def _capacity(self) -> int:
        """Sequences that may run and wait together."""
        return self.engine_config.max_num_seqs + self.config.max_queued_requests
