"""Use and memory of the GPUs of this machine through NVML, where the package `nvidia-ml-py` and a driver are; else none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU."""

    nvml: Any
    handle: Any

    def memory_mib(self) -> float:
        """Memory in use by all processes."""
        return float(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used) / MIB

    def utilization(self) -> float:
        """Share of the last moments in which a kernel was running."""
        return float(self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu) / 100


@contextmanager
def accelerators() -> Iterator[list[Accelerator]]:
    """The GPUs, while NVML is open."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: each with an error of its own kind
        yield []
        return
    try:
        count = nvml.nvmlDeviceGetCount()
        yield [Accelerator(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    finally:
        nvml.nvmlShutdown()
