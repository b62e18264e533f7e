"""Drafts on the native kernels: one team of threads for two programs, one pool of tiles for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_folders import tiny_folder, words

from triblade.config import EngineConfig
from triblade.errors import UnsupportedError
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "target")


def tokens(model: Path, **changes: Any) -> tuple[list[int], int]:
    """Greedy tokens, and the number of steps."""
    settings: dict[str, Any] = {"device": "cpu", "backend": "native", "num_kv_blocks": 64, "draft_policy": "fixed"}
    llm = LLM(EngineConfig(model=str(model), threads=2, **settings, **changes))
    found = llm.generate([words(21)], PARAMS)[0][0].token_ids
    llm.engine.check_idle()
    return found, llm.engine.load().num_steps


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_a_target_drafts_for_itself(target: Path, codec: str) -> None:  # F17
    plain, _ = tokens(target, kv_cache_dtype=codec)
    found, steps = tokens(target, drafter="draft", draft_model=str(target), kv_cache_dtype=codec)
    assert found == plain
    assert steps <= 2 + -(-32 // 5)  # one more than needed, should two logits be as good as equal


@pytest.mark.parametrize("changes", [{}, {"draft_layers": 1}, {"draft_quantization": "int8", "draft_layers": 2}])
def test_a_self_draft_changes_nothing(target: Path, changes: dict[str, Any]) -> None:  # F01
    assert tokens(target, drafter="self", **changes)[0] == tokens(target)[0]


def test_a_draft_that_the_kernels_cannot_run_is_refused(target: Path, tmp_path: Path) -> None:
    odd = tiny_folder(tmp_path / "odd", head_dim=20, num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="the draft cannot run on the target's native kernels: head size 20"):
        tokens(target, drafter="draft", draft_model=str(odd))
