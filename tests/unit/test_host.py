"""Cores and memory inside containers, from made-up /proc and /sys trees."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from triblade import host

GIB = 1024**3
V1_UNLIMITED = 9223372036854771712  # 2**63 rounded down to a page: how cgroup v1 spells "no limit"


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write `files` below `root`; the host has 64 GiB, of which 40 are free."""
    base = {
        "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable:   {40 * GIB // 1024} kB\nHugePages_Total: 0\n"
    }
    for name, text in {**base, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def v2(limit: str, *, used: int = 0, inactive: int = 0, path: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/{path}/" if path else "sys/fs/cgroup/"
    return {
        "proc/self/cgroup": f"0::/{path}\n",
        folder + "memory.max": limit + "\n",
        folder + "memory.current": f"{used}\n",
        folder + "memory.stat": f"anon {used}\ninactive_file {inactive}\n",
    }


def v1(limit: int, *, used: int = 0, inactive: int = 0) -> dict[str, str]:
    folder = "sys/fs/cgroup/memory/"
    return {
        "proc/self/cgroup": "9:cpuset:/\n4:memory:/docker/0123abcd\n",  # the host's path, absent inside the container
        folder + "memory.limit_in_bytes": f"{limit}\n",
        folder + "memory.usage_in_bytes": f"{used}\n",
        folder + "memory.stat": f"cache 1\ntotal_inactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        pytest.param({}, 64, 40, id="H08-no-cgroup"),
        pytest.param(v2("max", used=3 * GIB), 64, 40, id="H08-v2-max"),
        pytest.param(v2(str(8 * GIB), used=3 * GIB), 8, 5, id="H08-v2-limit"),
        pytest.param(v2(str(8 * GIB), used=3 * GIB, inactive=2 * GIB), 8, 7, id="H08-v2-reclaimable"),
        pytest.param(v2(str(8 * GIB), used=9 * GIB), 8, 0, id="H08-v2-over-limit"),
        pytest.param(v2(str(100 * GIB)), 64, 40, id="H08-v2-limit-above-host"),
        pytest.param(v2(str(50 * GIB), used=GIB), 50, 40, id="H08-v2-host-has-less-free"),
        pytest.param(v1(V1_UNLIMITED, used=GIB), 64, 40, id="H08-v1-sentinel"),
        pytest.param(v1(6 * GIB, used=2 * GIB, inactive=GIB), 6, 5, id="H08-v1-limit"),
        pytest.param(v2("garbage"), 64, 40, id="unreadable-limit"),
    ],
)
def test_memory_is_the_smallest_of_host_and_cgroups(
    tmp_path: Path, files: dict[str, str], limit: int, available: int
) -> None:
    assert host.memory(tree(tmp_path, files)) == host.Memory(limit * GIB, available * GIB)


def test_a_limit_on_any_level_above_the_process_counts(tmp_path: Path) -> None:  # H08
    files = v2("max", path="kubepods/pod7/main") | {
        "sys/fs/cgroup/kubepods/pod7/memory.max": f"{2 * GIB}",
        "sys/fs/cgroup/kubepods/pod7/memory.current": f"{GIB}",
        "sys/fs/cgroup/kubepods/memory.max": f"{4 * GIB}",
    }
    assert host.memory(tree(tmp_path, files)) == host.Memory(2 * GIB, GIB)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 8, id="affinity-only"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8, id="v2-max"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2, id="v2-2.5"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1, id="v2-half"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8, id="v2-64"),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
            id="v1-3",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
            id="v1-no-quota",
        ),
    ],
)
def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert host.usable_cores(tree(tmp_path, files)) == cores


def test_peak_memory_is_read_from_the_process_status(tmp_path: Path) -> None:
    status = "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"
    root = tree(tmp_path, {"proc/self/status": status, "proc/7/status": status.replace("2048", "4096")})
    assert host.peak_rss_bytes(root=root) == 2048 * 1024
    assert host.peak_rss_bytes(7, root) == 4096 * 1024
    assert host.peak_rss_bytes(8, root) == 0


def test_code_that_may_be_dropped_is_executable_from_a_file_and_unchanged(tmp_path: Path) -> None:
    spans = {
        "1000-3000 r-xp 00000000 fe:00 77  /usr/lib/a b.so": 0,
        "3000-4000 r-xp 00002000 fe:00 77  /usr/lib/a b.so": 4,  # a debugger's breakpoint
        "4000-5000 r--p 00003000 fe:00 77  /usr/lib/a b.so": 0,
        "5000-6000 rw-p 00004000 fe:00 77  /usr/lib/a b.so": 0,
        "6000-7000 r-xp 00000000 00:00 0": 0,  # made by a compiler in this process: no file brings it back
        "7000-8000 r-xp 00000000 00:00 0  [vdso]": 0,
        "ffff000-ffff800 r-xp 00000000 fe:00 78  /usr/lib/c.so": 0,
    }
    figures = "Size: 8 kB\nRss: 4 kB\nPrivate_Clean: 4 kB\nPrivate_Dirty: {} kB\nVmFlags: rd ex mr\n"
    smaps = "".join(f"{span}\n{figures.format(dirty)}" for span, dirty in spans.items())
    root = tree(tmp_path, {"proc/self/smaps": smaps})
    assert list(host.clean_code(root)) == [(0x1000, 0x3000), (0xFFFF000, 0xFFFF800)]
    assert list(host.clean_code(Path("/nonexistent"))) == []


def test_dropped_code_runs_again() -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0])

    before = resident()
    host.return_code_pages()
    assert resident() < before
    assert sum(math.sqrt(n) for n in range(4)) > 4


def test_this_machine() -> None:
    found = host.memory()
    assert 0 < found.available_bytes <= found.limit_bytes
    assert 1 <= host.usable_cores() <= (os.cpu_count() or 1)
    before = host.peak_rss_bytes()
    block = bytearray(64 * 1024 * 1024)
    block[::4096] = b"x" * len(block[::4096])
    assert host.peak_rss_bytes() >= min(before + 1, len(block))
    assert host.peak_rss_bytes(root=Path("/nonexistent")) > 0
