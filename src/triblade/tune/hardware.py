"""Processors as numbers: what data sheets say (`hardware.toml`), and how much of it kernels reach (`kernels.toml`).

Pure: reads two files of the package. Knows no model and no plan. A measured profile of a machine has the same form, with what was
measured in place of what a data sheet says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from triblade.config import Label, from_mapping
from triblade.registry import unknown_name

GB = 10**9
TERA = 10**12

HardwareKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, or the cores and the memory of a host.

    Attributes:
        float16, int8, float8: dense rates of matrix products in TFLOP/s or TOP/s; 0: there is none.
        link_gb_s: to a device of the same kind, one direction; 0: there is no link.
        label: whether the figures come from a data sheet or were measured.
    """

    name: str
    kind: HardwareKind
    memory_gb: float
    bandwidth_gb_s: float
    float16: float
    int8: float
    float8: float = 0.0
    capability: str = ""
    cores: int = 1
    link: str = ""
    link_gb_s: float = 0.0
    label: Label = "rule"
    source: str

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * GB

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bandwidth_gb_s * GB

    @property
    def why_not_own_kernels(self) -> str | None:
        """What keeps this project's fast kernels from running here; None: nothing."""
        if self.kind == "cpu" or self.capability.partition(".")[0] == "9":
            return None
        return f"triblade's CUDA kernels are for compute capability 9.0 (H100, H200), {self.name} has {self.capability}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Shares of a processor's rates that kernels reach, and what they cost besides; see kernels.toml."""

    dense_bandwidth: float
    packed_bandwidth: float
    kv_bandwidth: float
    packed_rate: float
    dense_rate: float
    attention_rate: float
    spelled_bytes: float
    overlap: float
    layer_us: float
    launch_us: float
    spelled_launch_us: float
    step_us: float
    sequence_us: float
    event_us: float
    dense_tables: bool
    activation: Literal["float16", "int8"]
    source: str


def hardware_names() -> tuple[str, ...]:
    """Every name there is a data sheet for."""
    return tuple(_table("hardware.toml"))


def find_hardware(name: str) -> Hardware:
    """A processor by name.

    Raises:
        ConfigError: there is no data sheet of that name; the hint has the nearest one.
    """
    known = _table("hardware.toml")
    if name not in known:
        raise unknown_name("hardware", name, ["here", *known])
    return from_mapping(Hardware, known[name])


def kernels_of(hardware: Hardware) -> Kernels:
    """What is known of the kernels that run there: other shares of what was measured than of what a data sheet says."""
    table = dict(_table("kernels.toml")["native" if hardware.kind == "cpu" else "cuda"])
    measured = table.pop("measured", {}) if hardware.label == "measured" else {}
    return from_mapping(Kernels, {name: v for name, v in {**table, **measured}.items() if name != "measured"})


def _table(file: str) -> Mapping[str, Any]:
    return tomllib.loads((resources.files("triblade.tune") / file).read_text(encoding="utf-8"))
