"""A Ray Serve application for a translation: a configuration file for `serve run` and `serve deploy`.

Ray has builders for engines behind one OpenAI API (`ray.serve.llm`), with prefill and decode apart or not; what they take is
data, so no Python is written. Knows vLLM's options as data only. Running it is `ray_run`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from triblade.config import DeployConfig
from triblade.deploy.flags import as_comment, losses
from triblade.deploy.translation import ServedRole, Translation

FILE = "serve.yaml"
BUILDERS = {False: "ray.serve.llm:build_openai_app", True: "ray.serve.llm:build_pd_openai_app"}
BESIDE = {
    "num_cpus": 0
}  # of processes beside a CPU's engine: with a core for each, a small host would have none left for it
NAMED_ELSEWHERE = ("model", "served_model_name")  # model_loading_config has them


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
    rest = {"ingress_deployment_config": {"ray_actor_options": dict(BESIDE)}} if device == "cpu" else {}
    if translation.is_disaggregated:
        return {"prefill_config": configs["prefill"], "decode_config": configs["decode"], **rest}
    return {"llm_configs": [configs["whole"]], **rest}


def _llm_config(config: DeployConfig, translation: Translation, role: ServedRole, device: str) -> dict[str, Any]:
    """One `LLMConfig`."""
    engine = {name: value for name, value in role.options.items() if name not in NAMED_ELSEWHERE}
    loading = {"model_id": translation.names[0], "model_source": role.options["model"]}
    bundle = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
    beside = {"ray_actor_options": dict(BESIDE)} if device == "cpu" else {}
    return {
        "model_loading_config": loading,
        "engine_kwargs": engine,
        "deployment_config": {**_scaling(config, role), **beside},
        "placement_group_config": {"bundles": [dict(bundle) for _ in range(role.devices)], "strategy": "PACK"},
    }


def _scaling(config: DeployConfig, role: ServedRole) -> dict[str, Any]:
    """A fixed number of engines, or between two by the requests that each has."""
    if config.max_replicas is None or role.role == "prefill":
        return {"num_replicas": role.replicas}
    running = int(role.options["max_num_seqs"])
    bounds = {"min_replicas": role.replicas, "max_replicas": max(role.replicas, config.max_replicas)}
    return {"autoscaling_config": {**bounds, "target_ongoing_requests": running + config.queued_requests}}
