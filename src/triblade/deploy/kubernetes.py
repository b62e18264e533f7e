"""Manifests for Kubernetes: engines, services, a router, scaling by the queue, what Prometheus reads; values for charts.

Plain data out of a translation; nothing is sent anywhere. The router is that of vLLM's production stack, which hands prompts from
prefill to decode engines and sends equal beginnings to the same engine. Core objects only, but for the ServiceMonitor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from triblade.config import DeployConfig
from triblade.deploy.accepted import Accepted
from triblade.deploy.charts import llm_d, production_stack, router_arguments
from triblade.deploy.flags import as_comment, losses
from triblade.deploy.pods import PORT, PORT_NAME, labels, metadata, workloads
from triblade.deploy.translation import Loss, ServedRole, Translation
from triblade.errors import UnsupportedError

MANIFESTS, VALUES, ADAPTER = "kubernetes.yaml", "production-stack-values.yaml", "prometheus-adapter-values.yaml"
LLM_D = "llm-d-values.yaml"
IMAGE = "vllm/vllm-openai"
ROUTER_IMAGE = "lmcache/lmstack-router:latest"
QUEUE, QUEUE_METRIC = "vllm:num_requests_waiting", "vllm_num_requests_waiting"
SCRAPE = "15s"


def manifests(config: DeployConfig, accepted: Accepted, translation: Translation) -> Mapping[str, str]:
    """File name -> content.

    Raises:
        UnsupportedError: the vLLM that was asked computes on a CPU; pods ask for GPUs.
    """
    if accepted.device != "cuda":
        raise UnsupportedError(
            f"the manifests are for GPUs, and this vLLM computes on {accepted.device}",
            hint="leave --vllm-python out, or name an environment with a GPU build",
            param="target",
        )
    image = config.image or f"{IMAGE}:v{accepted.version}"
    own_losses = [*translation.losses, *_group_losses(config, translation)]
    head = as_comment(losses(own_losses))
    objects = [one for role in translation.roles for one in _of_role(config, role, image)]
    objects += router(config, translation) if _needs_router(config, translation) else []
    objects.append(_service_monitor(config))
    files = {MANIFESTS: head + yaml.safe_dump_all(objects, sort_keys=False)}
    if config.max_replicas is not None:
        files[ADAPTER] = yaml.safe_dump(_adapter(), sort_keys=False)
    if all(role.nodes == 1 for role in translation.roles):
        files[VALUES] = head + yaml.safe_dump(production_stack(config, translation, image), sort_keys=False)
        name, grows = f"{config.name}-decode", config.max_replicas is not None
        scaled = _autoscaler(config, name, translation.roles[-1]) if grows else None
        files[LLM_D] = head + yaml.safe_dump(llm_d(config, translation, image, scaled), sort_keys=False)
    return files


def _group_losses(config: DeployConfig, translation: Translation) -> Iterable[Loss]:
    """What engines on several nodes cannot have."""
    if config.max_replicas is not None and any(role.nodes > 1 for role in translation.roles):
        yield Loss(f"max_replicas = {config.max_replicas}", "an engine on several nodes is not scaled by the queue")


def _of_role(config: DeployConfig, role: ServedRole, image: str) -> list[dict[str, Any]]:
    """Engines of one kind, how they are reached, and how many there are to be."""
    found = workloads(config, role, image)
    names = [one["metadata"]["name"] for one in found]
    if role.nodes > 1:  # the pods of an engine find each other by name
        selectors = [{"app.kubernetes.io/instance": name} for name in names]
        found += [_service(config, name, role.role, own, False) for name, own in zip(names, selectors, strict=True)]
    else:
        selector = {"app.kubernetes.io/instance": names[0]}
        found.append(_service(config, names[0], role.role, selector, True))
        if config.max_replicas is not None and role.role != "prefill":
            found.append(_autoscaler(config, names[0], role))
    return found


def _service(
    config: DeployConfig, name: str, role: str, selector: Mapping[str, str], has_address: bool
) -> dict[str, Any]:
    """An address for all pods, or only a name for each; those must know each other before they are ready."""
    spec: dict[str, Any] = {"selector": selector, "ports": [{"name": PORT_NAME, "port": PORT, "targetPort": PORT_NAME}]}
    spec |= {} if has_address else {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(config, name, role), "spec": spec}


def _autoscaler(config: DeployConfig, name: str, role: ServedRole) -> dict[str, Any]:
    """By the requests that wait at an engine; down slowly, since an engine takes minutes to load."""
    queue = {
        "type": "Pods",
        "pods": {
            "metric": {"name": QUEUE_METRIC},
            "target": {"type": "AverageValue", "averageValue": str(config.queued_requests)},
        },
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": role.replicas,
        "maxReplicas": max(role.replicas, config.max_replicas or 0),
        "metrics": [queue],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(config, name, role.role),
        "spec": spec,
    }


def _service_monitor(config: DeployConfig) -> dict[str, Any]:
    """For the Prometheus operator: every service of this deployment."""
    spec = {
        "selector": {"matchLabels": {"app.kubernetes.io/name": config.name}},
        "endpoints": [{"port": PORT_NAME, "path": "/metrics", "interval": SCRAPE}],
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata(config, config.name, "monitor"),
        "spec": spec,
    }


def _adapter() -> dict[str, Any]:
    """Values of the chart prometheus-adapter: the queue as a metric of pods."""
    rule = {
        "seriesQuery": f'{{__name__="{QUEUE}",namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"as": QUEUE_METRIC},
        "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
    }
    return {"rules": {"custom": [rule]}}


def _needs_router(config: DeployConfig, translation: Translation) -> bool:
    grows = (config.max_replicas or 0) > 1
    return grows or sum(role.replicas for role in translation.roles) > 1


def router(config: DeployConfig, translation: Translation) -> list[dict[str, Any]]:
    """The router, its service, and what lets it see pods."""
    name = f"{config.name}-router"
    own = {"app.kubernetes.io/instance": name}
    selector = f"app.kubernetes.io/name={config.name},model in ({','.join(r.role for r in translation.roles)})"
    words = [
        "--host",
        "0.0.0.0",
        "--port",
        str(PORT),
        "--service-discovery",
        "k8s",
        "--k8s-namespace",
        config.namespace,
    ]
    words += ["--k8s-port", str(PORT), "--k8s-label-selector", selector, *router_arguments(translation)]
    health = {"httpGet": {"path": "/health", "port": PORT_NAME}, "periodSeconds": 10}
    container = {
        "name": "router",
        "image": ROUTER_IMAGE,
        "args": words,
        "ports": [{"name": PORT_NAME, "containerPort": PORT}],
        "readinessProbe": health,
        "livenessProbe": {**health, "failureThreshold": 6},
    }
    pod = {"serviceAccountName": name, "containers": [container]}
    template = {"metadata": {"labels": {**labels(config, "router"), **own}}, "spec": pod}
    deployment = {"replicas": 1, "selector": {"matchLabels": own}, "template": template}
    about = metadata(config, name, "router")
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": deployment},
        _service(config, name, "router", own, True),
        *_permissions(config, name),
    ]


def _permissions(config: DeployConfig, name: str) -> list[dict[str, Any]]:
    """To read pods of the namespace, and nothing else."""
    group, about = "rbac.authorization.k8s.io", metadata(config, name, "router")
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": config.namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": about, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": about,
            "subjects": [subject],
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        },
    ]
