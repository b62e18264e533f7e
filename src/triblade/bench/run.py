"""`triblade bench`: find the target, measure its words, warm up, drive the load while watching, report.

What was measured when somebody interrupts is reported and saved, and said to be part of a run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path

import psutil

from triblade.bench.driver import Driver
from triblade.bench.metrics import summarize
from triblade.bench.prelude import tokens_per_word, warm_up
from triblade.bench.report import comparison_lines, result_page, summary_lines
from triblade.bench.result import Result, load_result
from triblade.bench.target import Target
from triblade.bench.watch import Watch
from triblade.bench.workload import WordText, conversations
from triblade.config import BenchConfig, EngineConfig, client_api_key
from triblade.errors import BenchError, ConfigError

log = logging.getLogger(__name__)


def bench(engine: EngineConfig, config: BenchConfig) -> Result:
    """Measure a model (loaded here) or a server (`engine.model` is its address), write what `config` asks for.

    Raises:
        ConfigError: options, dataset or baseline are wrong, or nobody answers at the address.
        BenchError: not one request succeeded.
        KeyboardInterrupt: interrupted before any request had ended.
        TribladeError: whatever loading the model raises.
    """
    baseline = None if config.baseline is None else load_result(config.baseline)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        result = runner.run(_measure(engine, config))
    if config.output is not None:
        result.save(config.output)
    if config.html is not None:
        config.html.write_text(result_page(result, baseline), encoding="utf-8")
    if result.interrupted and not result.records:
        raise KeyboardInterrupt
    if not result.summary["output_tokens"]:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in result.summary["errors"].items())
        raise BenchError(f"no request succeeded: {reasons or 'none was sent'}")
    return result


def describe(result: Result, baseline: Path | None) -> str:
    """The lines to print."""
    lines = summary_lines(result)
    return lines if baseline is None else f"{lines}\n\n{comparison_lines(load_result(baseline), result)}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop that servers use, too, where there is one: what the load costs is taken from a server beside it."""
    try:
        import uvloop
    except ImportError:  # as on Windows
        return None
    return uvloop.new_event_loop


async def _measure(engine: EngineConfig, config: BenchConfig) -> Result:
    async with _target(engine, config) as target:
        text = WordText(await tokens_per_word(target, config))
        log.info("%s: %.2f tokens per word", target.name, text.tokens_per_word)
        asked = conversations(config, text)
        await warm_up(target, config, text)
        driver = Driver(target, config)
        watch = Watch(target, _process(engine, config))
        await watch.begin()
        watching = asyncio.create_task(watch.run())
        interrupted = False
        try:
            await driver.run(asked, config.num_requests)
        except asyncio.CancelledError:
            interrupted = True
        finally:
            duration_s = driver.now_s
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        await watch.end()
    summary = summarize(driver.records, duration_s, config.limits_s())
    result = Result.of(target.name, config, summary, watch.figures(), driver.records)
    return replace(result, interrupted=interrupted)


@asynccontextmanager
async def _target(engine: EngineConfig, config: BenchConfig) -> AsyncIterator[Target]:
    target: Target
    if is_url(engine.model):
        _refuse_engine_options(engine)
        from triblade.bench.http_target import HTTPTarget

        target = await HTTPTarget.connect(engine.model, config, client_api_key())
    else:
        from triblade.bench.engine_target import EngineTarget

        target = await EngineTarget.start(engine, chat=config.endpoint == "chat")
    try:
        yield target
    finally:
        await target.close()


def is_url(model: str) -> bool:
    """Whether a model is the address of a server."""
    return model.startswith(("http://", "https://"))


def _refuse_engine_options(engine: EngineConfig) -> None:
    """Options of an engine say nothing to a server that runs already."""
    plain = EngineConfig(model=engine.model)
    for name in (field.name for field in fields(EngineConfig)):
        if getattr(engine, name) != getattr(plain, name):
            raise ConfigError(
                f"{name} belongs to an engine in this process, {engine.model} runs already",
                hint="give it to the server",
                param=name,
            )


def _process(engine: EngineConfig, config: BenchConfig) -> psutil.Process | None:
    if not is_url(engine.model):
        return psutil.Process()
    if config.server_pid is None:
        return None
    try:
        return psutil.Process(config.server_pid)
    except psutil.NoSuchProcess as error:
        raise ConfigError(f"no such process: {config.server_pid}", param="server_pid") from error
