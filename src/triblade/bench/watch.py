"""What a target and its machine do during a load test, read a few times per second: gauges, memory, processor, accelerator.

A figure that cannot be read is left out; nothing here can fail a test. Memory and processor time are those of one process and its
children: this one for an engine in it, `--server-pid` for a server on this machine. What was busy beside it and the load disturbed
them, and is told. What processes share (libraries, mapped weights, rows in shared memory) counts once, as much as the one with most
of it has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from triblade.bench.accelerators import MIB, Accelerator, accelerators
from triblade.bench.cores import Cores
from triblade.bench.target import COUNTERS, GAUGES, Target

PERIOD_S = 0.5


@dataclass(eq=False)
class Watch:
    """Readings of one run."""

    target: Target
    process: psutil.Process | None = None
    highest: dict[str, float] = field(default_factory=dict)
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum and number of readings
    _children: dict[int, psutil.Process] = field(default_factory=dict)
    _cores: Cores = field(default_factory=Cores)
    _others: float | None = None
    _before: Mapping[str, float] = field(default_factory=dict)
    _after: Mapping[str, float] = field(default_factory=dict)

    async def begin(self) -> None:
        """Note the counters before the test."""
        self._before, self._cores = await self.target.readings(), Cores()
        self._note_memory()  # the first reading of a processor's use only starts its clock

    async def run(self) -> None:
        """Read until cancelled."""
        with accelerators() as devices:
            while True:
                await asyncio.sleep(PERIOD_S)
                await self.read(devices)

    async def end(self) -> None:
        """Note the counters after it, and what stands at its end: a test may be shorter than a period."""
        self._others = self._other_cores()
        self._after = await self.target.readings()
        self._note_gauges(self._after)
        self._note_memory()

    def figures(self) -> dict[str, float]:
        """Increase of the counters, highest gauges, mean use of processor and accelerator, and what follows from them."""
        grown = {name: self._after[name] - self._before.get(name, 0.0) for name in COUNTERS if name in self._after}
        found = {name.removesuffix("_total"): value for name, value in grown.items()}
        found |= {f"peak_{name}": value for name, value in self.highest.items()}
        found |= {f"mean_{name}": total / count for name, (total, count) in self.sums.items()}
        found |= {} if self._others is None else {"mean_other_cores": self._others}
        drafted, drafts = found.get("spec_decode_num_draft_tokens"), found.get("spec_decode_num_drafts")
        accepted = found.get("spec_decode_num_accepted_tokens", 0.0)
        if drafted and drafts:
            found["acceptance_rate"] = accepted / drafted
            found["mean_accepted_length"] = 1 + accepted / drafts
        return found

    async def read(self, devices: list[Accelerator]) -> None:
        """Take one reading."""
        self._note_gauges(await self.target.readings())
        cores = self._note_memory()
        if cores is not None:
            self._note_mean("cpu_cores", cores)
        for device in devices:
            self._note_highest("device_memory_mib", device.memory_mib())
            self._note_mean("device_utilization", device.utilization())

    def _other_cores(self) -> float | None:
        """Cores that neither the process nor the load kept busy; None where no use was read."""
        if self.process is None or "cpu_cores" not in self.sums:
            return None
        total, count = self.sums["cpu_cores"]
        return self._cores.others(total / count + (0.0 if self.process.pid == os.getpid() else self._cores.own))

    def _note_gauges(self, readings: Mapping[str, float]) -> None:
        for name in GAUGES:
            if name in readings:
                self._note_highest(name, readings[name])

    def _note_memory(self) -> float | None:
        """Note the resident memory of the process and its children; their busy cores since the last call, None without one."""
        if self.process is None:
            return None
        own_bytes, shared_bytes, percent = 0, 0, 0.0
        try:
            for child in self.process.children(recursive=True):
                self._children.setdefault(child.pid, child)  # a process object remembers its own last reading
            for process in (self.process, *self._children.values()):
                if process.is_running():
                    memory = process.memory_info()
                    shared = getattr(memory, "shared", 0)  # of files and between processes: once for all of them
                    own_bytes, shared_bytes = own_bytes + memory.rss - shared, max(shared_bytes, shared)
                    percent += process.cpu_percent()
        except psutil.Error:  # one of them has just ended
            pass
        if own_bytes + shared_bytes:
            self._note_highest("memory_mib", (own_bytes + shared_bytes) / MIB)
        return percent / 100

    def _note_highest(self, name: str, value: float) -> None:
        self.highest[name] = max(value, self.highest.get(name, value))

    def _note_mean(self, name: str, value: float) -> None:
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + value, count + 1)
