"""`triblade serve` on the real model, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

START_S = 120.0
# float32: equal requests give equal tokens whatever runs beside them. One thread: a team of them stalls on a busy
# machine. A small cache: it fills up.
OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "1024", "--num-kv-blocks", "96", "--port", "0")


@dataclass(frozen=True)
class RealServer:
    """A running `triblade serve`."""

    url: str
    http: httpx.Client
    openai: OpenAI
    log: list[str]
    pid: int

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == f"triblade:{name}"]
        assert samples, f"no such metric: {name}"
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def is_idle(self) -> bool:
        """Whether nothing runs or waits and every block is free."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)


@contextmanager
def real_server(model: Path, options: Sequence[str] = OPTIONS, name: str = "smollm2") -> Iterator[RealServer]:
    """Serve until the block ends; the server must end with exit code 0 and have logged no trace."""
    command = [sys.executable, "-m", "triblade", "serve", str(model), *options, "--served-model-name", name]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(iter(process.stderr.readline, "")))  # type: ignore[union-attr]
        reader.start()
        try:
            url = wait_until_ready(process, log)
            with (
                httpx.Client(base_url=url, timeout=60) as http,
                OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as openai,
            ):
                yield RealServer(url, http, openai, log, process.pid)
        finally:
            process.terminate()
            reader.join()
        assert process.wait(60) == 0, "".join(log)
        assert "Traceback" not in "".join(log), "".join(log)


def wait_until_ready(process: subprocess.Popen[str], log: list[str]) -> str:
    """The server's address, once it answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"serving \S+ at (http://\S+)/v1", "".join(log)):
            return found.group(1)
        time.sleep(0.1)
    pytest.fail("the server did not become ready:\n" + "".join(log))
