"""Options of a deployment: which plan, which engine runs it, where, and what a cluster is to know beside the plan.

Knows no option of the engine; what a plan's options become there is decided in `deploy`. Invariant: what cannot be done together
(running and writing files, a Kubernetes cluster run from here) is refused before anything is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triblade.config.checks import require_at_least, require_positive
from triblade.errors import ConfigError, UnsupportedError

ClusterEngine = Literal["vllm"]
DeployTarget = Literal["local", "ray", "kubernetes"]
SuffixMethod = Literal["auto", "suffix", "ngram"]
LoadFailurePolicy = Literal["recompute", "fail"]


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """How a plan is carried out by another engine."""

    plan: Path
    """The plan, as `plan` or `tune` wrote it."""

    engine: ClusterEngine = "vllm"
    """What serves it."""

    target: DeployTarget = "local"
    """`local` processes, an application of `ray` Serve, or manifests for `kubernetes`."""

    run: bool = False
    """Start it here and stay until interrupted (local, ray); default: print what would be done."""

    output: Path | None = None
    """Folder to write the files of the deployment to."""

    strict: bool = False
    """Fail if anything of the plan is lost."""

    vllm_python: Path | None = None
    """Python of the environment that has vLLM (and ray): its options are checked there, and it is what --run starts."""

    vllm_version: str = "0.33.0"
    """Release to write for where there is no `vllm_python`, from 0.24 on; also the tag of the image."""

    model: str | None = None
    """Name or path of the checkpoint where the engines run, if another than the plan's."""

    served_model_name: tuple[str, ...] = ()
    """Names clients may use for the model; default: the model's."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on."""

    tensor_parallel_size: int | None = None
    """Devices of one node that share each layer; default: the plan's."""

    pipeline_parallel_size: int = 1
    """Groups of such devices that share the layers; each is a node where one node does not hold two."""

    devices_per_node: int = 8
    """Devices of a node."""

    prefill_replicas: int | None = None
    """Engines that compute prompts; default: the plan's workers."""

    decode_replicas: int | None = None
    """Engines that answer; default: the plan's workers, or its devices divided by those of an engine."""

    max_replicas: int | None = None
    """Let the number of answering engines grow to this with the queue (ray, kubernetes)."""

    queued_requests: int = 8
    """Requests waiting at an engine from which on another one is started."""

    kv_connector: str = "NixlConnector"
    """vLLM's connector from prefill to decode engines."""

    kv_connector_option: tuple[str, ...] = ()
    """An option of the connector, NAME=VALUE such as `shared_storage_path=/mnt/kv`; may be given several times."""

    kv_load_failure_policy: LoadFailurePolicy = "recompute"
    """When keys and values do not arrive: `recompute` them at the decode engine, or `fail` the request."""

    suffix_method: SuffixMethod = "auto"
    """What drafter `suffix` becomes: vLLM's `suffix` (needs arctic-inference) or `ngram`; `auto`: the first where that is there."""

    draft_table: bool = True
    """Draft lengths by batch size, from the cost model, in place of the adaptive policy."""

    vllm_option: tuple[str, ...] = ()
    """An option of vLLM beside the plan's, or in its place, NAME=VALUE such as `enforce_eager=true`; may be given several times."""

    ready_timeout_s: float = 900.0
    """Seconds that engines have to load."""

    drain_timeout_s: float = 30.0
    """After SIGTERM, seconds that running requests have to finish."""

    name: str = "triblade"
    """Name of the deployment in a cluster."""

    namespace: str = "default"
    """Kubernetes namespace."""

    image: str | None = None
    """Image of the engines; default: vllm/vllm-openai of the version."""

    model_volume: str | None = None
    """Kubernetes: claim of the volume that holds the checkpoint; it is mounted at the checkpoint's folder."""

    def __post_init__(self) -> None:
        """Check ranges and what belongs together."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "devices_per_node", "queued_requests"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("prefill_replicas", "max_replicas"):
            require_at_least(name, getattr(self, name), 0)
        require_at_least("decode_replicas", self.decode_replicas, 1)
        require_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        require_positive("ready_timeout_s", self.ready_timeout_s)
        if not 0 < self.port <= 65535:
            raise ConfigError(f"port must be between 1 and 65535, got: {self.port}", param="port")
        for name in ("vllm_option", "kv_connector_option"):
            for option in getattr(self, name):
                if not option.partition("=")[1]:
                    raise ConfigError(f"{name} must be NAME=VALUE, got: {option!r}", param=name)
        self._check_run()

    def _check_run(self) -> None:
        if not self.run:
            return
        if self.output is not None:
            raise ConfigError("run and output exclude each other", hint="write the files first, then run without them")
        if self.target == "kubernetes":
            raise UnsupportedError(
                "a Kubernetes cluster is not run from here",
                hint="write the manifests with --output DIR, then: kubectl apply --filename DIR",
                param="run",
            )
        if self.vllm_python is None:
            raise ConfigError(
                f"run needs vLLM for target {self.target}",
                hint="name the Python of its environment with --vllm-python",
                param="vllm_python",
            )
