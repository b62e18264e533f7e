"""Pods of vLLM engines as Kubernetes objects, plain data. Knows nothing of services, scaling or files.

An engine on one node is a pod of a Deployment. One on several is a StatefulSet of as many pods, whose numbers are vLLM's node
ranks and whose first one answers; it needs no custom resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from triblade.config import DeployConfig
from triblade.deploy.flags import flags
from triblade.deploy.translation import ServedRole

PORT, PORT_NAME, NIXL_PORT = 8000, "http", 5600
MASTER_PORT = 29501
SHARED_MEMORY = "dshm"
PROBE_PERIOD_S = 10
END_S = 15  # beyond the drain time
INDEX_LABEL = "metadata.labels['apps.kubernetes.io/pod-index']"
# Only the first pod of an engine listens; the others are well as long as they run.
FIRST_ANSWERS = (
    "import os, urllib.request as r\n"
    f"os.environ['NODE_RANK'] == '0' and r.urlopen('http://127.0.0.1:{PORT}/health', timeout=5)"
)
SERVE_AS_NODE = 'if [ "$NODE_RANK" != 0 ]; then set -- "$@" --headless; fi; exec vllm serve "$@"'


def labels(config: DeployConfig, role: str) -> dict[str, str]:
    """Of everything that belongs to one kind of engine; the router reads `model`."""
    return {
        "app.kubernetes.io/name": config.name,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/managed-by": "triblade",
        "model": role,
    }


def metadata(config: DeployConfig, name: str, role: str) -> dict[str, Any]:
    """Of an object of this deployment."""
    return {"name": name, "namespace": config.namespace, "labels": labels(config, role)}


def workloads(config: DeployConfig, role: ServedRole, image: str) -> list[dict[str, Any]]:
    """What runs the engines of one role."""
    name = f"{config.name}-{role.role}"
    if role.nodes == 1:
        spec = {"replicas": role.replicas, **_template(config, role, image, name)}
        return [_object("Deployment", config, role, name, spec)]
    return [_group(config, role, image, f"{name}-{number}") for number in range(role.replicas)]


def _group(config: DeployConfig, role: ServedRole, image: str, name: str) -> dict[str, Any]:
    """One engine on several nodes; its pods start together, since each waits for the others."""
    spec = {
        "replicas": role.nodes,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        **_template(config, role, image, name),
    }
    return _object("StatefulSet", config, role, name, spec)


def _object(kind: str, config: DeployConfig, role: ServedRole, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata(config, name, role.role), "spec": spec}


def _template(config: DeployConfig, role: ServedRole, image: str, name: str) -> dict[str, Any]:
    own = {**labels(config, role.role), "app.kubernetes.io/instance": name}
    volumes = [{"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}, *model_volumes(config)]
    pod = {
        "terminationGracePeriodSeconds": round(config.drain_timeout_s) + END_S,
        "containers": [_container(config, role, image, name)],
        "volumes": volumes,
    }
    return {
        "selector": {"matchLabels": {"app.kubernetes.io/instance": name, "app.kubernetes.io/component": role.role}},
        "template": {"metadata": {"labels": own}, "spec": pod},
    }


def _container(config: DeployConfig, role: ServedRole, image: str, name: str) -> dict[str, Any]:
    mounts = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}, *model_mounts(config, role)]
    devices = str(role.devices // role.nodes)
    is_group = role.nodes > 1
    return {
        "name": "vllm",
        "image": image,
        "command": ["/bin/sh", "-c", SERVE_AS_NODE, "vllm"] if is_group else ["vllm", "serve"],
        "args": serve_arguments(config, role, name),
        "env": engine_variables(role),
        "ports": [{"name": PORT_NAME, "containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": devices}, "requests": {"nvidia.com/gpu": devices}},
        "volumeMounts": mounts,
        **probes(config, is_group=is_group),
    }


def model_volumes(config: DeployConfig) -> list[dict[str, Any]]:
    """The volume of the checkpoint, if there is one."""
    if config.model_volume is None:
        return []
    return [{"name": "model", "persistentVolumeClaim": {"claimName": config.model_volume, "readOnly": True}}]


def model_mounts(config: DeployConfig, role: ServedRole) -> list[dict[str, Any]]:
    """Where an engine sees it: in the place of the checkpoint's own folder."""
    if config.model_volume is None:
        return []
    return [{"name": "model", "mountPath": str(PurePosixPath(role.options["model"]).parent), "readOnly": True}]


def serve_arguments(config: DeployConfig, role: ServedRole, name: str, port: int = PORT) -> list[str]:
    """Words after `vllm serve`, the model first."""
    options = dict(role.options)
    model = options.pop("model")
    options |= {"host": "0.0.0.0", "port": port, "shutdown_timeout": round(config.drain_timeout_s)}
    if role.nodes > 1:
        options |= {
            "distributed_executor_backend": "mp",
            "nnodes": role.nodes,
            "node_rank": "$(NODE_RANK)",
            "master_addr": f"{name}-0.{name}.{config.namespace}.svc",
            "master_port": MASTER_PORT,
        }
    return [model, *flags(options)]


def engine_variables(role: ServedRole) -> list[dict[str, Any]]:
    """Environment of an engine, in a pod's form."""
    found: list[dict[str, Any]] = []
    if "kv_transfer_config" in role.options:
        found = [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
        ]
    if role.nodes > 1:
        found.append({"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX_LABEL}}})
    return found


def probes(config: DeployConfig, *, is_group: bool, port: int | str = PORT_NAME) -> dict[str, Any]:
    """Loading may take the whole time; afterwards three missed answers count."""
    probe: dict[str, Any] = {"httpGet": {"path": "/health", "port": port}}
    if is_group:
        probe = {"exec": {"command": ["python3", "-c", FIRST_ANSWERS]}}
    probe |= {"periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 5}
    return {
        "startupProbe": {**probe, "failureThreshold": max(1, round(config.ready_timeout_s / PROBE_PERIOD_S))},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 3},
    }
