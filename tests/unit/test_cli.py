"""The command line over a stand-in engine: streams, exit codes, flags, conversation. e2e has the real one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from triblade import __version__, cli
from triblade.commands.frame import SamplingFlags, app
from triblade.config import AlignConfig, ConvertConfig, EngineConfig, ServerConfig
from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.errors import ContextLengthError, ModelNotFoundError
from triblade.sampling_params import SamplingParams

ANSWER = ("h\u00e9llo ", "\U0001f600 ", "\u2588 \u4f60")


class StandInTokenizer:
    """Renders messages as one token per character."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for c in "|".join(f"{m['role']}:{m['content']}" for m in messages)]


class StandInLLM:
    """Answers every prompt with ANSWER; some words in the prompt make it fail."""

    def __init__(self, config: EngineConfig) -> None:
        if config.model == "absent":
            raise ModelNotFoundError("no such model: absent", hint="give a folder")
        self.config = config
        self.tokenizer = StandInTokenizer()
        self.prompts: list[str] = []

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        self.prompts.append(text)
        if "too long" in text:
            raise ContextLengthError("prompt of 9 tokens exceeds the context length: 8", hint="shorten it")
        for _ in range(text.rpartition("user:")[2].count("interrupt")):
            signal.raise_signal(signal.SIGINT)  # as if Ctrl-C came during a step
        if "nan" in text:
            yield RequestOutput(request_id="0", finish_reason=FinishReason.ERROR, error="logits are not finite")
            return
        pieces = [text] if text.startswith("echo") else [*ANSWER]
        pieces *= 20_000 if "forever" in text else 1
        yield from (RequestOutput(request_id="0", text=piece) for piece in pieces)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A job in the background starts with Ctrl-C ignored; these tests mean a terminal's."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[StandInLLM]:
    """Replace the engine; the list holds every one a command makes."""
    made: list[StandInLLM] = []

    def make(config: EngineConfig) -> StandInLLM:
        made.append(StandInLLM(config))
        return made[-1]

    module = types.ModuleType("triblade.llm")
    module.LLM = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triblade.llm", module)
    return made


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """Replace the server; the list holds the configurations it was run with."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []
    module = types.ModuleType("triblade.serve.run")
    module.serve = lambda engine, server, start, plan: calls.append((engine, server))  # type: ignore[attr-defined]
    module.start_engine = lambda server, topology, transfer: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triblade.serve.run", module)
    return calls


def in_process(*arguments: str, encoding: str = "utf-8", send: str = "", **options: Any) -> subprocess.Popen[bytes]:
    """The command in a process of its own, with the stand-in engine."""
    code = (
        "import sys, types; sys.path.insert(0, sys.argv.pop(1)); import test_cli\n"
        "module = types.ModuleType('triblade.llm'); module.LLM = test_cli.StandInLLM\n"
        "sys.modules['triblade.llm'] = module\n"
        "from triblade.cli import main; sys.exit(main())"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, **{**pipes, **options})


def run(*arguments: str, encoding: str = "utf-8", send: bytes = b"") -> tuple[int, bytes, bytes]:
    process = in_process(*arguments, encoding=encoding)
    out, err = process.communicate(send, timeout=60)
    return process.returncode, out, err


def test_help_and_version_load_nothing_heavy() -> None:
    code = "import sys, triblade.cli; print(sorted({'torch', 'numpy', 'transformers', 'fastapi'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"[]"


@pytest.mark.parametrize("flag", ["--version", "version"])
def test_version(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert cli.main([flag]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("--help",), 0),
        (("serve", "--help"), 0),
        (("generate", "m", "--prompt", "hi"), 0),
        (("generate", "m", "--prompt", "-", "--chat"), 0),
        (("chat", "m"), 0),
        (("generate", "\u4f60", "--dtype", "\U0001f600", "--prompt", "p"), 2),
    ],
)
def test_no_encoding_stops_a_command(encoding: str, arguments: tuple[str, ...], exit_code: int) -> None:  # H16
    code, out, err = run(*arguments, encoding=encoding, send="echo\u2588\n\U0001f600\n".encode())
    assert code == exit_code
    assert b"Traceback" not in err
    assert out or err
    (out + err).decode(encoding)


def test_the_answer_alone_is_on_stdout(llms: list[StandInLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--model", "m", "--prompt", "hi"]) == 0
    assert capsys.readouterr() == ("".join(ANSWER) + "\n", "")
    assert cli.main(["generate", "m", "--prompt", "--dash first"]) == 0
    assert [llm.prompts for llm in llms] == [["hi"], ["--dash first"]]


def test_generate_from_stdin_with_the_chat_template(
    llms: list[StandInLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("question"))
    assert cli.main(["generate", "m", "--prompt", "-", "--chat", "--system", "be brief"]) == 0
    assert llms[0].prompts == ["system:be brief|user:question"]


def test_sampling_flags_become_sampling_params() -> None:
    flags = SamplingFlags(max_tokens=3, temperature=0.5, stop=("a", "b"))
    assert flags.params() == SamplingParams(max_tokens=3, temperature=0.5, stop=("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["generate", "absent", "--prompt", "x"], 1, "error: no such model: absent\nhint: give a folder\n"),
        (["generate", "m", "--prompt", "nan"], 1, "error: logits are not finite\n"),
        (["generate", "m", "--prompt", "x", "--temperature", "-1"], 2, "error: temperature must be between 0 and 100"),
        (["generate", "m", "--prompt", "too long"], 2, "error: prompt of 9 tokens exceeds the context length: 8\n"),
        (["generate", "m", "--prompt", "interrupt"], 130, ""),
        (["generate", "m"], 2, "error: "),
        (["serve", "m", "--tensor-parallel-size", "2"], 2, "error: tensor_parallel_size must be 1 in this engine"),
        (["serve", "m", "--quantization", "awq"], 2, 'error: Invalid value "awq" for --quantization'),
        (["serve", "m", "--max-model-length", "2"], 2, "error: Unknown option: --max-model-length. Did you mean"),
        (["serve", "m", "--dtype", "int3"], 2, 'error: Invalid value "int3" for --dtype'),
        (["serve", "m", "n"], 2, "error: unexpected argument: n\n"),
        (["serve", "--port", "1"], 2, "error: missing: the model\n"),
        (
            ["generate", "--prompt", "x", "m"],
            2,
            "error: missing: the model\nhint: it comes first: triblade generate MODEL",
        ),
        (["align", "--output", "o"], 2, "error: missing: the model\nhint: it comes first: triblade align MODEL"),
        (["eval", "m", "--text", "t", "--generations", "-1"], 2, "error: generations must be at least 0, got: -1\n"),
        (["eval", "m", "--text", "t", "--generation-tokens", "0"], 2, "error: generation_tokens must be at least 1"),
        (["sreve"], 2, "error: Unknown command"),
    ],
)
def test_failures_say_what_happened(
    llms: list[StandInLLM],
    served: list[Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    exit_code: int,
    message: str,
) -> None:
    assert cli.main(arguments) == exit_code
    out, err = capsys.readouterr()
    assert err.startswith(message)
    assert "Traceback" not in err
    assert not out.strip()
    assert not served


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    process = in_process("generate", "m", "--prompt", "forever")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=60) == cli.BROKEN_PIPE
    assert process.stderr.read() == b""
    process.stderr.close()
    process.communicate()


def test_the_model_is_the_first_argument_or_a_flag(served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    assert cli.main(["serve", "m", "--port", "9"]) == 0
    assert cli.main(["serve", "--port", "9", "--model", "m"]) == 0
    assert served == [(EngineConfig(model="m"), ServerConfig(port=9))] * 2


def test_options_have_the_names_users_know(served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    arguments = "serve m --dtype float32 --max-model-len 64 --gpu-memory-utilization 0.5 --tensor-parallel-size 1"
    arguments += " --max-num-seqs 3 --max-num-batched-tokens 32 --block-size 8 --no-enable-prefix-caching --port 7"
    arguments += " --served-model-name a --served-model-name b --api-key k --kv-cache-dtype int8"
    assert cli.main(arguments.split()) == 0
    engine = EngineConfig(
        model="m",
        dtype="float32",
        max_model_len=64,
        gpu_memory_utilization=0.5,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        block_size=8,
        enable_prefix_caching=False,
        kv_cache_dtype="int8",
    )
    assert served == [(engine, ServerConfig(port=7, served_model_name=("a", "b"), api_key=("k",)))]


def test_every_field_of_the_configuration_is_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "console", Console(width=300))  # no name is broken into lines
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    flags = [f"--{f.name.replace('_', '-')}" for kind in (EngineConfig, ServerConfig) for f in fields(kind)]
    assert not [flag for flag in flags if flag not in text]


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("convert", ConvertConfig(model="m", output=Path("o"), bits=8, resume=True, threads=2)),
        ("align", AlignConfig(target="m", output=Path("o"), bits=8, resume=True, threads=2)),
    ],
)
def test_flags_of_long_runs_make_their_configuration(
    monkeypatch: pytest.MonkeyPatch, command: str, config: ConvertConfig | AlignConfig
) -> None:
    seen = list[Any]()
    module = types.ModuleType("stand-in")
    module.convert = module.align_head = lambda config: seen.append(config) or SamplingParams()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triblade.quant.convert", module)
    monkeypatch.setitem(sys.modules, "triblade.writing", module)
    assert cli.main([command, "m", "--output", "o", "--bits", "8", "--resume", "--threads", "2"]) == 0
    assert seen == [config]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["generate", "m"], "error: missing: --prompt\nhint: triblade generate --help lists its options\n"),
        (["serve", "m", "--prot", "8"], "Did you mean --port?\nhint: triblade serve --help lists its options\n"),
        (["servee", "m"], "hint: triblade --help lists the commands\n"),
    ],
)
def test_wrong_options_say_where_the_right_ones_are(
    capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert cli.main(arguments) == cli.BAD_OPTIONS
    assert capsys.readouterr().err.endswith(error)


def converse(monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return cli.main(["chat", "m", "--system", "s"])


def test_chat_keeps_and_forgets_history(
    llms: list[StandInLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(monkeypatch, "one", "", "two", "/reset", "three", "/exit", "four") == 0
    answer = "".join(ANSWER)
    assert llms[0].prompts == [
        "system:s|user:one",
        f"system:s|user:one|assistant:{answer}|user:two",
        "system:s|user:three",
    ]
    assert capsys.readouterr() == (f"{answer}\n" * 3, "conversation forgotten\n")


def test_a_failed_turn_does_not_end_the_chat(
    llms: list[StandInLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(monkeypatch, "too long", "/what", "/reset", "fine") == 0
    err = capsys.readouterr().err
    assert "error: prompt of 9 tokens" in err
    assert "hint: shorten it; /reset forgets the conversation\n" in err
    assert "unknown command: /what" in err
    assert llms[0].prompts[-1] == "system:s|user:fine"


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(
    llms: list[StandInLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert converse(monkeypatch, "interrupt", "go on") == 0
    assert llms[0].prompts[1] == f"system:s|user:interrupt|assistant:{ANSWER[0]}|user:go on"
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_leaves_the_chat(llms: list[StandInLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    assert converse(monkeypatch, "interrupt interrupt") == cli.INTERRUPTED
