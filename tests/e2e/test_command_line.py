"""The commands on the real model, in processes of their own: what is on which stream, in every encoding."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROMPT = "The capital of France is"
TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"  # a page of English
SMALL = ("--max-model-len", "512", "--num-kv-blocks", "32")


def triblade(*arguments: str, send: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "triblade", *arguments],
        input=send,
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        timeout=300,
    )


def test_pull_prints_the_path_and_nothing_else(smollm2: Path) -> None:  # H16, H17
    done = triblade("pull", "smollm2-135m", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.decode() == f"{smollm2}\n"
    assert done.stderr.count(b"\n") < 50
    assert b"\r" not in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii"])
def test_generate(smollm2: Path, encoding: str) -> None:  # H16, H17, H05
    done = triblade(
        "generate", str(smollm2), "--prompt", PROMPT, "--max-tokens", "8", *SMALL, PYTHONIOENCODING=encoding
    )
    log = done.stderr.decode(encoding).splitlines()
    assert done.returncode == 0
    assert "Paris" in done.stdout.decode(encoding)
    assert done.stdout.endswith(b"\n")
    assert b"\x1b" not in done.stdout + done.stderr
    assert len(log) < 50
    planned = next(number for number, line in enumerate(log) if "memory: weights" in line)
    loaded = next(number for number, line in enumerate(log) if "loaded" in line)
    assert planned < loaded
    assert len([line for line in log if "device" in line]) == 1


def test_chat_answers_piped_lines(smollm2: Path) -> None:  # H16
    lines = "What is the capital of Japan?\n/reset\nSay \U0001f600\n".encode()
    done = triblade("chat", str(smollm2), "--max-tokens", "12", *SMALL, send=lines, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"Tokyo" in done.stdout.splitlines()[0]
    assert b"conversation forgotten" in done.stderr


def test_a_gpu_that_is_not_there_is_an_error_with_the_drivers_reason(smollm2: Path) -> None:  # H05
    done = triblade("generate", str(smollm2), "--prompt", PROMPT, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == b""
    error, hint = done.stderr.decode().splitlines()[-2:]
    assert error.startswith("error: no CUDA device: ")
    assert len(error) > len("error: no CUDA device: ")
    assert "--device cpu" in hint


def test_a_user_without_a_name_and_a_home(smollm2: Path) -> None:  # H07
    """Containers run under user ids that no user database knows."""
    code = (
        "import getpass, pwd, sys\n"
        "def unknown(*_): raise KeyError('uid not found')\n"
        "pwd.getpwuid = pwd.getpwnam = getpass.getuser = unknown\n"
        "from triblade.cli import main; sys.exit(main())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    arguments = ["generate", str(smollm2), "--prompt", PROMPT, "--max-tokens", "4", *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"Paris" in done.stdout


def test_eval_agrees_with_the_engine(smollm2: Path) -> None:
    """Dense attention over a window gives the perplexity that the engine's prompt log-probabilities give."""
    from triblade.llm import LLM
    from triblade.sampling_params import SamplingParams

    llm = LLM(str(smollm2), dtype="float32", max_model_len=512, num_kv_blocks=64)
    ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[:300]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    windows = llm.generate([ids[:200], ids[200:]], params)
    logprobs = [item.logprob for (window,) in windows for item in window.prompt_logprobs or () if item is not None]
    done = triblade(
        "eval",
        str(smollm2),
        "--text",
        str(TEXT),
        "--context",
        "200",
        "--max-tokens",
        "300",
        "--json",
        "--dtype",
        "float32",
    )
    report = json.loads(done.stdout)
    assert report["num_tokens"] == len(logprobs) == 298
    assert report["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), rel=1e-4)


def test_eval_against_itself(smollm2: Path) -> None:
    done = triblade(
        "eval", str(smollm2), "--text", str(TEXT), "--context", "128", "--max-tokens", "256", "--against", str(smollm2)
    )
    assert done.returncode == 0
    first, second, third, fourth = done.stdout.decode().splitlines()
    assert first.startswith("perplexity ")
    assert first.endswith(" over 254 tokens, context 128")
    assert second.split("perplexity ")[1] == first.split()[1]
    assert third == "KL 0.000000 nats/token, top-1 agreement 100.00%"
    assert fourth == "hidden states off by layer:" + " 0.0e+00" * 30


@pytest.mark.parametrize(
    ("content", "message"), [(b"ok \x80", "byte 0x80 at offset 3"), (b"", "at least 2 tokens"), (None, "No such file")]
)
def test_eval_of_a_text_that_is_none(smollm2: Path, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    done = triblade("eval", str(smollm2), "--text", str(path))
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr
