"""Options of one worker process. Knows no engine; see `EngineConfig` and `TransferConfig` for theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triblade.config.checks import require_address
from triblade.errors import ConfigError

WorkerRole = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One process of a model served by several."""

    role: WorkerRole
    """`prefill` computes prompts for decode workers; `decode` answers the requests of a server."""

    address: str
    """Where others reach it: `HOST:PORT`, the path of a Unix socket, or `fd:N`, a listening socket it inherited."""

    prefill_address: tuple[str, ...] = ()
    """Of a decode worker: a prefill worker that it may ask; may be given several times."""

    cores: tuple[int, ...] = ()
    """CPU cores it may use; default: all that its parent may."""

    drain_timeout_s: float = 30.0
    """After SIGTERM, seconds that running requests have to finish."""

    parent_pipe: int | None = None
    """Descriptor of a pipe; the worker ends when its other end is closed."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.role == "prefill" and self.prefill_address:
            raise ConfigError(
                f"prefill_address is for decode workers, got role prefill and {', '.join(self.prefill_address)}",
                hint="leave it out",
            )
        require_address("address", self.address)
        for address in self.prefill_address:
            require_address("prefill_address", address)
