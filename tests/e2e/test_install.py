"""The package builds with the native module where there is a compiler, and without it where there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from triblade import __version__

ROOT = Path(__file__).parents[2]


def tool_folder(path: Path, *names: str) -> Path:
    """A folder that holds these programs of the environment and nothing else."""
    path.mkdir()
    for name in names:
        found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
        assert found, name
        (path / name).symlink_to(found)
    return path


def build_wheel(folder: Path, environment: dict[str, str], *settings: str) -> Path:
    """The wheel that pip builds from this source tree."""
    options = [f"--config-settings={setting}" for setting in settings]
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        *options,
        "-w",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(build, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    # A machine without a compiler has cmake and ninja still: pip fetches them.
    tools = tool_folder(tmp_path / "tools", "cmake", "ninja")
    wheel = build_wheel(tmp_path, {"PATH": str(tools), "HOME": str(tmp_path)})
    assert wheel.name == f"triblade-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules | {"triblade/py.typed"} <= names
    assert not [name for name in names if name.endswith(".so")]
    assert f"triblade-{__version__}.dist-info/licenses/LICENSE" in names


def test_a_wheel_has_the_native_module_where_there_is_a_compiler(tmp_path: Path) -> None:
    tools = tool_folder(tmp_path / "tools", "cmake", "ninja")
    environment = {"PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    wheel = build_wheel(tmp_path, environment, "cmake.build-type=Debug")  # quicker to compile than Release
    assert "-none-any" not in wheel.name
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import triblade._native as n; print(n.__file__); print(n.isa())"
    )
    run = [sys.executable, "-S", "-I", "-c", code, str(site)]
    file, isa = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert file.startswith(str(site / "triblade" / "_native"))
    assert isa in ("portable", "avx2", "avx2-vnni", "avx512-vnni", "avx512-bf16")
