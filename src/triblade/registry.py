"""Plain string tables: name -> "module:attribute", imported only when asked for.

Adding a model family, a KV codec or a backend is one file and one line here. The table knows nothing of what it holds; an
unknown name fails with the list of names and the nearest one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from triblade.errors import ConfigError


class Registry(Mapping[str, Any]):
    """A read-only mapping that imports an entry on first use."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        module, _, attribute = self._entries[name].partition(":")
        return getattr(import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def unknown_name(kind: str, name: str, choices: Mapping[str, Any] | list[str]) -> ConfigError:
    """The error for a name that is not in `choices`, naming the nearest one."""
    near = difflib.get_close_matches(name, list(choices), n=1)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {kind}: {name!r}", hint=f"{suggestion}choices: {', '.join(sorted(choices))}")


# Hugging Face `architectures` entry -> the function that turns its config into ours.
MODELS = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "triblade.models.families.llama:llama",
        "MistralForCausalLM": "triblade.models.families.llama:mistral",
        "Qwen2ForCausalLM": "triblade.models.families.qwen:qwen2",
        "Qwen3ForCausalLM": "triblade.models.families.qwen:qwen3",
        "Phi3ForCausalLM": "triblade.models.families.phi:phi3",
        "Gemma2ForCausalLM": "triblade.models.families.gemma:gemma2",
        "Gemma3ForCausalLM": "triblade.models.families.gemma:gemma3",
    },
)

# `quant_method` in config.json -> the class that reads and writes such checkpoints.
CHECKPOINT_FORMATS = Registry(
    "checkpoint format",
    {
        "compressed-tensors": "triblade.quant.formats.compressed_tensors:CompressedTensors",
        "awq": "triblade.quant.formats.awq:AWQ",
        "gptq": "triblade.quant.formats.gptq:GPTQ",
    },
)

KV_CODECS = Registry(
    "KV cache dtype",
    {
        "float32": "triblade.kv.codecs:float32",
        "bfloat16": "triblade.kv.codecs:bfloat16",
        "float16": "triblade.kv.codecs:float16",
        "int8": "triblade.kv.codecs:int8",
    },
)

# Name -> factory (layout, table or None, dtype of the receiver's cache or None) -> `kv.wire.WireCodec`.
WIRE_CODECS = Registry(
    "KV codec on the wire",
    {
        "raw": "triblade.kv.wire:RawWire",
        "int8": "triblade.kv.wire:Int8Wire",
        "pca-lut": "triblade.kv.wire_pca:PcaLutWire",
    },
)

# Name -> a `disagg.links.Connector`, without arguments.
CONNECTORS = Registry(
    "connector",
    {
        "local": "triblade.disagg.links:LocalConnector",
        "shm": "triblade.disagg.sockets:UnixConnector",
        "tcp": "triblade.disagg.sockets:TcpConnector",
        "cuda-ipc": "triblade.disagg.cuda_ipc:CudaIpcConnector",
    },
)

# Steps of a quantization, composed with "+": `awq+gptq`.
PASSES = Registry(
    "quantization pass",
    {
        "rtn": "triblade.quant.passes:RTN",
        "range": "triblade.quant.passes:RANGE",
        "awq": "triblade.quant.passes:AWQ",
        "balance": "triblade.quant.passes:BALANCE",
        "smooth": "triblade.quant.passes:SMOOTH",
        "correct": "triblade.quant.passes:CORRECT",
        "gptq": "triblade.quant.passes:GPTQ",
        "refine": "triblade.quant.passes:REFINE",
    },
)

# Name -> function (config, model, kernels) -> `engine.drafters.DrafterPlan`.
DRAFTERS = Registry(
    "drafter",
    {
        "suffix": "triblade.spec.suffix:SuffixPlan",
        "draft": "triblade.engine.draft_plans:draft_model",
        "self": "triblade.engine.draft_plans:self_draft",
        "eagle": "triblade.engine.eagle:eagle_head",
    },
)

# Name -> class (cache, model) -> `engine.attend.StepAttention`; see `engine.attention_choice.AttentionKind`.
ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "flash_attn": "triblade.engine.attention_packages:FlashAttention",
        "flashinfer": "triblade.engine.attention_packages:FlashInfer",
        "triton": "triblade.engine.attention_packages:TritonAttention",
        "sdpa": "triblade.engine.attend:SdpaAttention",
        "eager": "triblade.engine.attend:EagerAttention",
    },
)

# Name -> class (matrices, dtype) of products where they are faster than ours; see `engine.linear_choice`.
LINEAR_BACKENDS = Registry("linear backend", {"humming": "triblade.ops.cuda.humming:HummingProducts"})

# Name -> function without arguments -> `serve.tools.formats.ToolFormat`.
TOOL_CALL_PARSERS = Registry(
    "tool call parser",
    {
        "hermes": "triblade.serve.tools.formats:hermes",
        "llama3_json": "triblade.serve.tools.formats:llama3_json",
        "mistral": "triblade.serve.tools.formats:mistral",
        "json": "triblade.serve.tools.formats:plain_json",
    },
)

# Name -> function without arguments -> `serve.reasoning.Markers`.
REASONING_PARSERS = Registry(
    "reasoning parser",
    {
        "qwen3": "triblade.serve.reasoning:think",
        "deepseek_r1": "triblade.serve.reasoning:think",
        "mistral": "triblade.serve.reasoning:mistral_think",
    },
)

BACKENDS = Registry(
    "backend",
    {
        "reference": "triblade.ops.reference:ReferenceBackend",
        "deterministic": "triblade.ops.deterministic:DeterministicBackend",
    },
)
