"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizer.json they were made from, or say what is missing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from gguf_files import TYPES, random_tensor, write
from tiny_tokenizers import CORPUS, byte_level, gguf_entries, sentencepiece, sentencepiece_parts
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from triblade.errors import CheckpointError, UnsupportedError
from triblade.models.gguf_tokenizer import merges_from_scores, tokenizer_from_metadata
from triblade.models.pretokenizers import pre_tokenization
from triblade.models.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGGED = ["<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|> b"]
# The patterns as the models' own tokenizer.json files have them, written down here a second time on purpose.
PATTERNS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def from_metadata(**entries: Any) -> Tokenizer:
    return Tokenizer(tokenizer_from_metadata({"general.architecture": "llama", **entries}))


def encode(backend: Backend, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("pre", [*PATTERNS, "smollm"])
def test_byte_level_ids_equal_the_original(pre: str) -> None:  # A29
    original = byte_level(SPECIAL, PATTERNS.get(pre), vocab_size=500)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        original.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    tokenizer = from_metadata(**gguf_entries(original, pre, SPECIAL))
    for text in [*CORPUS, *TAGGED]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == encode(original, text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


def test_the_way_of_cutting_words_matters() -> None:
    """The comparison above can fail: with another rule ids differ."""
    original = byte_level(SPECIAL, PATTERNS["llama-bpe"], vocab_size=500)
    other = from_metadata(**gguf_entries(original, "gpt-2", SPECIAL))
    assert any(other.encode(text, add_special_tokens=False) != encode(original, text) for text in CORPUS)


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_words_that_are_tokens_need_no_merges_in_some_families(pre: str, whole: bool) -> None:  # A29
    entries = gguf_entries(byte_level(SPECIAL), pre, SPECIAL)
    entries["tokenizer.ggml.tokens"].append("zzzq")
    entries["tokenizer.ggml.token_type"].append(1)
    ids = from_metadata(**entries).encode("zzzq", add_special_tokens=False)
    assert (ids == [len(entries["tokenizer.ggml.tokens"]) - 1]) is whole


def test_an_unknown_way_of_cutting_words_is_refused(tmp_path: Path) -> None:  # A29
    with pytest.raises(UnsupportedError, match="'surprise'") as error:
        from_metadata(**gguf_entries(byte_level(), "surprise", []))
    assert "--tokenizer" in str(error.value)
    assert "smollm" in str(error.value)


@pytest.mark.parametrize("pre", [None, "default", ""])
def test_an_unstated_way_of_cutting_words_is_a_loud_warning(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:  # A29
    entries = gguf_entries(byte_level(SPECIAL), "gpt-2", SPECIAL)
    stated = from_metadata(**entries)
    assert caplog.records == []
    entries.pop("tokenizer.ggml.pre")
    entries |= {} if pre is None else {"tokenizer.ggml.pre": pre}
    guessed = from_metadata(**entries)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "--tokenizer" in caplog.text
    assert guessed.encode("it's 12 x") == stated.encode("it's 12 x")


def sentencepiece_entries(**extra: Any) -> dict[str, Any]:
    tokens, scores, types = sentencepiece_parts()
    keys = {"tokens": tokens, "scores": scores, "token_type": types, "model": "llama", "unknown_token_id": 0}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, **extra}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(("architecture", "prefix"), [("gemma3", False), ("phi3", True)])
def test_sentencepiece_ids_equal_the_original(architecture: str, prefix: bool) -> None:  # A29
    """tokenizer.json spells user-defined newlines and tags as added tokens; here they are in the vocabulary alike."""
    original = sentencepiece(prefix=prefix)
    original.add_tokens([AddedToken(token, normalized=False) for token in ("\n", "\n\n", "<table>")])
    entries = sentencepiece_entries(add_space_prefix=prefix) | {"general.architecture": architecture}
    tokenizer = from_metadata(**entries)
    for text in [*CORPUS, "<turn>user\n\n\n x</s>", "x" + " " * 40 + "y"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == encode(original, text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert tokenizer.encode(text) == [1, *ids]  # a SentencePiece vocabulary has a BOS unless the file denies it
    denied = from_metadata(**entries, **{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True})
    assert denied.encode("the")[-1] == 2
    assert denied.encode("the")[0] != 1


def test_a_space_prefix_is_put_before_the_text_only() -> None:  # C34
    tokenizer = from_metadata(**sentencepiece_entries())
    alone = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.token(alone[0]).startswith(" ")
    behind = tokenizer.encode("<turn>the", add_special_tokens=False)
    assert behind[0] == 3
    assert not tokenizer.token(behind[1]).startswith(" ")
    assert tokenizer.decode(alone) == "the"


def test_without_a_space_prefix_text_comes_back_as_it_was() -> None:  # C34
    tokenizer = from_metadata(**sentencepiece_entries(add_space_prefix=False))
    for text in [*CORPUS, "<turn>user", "<turn> user\n<turn>"]:
        if "▁" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_byte_tokens_are_bytes_and_never_text() -> None:
    tokenizer = from_metadata(**sentencepiece_entries(add_space_prefix=False))
    ids = tokenizer.encode("🧿", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([b]) for b in "🧿".encode()]
    spelled = tokenizer.encode("<0x41>", add_special_tokens=False)
    assert len(spelled) > 1
    assert tokenizer.decode(spelled) == "<0x41>"


def test_merges_follow_the_scores() -> None:
    scores = {"a": -5.0, "b": -6.0, "c": -7.0, "ab": -1.0, "bc": -0.5, "abc": -2.0}
    assert merges_from_scores(scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
    backend = Backend(models.BPE({token: i for i, token in enumerate(scores)}, merges_from_scores(scores)))
    assert encode(backend, "abc") == [5]
    assert encode(backend, "abcab") == [5, 3]
    assert encode(backend, "bcb") == [4, 1]


class TestSpecialTokens:
    """Begin, end and turn tokens, and the chat template."""

    TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"

    def load(self, pre: str = "qwen2", template: str | None = None, **extra: Any) -> Tokenizer:
        entries = gguf_entries(byte_level(SPECIAL), pre, SPECIAL)
        entries |= {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
        return from_metadata(**entries, **({} if template is None else {"tokenizer.chat_template": template}))

    def test_stated_ids(self) -> None:
        tokenizer = self.load(bos_token_id=1, eos_token_id=0, eot_token_id=2, eom_token_id=5, padding_token_id=0)
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_ids == {0, 2, 5}
        assert self.load(bos_token_id=0xFFFFFFFF).bos_token_id is None

    @pytest.mark.parametrize(
        ("template", "stated", "expected"),
        [
            (None, {}, {0}),  # a base model: the token exists, nothing uses it
            (TEMPLATE, {}, {0, 2}),  # the file's own template ends turns with it
            (TEMPLATE, {"eot_token_id": 1}, {0, 1}),  # the file says so itself: no guess
            ("{{ messages }}", {}, {0}),
        ],
    )
    def test_an_end_of_turn_is_not_guessed_from_the_vocabulary_alone(
        self, template: str | None, stated: Any, expected: set[int]
    ) -> None:  # A29
        assert self.load(template=template, eos_token_id=0, **stated).eos_token_ids == expected

    def test_ids_outside_the_vocabulary_are_refused(self) -> None:
        with pytest.raises(CheckpointError, match="eos_token_id is not in the vocabulary, got: 99999"):
            self.load(eos_token_id=99999)

    @pytest.mark.parametrize(
        ("pre", "stated", "begins"),
        [
            ("qwen2", {}, False),
            ("qwen2", {"add_bos_token": True}, True),
            ("llama-bpe", {}, True),
            ("llama-bpe", {"add_bos_token": False}, False),
        ],
    )
    def test_whether_a_text_begins_with_bos(self, pre: str, stated: Any, begins: bool) -> None:
        assert (self.load(pre, bos_token_id=1, **stated).encode("the fox")[0] == 1) is begins

    def test_the_template_gets_the_special_tokens(self) -> None:  # C35
        tokenizer = self.load("llama-bpe", self.TEMPLATE, bos_token_id=0, eos_token_id=2)
        chat = [{"role": "user", "content": "hi"}]
        assert tokenizer.render_chat(chat) == "<|endoftext|><|im_start|>hi<|im_end|>"
        assert tokenizer.encode_chat(chat).count(0) == 1
        assert self.load().chat_template is None


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "tokens is missing"),
    "no merges": ({"merges": None}, "merges is missing"),
    "types": ({"token_type": [1]}, "1 types for"),
    "merge of unknown tokens": ({"merges": ["qqq zzz"]}, "not consistent"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_byte_level_metadata_is_a_clean_error(name: str) -> None:
    change, message = BROKEN[name]
    entries = gguf_entries(byte_level(), "gpt-2", [])
    entries |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=message):
        from_metadata(**{key: value for key, value in entries.items() if value is not None})


def test_broken_or_foreign_tokenizers_are_refused() -> None:
    with pytest.raises(CheckpointError, match="scores"):
        from_metadata(**sentencepiece_entries(scores=[1.0]))
    with pytest.raises(UnsupportedError, match="'bert'"):
        from_metadata(**{"tokenizer.ggml.model": "bert"})
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        from_metadata()


def test_a_file_is_read_like_its_metadata(tmp_path: Path) -> None:
    entries = gguf_entries(byte_level(SPECIAL), "smollm", SPECIAL)
    path = write(tmp_path / "x.gguf", "llama", {}, {"token_embd.weight": (random_tensor(4), TYPES.F32)}, entries)
    assert Tokenizer.load(path).encode("the 12 foxes") == from_metadata(**entries).encode("the 12 foxes")


def test_rules_end_in_the_byte_alphabet() -> None:
    for pre in (*PATTERNS, "smollm", "gpt-4o", "dbrx", "starcoder", "deepseek-r1-qwen"):
        pieces = pre_tokenization(pre).pre_tokenizer().pre_tokenize_str("Hi, wörld 123\n")
        assert "".join(piece for piece, _ in pieces) == "Hi,ĠwÃ¶rldĠ123Ċ"
        assert json.loads(pre_tokenization(pre).pre_tokenizer().__getstate__())["type"] == "Sequence"
