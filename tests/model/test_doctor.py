"""`triblade doctor`: the report on standard output, the verdict in the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_folders import tiny_folder

from triblade.cli import main


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "target")


def test_a_pair_that_fits(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", str(target), "--draft", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"draft {target} fits target {target}"
    assert [line.split()[1] for line in lines[1:]] == [
        "tokenizer:",
        "vocabulary:",
        "rope:",
        "max",
        "size:",
        "acceptance:",
    ]
    assert lines[-1].startswith("ok       acceptance: ")


def test_a_draft_that_is_never_right(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_folder(tmp_path / "other", seed=1)
    assert main(["doctor", "--target", str(target), "--draft", str(other)]) == 0
    assert "warning  acceptance: 1." in capsys.readouterr().out


def test_a_pair_that_does_not_fit(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_folder(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["w7"], vocab["w8"] = vocab["w8"], vocab["w7"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["doctor", "--target", str(target), "--draft", str(other)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        f"draft {other} does not fit target {target}\nrefused  tokenizer: id 7 is 'w7' for the target"
    )
    assert "acceptance" not in out


def test_the_probe_can_be_left_out(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", str(target), "--draft", str(target), "--no-probe"]) == 0
    assert "acceptance" not in capsys.readouterr().out


def test_a_model_that_is_not_there(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", str(target), "--draft", "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "no such model: 'no-such-model'" in captured.err) == ("", True)
