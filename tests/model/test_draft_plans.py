"""From options to an engine with a draft: models in folders, aligned at load, in the target's rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import tiny_folder, words

from triblade.config import EngineConfig
from triblade.engine.draft_plans import draft_model, self_draft
from triblade.errors import ConfigError, UnsupportedError
from triblade.llm import LLM
from triblade.models.loader import open_model
from triblade.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
PROMPTS = [words(count, seed=count) for count in (3, 16, 21)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another shape in every respect that may differ, and with padding behind the vocabulary."""
    shape = {"num_hidden_layers": 1, "head_dim": 32, "num_key_value_heads": 1, "hidden_size": 32, "vocab_size": 112}
    return tiny_folder(tmp_path_factory.mktemp("models") / "small", seed=1, **shape)


def options(model: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"device": "cpu", "deterministic": True, "num_kv_blocks": 64, "draft_policy": "fixed"}
    return EngineConfig(model=str(model), **{**settings, **changes})


def tokens(config: EngineConfig) -> tuple[list[list[int]], int]:
    """Greedy tokens for all prompts, and the number of steps."""
    llm = LLM(config)
    found = [choices[0].token_ids for choices in llm.generate(PROMPTS, PARAMS)]
    llm.engine.check_idle()
    return found, llm.engine.load().num_steps


@pytest.mark.parametrize(
    "changes",
    [
        {"drafter": "self"},
        {"drafter": "self", "draft_quantization": "int8", "draft_layers": 2},
        {"drafter": "draft", "draft_model": "small"},
        {"drafter": "draft", "draft_model": "small", "draft_quantization": "int4", "num_speculative_tokens": 1},
    ],
)
def test_output_is_the_targets(target: Path, small: Path, changes: dict[str, Any]) -> None:  # F01
    if "draft_model" in changes:
        changes = {**changes, "draft_model": str(small)}
    assert tokens(options(target, **changes))[0] == tokens(options(target))[0]


def test_a_target_drafts_for_itself(target: Path) -> None:  # F17
    found, steps = tokens(options(target, drafter="draft", draft_model=str(target), num_speculative_tokens=3))
    assert (found, steps) == (tokens(options(target))[0], 1 + 32 // 4)


def test_the_draft_lies_in_the_targets_rows(target: Path, small: Path) -> None:  # S5: one pool, one block for both
    plain = LLM(options(target)).engine.runner.executor.cache
    cache = LLM(options(target, drafter="draft", draft_model=str(small))).engine.runner.executor.cache
    assert cache.num_blocks == plain.num_blocks
    assert cache.layout.row_bytes == plain.layout.row_bytes + 16 * 2 * 1 * 32 * 4  # tokens, K and V, heads, size, bytes
    assert cache.layout.fingerprint() != plain.layout.fingerprint()


def test_a_plan_knows_its_memory_before_anything_is_loaded(target: Path, small: Path) -> None:
    config = options(target, deterministic=False, drafter="draft", draft_model=str(small))
    model = open_model(config)
    dense = draft_model(config, model, kernels="reference")
    assert dense.weight_bytes == dense.draft.config.num_parameters * 2
    native = options(target, deterministic=False, drafter="self")
    packed = self_draft(native, model, kernels="native")
    assert packed.weight_bytes < model.weight_bytes * 0.8  # most of a tiny model is its embedding, which keeps 8 bits


def test_a_draft_of_the_targets_own_weights_is_refused(target: Path) -> None:
    config = options(target, deterministic=False, quantization="int4", drafter="self")
    with pytest.raises(ConfigError, match="the draft would be the target itself, both in int4"):
        self_draft(config, open_model(config), kernels="native")


def test_a_foreign_tokenizer_is_refused_at_load(target: Path, tmp_path: Path) -> None:  # S2
    other = tiny_folder(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["w7"], vocab["w8"] = vocab["w8"], vocab["w7"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedError, match="id 7 is 'w7' for the target and 'w8' for the draft"):
        LLM(options(target, drafter="draft", draft_model=str(other)))


def test_what_was_found_is_logged(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = tiny_folder(tmp_path / "short", num_hidden_layers=1, max_position_embeddings=40)
    with caplog.at_level(logging.WARNING):
        found = tokens(options(target, drafter="draft", draft_model=str(short)))[0]
    assert "no drafts behind position 40" in caplog.text  # F16
    assert found == tokens(options(target))[0]


def test_a_draft_proposes_tokens_of_the_target_only(target: Path, small: Path) -> None:
    config = options(target, drafter="draft", draft_model=str(small))
    plan = draft_model(config, open_model(config), kernels="reference")
    assert (plan.draft.config.vocab_size, plan.draft.vocab_size) == (112, 96)
    assert plan.draft.dtype == torch.float32
