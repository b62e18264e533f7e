"""What benchmarks/deployed.py and deploy_vllm.py conclude from answers: equal or parted, near or far, and what a cut run keeps."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("deployed")


@pytest.fixture
def deploy_vllm(deployed: ModuleType) -> ModuleType:
    return importlib.import_module("deploy_vllm")


def answer_of(module: ModuleType, *likely: dict[str, float]) -> Any:
    """Each token is the most likely one."""
    tokens = [max(one, key=lambda token: one[token]) for one in likely]
    return module.Answer("".join(tokens), tokens, list(likely))


def test_where_answers_part(deployed: ModuleType) -> None:
    first = answer_of(deployed, {"a": -0.1, "b": -3.0}, {"c": -0.6, "d": -0.7})
    second = answer_of(deployed, {"a": -0.1, "b": -3.0}, {"d": -0.5, "c": -0.75})
    assert deployed.parting(first, first, ("one", "two")) is None
    assert deployed.parting(first, second, ("one", "two")) == {
        "token": 1,
        "one": "c",
        "two": "d",
        "gap_in_one": 0.1,
        "gap_in_two": 0.25,
    }
    far = answer_of(deployed, {"a": -0.1}, {"e": -0.1})
    assert deployed.parting(first, far, ("one", "two"))["gap_in_one"] is None  # not among the most likely


def test_the_first_error_of_a_log(deployed: ModuleType, tmp_path: Path) -> None:
    """Later ones are of those who waited for it; what an engine logs has its name and place in front."""
    path = tmp_path / "log"
    lines = [
        "12:00:00 INFO vllm-0: process 7",
        "(EngineCore pid=7) INFO 11-30 18:41:48 [core.py:133] an Error is not what this says",
        "(EngineCore pid=7) ERROR 11-30 18:41:49 [core.py:1] ImportError: no such module: abc",
        "(APIServer pid=6) RuntimeError: Engine core initialization failed.",
    ]
    with path.open("w", encoding="utf-8") as log:
        log.write("\n".join(lines))
        log.flush()
        assert deployed.first_error(log) == "ImportError: no such module: abc"


def test_by_how_much_engines_differ_where_they_agree(deploy_vllm: ModuleType) -> None:
    """Places after the parting do not count: the texts before them are others."""
    theirs = answer_of(deploy_vllm, {"a": -0.1, "b": -0.5}, {"c": -0.6, "d": -0.7}, {"e": -1.0, "f": -9.0})
    ours = answer_of(deploy_vllm, {"a": -0.1, "b": -0.7}, {"d": -0.5, "c": -0.75}, {"e": -1.0, "f": -2.0})
    assert list(deploy_vllm.shifts(theirs, ours)) == pytest.approx([0.2, 0.35])
    found = deploy_vllm.agreement([(theirs, ours), (ours, ours)])
    assert (found["equal"], found["of"], len(found["partings"])) == (1, 2, 1)
    assert found["shift"]["largest"] == pytest.approx(0.35)


def test_a_run_that_was_cut_goes_on(deploy_vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM answered stands in the file before our engine starts, and is not asked for again."""
    asked: list[str] = []
    plan, output = tmp_path / "plan.toml", tmp_path / "result.json"

    @contextmanager
    def deployment(*_: Any) -> Iterator[Any]:
        yield deploy_vllm.Deployment("vllm", 1.0)

    @contextmanager
    def server(*_: Any) -> Iterator[Any]:
        yield 1, None, 1.0

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    def answered(url: str, prompt: str, new_tokens: int) -> Any:
        asked.append(url)
        return answer_of(deploy_vllm, {"a": -0.1, "b": -0.5}, {"c": -0.1, "d": -0.5})

    monkeypatch.setattr(deploy_vllm, "deployed", deployment)
    monkeypatch.setattr(deploy_vllm, "answer", answered)
    monkeypatch.setattr(deploy_vllm, "prompts", lambda: ["one"])
    monkeypatch.setattr(deploy_vllm.Deployment, "counted", lambda *_: {})
    monkeypatch.setattr(deploy_vllm, "read_toml", lambda *_: Namespace(decode=Namespace(model="m")))
    monkeypatch.setattr(deploy_vllm, "serving", cut)
    options = {"vllm_python": "python", "deploy_option": [], "new_tokens": 2, "requests": 0, "users": 1}
    arguments = Namespace(output=output, **options)
    with pytest.raises(KeyboardInterrupt):
        deploy_vllm.compare(arguments, "name", plan)
    (record,) = json.loads(output.read_text())["runs"]
    assert list(record["answers"]) == ["vllm"]
    monkeypatch.setattr(deploy_vllm, "serving", server)
    deploy_vllm.compare(arguments, "name", plan)
    (record,) = json.loads(output.read_text())["runs"]
    assert asked == ["vllm", "http://127.0.0.1:1"]
    assert (record["equal"], record["of"], record["vllm_texts"]) == (1, 1, ["ac"])
    assert "answers" not in record
