"""Commands that measure: eval, bench, compare, doctor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from triblade import console
from triblade.commands.frame import BENCH_GROUP, INTERRUPTED, EngineFlags, LogLevelFlag, app, print_report
from triblade.config import BenchConfig, EngineConfig, client_api_key
from triblade.config.checks import require_at_least
from triblade.errors import ConfigError

if TYPE_CHECKING:
    from triblade.doctor.symptoms import Finding


NOTHING = EngineConfig(model="")


@app.command(name="eval", usage="triblade eval MODEL --text FILE [OPTIONS]")
def evaluate(
    engine: EngineFlags,
    *,
    text: Path,
    context: int = 2048,
    max_tokens: int | None = None,
    against: str | None = None,
    generations: int = 0,
    generation_tokens: int = 512,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "info",
) -> None:
    """Measure perplexity on a text file, and how far the model is from another one.

    The file is one stream of tokens without special tokens, cut into windows of --context tokens that share nothing.

    Args:
        text: UTF-8 text file.
        context: Tokens per window.
        max_tokens: Use only this many tokens from the start; default: all.
        against: Also report KL divergence (nats per token) and top-1 agreement to this model.
        generations: Also continue this many pieces of the text greedily, and report how much the continuations repeat.
        generation_tokens: Tokens of each continuation.
        as_json: Print one JSON object.
    """
    from triblade.quant.evaluate import evaluate_file

    console.setup_logging(log_level)
    require_at_least("generations", generations, 0)
    require_at_least("generation_tokens", generation_tokens, 1)
    report = evaluate_file(engine, text, context=context, max_tokens=max_tokens, against=against)
    if generations:
        rates = [_repetition(named, text, generations, generation_tokens) for named in _both(engine, against)]
        report = replace(
            report, repetition_rate=rates[0], against_repetition_rate=rates[1] if against is not None else None
        )
    print_report(report, as_json)


@app.command(usage="triblade bench MODEL|URL [OPTIONS]")
def bench(
    engine: EngineFlags,
    *,
    config: Annotated[BenchConfig, Parameter(name="*", group=BENCH_GROUP)] = BenchConfig(),  # noqa: B008 - frozen
    log_level: LogLevelFlag = "warning",
) -> int:
    """Measure a model in this process, or any OpenAI server at a URL, under load."""
    from triblade.bench.run import bench as run
    from triblade.bench.run import describe

    console.setup_logging(log_level)
    result = run(engine, config)
    print(describe(result, config.baseline))
    return INTERRUPTED if result.interrupted else 0


@app.command(usage="triblade compare BEFORE AFTER")
def compare(before: Path, after: Path, /) -> None:
    """Set two results of `bench --output` side by side."""
    from triblade.bench.report import comparison_lines
    from triblade.bench.result import load_result

    print(comparison_lines(load_result(before), load_result(after)))


@app.command(usage="triblade doctor [URL|MODEL|--target MODEL --draft MODEL] [OPTIONS]")
def doctor(
    engine: EngineFlags = NOTHING,
    *,
    text: Path | None = None,
    expected_perplexity: float | None = None,
    target: str | None = None,
    draft: str | None = None,
    probe: bool = True,
    prefill_workers: int = 1,
    decode_workers: int = 1,
    log_level: LogLevelFlag = "error",
) -> int:
    """Name what is wrong, its cause and what to do; exit code 1 if there is anything.

    With the URL of a server: ask it for some seconds. With a model and options of `serve`: whether it fits, what runs it.
    With --target and --draft: whether the draft fits. With nothing: which devices or cores should prefill and which decode.

    Args:
        text: With a URL: UTF-8 text whose perplexity is measured through the server.
        expected_perplexity: What the original model has on that text.
        target: The model to be served.
        draft: The small model that is to draft for it.
        probe: Also load both and let the draft propose 4 tokens at a time for a few prompts.
        prefill_workers: Devices wanted for prefill, when no model is given.
        decode_workers: Devices wanted for decode.
    """
    console.setup_logging(log_level)
    if engine != NOTHING:
        return _report(_examine(engine, text, expected_perplexity))
    if target is not None and draft is not None:
        return _compare_draft(target, draft, probe=probe)
    if target != draft:
        raise ConfigError("doctor compares two models", hint="give --target and --draft, or neither")
    from triblade.disagg.machine import describe_machine

    print(describe_machine(prefill_workers, decode_workers))
    return 0


def _examine(engine: EngineConfig, text: Path | None, expected_perplexity: float | None) -> list[Finding]:
    """Findings about a running server, if the model is an address, or about a configuration."""
    from triblade.bench.run import is_url

    if not is_url(engine.model):
        from triblade.doctor.configuration import examine

        return examine(engine)
    from triblade.doctor.symptoms import diagnose
    from triblade.doctor.visit import visit
    from triblade.quant.evaluate import read_text

    scored = read_text(text) if text is not None else ""
    return diagnose(
        asyncio.run(visit(engine.model, api_key=client_api_key(), text=scored, expected_perplexity=expected_perplexity))
    )


def _report(findings: Sequence[Finding]) -> int:
    for finding in findings:
        print(finding)
    if not findings:
        print("nothing wrong was found")
    return int(bool(findings))


def _compare_draft(target: str, draft: str, *, probe: bool) -> int:
    """Whether a draft model fits; 1 if not."""
    from triblade.engine.build import build_engine
    from triblade.engine.probe import probe as measure
    from triblade.models.loader import open_model
    from triblade.spec.rope_trial import fit_of_draft

    config = EngineConfig(model=target, drafter="draft", draft_model=draft)
    fit = fit_of_draft(open_model(config), open_model(EngineConfig(model=draft)))
    print(fit)
    if fit.refusal is not None:
        return 1
    if probe:
        acceptance = measure(build_engine(config))
        print(f"{'warning' if acceptance.is_near_zero else 'ok':8} acceptance: {acceptance}")
    return 0


def _both(engine: EngineConfig, against: str | None) -> list[EngineConfig]:
    return [engine] if against is None else [engine, replace(engine, model=against, revision=None, tokenizer=None)]


def _repetition(engine: EngineConfig, text: Path, count: int, tokens: int) -> float:
    """How much a model repeats itself when it goes on writing `count` pieces of a text."""
    from triblade.llm import LLM
    from triblade.models.loader import open_model
    from triblade.quant.evaluate import prompts_from
    from triblade.quant.repetition import repetition_rate
    from triblade.writing import long_texts

    prompts = prompts_from(open_model(engine), text, count)
    return repetition_rate(long_texts(LLM(engine), prompts, tokens))
