"""The head in the package: a file of today's version, made for the real model as it is served, and right often enough to be of use.

That its guesses change no answer is shown for all heads in tests/equivalence/test_eagle_drafter.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from triblade import spec
from triblade.config import EngineConfig
from triblade.engine.build import build_engine
from triblade.engine.probe import probe
from triblade.models.loader import open_model
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle_files import VERSION, load_eagle

HEAD = Path(spec.__file__).parent / "heads" / "smollm2-135m"
MOST_BYTES = 10_000_000  # of a file in the package
QUESTIONS = ("Why is the sky blue?", "Write an email to a colleague who missed a deadline.")
USEFUL = 1.8  # tokens per step; 2.35 over the 80 questions of the benchmark


def test_it_is_small_and_was_made_for_this_checkpoint(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read = load_eagle(HEAD, open_model(EngineConfig(model=str(smollm2))))
    assert not caplog.records
    assert read.facts["version"] == VERSION
    assert read.inner_layers == (9, 19)
    assert read.weights.inner_norms.shape == (2, read.config.hidden_size)
    assert sum(file.stat().st_size for file in HEAD.iterdir()) <= MOST_BYTES


def test_its_guesses_are_of_use(smollm2: Path) -> None:
    engine = build_engine(EngineConfig(model=str(smollm2), drafter="eagle", max_model_len=512, num_kv_blocks=64))
    prompts = [engine.tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    found = probe(engine, prompts, SamplingParams(temperature=0, max_tokens=48))
    assert found.mean_length > USEFUL, found
