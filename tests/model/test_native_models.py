"""Whole tiny models as native step programs: against the reference with the kernels' roundings, and against themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import TYPES, write_model
from native_kernels import ISAS
from native_models import (
    Twin,
    all_logits,
    compute,
    executor_of,
    make_cache,
    native_executor,
    native_tiny,
    sequence,
    twin_executor,
)
from tiny import FAMILIES, PROMPT_TOKENS, StateDictSource, prompt
from tiny_engine import open_tiny, tiny_llm
from torch import Tensor

from triblade.config import EngineConfig
from triblade.engine.executor import TorchExecutor
from triblade.engine.native_program import why_not_native
from triblade.engine.outputs import FinishReason
from triblade.errors import CheckpointError, ConfigError, UnsupportedError
from triblade.models.config import model_config
from triblade.models.decoder import Decoder
from triblade.models.gguf_checkpoint import GGUFCheckpoint
from triblade.models.weights import load_weights
from triblade.ops.packing import Format, unpack
from triblade.quant.evaluate import evaluate_file
from triblade.quant.packed_weights import PackingReader
from triblade.sampling_params import SamplingParams

IDS = prompt(PROMPT_TOKENS + 15)
LONG = prompt(1050, seed=3)
SHORT = LONG[:60]


def assert_near(ours: Tensor, expected: Tensor, bound: float) -> None:
    """Root mean square of the difference, in parts of the logits' own."""
    error = (ours - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= bound, float(error)


# A last bit may tip a rounding to bfloat16 or to a code, and the difference goes through every layer behind it. Most models differ
# by less than 1e-6; with any part of the arithmetic left out none is below 0.1.
KINDS: list[tuple[torch.dtype, Any, float]] = [
    (torch.float32, None, 3e-3),
    (torch.bfloat16, None, 1.5e-2),
    (torch.float32, "int8", 5e-2),
    (torch.float32, "int4", 5e-2),
]


@pytest.mark.parametrize(("dtype", "scheme", "bound"), KINDS, ids=["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str, dtype: torch.dtype, scheme: Any, bound: float) -> None:
    model = native_tiny(family)
    native = native_executor(model, dtype, scheme)
    expected = all_logits(twin_executor(model, dtype, scheme), IDS)
    assert_near(all_logits(native, IDS), expected, bound)
    assert native.name.startswith("native (")


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    """All of a model at once: q/k norms, post norms, window, soft caps, gelu, tied embeddings."""
    for family in ("qwen3", "gemma2", "gemma3", "llama-bias"):
        model = native_tiny(family)
        native = native_executor(model, isa=isa)
        assert native.name == f"native ({isa})"
        assert_near(all_logits(native, IDS), all_logits(twin_executor(model), IDS), 3e-3)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_int8_cache(scheme: Any) -> None:
    """Rounded queries and weights of the attention are on top of what the twin rounds."""
    for family in ("llama", "gemma2", "qwen2-window"):
        model = native_tiny(family)
        native = native_executor(model, scheme=scheme, codec="int8")
        assert_near(all_logits(native, IDS), all_logits(twin_executor(model, scheme=scheme, codec="int8"), IDS), 0.1)


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize(("dtype", "scheme"), [kind[:2] for kind in KINDS], ids=["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama-bias", "gemma2", "mistral"])
def test_chunks_do_not_change_a_bit(family: str, dtype: torch.dtype, scheme: Any, codec: str) -> None:  # E14
    """A token's bits do not depend on how its prompt is cut: every row sums in one order whatever tile it is in."""
    native = native_executor(native_tiny(family), dtype, scheme, codec)
    whole = all_logits(native, IDS)
    for number, chunk in enumerate((1, 7, 16, 25)):
        assert torch.equal(all_logits(native, IDS, chunk, number), whole)


@pytest.mark.parametrize("scheme", [None, "int4"])
def test_batches_do_not_change_a_bit(scheme: Any) -> None:  # E14
    """Prompt chunks and decodes of four sequences in one step, each as if it were alone."""
    native = native_executor(native_tiny("gemma2"), scheme=scheme, threads=3)
    prompts = [prompt(length, seed=length) for length in (40, 9, 64, 17)]
    alone = [all_logits(native, tokens) for tokens in prompts]
    requests = [sequence(number, tokens) for number, tokens in enumerate(prompts)]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    plan = ((30, 1, 64, 5), (1, 1, 0, 12), (9, 7, 0, 0))
    for sizes in plan:
        chosen = [number for number, size in enumerate(sizes) if size]
        made = compute(native, [requests[n] for n in chosen], [sizes[n] for n in chosen])
        for number, logits in zip(chosen, made, strict=True):
            rows[number].append(logits)
    for ours, expected in zip(rows, alone, strict=True):
        assert torch.equal(torch.cat(ours), expected)


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_threads_do_not_change_a_bit(family: str, codec: str) -> None:  # E14
    """Also where a long context is cut along its keys, so that several threads compute one token's attention."""
    model = native_tiny(family, max_position_embeddings=1100)
    one = native_executor(model, codec=codec, threads=1, max_tokens=1100, max_rows=1100)
    expected = all_logits(one, LONG)
    for threads in (2, 3):
        native = native_executor(model, codec=codec, threads=threads, max_tokens=1100, max_rows=1100)
        request = sequence(0, LONG)
        rows = compute(native, [request], [len(LONG) - 12])
        for size in (1, 5, 1, 2, 3):
            rows += compute(native, [request], [size])
        assert torch.equal(torch.cat(rows), expected)


# ---- GGUF files


def gguf_model(path: Path, kind: Any) -> GGUFCheckpoint:
    """A llama with biases whose rope rows the file permutes, all matrices of one type."""
    model = native_tiny("llama-bias")
    return GGUFCheckpoint(write_model(path / "model.gguf", "llama", model.hf_config, model.source.tensors, kind=kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_gguf_blocks_are_multiplied_as_stored(kind: str, tmp_path: Path) -> None:
    checkpoint = gguf_model(tmp_path, TYPES[kind])
    config = model_config(checkpoint.config)
    weights = PackingReader(checkpoint, config, torch.bfloat16).read()
    expected_format = {"Q4_0": Format.INT4, "Q4_1": Format.INT4, "Q8_0": Format.INT8, "F16": Format.BF16}[kind]
    assert weights.layers[0].qkv.format == weights.embedding.format == expected_format
    assert (weights.layers[0].qkv.offsets is not None) == (kind == "Q4_1")
    native = executor_of(config, weights)
    twin = Twin("bfloat16" if kind == "F16" else "int8", group=32)
    dtype = torch.bfloat16 if kind == "F16" else torch.float32
    dense = StateDictSource({name: checkpoint.tensor(name).to(dtype).float() for name in checkpoint.names()})
    decoder = Decoder(config, load_weights(dense, config, torch.float32), twin, config.context_length)
    expected = all_logits(TorchExecutor(decoder, make_cache(config, "bfloat16", "tokens"), config.vocab_size), IDS)
    assert_near(all_logits(native, IDS), expected, 5e-2)


def test_mixed_types_of_one_matrix_become_dense(tmp_path: Path) -> None:
    model = native_tiny("llama")
    other = {"blk.1.attn_v.weight": (model.source.tensors["model.layers.1.self_attn.v_proj.weight"], TYPES.Q8_0)}
    extra: dict[str, Any] = {"/tensors": other, "kind": TYPES.Q4_0}
    checkpoint = GGUFCheckpoint(
        write_model(tmp_path / "m.gguf", "llama", model.hf_config, model.source.tensors, **extra)
    )
    config = model_config(checkpoint.config)
    layers = PackingReader(checkpoint, config, torch.bfloat16).read().layers
    assert [layer.qkv.format for layer in layers] == [Format.INT4, Format.BF16, Format.INT4]
    v = unpack(layers[1].qkv)[-config.kv_size :]
    assert torch.equal(v, checkpoint.tensor("model.layers.1.self_attn.v_proj.weight").bfloat16().float())


def test_stored_blocks_of_a_wrong_shape_are_refused(tmp_path: Path) -> None:  # A14
    model = native_tiny("llama")
    extra: dict[str, Any] = {
        "/tensors": {"blk.1.attn_output.weight": (torch.ones(64, 96), TYPES.Q8_0)},
        "kind": TYPES.Q8_0,
    }
    checkpoint = GGUFCheckpoint(
        write_model(tmp_path / "m.gguf", "llama", model.hf_config, model.source.tensors, **extra)
    )
    with pytest.raises(
        CheckpointError, match=r"o_proj\.weight has shape \[64, 96\], the configuration asks for \[64, 64\]"
    ):
        PackingReader(checkpoint, model_config(checkpoint.config), torch.bfloat16).read()


# ---- inside the engine


def native_llm(name: str = "llama", **options: Any) -> Any:
    opened = open_tiny(name, hidden_size=64, intermediate_size=96)
    settings = {
        "deterministic": False,
        "backend": "native",
        "kv_cache_dtype": "bfloat16",
        "block_size": 16,
        "num_kv_blocks": 32,
    }
    return tiny_llm(opened, **{**settings, "threads": 2, **options})


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_greedy_tokens_do_not_depend_on_scheduling(options: dict[str, Any]) -> None:  # E14, E15
    """Alone or together, whole or in chunks, cold or from the prefix cache, after preemption: the same tokens."""
    prompts = [prompt(length, seed=length) for length in (9, 33, 20)]
    reference = [native_llm(**options).generate([ids], GREEDY)[0][0].token_ids for ids in prompts]
    small = {"num_kv_blocks": 5, "max_num_batched_tokens": 7}
    for extra in ({}, {"max_num_batched_tokens": 7}, {"threads": 3}, small):
        llm = native_llm(**options, **extra)
        for _ in range(2):  # the second time from the cache
            assert [c[0].token_ids for c in llm.generate(prompts, GREEDY)] == reference


def test_greedy_tokens_are_those_of_the_reference() -> None:
    prompts = [prompt(length, seed=length) for length in (9, 33, 20)]
    native = native_llm().generate(prompts, GREEDY)
    reference = native_llm(backend="reference").generate(prompts, GREEDY)
    assert [c[0].token_ids for c in native] == [c[0].token_ids for c in reference]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_a_row_that_is_not_finite_ends_with_an_error_and_harms_nobody(isa: str, options: dict[str, Any]) -> None:  # A22
    opened = open_tiny("llama", hidden_size=64, intermediate_size=96)
    if options:  # rounding refuses nothing, so the number that overflows is in a norm
        opened.checkpoint.tensor("model.norm.weight")[5] = torch.nan
        llm = tiny_llm(
            opened, deterministic=False, backend="native", kv_cache_dtype="bfloat16", block_size=16, isa=isa, **options
        )
        (bad,) = llm.generate([IDS[:8]], GREEDY)
        assert bad[0].finish_reason is FinishReason.ERROR
        return
    opened.checkpoint.tensor("model.embed_tokens.weight")[77] = torch.inf
    llm = tiny_llm(
        opened,
        deterministic=False,
        backend="native",
        kv_cache_dtype="bfloat16",
        block_size=16,
        isa=isa,
        num_kv_blocks=4,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={77: -100})
    good = llm.generate([IDS[:8]], params)[0][0].token_ids
    (bad,) = llm.generate([[3, *IDS[:20], 77, *IDS[:20]]], params)
    assert bad[0].finish_reason is FinishReason.ERROR
    # What it left in the cache is behind the ends of those that get its blocks.
    for ids in (IDS[:8], IDS[1:9], IDS[2:10], IDS[:8]):
        made = llm.generate([ids], params)[0][0]
        assert made.finish_reason is FinishReason.LENGTH
    assert made.token_ids == good


def test_two_engines_share_nothing() -> None:
    """Two programs in two threads at once give what each gives alone."""
    from concurrent.futures import ThreadPoolExecutor

    models = [native_tiny("llama"), native_tiny("gemma2", seed=1)]
    alone = [all_logits(native_executor(model, threads=2), SHORT, 9) for model in models]
    executors = [native_executor(model, threads=2) for model in models]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            together = list(pool.map(lambda executor: all_logits(executor, SHORT, 9), executors))
            assert all(torch.equal(ours, expected) for ours, expected in zip(together, alone, strict=True))


def test_isa_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_llm(isa="portable").engine.runner.executor.name == "native (portable)"
    monkeypatch.setenv("TRIBLADE_ISA", "portable")
    assert native_llm().engine.runner.executor.name == "native (portable)"
    assert (
        native_llm(isa=ISAS[0]).engine.runner.executor.name == f"native ({ISAS[0]})"
    )  # the option is nearer than the environment


def test_an_isa_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"instruction set .*'avx9000'") as error:
        native_llm(isa="avx9000")
    assert isinstance(error.value, UnsupportedError)
    assert error.value.hint == f"this processor runs: {', '.join(ISAS)}"


def test_what_the_kernels_do_not_run_is_said() -> None:
    config = model_config(native_tiny("llama").hf_config)
    assert why_not_native(config, "bfloat16", 16) is None
    assert why_not_native(config, "float32", 16) == "KV cache dtype float32 (native: bfloat16, int8)"
    assert why_not_native(config, "int8", 24) == "block size 24 (native: a multiple of 16)"
    odd = model_config(native_tiny("llama", head_dim=20).hf_config)
    assert why_not_native(odd, "int8", 16) == "head size 20 (native: a multiple of 16)"
    wide = model_config(native_tiny("llama", hidden_size=72, head_dim=16).hf_config)
    assert why_not_native(wide, "int8", 16) == "hidden size 72 (native: a multiple of 16)"
    with pytest.raises(
        UnsupportedError, match=r"backend native .*block size 24.*\n.*that, or use --backend reference$"
    ):
        native_llm(block_size=24)
    with pytest.raises(UnsupportedError, match=r"quantization int4 .*deterministic.*\n.* without --quantization$"):
        native_llm(deterministic=True, quantization="int4", backend="auto")


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"backend": "native"}], ids=str)
def test_eval_refuses_what_it_does_not_measure(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="as they are stored"):
        evaluate_file(EngineConfig(model="any", **options), Path("any.txt"))


def test_sizes_are_counted() -> None:
    model = native_tiny("llama-tied")
    native = native_executor(model, torch.bfloat16)
    assert native.weight_bytes == sum(t.numel() for t in model.source.tensors.values() if t.ndim == 2) * 2
    assert native.buffer_bytes >= 256 * 64 * 4
