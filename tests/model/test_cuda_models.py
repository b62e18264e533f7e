"""Whole tiny models on the CUDA kernels, emulated on the host: against float32, in chunks, batches, and with quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engines import SIZES, cuda_llm, cuda_open
from cuda_models import (
    CPU,
    RecordingExecutor,
    config_of,
    cuda_executor,
    cuda_tiny,
    kernel_folder,
    prompts,
    reference_executor,
    relative,
)
from native_models import all_logits, rounded_source, sequence
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm

from triblade.engine.cuda import CudaExecutor, why_not_cuda
from triblade.engine.cuda_steps import ONE_RECORDS, recording
from triblade.engine.request import Request
from triblade.engine.runner import ModelRunner
from triblade.engine.scheduler import ScheduledRequest
from triblade.models.config import model_config
from triblade.ops.cuda.packing import unpack
from triblade.quant.device_weights import DeviceReader, device_bytes
from triblade.sampling_params import SamplingParams
from triblade.spec.sampler import Sampler

IDS = prompt(30)
BOUND = 6e-2  # of bfloat16's roundings in a model of three layers


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernel_folder(tmp_path_factory)


KINDS = [
    ("llama-bias", "bfloat16"),
    ("qwen2-window", "int8"),
    ("qwen3", "bfloat16"),
    ("gemma2", "int8"),
    ("gemma3", "bfloat16"),
    ("phi3-partial", "bfloat16"),
]


@pytest.mark.parametrize(("family", "codec"), KINDS)
def test_every_family(family: str, codec: str, folder: Path) -> None:
    """Biases, q/k norms, post norms, windows, soft caps, gelu, partial rotation, tied and separate heads."""
    model = cuda_tiny(family)
    config = config_of(model)
    ours = all_logits(cuda_executor(model.source, config, folder, codec=codec), IDS, 11)
    expected = all_logits(reference_executor(model.source, config, codec, torch.float32), IDS)
    rounded = all_logits(reference_executor(model.source, config, codec, torch.bfloat16), IDS)
    # The reference in bfloat16 rounds more often; wrong parts of the arithmetic make several times its difference.
    assert relative(ours, expected) < 1.25 * relative(rounded, expected)


def test_float16(folder: Path) -> None:
    model = cuda_tiny("qwen2")
    config = config_of(model)
    ours = all_logits(cuda_executor(model.source, config, folder, torch.float16), IDS)
    assert relative(ours, all_logits(reference_executor(model.source, config, "float32", torch.float32), IDS)) < 6e-3


def test_mixed_steps_and_more_rows_than_are_streamed(folder: Path) -> None:
    """Chunks of several lengths and single tokens in one step, first together beyond what the streaming kernel takes."""
    model = cuda_tiny("mistral", max_position_embeddings=320, num_hidden_layers=1)
    config = config_of(model)
    ours = cuda_executor(model.source, config, folder)
    alone = reference_executor(model.source, config, "bfloat16", torch.float32)
    tokens = prompts((9, 22, 125))
    expected = [all_logits(alone, ids, number=number) for number, ids in enumerate(tokens)]
    requests = [sequence(number, ids) for number, ids in enumerate(tokens)]
    for sizes in ((4, 10, 118), (4, 11, 6), (1, 1, 1)):
        items = [ScheduledRequest.next(r, size) for r, size in zip(requests, sizes, strict=True)]
        ours.forward(items)
        ends = list(accumulate(sizes))
        for number, (end, item) in enumerate(zip(ends, items, strict=True)):
            scores = ours.score([end - 1], with_logits=True)
            assert scores.logits is not None
            last = expected[number][item.start + item.num_tokens - 1]
            assert relative(scores.logits[0], last) < BOUND
            assert scores.best == [int(scores.logits[0].argmax())]
            item.request.num_computed_tokens += item.num_tokens


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_weights_rounded_while_loading(scheme: Any, folder: Path) -> None:
    """The model computes what its codes say: the reference gets them spelled out."""
    model = cuda_tiny("llama", hidden_size=64, intermediate_size=192)
    config = config_of(model)
    weights = DeviceReader(model.source, config, torch.bfloat16, CPU, scheme).read()
    layer = weights.layers[0]
    assert [m.bits for m in (layer.qkv, layer.output, layer.gate_up, layer.down)] == [4 if scheme == "int4" else 8] * 4
    expected = rounded_source(model, torch.float32, scheme).tensors["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(unpack(layer.down), expected)
    total = sum(m.nbytes for w in weights.layers for m in (w.qkv, w.output, w.gate_up, w.down))
    assert total < device_bytes(model.source, config, torch.bfloat16, scheme)
    logits = all_logits(cuda_executor(model.source, config, folder, scheme=scheme), IDS)
    assert bool(logits.isfinite().all())


def greedy(executor: Any, requests: list[Request], steps: int) -> list[list[int]]:
    """Decode steps of all requests together, as the runner and the engine do it: the tokens of each."""
    for _ in range(steps):
        executor.forward([ScheduledRequest.next(r, 1) for r in requests])
        best = executor.score(range(len(requests)), with_logits=False).best
        for request, token in zip(requests, best, strict=True):
            request.num_computed_tokens += 1
            request.append(token)
    return [request.output_token_ids for request in requests]


def begun(executor: Any, lengths: tuple[int, ...]) -> list[Request]:
    """Requests of which everything but the last token is computed."""
    requests = [sequence(number, ids) for number, ids in enumerate(prompts(lengths))]
    for request in requests:
        executor.forward([ScheduledRequest.next(request, request.num_tokens - 1)])
        request.num_computed_tokens = request.num_tokens - 1
    return requests


def launched_and_recorded(folder: Path) -> tuple[CudaExecutor, RecordingExecutor]:
    """Two executors of one tiny model: kernel by kernel, and whole steps."""
    model = cuda_tiny("qwen2", num_hidden_layers=2)
    config = config_of(model)
    launched, recorded = (
        cuda_executor(model.source, config, folder, kind=kind) for kind in (CudaExecutor, RecordingExecutor)
    )
    return launched, recorded


def test_steps_run_ahead(folder: Path) -> None:
    """Tokens are those of launched steps; every step but the first is found under way, with the next one behind it."""
    launched, recorded = launched_and_recorded(folder)
    expected = greedy(launched, begun(launched, (7, 12, 20)), 9)
    requests = begun(recorded, (7, 12, 20))
    before = recorded.replays
    assert greedy(recorded, requests, 9) == expected
    assert recorded.replays - before == 10  # the last of them for nothing


def test_requests_leave_a_chain_of_steps(folder: Path) -> None:
    """Those that stay find their step under way, in whatever order; nothing is computed for nothing but the last step.
    What a request that left still wrote is behind its end."""
    launched, recorded = launched_and_recorded(folder)
    results = []
    for executor in (launched, recorded):
        requests = begun(executor, (7, 12, 20, 9))
        before = executor.replays if isinstance(executor, RecordingExecutor) else 0
        greedy(executor, requests, 3)
        greedy(executor, [requests[3], requests[0], requests[1]], 3)
        greedy(executor, [requests[1]], 3)
        results.append([request.output_token_ids for request in requests])
        for layer in range(executor.cache.layout.num_layers):
            tables = torch.tensor([list(requests[2].block_table)])
            results[-1].append([x[0, :22].float().tolist() for x in executor.cache.read(layer, tables)])
    assert results[0] == results[1]
    assert recorded.replays - before == 10


def test_blocks_that_come_while_steps_run(folder: Path) -> None:
    """A table grows one step before it is needed: the chain goes on with it. Without a block in time the step begins anew."""
    launched, recorded = launched_and_recorded(folder)
    expected = greedy(launched, begun(launched, (7, 12)), 30)
    for ahead in (1, 0):
        requests = begun(recorded, (7, 12))
        whole = [list(request.block_table) for request in requests]
        for request in requests:
            request.block_table = request.block_table[:1]
        for _ in range(30):
            for request, blocks in zip(requests, whole, strict=True):
                needed = -(-(request.num_tokens + ahead) // 16)
                request.block_table.extend(blocks[len(request.block_table) : needed])
            greedy(recorded, requests, 1)
        assert [request.output_token_ids for request in requests] == expected
        assert recorded._now is not None
        assert recorded._now.number == (29 if ahead else 3)  # steps since one began from the host's inputs


def test_logits_of_a_step_that_was_overtaken(folder: Path) -> None:
    """They are asked for when the next step has run already: the step is computed again."""
    launched, recorded = launched_and_recorded(folder)
    results = []
    for executor in (launched, recorded):
        requests = begun(executor, (7, 12))
        tokens = greedy(executor, requests, 3)
        executor.forward([ScheduledRequest.next(r, 1) for r in requests])
        scores = executor.score([1, 0], with_logits=True)
        assert scores.logits is not None
        results.append((tokens, scores.best, scores.logits.tolist()))
    assert results[0] == results[1]


class Undrawn:
    """An executor that leaves drawing to the host."""

    def __init__(self, executor: Any) -> None:
        self.forward, self.score, self.max_rows = executor.forward, executor.score, executor.max_rows


def test_drawn_tokens_run_ahead_as_well(folder: Path) -> None:
    """Requests with temperatures and without, from their prompts on: the host's tokens, seed for seed, step behind step."""
    model = cuda_tiny("qwen2", num_hidden_layers=2)
    config = config_of(model)
    results = []
    for draws in (False, True):
        executor = cuda_executor(model.source, config, folder, kind=RecordingExecutor)
        runner = ModelRunner(executor if draws else Undrawn(executor), Sampler(config.vocab_size))  # type: ignore[arg-type]
        requests = [sequence(number, ids) for number, ids in enumerate(prompts((7, 12, 20)))]
        for request, temperature in zip(requests, (0.8, 0.0, 1.2), strict=True):
            request.params, request.seed = SamplingParams(temperature=temperature, min_p=0.01), request.number + 2**62
        for step in range(10):
            sizes = [r.num_tokens - r.num_computed_tokens for r in requests]
            before = executor.replays
            for result in runner.execute([ScheduledRequest.next(r, n) for r, n in zip(requests, sizes, strict=True)]):
                result.request.num_computed_tokens += result.item.num_tokens
                result.request.append(result.token_ids[0])
            if step > 1:
                assert executor.replays - before == 1
        assert executor._now is not None
        assert (executor._now.number > 5) == draws
        results.append([request.output_token_ids for request in requests])
    assert results[0] == results[1]


DRAFTS = [  # what three requests have drafted for them, step by step
    ((3, 3, 3), 16),
    ((0, 3, 1), 16),
    ((8, 0, 0), 36),
    ((0, 0, 0), 4),
    ((1, 2, 0), 12),
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_verified_in_recorded_steps(folder: Path, temperature: float) -> None:
    """Right and wrong drafts of several lengths together: the tokens of plain steps, seed for seed, and nothing is launched."""
    model = cuda_tiny("qwen2", num_hidden_layers=2)
    config = config_of(model)
    plain, drafted = (cuda_executor(model.source, config, folder, kind=RecordingExecutor) for _ in range(2))
    runners = [ModelRunner(executor, Sampler(config.vocab_size)) for executor in (plain, drafted)]
    requests = [[sequence(number, ids) for number, ids in enumerate(prompts((7, 12, 20)))] for _ in runners]
    for request in (r for group in requests for r in group):
        request.params, request.seed = SamplingParams(temperature=temperature, min_p=0.01), request.number + 2**62

    def step(runner: ModelRunner, group: list[Request]) -> None:
        sizes = [r.num_tokens + len(r.draft_token_ids) - r.num_computed_tokens for r in group]
        for result in runner.execute([ScheduledRequest.next(r, n) for r, n in zip(group, sizes, strict=True)]):
            result.request.num_computed_tokens = result.item.start + result.item.num_tokens
            result.request.num_computed_tokens -= result.item.num_draft_tokens - result.num_accepted_tokens
            for token in result.token_ids:
                result.request.append(token)

    for _ in range(40):
        step(runners[0], requests[0])
    answers = [request.output_token_ids for request in requests[0]]
    step(runners[1], requests[1])
    for lengths, rows in DRAFTS:
        for request, answer, length in zip(requests[1], answers, lengths, strict=True):
            coming = answer[len(request.output_token_ids) :][:length]
            request.propose([*coming[:2], *(token + 1 for token in coming[2:])], None)
        before = drafted.replays
        step(runners[1], requests[1])
        assert drafted.replays > before
        assert drafted._now is not None
        assert drafted._now.recorded.inputs.tokens.shape[1] == rows
    for request, answer in zip(requests[1], answers, strict=True):
        assert request.output_token_ids == answer[: len(request.output_token_ids)]
    assert [len(request.output_token_ids) for request in requests[1]] == [11, 12, 9]


def test_a_step_that_was_not_expected_is_computed(folder: Path) -> None:
    """A request takes another token than its best, gets its blocks taken away and others: what ran ahead is dropped."""
    launched, recorded = launched_and_recorded(folder)
    results = []
    for executor in (launched, recorded):
        requests = begun(executor, (7, 12, 13))
        requests[2].block_table = requests[2].block_table[:1]  # of 16 tokens
        greedy(executor, requests, 3)
        requests[2].block_table = sequence(2, [1]).block_table
        greedy(executor, requests[:2], 2)
        requests[0].token_ids[-1] = requests[0].output_token_ids[-1] = 5
        greedy(executor, requests, 4)
        requests[1].block_table = requests[1].block_table[:]
        greedy(executor, requests, 4)
        results.append([request.output_token_ids for request in requests])
    assert results[0] == results[1]


def test_guessing_stops_where_it_is_wrong(folder: Path) -> None:
    """Tokens that are not the best: after a wrong guess nothing runs ahead until one would have been right."""
    model = cuda_tiny("qwen2", num_hidden_layers=1)
    executor = cuda_executor(model.source, config_of(model), folder, kind=RecordingExecutor)
    (request,) = begun(executor, (9,))
    for step in range(4):
        before = executor.replays
        executor.forward([ScheduledRequest.next(request, 1)])
        executor.score([0], with_logits=False)
        assert executor.replays - before == (2 if step == 0 else 1)
        request.num_computed_tokens += 1
        request.append(4)


def test_what_is_left_to_the_reference() -> None:
    config = model_config(cuda_tiny("llama").hf_config)
    assert why_not_cuda(config, torch.bfloat16, "bfloat16") is None
    assert why_not_cuda(config, torch.float32, "float32") == "dtype torch.float32 (CUDA kernels: bfloat16, float16)"
    assert "KV cache dtype float16" in str(why_not_cuda(config, torch.bfloat16, "float16"))
    narrow = model_config(cuda_tiny("llama", head_dim=20).hf_config)
    assert why_not_cuda(narrow, torch.bfloat16, "int8") == "80 inputs (CUDA kernels: a multiple of 64)"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_of_prompts(pooling: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others that generate, whose steps would be replayed: the reference's vectors, and nobody else's tokens change."""
    reference = tiny_llm(open_tiny("llama", **SIZES), deterministic=False, backend="reference")
    llm = cuda_llm(cuda_open(), folder, monkeypatch)
    speaking = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (expected,) = llm.generate([IDS[:9]], speaking)
    wanted = [IDS, IDS[3:8], IDS[:1]]
    params = [speaking] + [SamplingParams(max_tokens=0, pooling=pooling)] * len(wanted)
    spoken, *found = llm.generate([IDS[:9], *wanted], params)
    assert spoken[0].token_ids == expected[0].token_ids
    ours = torch.tensor([choice.embedding for (choice,) in found])
    assert (ours * torch.tensor(reference.embed(wanted, pooling))).sum(-1).min() > 0.99
    llm.engine.check_idle()


@pytest.mark.parametrize("is_default", [True, False])
def test_steps_are_recorded_one_at_a_time_in_the_threads_stream(
    is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded kernel keeps the priority of the stream it was recorded in; the default stream cannot be recorded."""
    recorded: list[dict[str, Any]] = []

    @contextmanager
    def graph(_: object, **options: Any) -> Iterator[None]:
        recorded.append(options | {"alone": ONE_RECORDS.locked()})
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "default" if is_default else "high")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    with recording("graph", "pool"):
        recorded.append({})
    stream = None if is_default else "high"
    expected = {"pool": "pool", "stream": stream, "capture_error_mode": "thread_local", "alone": True}
    assert recorded == [expected, {}]
    assert not ONE_RECORDS.locked()
