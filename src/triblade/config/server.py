"""Options of the HTTP server in front of an engine. Knows nothing of the engine; see `EngineConfig` for its options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from triblade.config.checks import require_at_least
from triblade.errors import ConfigError
from triblade.registry import REASONING_PARSERS, TOOL_CALL_PARSERS, unknown_name
from triblade.sampling_params import Pooling

LogLevel = Literal["debug", "info", "warning", "error"]
GenerationConfigSource = Literal["auto", "none"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP server in front of one engine."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on every interface."""

    port: int = 8000
    """Port to listen on; bound before the model loads. 0 picks a free one."""

    served_model_name: tuple[str, ...] = ()
    """Names clients may use for the model; default: `model` as given. The first one is reported."""

    api_key: tuple[str, ...] = ()
    """Keys that clients must send as a bearer token; also read from TRIBLADE_API_KEY. None: no key is asked for."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the server (CORS), such as `https://chat.example.org`; `*` is every one. Default: none."""

    generation_config: GenerationConfigSource = "auto"
    """Sampling defaults of requests: `auto` takes the model's generation_config, `none` the defaults of the OpenAI API."""

    trust_request_chat_template: bool = False
    """Let requests bring a chat template. A template is a program: allow it to clients you trust only."""

    tool_call_parser: str = "auto"
    """How the model writes tool calls: `hermes` (Qwen, too), `llama3_json`, `mistral`, `json`; `auto` asks the chat template."""

    enable_auto_tool_choice: bool = True
    """Let the model decide whether to call tools; without, requests must force a call, or forbid it."""

    reasoning_parser: str = "none"
    """Tell reasoning apart from the answer: `qwen3` and `deepseek_r1` (`<think>`), `mistral` (`[THINK]`), or `none`."""

    embedding_pooling: Pooling = "last"
    """What /v1/embeddings makes of a prompt: the hidden state of its `last` token, or the `mean` of all."""

    max_queued_requests: int = 1024
    """Requests that may wait; one more is answered with 503."""

    rate_limit_per_minute: int | None = None
    """Requests per minute and API key (client address without keys); one more is answered with 429."""

    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; a larger one is answered with 413."""

    drain_timeout_s: float = 30.0
    """After SIGTERM, seconds that running requests have to finish; a second signal ends at once."""

    request_timeout_s: float = 600.0
    """Seconds until a request is aborted, queueing included; 0 is no limit."""

    log_level: LogLevel = "info"
    """Least severe messages to log (to standard error)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got: {self.port}")
        for field, table in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            name, neutral = getattr(self, field), getattr(ServerConfig, field)
            if name != neutral and name not in table:
                raise unknown_name(table.kind, name, [neutral, *table])
        for name in ("max_queued_requests", "rate_limit_per_minute", "max_body_bytes"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("drain_timeout_s", "request_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must be a finite number, at least 0, got: {getattr(self, name)}")
