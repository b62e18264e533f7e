"""Values of Helm charts, plain data out of a translation: vLLM's production stack, and the model service of llm-d.

Both charts make the same engines as the manifests do, by templates of their own; what a chart says itself (host, port, prefix
caching) is not said twice. Knows no file. Invariant: an engine on several nodes is in neither, and is not given to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triblade.config import DeployConfig
from triblade.deploy.pods import (
    END_S,
    PORT,
    PORT_NAME,
    SHARED_MEMORY,
    engine_variables,
    model_mounts,
    model_volumes,
    probes,
    serve_arguments,
)
from triblade.deploy.translation import ServedRole, Translation

CORES_PER_DEVICE, GIB_PER_DEVICE = 8, 64  # of the host's, that the chart of the production stack asks for
POD_IP = "$(POD_IP)"  # the production stack sets it; its schema takes variables with plain values only
SIDECAR_PORT = 8200  # where an engine listens behind llm-d's sidecar
POOL_LABEL = "llm-d.ai/model"  # what an InferencePool of llm-d selects by
OF_THE_CHART = ("--host", "--port", "--tensor-parallel-size")  # with a value each


def router_arguments(translation: Translation) -> list[str]:
    """How the production stack's router is to choose engines."""
    if not translation.is_disaggregated:
        return ["--routing-logic", "prefixaware"]
    return [
        "--routing-logic", "disaggregated_prefill_orchestrated",
        "--prefill-model-labels", "prefill", "--decode-model-labels", "decode",
    ]  # fmt: skip


def production_stack(config: DeployConfig, translation: Translation, image: str) -> dict[str, Any]:
    """Values of the chart vllm-stack."""
    repository, _, tag = image.rpartition(":")
    models = [_stack_model(config, role, repository, tag) for role in translation.roles]
    words = router_arguments(translation)
    routing, extra = words[1], words[2:]
    chosen: dict[str, Any] = {"routingLogic": routing, "serviceDiscovery": "k8s"}
    chosen |= {"extraArgs": extra} if extra else {}
    startup = probes(config, is_group=False, port=PORT)["startupProbe"]
    engines = {"startupProbe": startup, "containerPort": PORT, "serviceMonitor": {"enabled": True}}
    return {"servingEngineSpec": {**engines, "modelSpec": models}, "routerSpec": chosen}


def _stack_model(config: DeployConfig, role: ServedRole, repository: str, tag: str) -> dict[str, Any]:
    model, *words = serve_arguments(config, role, config.name)
    caching = ("--enable-prefix-caching", "--no-enable-prefix-caching")
    before = ["", *words]
    kept = [
        word
        for word, last in zip(words, before, strict=False)
        if word not in (*OF_THE_CHART, *caching) and last not in OF_THE_CHART
    ]
    vllm = {"enablePrefixCaching": role.options["enable_prefix_caching"], "extraArgs": kept}
    # With its own option the chart mounts the shared memory that several devices need.
    vllm |= {"tensorParallelSize": role.devices} if role.devices > 1 else {}
    extras = {
        "env": [{"name": one["name"], "value": one.get("value", POD_IP)} for one in engine_variables(role)],
        "extraVolumes": model_volumes(config),
        "extraVolumeMounts": model_mounts(config, role),
        "keda": _keda(config, role),
    }
    return {
        "name": role.role,
        "repository": repository,
        "tag": tag,
        "modelURL": model,
        "replicaCount": role.replicas,
        "requestCPU": CORES_PER_DEVICE * role.devices,
        "requestMemory": f"{GIB_PER_DEVICE * role.devices}Gi",
        "requestGPU": role.devices,
        "vllmConfig": vllm,
        **{name: value for name, value in extras.items() if value},
    }


def _keda(config: DeployConfig, role: ServedRole) -> dict[str, Any]:
    """Scaling by the queue, which this chart leaves to KEDA; its schema takes no trigger but its own, so that one decides when."""
    if config.max_replicas is None or role.role == "prefill":
        return {}
    most = max(role.replicas, config.max_replicas)
    return {"enabled": True, "minReplicaCount": role.replicas, "maxReplicaCount": most}


def llm_d(
    config: DeployConfig, translation: Translation, image: str, scaled: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Values of the chart llm-d-modelservice: decode pods, and prefill ones behind its sidecar; whole engines only decode there.

    Args:
        scaled: the autoscaler of the engines that answer.
    """
    roles = {"prefill" if role.role == "prefill" else "decode": role for role in translation.roles}
    apart = translation.is_disaggregated
    model = str(roles["decode"].options["model"])
    volume = config.model_volume
    pods = {name: _llm_d_pods(config, role, image, apart and name == "decode") for name, role in roles.items()}
    values: dict[str, Any] = {
        "fullnameOverride": config.name,
        "multinode": False,
        "modelArtifacts": {
            "name": str(roles["decode"].options.get("served_model_name", [model])[0]),
            "labels": {"llm-d.ai/inference-serving": "true", POOL_LABEL: config.name},
            "uri": f"hf://{model}" if volume is None else f"pvc://{volume}/{model.rpartition('/')[2]}",
        },
        "routing": {"servicePort": PORT, "proxy": {"enabled": apart, "targetPort": SIDECAR_PORT, "secure": False}},
        "decode": pods["decode"],
        "prefill": pods.get("prefill", {"create": False, "replicas": 0}),
    }
    return values if scaled is None else values | {"extraObjects": [scaled]}


def _llm_d_pods(config: DeployConfig, role: ServedRole, image: str, has_sidecar: bool) -> dict[str, Any]:
    """One container of an engine, whose command is the manifests'."""
    port = SIDECAR_PORT if has_sidecar else PORT
    container = {
        "name": "vllm",
        "image": image,
        "modelCommand": "custom",
        "command": ["vllm", "serve"],
        "args": serve_arguments(config, role, config.name, port),
        "env": engine_variables(role),
        "ports": [{"name": PORT_NAME, "containerPort": port, "protocol": "TCP"}],
        "mountModelVolume": False,  # our own mount is where the plan's checkpoint is
        "volumeMounts": [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}, *model_mounts(config, role)],
        "extraConfig": probes(config, is_group=False, port=port),
    }
    return {
        "create": True,
        "replicas": role.replicas,
        "parallelism": {"tensor": role.devices, "data": 1, "dataLocal": 1, "workers": 1},
        "terminationGracePeriodSeconds": round(config.drain_timeout_s) + END_S,
        "containers": [container],
        "volumes": [{"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}, *model_volumes(config)],
        "monitoring": {"podmonitor": {"enabled": True, "portName": PORT_NAME}},
    }
