"""A Ray Serve application for a translation: a configuration file for `serve run` and `serve deploy`, and running it here.

Ray has builders for engines behind one OpenAI API (`ray.serve.llm`), with prefill and decode apart or not; what they take is
data, so no Python is written. Knows vLLM's options as data only.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from triblade.config import DeployConfig
from triblade.config.environment import extended_environment
from triblade.deploy.flags import as_comment, losses
from triblade.deploy.translation import ServedRole, Translation

log = logging.getLogger(__name__)

FILE = "serve.yaml"
BUILDERS = {False: "ray.serve.llm:build_openai_app", True: "ray.serve.llm:build_pd_openai_app"}
NAMED_ELSEWHERE = ("model", "served_model_name")  # model_loading_config has them
SERVE_MODULE = "ray.serve.scripts"


def ray_files(config: DeployConfig, translation: Translation, device: str) -> Mapping[str, str]:
    """File name -> content.

    Args:
        config: where to listen, and how far to grow.
        translation: the engines.
        device: that they compute on.
    """
    application = {
        "name": config.name,
        "route_prefix": "/",
        "import_path": BUILDERS[translation.is_disaggregated],
        "args": _arguments(config, translation, device),
    }
    document = {"http_options": {"host": config.host, "port": config.port}, "applications": [application]}
    return {FILE: as_comment(losses(translation.losses)) + yaml.safe_dump(document, sort_keys=False)}


def _arguments(config: DeployConfig, translation: Translation, device: str) -> dict[str, Any]:
    """Of the builder."""
    configs = {role.role: _llm_config(config, translation, role, device) for role in translation.roles}
    if translation.is_disaggregated:
        return {"prefill_config": configs["prefill"], "decode_config": configs["decode"]}
    return {"llm_configs": [configs["whole"]]}


def _llm_config(config: DeployConfig, translation: Translation, role: ServedRole, device: str) -> dict[str, Any]:
    """One `LLMConfig`."""
    engine = {name: value for name, value in role.options.items() if name not in NAMED_ELSEWHERE}
    loading = {"model_id": translation.names[0], "model_source": role.options["model"]}
    bundle = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
    found: dict[str, Any] = {
        "model_loading_config": loading,
        "engine_kwargs": engine,
        "deployment_config": _scaling(config, role),
        "placement_group_config": {"bundles": [bundle] * role.devices, "strategy": "PACK"},
    }
    return found


def _scaling(config: DeployConfig, role: ServedRole) -> dict[str, Any]:
    """A fixed number of engines, or between two by the requests that each has."""
    if config.max_replicas is None or role.role == "prefill":
        return {"num_replicas": role.replicas}
    running = int(role.options["max_num_seqs"])
    bounds = {"min_replicas": role.replicas, "max_replicas": max(role.replicas, config.max_replicas)}
    return {"autoscaling_config": {**bounds, "target_ongoing_requests": running + config.queued_requests}}


def run_ray(files: Mapping[str, str], python: Path) -> int:
    """`serve run` until interrupted; it starts a cluster of this host if there is none.

    Args:
        files: what `ray_files` made.
        python: of the environment with vLLM and ray.

    Returns:
        The exit code of Ray's command.
    """
    with tempfile.TemporaryDirectory(prefix="triblade-") as folder:
        path = Path(folder, FILE)
        path.write_text(files[FILE], encoding="utf-8")
        command = [str(python.absolute()), "-m", SERVE_MODULE, "run", str(path)]
        return _attached(command)


def _attached(command: Sequence[str]) -> int:
    """Run a program that ends with this one; it gets the terminal's interrupt itself."""
    with resources.as_file(resources.files("triblade.deploy") / "tether.py") as tether:
        child = subprocess.Popen(
            [sys.executable, str(tether), str(os.getpid()), *command], env=extended_environment({})
        )
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.terminate()
            return child.wait()
