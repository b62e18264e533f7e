"""`deploy --target ray`: the application checked by the installed Ray's own classes, and `serve run` until a signal.

1. Ray's configuration classes read the engines of the file, so that an unknown option is found before anything starts;
2. `serve run` starts it, and a cluster of this host if there is none; 3. the first answer to a request says that it is ready: Ray
lists a model before its engine has loaded; 4. a signal is passed on as an interrupt, by which Ray takes the application down.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import httpx
import yaml

from triblade.config import DeployConfig
from triblade.deploy.accepted import PROBE_TIMEOUT_S, SHOWN_LINES
from triblade.deploy.attached import AttachedProcess
from triblade.deploy.ray_app import FILE
from triblade.deploy.vllm_processes import END_TIMEOUT_S, check_alive
from triblade.errors import ConfigError, EngineDeadError

PROBE = "ray_probe.py"
SERVE_MODULE = "ray.serve.scripts"
POLL_S = 1.0
REQUEST_TIMEOUT_S = 30.0


def check_application(files: Mapping[str, str], python: Path) -> str:
    """Let Ray read the engines of the application, without a cluster.

    Args:
        files: what `ray_files` made.
        python: of an environment with vLLM and ray.

    Returns:
        Ray's version.

    Raises:
        ConfigError: Ray refuses it, or is not there; the last lines it said are in the message.
    """
    applications = yaml.safe_load(files[FILE])["applications"]
    with resources.as_file(resources.files("triblade.deploy") / PROBE) as script:
        try:
            done = subprocess.run(
                [str(python.absolute()), str(script)],
                input=json.dumps(applications),
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"cannot ask Ray in {python}: {error}", hint="check --vllm-python") from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-SHOWN_LINES:])
        raise ConfigError(
            f"Ray in {python} does not take the application:\n{said}",
            hint="it needs ray[serve,llm], pyarrow among it, and options that its vLLM knows",
        )
    version: str = json.loads(done.stdout.strip().splitlines()[-1])["version"]
    return version


def run_ray(config: DeployConfig, files: Mapping[str, str], name: str, say_ready: Callable[[str], None]) -> int:
    """`serve run` until SIGTERM or SIGINT.

    Args:
        config: where it listens, how long it may take, and the Python of the environment.
        files: what `ray_files` made.
        name: of the model, to ask for it.
        say_ready: gets the address of the API once it answers.

    Returns:
        The exit code, 0.

    Raises:
        EngineDeadError: Ray's command ended, or the application did not answer in time.
    """
    assert config.vllm_python is not None  # `DeployConfig` refuses to run without
    url = f"http://{config.host}:{config.port}/v1"
    with tempfile.TemporaryDirectory(prefix="triblade-") as folder:
        path = Path(folder, FILE)
        path.write_text(files[FILE], encoding="utf-8")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        serve = AttachedProcess(
            "ray serve", [str(config.vllm_python.absolute()), "-m", SERVE_MODULE, "run", str(path)], {}
        )
        try:
            _wait_until_ready(serve, url, name, config.ready_timeout_s)
            say_ready(url)
            serve.wait(None)
            check_alive([serve])
        except KeyboardInterrupt:
            serve.end(signal.SIGINT)
        finally:
            serve.wait(config.drain_timeout_s + END_TIMEOUT_S)
    return 0


def _wait_until_ready(serve: AttachedProcess, url: str, name: str, timeout_s: float) -> None:
    """Until a request was answered.

    Raises:
        EngineDeadError: Ray's command ended, or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while not _is_answered(url, name):
        check_alive([serve])
        if time.monotonic() > deadline:
            serve.end(signal.SIGINT)
            raise EngineDeadError(
                f"no answer after {timeout_s:g} s: {url}",
                hint="see Ray's log above; `serve status` says what is missing",
            )
        time.sleep(POLL_S)


def _is_answered(url: str, name: str) -> bool:
    """Whether a request for one token gets an answer."""
    request = {"model": name, "prompt": "ready?", "max_tokens": 1}
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.post(f"{url}/completions", json=request, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        return answer.status_code == httpx.codes.OK
    return False
