"""What is compared between a draft and its target, what is repaired, and what is refused by its first difference (S2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from tiny_engine import open_tiny, word_tokenizer
from tiny_folders import words
from tokenizers import AddedToken, decoders, models

from triblade.errors import UnsupportedError
from triblade.models.checkpoint import Checkpoint
from triblade.models.loader import OpenModel
from triblade.models.tokenizer import Tokenizer
from triblade.models.tokenizer_parts import TokenizerParts
from triblade.models.weights import resolve_tied_head
from triblade.ops.attention import eager_attention
from triblade.ops.reference import ReferenceBackend
from triblade.spec import rope_trial
from triblade.spec.draft_fit import DraftFit, Finding, Ropes, compare
from triblade.spec.rope_trial import fit_of_draft, loss
from triblade.spec.shared_tables import EMBEDDING, HEAD

SIZE = 96


def never(model: OpenModel, ropes: Ropes) -> float:
    """No weights need to be read."""
    raise AssertionError(f"{model.name} was measured")


def losses(**by_theta: float) -> Callable[[OpenModel, Ropes], float]:
    """Measured losses by theta: `theta_500=2.0`."""
    return lambda model, ropes: by_theta[f"theta_{ropes[0].theta:.0f}"]


def pair(draft_name: str = "llama", **draft: Any) -> tuple[OpenModel, OpenModel]:
    changed = {"num_hidden_layers": 1, **draft}
    return open_tiny("llama"), replace(open_tiny(draft_name, seed=1, **changed), name="small")


def finding(fit: DraftFit, subject: str) -> Finding:
    (found,) = [f for f in fit.findings if f.subject == subject]
    return found


def with_tokens(model: OpenModel, names: list[str], special: list[str] | None = None) -> OpenModel:
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special or []])
    return replace(model, tokenizer=Tokenizer(TokenizerParts(backend=backend)))


def test_a_pair_that_fits() -> None:
    target, draft = pair()
    report = compare(target, draft, never)
    assert [f.severity for f in report.findings] == ["ok"] * 5
    assert report.refusal is None
    report.check()
    assert str(report).startswith("draft small fits target llama\nok       tokenizer: 96 tokens are the same strings")
    assert report.repaired is draft


WORDS = [f"w{i}" for i in range(10)]


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (WORDS, [*WORDS[:4], "x", *WORDS[5:9], "y"], "id 4 is 'w4' for the target and 'x' for the draft"),
        (["<s>", *WORDS[1:]], WORDS, "id 0 is '<s>' for the target and 'w0' for the draft"),
    ],
)
def test_the_first_difference_of_the_tokenizers_is_named(target: list[str], draft: list[str], message: str) -> None:
    one, two = pair()
    report = compare(with_tokens(one, target), with_tokens(two, draft), never)
    assert report.refusal is not None
    assert message in report.refusal.message
    assert "rope" not in [f.subject for f in report.findings]  # nothing was measured
    with pytest.raises(UnsupportedError, match=f"small cannot draft for llama: tokenizer: {message}") as caught:
        report.check()
    assert caught.value.hint is not None


def test_added_tokens_are_compared() -> None:
    one, two = pair()
    report = compare(with_tokens(one, WORDS, ["<a>", "<b>"]), with_tokens(two, WORDS, ["<a>", "<c>"]), never)
    assert report.refusal is not None
    assert report.refusal.message == "id 11 is '<b>' for the target and '<c>' for the draft"


def test_one_token_in_two_spellings_is_the_same() -> None:
    """A GGUF file says "  " where tokenizer.json says "▁▁"."""
    one, two = pair()
    spelled = []
    for model, word in ((one, "▁▁"), (two, "  ")):
        opened = with_tokens(model, ["a", word])
        opened.tokenizer.backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
        spelled.append(replace(model, tokenizer=Tokenizer(TokenizerParts(backend=opened.tokenizer.backend))))
    assert finding(compare(*spelled, never), "tokenizer").severity == "ok"


def test_padding_behind_the_shared_range_is_allowed() -> None:
    target, draft = pair(vocab_size=128)
    draft = replace(draft, tokenizer=word_tokenizer(120))
    found = finding(compare(target, draft, never), "vocabulary")
    assert (found.severity, found.message) == ("ok", "96 tokens, the draft embeds 128, of which 32 are cut off")


def test_tokens_that_the_draft_was_not_trained_on_are_named() -> None:
    target, draft = pair()
    found = finding(compare(target, replace(draft, tokenizer=word_tokenizer(90)), never), "vocabulary")
    assert found.severity == "warning"
    assert "6 tokens from id 90 on, 'w90'" in found.message


def test_a_vocabulary_that_does_not_cover_the_targets_is_refused() -> None:
    target, draft = pair(vocab_size=80)
    report = compare(target, draft, never)
    assert report.refusal is not None
    assert (
        report.refusal.message
        == "the target has 96 tokens, the draft embeds 80; the first it cannot read is id 80, 'w80'"
    )


def test_a_wrong_theta_is_replaced_by_the_targets_when_the_weights_say_so() -> None:
    target, draft = pair(rope_theta=500.0)
    report = compare(target, draft, losses(theta_500=3.1, theta_10000=2.9))
    found = finding(report, "rope")
    assert found.severity == "fixed"
    assert "theta 500 for the draft, theta 10000 for the target" in found.message
    assert "loss is 3.100 with its own, 2.900 with the target's: the target's are used" in found.message
    assert report.config == replace(draft.config, ropes=target.config.ropes)


@pytest.mark.parametrize("taken", [2.895, 2.9, 4.0])
def test_a_theta_of_its_own_is_kept_when_the_weights_say_so(taken: float) -> None:
    target, draft = pair(rope_theta=500.0)
    report = compare(target, draft, losses(theta_500=2.9, theta_10000=taken))
    assert finding(report, "rope").severity == "ok"
    assert report.config.ropes == draft.config.ropes


def test_scaling_is_tried_as_a_whole() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    target, draft = pair(rope_scaling=scaling, head_dim=24)
    report = compare(target, draft, lambda model, ropes: ropes[0].factor)
    assert "theta 10000 linear factor 4 for the draft" in finding(report, "rope").message
    (rope,) = report.config.ropes
    assert (rope.kind, rope.factor, rope.rotary_dim) == ("default", 1.0, 24)


def test_models_of_different_make_keep_their_ropes() -> None:
    target, draft = pair("qwen3", rope_theta=500.0)
    found = finding(compare(target, draft, never), "rope")
    assert (found.severity, "keep their own" in found.message) == ("ok", True)


def test_longrope_factors_fit_one_head_size_only() -> None:
    target = open_tiny("phi3-longrope-short")
    draft = open_tiny("phi3", head_dim=24)
    assert "keep their own" in finding(compare(target, draft, never), "rope").message


def test_a_theta_that_nobody_states_is_named() -> None:
    target, draft = pair()
    stated = {k: v for k, v in draft.checkpoint.config.items() if not k.startswith("rope")}
    draft.checkpoint.config = stated  # type: ignore[misc]
    found = finding(compare(target, draft, never), "rope theta")
    assert (found.severity, found.message) == ("warning", "config.json names none, assumed: 10000")


@pytest.mark.parametrize(("eps", "message"), [(None, "names none"), (0.5, "an unusual value: 0.5")])
def test_odd_norms_are_named(eps: float | None, message: str) -> None:
    target, draft = pair()
    draft.checkpoint.config = {**draft.checkpoint.config, "rms_norm_eps": eps}  # type: ignore[misc]
    draft = replace(draft, config=replace(draft.config, rms_norm_eps=eps or 1e-6))
    assert message in finding(compare(target, draft, never), "rms_norm_eps").message


@pytest.mark.parametrize(("context", "severity", "clamped"), [(32, "warning", 32), (64, "ok", 64), (128, "fixed", 64)])
def test_positions_are_those_of_the_shorter_context(context: int, severity: str, clamped: int) -> None:  # F16
    target, draft = pair(max_position_embeddings=context)
    report = compare(target, draft, never)
    assert finding(report, "max positions").severity == severity
    assert report.config.context_length == clamped


def test_the_loss_depends_on_the_rope_settings_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_trial, "TEXT", words(60))
    model, _ = pair()
    other = (replace(model.config.ropes[0], theta=3.0),)
    assert loss(model, model.config.ropes) == loss(model, model.config.ropes)
    assert abs(loss(model, model.config.ropes) - loss(model, other)) > 1e-4


def test_weights_are_read_only_when_settings_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    read: list[torch.dtype] = []
    monkeypatch.setattr(OpenModel, "load", lambda self, *rest: read.append(self.dtype))
    fit_of_draft(target, draft)
    assert read == []


def test_a_draft_of_half_the_target_is_remarked() -> None:
    target, _ = pair()
    found = finding(compare(target, target, never), "size")
    assert (found.severity, "100% of the target's parameters" in found.message) == ("warning", True)


class WithoutTables:
    """A checkpoint that relies on its target's embedding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def names(self) -> frozenset[str]:
        return self._checkpoint.names() - {EMBEDDING, HEAD}


def bare(model: OpenModel) -> OpenModel:
    """As it would be opened without its tables."""
    checkpoint: Any = WithoutTables(model.checkpoint)
    return replace(model, checkpoint=checkpoint, config=resolve_tied_head(model.config, checkpoint.names()))


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_draft_without_tables_takes_the_targets(family: str) -> None:
    target = open_tiny(family)
    report = compare(target, bare(open_tiny("llama", seed=1, num_hidden_layers=1)), never)
    assert finding(report, "embedding").severity == "fixed"
    weights = report.repaired.load(64, ReferenceBackend(eager_attention), torch.device("cpu")).weights
    assert torch.equal(weights.embedding.weight, target.checkpoint.tensor(EMBEDDING))
    assert torch.equal(weights.head.weight, target.checkpoint.tensor(EMBEDDING if family == "llama-tied" else HEAD))
    assert report.repaired.checkpoint.fingerprint() != target.checkpoint.fingerprint()


def test_a_draft_without_tables_must_be_as_wide_as_its_target() -> None:
    report = compare(open_tiny("llama"), bare(open_tiny("llama", hidden_size=64)), never)
    assert report.refusal is not None
    assert report.refusal.message.endswith("has none, and the target's is 96 x 48 instead of 96 x 64")
