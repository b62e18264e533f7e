"""Whether a draft model fits its target: what is compared, what was found, and the draft as it should run.

A draft that does not fit never fails, it is only never right: a token id that means another word, or positions rotated by another
theta, cost all speed and say nothing. So everything the two must share is compared, what can be repaired without changing what the
draft was trained to compute is repaired, and the rest is refused by its first difference. Weights are needed for
one question only, which rope setting they were trained with, and that is asked through `measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from triblade.errors import UnsupportedError
from triblade.models.config import ModelConfig, RopeConfig, rope_parameters
from triblade.spec.shared_tables import EMBEDDING, HEAD, SharedTables

if TYPE_CHECKING:
    from triblade.models.loader import OpenModel
    from triblade.models.tokenizer import Tokenizer

Severity = Literal["ok", "fixed", "warning", "refused"]
Ropes = tuple[RopeConfig, ...]
Measure = Callable[["OpenModel", Ropes], float]  # loss of a model under rope settings, nats per token

# A rope setting is replaced only by one that is clearly better; right and wrong settings of trained models are 0.1 to 5 nats apart.
MARGIN_NATS = 0.02
LARGEST_EPS = 1e-3  # of a norm; every published model is below


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was compared."""

    severity: Severity
    subject: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        hint = f"\n{'':9}hint: {self.hint}" if self.hint else ""
        return f"{self.severity:8} {self.subject}: {self.message}{hint}"


@dataclass(frozen=True, slots=True)
class DraftFit:
    """The report on a pair.

    Attributes:
        target: its name.
        draft: its name.
        findings: in the order of comparison.
        repaired: the draft, with the configuration and the tables it should run with.
    """

    target: str
    draft: str
    findings: tuple[Finding, ...]
    repaired: OpenModel

    @property
    def config(self) -> ModelConfig:
        """The draft's configuration, repaired."""
        return self.repaired.config

    @property
    def refusal(self) -> Finding | None:
        """The first difference that makes the pair useless."""
        return next((finding for finding in self.findings if finding.severity == "refused"), None)

    def check(self) -> None:
        """Raise if the draft does not fit.

        Raises:
            UnsupportedError: naming the first difference.
        """
        if self.refusal is not None:
            message = f"{self.draft} cannot draft for {self.target}: {self.refusal.subject}: {self.refusal.message}"
            raise UnsupportedError(message, hint=self.refusal.hint, param="draft_model")

    def __str__(self) -> str:
        verdict = "does not fit" if self.refusal else "fits"
        return "\n".join([f"draft {self.draft} {verdict} target {self.target}", *map(str, self.findings)])


def compare(target: OpenModel, draft: OpenModel, measure: Measure) -> DraftFit:
    """Compare a draft with its target.

    Args:
        target: as it will be served.
        draft: as its files describe it.
        measure: asked only if the rope settings of one family differ.
    """
    name = draft.name
    findings = [tokenizer_finding(target.tokenizer, draft.tokenizer), vocabulary_finding(target, draft)]
    if EMBEDDING not in draft.checkpoint.names():
        finding, draft = _tables(target, draft)
        findings.append(finding)
    findings += _odd_values(draft)
    if all(finding.severity != "refused" for finding in findings):
        finding, draft = _rope(target, draft, measure)
        findings.append(finding)
    finding, draft = _positions(target, draft)
    findings += [finding, _shape(target.config, draft.config)]
    return DraftFit(target.name, name, tuple(findings), draft)


def tokenizer_finding(target: Tokenizer, draft: Tokenizer) -> Finding:
    """Compare token by token, added and special ones included, over the ids that both have; what only one has is padding."""
    shared = min(target.vocab_size, draft.vocab_size)
    for token_id in range(shared):
        ours, theirs = target.backend.id_to_token(token_id), draft.backend.id_to_token(token_id)
        # One file may spell a token as text and another as bytes.
        if ours != theirs and target.token_bytes(token_id) != draft.token_bytes(token_id):
            return Finding(
                "refused",
                "tokenizer",
                f"id {token_id} is {_quoted(ours)} for the target and {_quoted(theirs)} for the draft",
                "use a draft of the target's family, with the same tokenizer",
            )
    return Finding("ok", "tokenizer", f"{shared} tokens are the same strings")


def vocabulary_finding(target: OpenModel, draft: OpenModel) -> Finding:
    """Every token of the target needs a row in the draft's embedding; rows and tokens beyond are padding."""
    needed, rows = target.vocab_size, draft.config.vocab_size
    if rows < needed:
        return Finding(
            "refused",
            "vocabulary",
            f"the target has {needed} tokens, the draft embeds {rows}; the first it cannot read is id {rows}, "
            f"{_quoted(target.tokenizer.backend.id_to_token(rows))}",
            "use a draft whose embedding covers the target's vocabulary",
        )
    if draft.tokenizer.vocab_size < needed:
        unknown = needed - draft.tokenizer.vocab_size
        return Finding(
            "warning",
            "vocabulary",
            f"the draft's tokenizer ends before the target's: {unknown} tokens from id {draft.tokenizer.vocab_size} on, "
            f"{_quoted(target.tokenizer.backend.id_to_token(draft.tokenizer.vocab_size))}, may be untrained",
        )
    beyond = f", of which {rows - needed} are cut off" if rows > needed else ""
    return Finding("ok", "vocabulary", f"{needed} tokens, the draft embeds {rows}{beyond}")


def _tables(target: OpenModel, draft: OpenModel) -> tuple[Finding, OpenModel]:
    """A draft without an embedding takes the target's, if it is as wide."""
    ours, theirs = target.config, draft.config
    if (ours.vocab_size, ours.hidden_size) != (theirs.vocab_size, theirs.hidden_size):
        message = (
            f"the draft's checkpoint has none, and the target's is {ours.vocab_size} x {ours.hidden_size} instead of "
            f"{theirs.vocab_size} x {theirs.hidden_size}"
        )
        return Finding("refused", "embedding", message, "use a draft with an embedding of its own"), draft
    tied = HEAD not in draft.checkpoint.names() and ours.tie_word_embeddings
    shared = SharedTables(draft.checkpoint, target.checkpoint)
    repaired = replace(draft, checkpoint=shared, config=replace(theirs, tie_word_embeddings=tied))
    return Finding("fixed", "embedding", "the draft's checkpoint has none: the target's is used"), repaired


def _odd_values(draft: OpenModel) -> Iterator[Finding]:
    """Values of the draft's config.json that are missing or outside what any trained model has."""
    stated = draft.checkpoint.config
    if rope_parameters(stated).get("rope_theta") is None and not _has_nested_theta(stated.get("rope_parameters")):
        assumed = draft.config.ropes[0].theta
        yield Finding("warning", "rope theta", f"config.json names none, assumed: {assumed:g}")
    eps = draft.config.rms_norm_eps
    if stated.get("rms_norm_eps") is None:
        yield Finding("warning", "rms_norm_eps", f"config.json names none, assumed: {eps:g}")
    elif not 0 < eps <= LARGEST_EPS:
        yield Finding("warning", "rms_norm_eps", f"an unusual value: {eps:g}", "compare it with the published model's")


def _has_nested_theta(parameters: object) -> bool:
    """Settings per layer type, as Gemma 3 has them."""
    nested = parameters.values() if isinstance(parameters, dict) else ()
    return any(isinstance(value, dict) and value.get("rope_theta") is not None for value in nested)


def _rope(target: OpenModel, draft: OpenModel, measure: Measure) -> tuple[Finding, OpenModel]:
    """Keep the draft's rope settings, or take the target's where the weights say that they were trained with those."""
    own, theirs = draft.config.ropes, transferred(target.config.ropes, draft.config.ropes)
    if theirs is not None and list(map(_settings, own)) == list(map(_settings, theirs)):
        return Finding("ok", "rope", f"same settings: {_described(own)}"), draft
    difference = f"{_described(own)} for the draft, {_described(target.config.ropes)} for the target"
    if theirs is None or target.config.architecture != draft.config.architecture:
        return Finding("ok", "rope", f"{difference}; models of different make keep their own"), draft
    kept, taken = measure(draft, own), measure(draft, theirs)
    losses = f"on a short text the draft's loss is {kept:.3f} with its own, {taken:.3f} with the target's"
    if taken < kept - MARGIN_NATS:
        repaired = replace(draft, config=replace(draft.config, ropes=theirs))
        return Finding("fixed", "rope", f"{difference}; {losses}: the target's are used"), repaired
    return Finding("ok", "rope", f"{difference}; {losses}: the draft's are kept"), draft


def transferred(ropes: Ropes, onto: Ropes) -> Ropes | None:
    """Rope settings of one model for another's head sizes; None where they cannot be carried over."""
    if len(ropes) != len(onto):
        return None
    if any(a.kind == "longrope" and a.rotary_dim != b.rotary_dim for a, b in zip(ropes, onto, strict=True)):
        return None  # it has a factor for each dimension
    return tuple(replace(a, rotary_dim=b.rotary_dim) for a, b in zip(ropes, onto, strict=True))


def _settings(rope: RopeConfig) -> RopeConfig:
    """What changes a rotation: without scaling, the original context does not."""
    return replace(rope, original_context=0, factor=1.0) if rope.kind == "default" else rope


def _described(ropes: Ropes) -> str:
    return ", ".join(
        f"theta {rope.theta:g}" + (f" {rope.kind} factor {rope.factor:g}" if rope.kind != "default" else "")
        for rope in ropes
    )


def _positions(target: OpenModel, draft: OpenModel) -> tuple[Finding, OpenModel]:
    """The draft never runs past the shorter context."""
    ours, theirs = target.config.context_length, draft.config.context_length
    if theirs < ours:
        message = f"the draft takes {theirs}, the target {ours}: no drafts behind position {theirs}"
        return Finding("warning", "max positions", message), draft
    if theirs > ours:
        message = f"the draft takes {theirs}, limited to the target's {ours}"
        clamped = replace(draft, config=replace(draft.config, context_length=ours))
        return Finding("fixed", "max positions", message), clamped
    return Finding("ok", "max positions", f"{ours}"), draft


def _shape(target: ModelConfig, draft: ModelConfig) -> Finding:
    """Hidden and head sizes need not match: the draft has matrices and KV layers of its own. Only its size matters."""
    sizes = ", ".join(
        f"{name} {getattr(draft, name)} beside {getattr(target, name)}"
        for name in ("num_layers", "hidden_size", "head_dim", "num_kv_heads")
    )
    share = draft.num_parameters / target.num_parameters
    if share > 0.5:
        message = (
            f"the draft has {share:.0%} of the target's parameters; drafting pays if it has much fewer bits ({sizes})"
        )
        return Finding("warning", "size", message)
    return Finding("ok", "size", f"{share:.1%} of the target's parameters ({sizes})")


def _quoted(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
