"""What a step costs: bytes moved, operations, launches and host time, as seconds. Pure arithmetic over shapes and rates.

A step computes `rows` tokens, reads all weights once and the KV of its sequences once. Memory and arithmetic overlap in part
(exponent p of `kernels.toml`); launches, layers and the host come on top. Knows no request and no queue: see `serving`.
"""

from __future__ import annotations

from dataclasses import dataclass

from triblade.kv.layout import CODEC_PLANES, KVLayout
from triblade.models.config import ModelConfig
from triblade.quant.bits import bits_per_weight
from triblade.tune.hardware import TERA, Hardware, Kernels

BLOCK_TOKENS = 16
GROUPS = (64, 32, 16)
DENSE_BYTES = 2
NARROWEST_BITS = 4  # kernels multiply codes of 2 and 3 bits as 4-bit ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How matrices are stored.

    Attributes:
        scheme: `bf16`, `int8`, `int4`, `int3`, or `stored`: what the checkpoint has, in `bits`.
        bits: of a code in the file; 16: no codes.
        table_bits: of embedding and head, where kernels multiply codes of tables at all.
    """

    scheme: str
    bits: int
    table_bits: int = 16

    @property
    def is_packed(self) -> bool:
        return self.bits < 16


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of steps of one model on one device, with one kind of weights and of KV."""

    model: ModelConfig
    hardware: Hardware
    kernels: Kernels
    weights: Weights
    kv_dtype: str

    @property
    def body_parameters(self) -> int:
        """Weights of all layers' matrices."""
        return self.model.num_parameters - self._tables * self._table_parameters

    @property
    def body_bytes(self) -> float:
        """In memory, as kernels hold them."""
        return self.body_parameters * self._weight_bytes(self.weights.bits)

    @property
    def head_bytes(self) -> float:
        """Of the output table."""
        bits = 16 if self.kernels.dense_tables else self.weights.table_bits
        return self._table_parameters * self._weight_bytes(bits)

    @property
    def weight_bytes(self) -> float:
        """Everything that is held."""
        return self.body_bytes + self._tables * self.head_bytes

    @property
    def layout(self) -> KVLayout:
        """The rows of the cache."""
        return KVLayout(
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            block_size=BLOCK_TOKENS,
            codec=self.kv_dtype if self.kv_dtype in CODEC_PLANES else "bfloat16",
        )

    @property
    def kv_token_bytes(self) -> float:
        """Of one token, all layers."""
        return self.layout.row_bytes / BLOCK_TOKENS

    def decode_s(self, sequences: float, context: float, rows_each: float = 1.0) -> float:
        """A recorded step of so many sequences with `context` tokens in the cache, each computing `rows_each` tokens."""
        rows = sequences * rows_each
        read = sequences * self._seen(context) * self.kv_token_bytes
        read_s = read / (self.hardware.bandwidth * self.kernels.kv_bandwidth)
        attention = max(read_s, self._attention_s(rows, self._seen(context)))
        return self._linear_s(rows, rows) + attention + self._overhead_s(sequences)

    def prefill_s(self, tokens: float, cached: float, chunk: int) -> float:
        """A prompt of `tokens` behind `cached` ones, alone, in steps of at most `chunk` tokens."""
        seconds, done = 0.0, 0.0
        while done < tokens:
            rows = min(chunk, tokens - done)
            seconds += self.prompts_step_s(rows, cached + done + rows / 2, 1.0)
            done += rows
        return seconds

    def prompts_step_s(self, rows: float, context: float, prompts: float) -> float:
        """A step with so many tokens of prompts, `context` others before each on average, and so many prompts' logits."""
        launch_us = self.kernels.launch_us + self.kernels.spelled_launch_us * self.weights.is_packed
        launched_s = self.model.num_layers * launch_us * 1e-6
        device = self._linear_s(rows, prompts) + self._attention_s(rows, self._seen(context))
        return max(device, launched_s) + self._overhead_s(prompts)

    def _linear_s(self, rows: float, head_rows: float) -> float:
        """All matrix products; packed weights of many rows are spelled out for the library's products where that is faster."""
        body, head = 2.0 * self.body_parameters * rows, 2.0 * self._table_parameters * head_rows
        head_s = self._overlapped(
            self._read_s(self.head_bytes, is_packed=False), head / self._rate(self.kernels.dense_rate)
        )
        dense_s = self._overlapped(
            self._read_s(self.body_bytes, is_packed=self.weights.is_packed), body / self._rate(self.kernels.dense_rate)
        )
        if not self.weights.is_packed:
            return dense_s + head_s
        packed_s = self._overlapped(
            self._read_s(self.body_bytes, is_packed=True), body / self._rate(self.kernels.packed_rate)
        )
        if self.kernels.spelled_bytes:
            spelled = self.body_parameters * self.kernels.spelled_bytes
            packed_s = min(packed_s, dense_s + self._read_s(spelled, is_packed=False))
        return packed_s + head_s

    def _read_s(self, size: float, *, is_packed: bool) -> float:
        share = self.kernels.packed_bandwidth if is_packed else self.kernels.dense_bandwidth
        return size / (self.hardware.bandwidth * share)

    def _rate(self, share: float) -> float:
        """Operations per second of products; packed weights meet 8-bit activations on a CPU."""
        is_int8 = self.kernels.activation == "int8" and self.weights.is_packed
        return TERA * share * (self.hardware.int8 if is_int8 else self.hardware.float16)

    def _attention_s(self, rows: float, context: float) -> float:
        operations = 4.0 * self.model.q_size * self.model.num_layers * rows * context
        return operations / (TERA * self.hardware.float16 * self.kernels.attention_rate)

    def _overlapped(self, memory_s: float, arithmetic_s: float) -> float:
        power = self.kernels.overlap
        return float((memory_s**power + arithmetic_s**power) ** (1 / power))

    def _overhead_s(self, sequences: float) -> float:
        layers = self.model.num_layers * self.kernels.layer_us
        return (layers + self.kernels.step_us + sequences * self.kernels.sequence_us) * 1e-6

    def _seen(self, context: float) -> float:
        """Tokens that a query sees, on average over the layers: some have windows."""
        windows = [layer.window or context for layer in self.model.layers]
        return sum(min(context, window) for window in windows) / len(windows)

    def _weight_bytes(self, bits: int) -> float:
        if bits >= 16:
            return DENSE_BYTES
        inputs = (self.model.hidden_size, self.model.q_size, self.model.intermediate_size)
        group = next((size for size in GROUPS if all(width % size == 0 for width in inputs)), GROUPS[-1])
        return bits_per_weight(max(bits, NARROWEST_BITS), group, symmetric=True) / 8

    @property
    def _table_parameters(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def _tables(self) -> int:
        return 1 if self.model.tie_word_embeddings else 2
