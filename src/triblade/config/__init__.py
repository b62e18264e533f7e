"""Everything a user can set, as frozen dataclasses resolved once: flags, TOML and the reference docs come from these fields.

This package is the only place that reads the environment. It knows no model: a value that depends on one (context length, dtype,
number of KV blocks) is `None` or "auto" here and resolved where the model is loaded.
"""

from __future__ import annotations

from triblade.config.bench import BenchConfig
from triblade.config.deploy import DeployConfig
from triblade.config.disaggregation import TopologyConfig, TransferConfig
from triblade.config.engine import DType, EngineConfig
from triblade.config.environment import (
    cache_dir,
    client_api_key,
    forced_isa,
    offline,
    router_environment,
    with_environment,
)
from triblade.config.mapping import from_mapping, to_flags
from triblade.config.plan import (
    Figure,
    Goals,
    Label,
    Plan,
    PlanConfig,
    QualityFloor,
    ServingEngine,
    WeightPlan,
    Workload,
)
from triblade.config.route import Policy, RouteConfig
from triblade.config.runs import AlignConfig, BiasMode, ConvertConfig, KVCalibrateConfig
from triblade.config.server import LogLevel, ServerConfig
from triblade.config.simulate import SimulateConfig
from triblade.config.toml_file import parse_toml, read_toml, to_toml
from triblade.config.tune import TuneConfig
from triblade.config.worker import WorkerConfig

__all__ = [
    "AlignConfig",
    "BenchConfig",
    "BiasMode",
    "ConvertConfig",
    "DType",
    "DeployConfig",
    "EngineConfig",
    "Figure",
    "Goals",
    "KVCalibrateConfig",
    "Label",
    "LogLevel",
    "Plan",
    "PlanConfig",
    "Policy",
    "QualityFloor",
    "RouteConfig",
    "ServerConfig",
    "ServingEngine",
    "SimulateConfig",
    "TopologyConfig",
    "TransferConfig",
    "TuneConfig",
    "WeightPlan",
    "WorkerConfig",
    "Workload",
    "cache_dir",
    "client_api_key",
    "forced_isa",
    "from_mapping",
    "offline",
    "parse_toml",
    "read_toml",
    "router_environment",
    "to_flags",
    "to_toml",
    "with_environment",
]
