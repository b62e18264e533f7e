"""The package builds where there is no compiler and no CMake, and its wheel holds everything."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from triblade import __version__

ROOT = Path(__file__).parents[2]


def test_a_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    environment = {"PATH": str(empty), "HOME": str(empty)}
    done = subprocess.run(build, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"triblade-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules | {"triblade/py.typed"} <= names
    assert f"triblade-{__version__}.dist-info/licenses/LICENSE" in names
