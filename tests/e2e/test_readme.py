"""What the README tells people to type works as it stands, and so does the demo."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
PORT = 8000  # the README's


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A command as a reader of the README would run it, in the project's folder with its environment active."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=active())


def active() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("triblade ") and " serve " not in line])
def test_commands(line: str) -> None:
    done = run(*shlex.split(line))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.usefixtures("smollm2")
def test_python() -> None:
    (block,) = (block for language, block in BLOCKS if language == "python" and "OpenAI" not in block)
    done = run(sys.executable, "-c", block)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.fixture
def server(smollm2: Path) -> Iterator[str]:
    """The README's server, on a free port when somebody listens on its own."""
    (line,) = (line for line in COMMANDS if line.startswith("triblade serve"))
    port = PORT if is_free(PORT) else free_port()
    process = subprocess.Popen(shlex.split(line.replace(str(PORT), str(port))), env=active())
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process)
        yield f":{port}/"
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail("the server did not become ready")


def test_openai_client(server: str) -> None:
    (block,) = (block for language, block in BLOCKS if language == "python" and "OpenAI" in block)
    done = run(sys.executable, "-c", block.replace(f":{PORT}/", server))
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout


@pytest.mark.usefixtures("smollm2")
def test_demo(tmp_path: Path) -> None:
    short = ["--max-tokens", "8", "--concurrency", "2", "--requests", "4", "--trials", "1"]
    done = run(sys.executable, "examples/demo.py", *short, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
    for told in ("chosen: ", "4 requests, 0 failed", "trial 0: no drafts, one engine", "all answers together", "MiB"):
        assert told in done.stdout
    for name in ("int4/config.json", "plan.toml", "bench.html", "tuned/report.html"):
        assert (tmp_path / name).is_file()
