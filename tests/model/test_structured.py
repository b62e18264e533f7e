"""Outputs of tiny random models under grammars: always of the form asked for, whatever samples, drafts or interrupts them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest
from constrained import END, answers, byte_tokenizer, compiler, engine, form
from random_schemas import random_schema

from triblade.errors import RequestError, UnsupportedError
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams, StructuredOutputs
from triblade.spec.token_mask import has_any
from triblade.structured.compiler import GrammarCompiler
from triblade.structured.composed import composed

TOY = "[!-~]{5}"


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    llm = engine()
    yield llm
    llm.engine.check_idle()


SCHEMAS = [random_schema(seed) for seed in range(100)]


@pytest.mark.parametrize(("drafter", "backend"), [(None, "native"), ("suffix", "native"), ("suffix", "reference")])
def test_a_hundred_random_schemas(drafter: str | None, backend: str) -> None:  # A23, F20
    drafting = {"drafter": "suffix", "draft_policy": "fixed", "num_speculative_tokens": 4}
    options = {"backend": "native", "kv_cache_dtype": "bfloat16", "block_size": 16} if backend == "native" else {}
    plain = engine(**options)
    llm = engine(**options, **drafting) if drafter else plain
    found = answers(llm, [form("json_schema", schema) for schema in SCHEMAS])
    ended = [
        (schema, answer.text) for schema, answer in zip(SCHEMAS, found, strict=True) if answer.finish_reason == "stop"
    ]
    assert len(ended) >= 95
    assert not [text for schema, text in ended if not jsonschema_rs.is_valid(schema, json.loads(text))]
    if drafter:
        assert llm.engine.load().speculation.num_accepted_tokens > 20
        again = answers(plain, [form("json_schema", schema) for schema in SCHEMAS[:20]])
        assert [answer.text for answer in found[:20]] == [answer.text for answer in again]  # seed for seed


def test_equal_in_distribution_with_drawn_drafts(plain: LLM) -> None:  # F20
    """A toy grammar; a chi-square over two samples, with drafts drawn from a distribution that knows no grammar."""
    drafts = {"drafter": "self", "draft_quantization": "int8", "draft_temperature": 1.0}
    drafting = engine(**drafts, draft_policy="fixed", num_speculative_tokens=2, backend="reference")
    samples = []
    for llm in (plain, drafting):
        texts = [answer.text for answer in answers(llm, [form("regex", TOY)] * 1200)]
        assert all(len(text) == 5 for text in texts)
        samples.append(Counter((place, ord(text[place]) % 4) for text in texts for place in (1, 2, 3)))
    cells = samples[0] | samples[1]
    statistic = sum(
        (samples[0][cell] - samples[1][cell]) ** 2 / (samples[0][cell] + samples[1][cell]) for cell in cells
    )
    assert len(cells) == 12
    assert statistic < 33.7  # nine degrees of freedom: exceeded by chance once in ten thousand times
    assert drafting.engine.load().speculation.num_accepted_tokens > 50


def test_greedy_with_bias_bars_and_logprobs(plain: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "logprobs": 2, "bad_words": ("yes",), "logit_bias": {200: 100.0}}
    (answer,) = answers(plain, [form("choice", ["yes", "no"])], **options)
    assert answer.text in ("yes", "no")
    assert answer.logprobs is not None
    assert answer.logprobs[0].top[0][0] != answer.token_ids[0]  # raw: the best token was not allowed
    bias = {ord("n") - 33: -100.0}
    (other,) = answers(plain, [form("choice", ["yes", "no"])], logit_bias=bias, temperature=0.0)
    assert other.text == "yes"


def test_an_end_is_allowed_only_where_the_text_is_complete(plain: LLM) -> None:
    eager = {END: 100.0}
    (answer,) = answers(plain, [form("regex", "[ab]{3}(cd)*")], logit_bias=eager)
    assert len(answer.text) == 3
    assert answer.token_ids[-1] == END
    (longer,) = answers(plain, [form("regex", "[ab]{3}(cd)*")], logit_bias=eager, min_tokens=5)
    assert longer.text[3:] == "cd"
    (endless,) = answers(plain, [form("regex", "[ab]{3}")], ignore_eos=True)
    assert len(endless.token_ids) == 3  # nothing may follow, so it ends without an end token
    assert endless.finish_reason == "stop"
    (short,) = answers(plain, [form("regex", "[ab]{3}")], min_tokens=9)
    assert len(short.text) == 3  # the grammar is stronger than min_tokens
    (kept,) = answers(plain, [form("choice", ["x", "y"])], allowed_token_ids=(ord("y") - 33, END))
    assert kept.text == "y"


def test_choices_have_their_own_state_and_neighbours_none(plain: LLM) -> None:
    params = SamplingParams(n=6, max_tokens=40, seed=3, structured_outputs=form("regex", "[a-z]{4,6}"))
    free = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    together = plain.generate([[1, 2], [4, 5, 6]], [params, free])
    texts = [answer.text for answer in together[0]]
    assert len(set(texts)) > 1
    assert all(4 <= len(text) <= 6 and text.isalpha() for text in texts)
    assert together[1][0].token_ids == plain.generate([[4, 5, 6]], free)[0][0].token_ids


def test_preemption_changes_nothing(plain: LLM) -> None:
    forms = [form("json_schema", schema) for schema in SCHEMAS[:8]]
    tight = engine(num_kv_blocks=40, max_model_len=120)
    found = answers(tight, forms, max_tokens=100)
    assert tight.engine.load().num_preemptions > 0
    assert [a.text for a in found] == [a.text for a in answers(plain, forms, max_tokens=100)]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (form("regex", "[0-9"), "regex cannot be used"),
        (form("grammar", "root ::= missing"), "not defined"),
        (form("json_schema", "{"), "not valid JSON"),
        (form("json_schema", {"type": "array", "uniqueItems": True}), "uniqueItems"),
        (form("json_schema", {"$ref": "#"}), "cannot be used"),
        (form("json_schema", "[" * 5000), "not valid JSON"),
        (form("regex", "a" * 2**19), "at most"),
    ],
)
def test_wrong_forms_are_refused(plain: LLM, wanted: StructuredOutputs, words: str) -> None:
    for _ in range(2):  # what was found out once is remembered
        with pytest.raises(RequestError, match=words):
            answers(plain, [wanted])


def test_a_form_that_never_compiles_costs_its_sender_only() -> None:  # D14
    """While one thread waits for it, others go on computing, and the next form is served."""
    patient = GrammarCompiler(byte_tokenizer(), END + 1, limit_s=0.5)
    patient.compile(form("regex", "a"), frozenset({END}))
    hostile = form("json_schema", {"enum": ["".join(chr(97 + (n >> k) % 26) for k in range(60)) for n in range(3900)]})
    errors: list[RequestError] = []

    def ask() -> None:
        try:
            patient.compile(hostile, frozenset({END}))
        except RequestError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    turns = 0
    while asking.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 20, errors
    assert [error.message for error in errors] == ["the json_schema takes more than 0.5 s to compile and to follow"]
    assert patient.compile(form("regex", "b"), frozenset({END}))().allowed().any()


def test_a_form_that_takes_too_much_memory() -> None:  # D14
    small = GrammarCompiler(byte_tokenizer(), END + 1, limit_s=20.0, memory_bytes=2**25)
    wide = form("json_schema", {"enum": ["".join(chr(97 + (n >> k) % 26) for k in range(60)) for n in range(3000)]})
    with pytest.raises(RequestError, match="too much memory"):
        small.compile(wide, frozenset({END}))
    assert (
        small.compile(form("regex", "b"), frozenset({END}))().allowed().any()
    )  # another process compiles the next one


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triblade.structured.compiler.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as caught:
        compiler().compile(form("regex", "a"), frozenset({END}))
    assert "triblade[structured]" in str(caught.value.hint)
    assert caught.value.http_status == 400


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for what never comes takes a while."""
    monkeypatch.setattr("triblade.structured.matcher.SLOW_S", 0.05)


class StuckMatcher:
    """A matcher that answers one kind of call when it is told to."""

    def __init__(self, matcher: Any, stuck_at: str = "fill_next_token_bitmask") -> None:
        self.matcher = matcher
        self.go_on = threading.Event()
        setattr(self, stuck_at, lambda *_: self.go_on.wait(30))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


def followed(own: GrammarCompiler, wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    """A compiler's `compile`, of whose constraints every matcher is wrapped."""

    def compile(wanted: StructuredOutputs, stops: frozenset[int]) -> Any:
        make = own.compile(wanted, stops)

        def made() -> Any:
            constraint: Any = make()
            constraint._matcher = wrap(constraint._matcher)
            return constraint

        return made

    return compile


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stuck_at", ["fill_next_token_bitmask", "accept_token"])
def test_an_answer_that_never_comes_ends_its_own_request(plain: LLM, stuck_at: str) -> None:  # D14
    """The engine stops waiting, whoever is beside it gets the same tokens as alone, and the form is refused from then on."""
    own = GrammarCompiler(byte_tokenizer(), END + 1)
    stuck: list[StuckMatcher] = []

    def sticks(matcher: Any) -> StuckMatcher:
        stuck.append(StuckMatcher(matcher, stuck_at))
        return stuck[-1]

    llm = engine()
    llm.engine.compile = followed(own, sticks)
    free = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    hostile = SamplingParams(max_tokens=12, structured_outputs=form("regex", "[ab]+"))
    bad, good = llm.generate([[1, 2], [4, 5, 6]], [hostile, free])
    assert bad[0].finish_reason == "error"
    assert good[0].token_ids == plain.generate([[4, 5, 6]], free)[0][0].token_ids
    llm.engine.check_idle()
    with pytest.raises(RequestError, match="too long to follow"):
        llm.generate([[1, 2]], hostile)
    assert len(own._abandoned) == 1
    stuck[0].go_on.set()
    while len(own._abandoned):
        time.sleep(0.005)


class BrokenMatcher(StuckMatcher):
    """A matcher that fails instead."""

    def __init__(self, matcher: Any, broken_at: str) -> None:
        super().__init__(matcher, broken_at)
        setattr(self, broken_at, self.fail)

    def fail(self, *_: Any) -> None:
        raise RuntimeError("injected")


@pytest.mark.parametrize("kind", ["regex", "choice"])  # in a thread of its own, and in the engine's
@pytest.mark.parametrize("broken_at", ["fill_next_token_bitmask", "accept_token"])
def test_a_library_that_fails_ends_its_own_request(plain: LLM, kind: Any, broken_at: str) -> None:  # D14
    llm = engine()
    llm.engine.compile = followed(GrammarCompiler(byte_tokenizer(), END + 1), lambda m: BrokenMatcher(m, broken_at))
    free = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    text = "[ab]+" if kind == "regex" else '["abab", "baba"]'
    bad, good = llm.generate([[1, 2], [4, 5, 6]], [SamplingParams(structured_outputs=form(kind, text)), free])
    assert bad[0].finish_reason == "error"
    assert good[0].token_ids == plain.generate([[4, 5, 6]], free)[0][0].token_ids
    llm.engine.check_idle()


@pytest.mark.usefixtures("impatient")
def test_many_that_never_come_are_refused(plain: LLM) -> None:  # D14
    own = GrammarCompiler(byte_tokenizer(), END + 1)
    stuck = []
    for letter in "abcd":
        constraint: Any = own.compile(form("regex", letter), frozenset({END}))()
        constraint._matcher = StuckMatcher(constraint._matcher)
        stuck.append(constraint._matcher)
        assert constraint.allowed().eq(-1).all()
        assert "too long" in constraint.fault
        constraint.rollback(1)
        assert not constraint.accept(ord(letter) - 33)
        assert not constraint.is_exhausted
    with pytest.raises(RequestError, match="too many grammars"):
        own.compile(form("regex", "e"), frozenset({END}))
    assert own.compile(form("json_object"), frozenset({END}))().allowed().any()
    for matcher in stuck:
        matcher.go_on.set()


def test_forms_asked_for_at_once_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:  # D14
    own, lines = GrammarCompiler(byte_tokenizer(), END + 1), []
    ask = own._pool.ask
    monkeypatch.setattr(own._pool, "ask", lambda line: lines.append(line) or time.sleep(0.05) or ask(line))
    found = []

    def compiled() -> None:
        found.append(own.compile(form("regex", "[ab]+"), frozenset({END})))

    threads = [threading.Thread(target=compiled) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(lines)) == (4, 1)


ANY = {"type": "any_text"}
WIDE = {
    "a class": form("regex", "[^a]+"),
    "a dot": form("regex", ".+"),
    "no digit": form("regex", r"\D+"),
    "no word": form("regex", r"\W+"),
    "no space": form("regex", r"\S+"),
    "EBNF": form("grammar", 'root ::= "" | [^a] root'),
    "a pattern": form("json_schema", {"type": "string", "pattern": "^[^a]+$"}),
    "a string": form("json_schema", {"type": "string"}),
    "a key": form("json_schema", {"type": "object", "additionalProperties": True}),
    "any text": composed(ANY),
    "up to a mark": composed({"type": "tag", "begin": "", "content": ANY, "end": "</t>"}),
}


@pytest.mark.parametrize("name", WIDE)
def test_no_halves_of_surrogate_pairs(name: str) -> None:
    """Wherever any character may come, also as several tokens: what has no place in UTF-8 is barred, drafted or not."""
    tokenizer = byte_tokenizer()
    ids = {tokenizer.token_bytes(token): token for token in range(256)}
    constraint = compiler().compile(WIDE[name], frozenset({END}))()
    for byte in {"a pattern": b'"', "a string": b'"', "a key": b'{"'}.get(name, b""):
        assert constraint.accept(ids[bytes([byte])])
    assert constraint.accept(ids[b"\xed"])
    allowed = [byte for byte in range(256) if has_any(constraint.allowed(), [ids[bytes([byte])]])]
    assert allowed == list(range(0x80, 0xA0)) or (name == "up to a mark" and not set(range(0xA0, 0xC0)) & set(allowed))
    assert not constraint.accept(ids[b"\xa0"])
    assert constraint.accept(ids[b"\x80"])
    assert constraint.accept(ids[b"\x80"])
    constraint.rollback(2)
    assert not constraint.accept(ids[b"\xbf"])
    constraint.rollback(1)
    assert constraint.accept(ids[b"\xec"])
    assert constraint.accept(ids[b"\xa0"])


def test_what_random_tokens_spell_is_text(plain: LLM) -> None:
    found = answers(plain, [form("regex", "[^a]{40}")] * 20)
    assert all("\ufffd" not in answer.text for answer in found if answer.finish_reason == "stop")
    assert sum(answer.finish_reason == "stop" for answer in found) > 10
