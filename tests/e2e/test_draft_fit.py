"""A real draft with a wrong rope setting is recognised by its weights, and repaired (S2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from triblade.config import EngineConfig
from triblade.models.loader import OpenModel, open_model
from triblade.spec.rope_trial import fit_of_draft


def with_theta(model: OpenModel, theta: float) -> OpenModel:
    return replace(model, config=replace(model.config, ropes=(replace(model.config.ropes[0], theta=theta),)))


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_a_wrong_theta_is_repaired(smollm2: Path, theta: float) -> None:
    model = open_model(EngineConfig(model=str(smollm2)))
    report = fit_of_draft(model, with_theta(model, theta))
    assert [f.severity for f in report.findings if f.subject == "rope"] == ["fixed"]
    assert report.config == model.config


def test_a_right_theta_is_kept_beside_a_target_with_a_wrong_one(smollm2: Path) -> None:
    model = open_model(EngineConfig(model=str(smollm2)))
    report = fit_of_draft(with_theta(model, 1e4), model)
    assert "the draft's are kept" in next(f.message for f in report.findings if f.subject == "rope")
    assert report.config == model.config
