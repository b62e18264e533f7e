"""Options of prefill and decode in workers of their own. Knows no worker; see docs/guides/disaggregation.md for what to choose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triblade.config.checks import require_address, require_at_least, require_positive
from triblade.errors import ConfigError

ConnectorName = Literal["shm", "tcp", "cuda-ipc"]
Isolation = Literal["process", "thread"]


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """How KV rows come from prefill workers, and when they do."""

    connector: ConnectorName = "shm"
    """Between workers: `shm` shares the memory of the rows on one host, `tcp` sends them, `cuda-ipc` writes them from GPU to GPU of
    one host."""

    wire_codec: str = "raw"
    """How rows are encoded on their way: `raw` as they are (equal KV dtype and backend on both sides), or a compressing codec."""

    wire_table: Path | None = None
    """Table of a calibrated wire codec."""

    wire_error_limit: float = 1.2e-3
    """Squared error of sampled keys or values of a layer, as a share of these, above which a request does not go as `int8`. Tables
    of calibrated codecs bring limits of their own."""

    remote_prefill_tokens: int = 64
    """Prompts with fewer tokens outside the prefix cache are computed by the decode worker itself."""

    max_prefill_backlog: int = 8192
    """Tokens waiting at the prefill worker from which on the decode worker computes prompts itself."""

    remote_kv_share: float = 0.5
    """Share of the decode worker's KV blocks that requests on their way may hold."""

    transfer_timeout_s: float = 30.0
    """Seconds in which no row moves, or that the rows which are left would take, until the decode worker computes them itself."""

    lease_s: float = 30.0
    """Seconds that a prefill worker keeps rows for a decode worker that takes nothing."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_at_least("remote_prefill_tokens", self.remote_prefill_tokens, 1)
        require_at_least("max_prefill_backlog", self.max_prefill_backlog, 1)
        if not 0 < self.remote_kv_share <= 1:
            raise ConfigError(f"remote_kv_share must be in (0, 1], got: {self.remote_kv_share}")
        for name in ("transfer_timeout_s", "lease_s", "wire_error_limit"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a finite number above 0, got: {value}")


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """How many workers serve a model; none, as by default, is one engine in the server's process."""

    prefill_workers: int = 0
    """Workers that compute prompts and give their KV rows to the decode workers."""

    decode_workers: int = 0
    """Workers that answer requests; needed with prefill workers. Without those, several engines share the requests."""

    pd_isolation: Isolation = "process"
    """`process` gives every worker its own process and its own weights; `thread` has one prefill and one decode engine in the
    server's process, which share the weights and end together."""

    pd_memory: str = "30:70"
    """Memory of all prefill workers to that of all decode workers, where these do not have a device each."""

    prefill_threads: int | None = None
    """CPU cores of the prefill workers together; default: half of them, one at least."""

    worker_restarts: int = 3
    """Times that a worker which died is started again."""

    decode_address: tuple[str, ...] = ()
    """A decode worker that was started elsewhere (`triblade worker`), as HOST:PORT or path; may be given several times."""

    prefill_address: tuple[str, ...] = ()
    """A prefill worker that was started elsewhere, for the decode workers that are started here; may be given several times."""

    attach_timeout_s: float = 60.0
    """Seconds that workers started elsewhere have to answer when the server starts."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("prefill_workers", "decode_workers", "worker_restarts"):
            require_at_least(name, getattr(self, name), 0)
        require_at_least("prefill_threads", self.prefill_threads, 1)
        if self.prefill_workers and not self.decode_workers:
            raise ConfigError(
                f"prefill_workers: {self.prefill_workers} without a decode worker", hint="add --decode-workers 1"
            )
        self._check_isolation()
        if self.prefill_address and not self.decode_workers:
            raise ConfigError(
                f"prefill_address is for decode workers that are started here, got: {', '.join(self.prefill_address)}",
                hint="add --decode-workers 1, or give it to the `triblade worker` that decodes",
            )
        for name in ("decode_address", "prefill_address"):
            for address in getattr(self, name):
                require_address(name, address)
        require_positive("attach_timeout_s", self.attach_timeout_s)
        _ = self.shares

    def _check_isolation(self) -> None:
        counts = (self.prefill_workers, self.decode_workers)
        if self.pd_isolation == "thread" and (counts != (1, 1) or self.decode_address or self.prefill_address):
            elsewhere = len(self.decode_address) + len(self.prefill_address)
            raise ConfigError(
                "pd_isolation thread is one prefill and one decode worker in this process, "
                f"got: {counts[0]} and {counts[1]}, and {elsewhere} elsewhere",
                hint="use --prefill-workers 1 --decode-workers 1, or --pd-isolation process",
            )

    @property
    def is_distributed(self) -> bool:
        """Whether there are workers at all."""
        return self.decode_workers > 0 or bool(self.decode_address)

    @property
    def num_prefill_workers(self) -> int:
        """That a decode worker which is started here knows."""
        return self.prefill_workers + len(self.prefill_address)

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the memory that the prefill and the decode workers get; they sum to 1.

        Raises:
            ConfigError: `pd_memory` is not of the form 30:70.
        """
        parts = self.pd_memory.split(":")
        if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(f"pd_memory must be two whole numbers such as 30:70, got: {self.pd_memory!r}")
        prefill, decode = (int(part) for part in parts)
        return (prefill / (prefill + decode), decode / (prefill + decode)) if self.prefill_workers else (0.0, 1.0)
