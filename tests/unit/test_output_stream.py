"""Token ids in, text out: no half characters, no piece of a stop string, and together the whole decode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from triblade.engine.detokenizer import OutputStream, TextDelta
from triblade.engine.stop_strings import StopStrings
from triblade.errors import RequestError
from triblade.sampling_params import SamplingParams

CORPUS = [
    "Daenerys is the Khaleesi of the great grass sea, mother of dragons.",
    "The capital of France is Paris. Is the capital of Japan Kyoto? No, it is Tokyo!",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\n# 12 + 34 = 46",
    "Grüße aus Zürich, naïve café, 北京和上海, こんにちは世界",
] * 3
CHARACTERS = ["😀", "👩‍🚀", "🏳️‍🌈", "é", "ñ", "漢字", "ไทย", "\n", "  ", "x", "the ", "Paris"]
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Sample:
    """The part of a tokenizer that OutputStream needs, and what these tests need."""

    backend: Tokenizer
    vocab_size: int

    def id_of(self, token: str) -> int:
        number = self.backend.token_to_id(token)
        assert number is not None
        return number

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def byte_level() -> Sample:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<｜end▁of▁turn｜>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken("né◌", normalized=False), AddedToken("né", normalized=False)]
    )  # "né" is spelled like bytes
    return Sample(backend, backend.get_vocab_size())


def sentencepiece(decoder: decoders.Decoder, *, prepends_space: bool) -> Sample:
    """BPE over "▁" with the 256 byte tokens, as Llama 2, Mistral and Gemma have it."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    missing = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁▁▁", REPLACEMENT]
    vocabulary = {**model["vocab"], **{token: len(model["vocab"]) + n for n, token in enumerate(missing)}}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prepends_space else space
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["[INST]"])
    return Sample(backend, backend.get_vocab_size())


def word_level() -> Sample:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Sample(backend, 4)


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
SAMPLES = {
    "byte-level": byte_level(),
    "llama": sentencepiece(LLAMA, prepends_space=True),
    "gemma": sentencepiece(GEMMA, prepends_space=False),
    "metaspace": sentencepiece(METASPACE, prepends_space=True),
    "no-decoder": word_level(),
}
WITH_BYTES = ["byte-level", "llama", "gemma", "metaspace"]


def stream_of(sample: Sample, prompt: Sequence[int] = (), **params: Any) -> OutputStream:
    return OutputStream(sample, SamplingParams(**params), prompt)


def run(stream: OutputStream, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> tuple[list[str], int, str | None]:
    """Texts given out for pieces of these sizes in turn and at the end, tokens kept, the stop string."""
    texts, kept, start, turn = [], 0, 0, 0
    while start < len(ids):
        piece = ids[start : start + sizes[turn % len(sizes)]]
        delta = stream.append(piece)
        texts.append(delta.text)
        kept += delta.num_tokens
        if delta.stop_string is not None:
            return [*texts, stream.flush()], kept, delta.stop_string
        assert delta.num_tokens == len(piece)
        start, turn = start + len(piece), turn + 1
    return [*texts, stream.flush()], kept, None


@pytest.mark.parametrize("name", SAMPLES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_joined_text_is_the_whole_decode_of_any_ids(name: str, data: st.DataObject) -> None:
    """Random ids are mostly broken UTF-8, cut runs of byte tokens, special tokens in odd places."""
    sample = SAMPLES[name]
    anything = st.integers(0, sample.vocab_size - 1)
    if "▁" in (vocabulary := sample.backend.get_vocab()):
        byte_tokens = st.sampled_from(
            [vocabulary[f"<0x{byte:02X}>"] for byte in (*b"\xf0\x9f\x98\x80\xe6\xbc\xa2 A\xff",)]
        )
        spaces = st.sampled_from([vocabulary["▁"], vocabulary["▁▁"], vocabulary["</s>"]])
        anything = st.one_of(anything, byte_tokens, spaces)
    ids = data.draw(st.lists(anything, max_size=25))
    skip = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    texts, kept, _ = run(stream_of(sample, skip_special_tokens=skip), ids, sizes)
    assert "".join(texts) == sample.decode(ids, skip)  # C30, C33
    assert kept == len(ids)


@pytest.mark.parametrize("name", WITH_BYTES)
@settings(deadline=None, max_examples=100)
@given(text=st.lists(st.sampled_from(CHARACTERS), max_size=12).map("".join), later=st.sampled_from(["", "!", "é"]))
def test_valid_text_never_shows_half_a_character(name: str, text: str, later: str) -> None:
    sample = SAMPLES[name]
    texts, _, _ = run(stream_of(sample), sample.encode(text + later))
    assert "".join(texts) == text + later
    assert not any(REPLACEMENT in piece for piece in texts)  # C30


@pytest.mark.parametrize("name", WITH_BYTES)
def test_an_unfinished_character_is_flushed_at_the_end(name: str) -> None:
    sample = SAMPLES[name]
    ids = sample.encode("x😀")[:-2]
    texts, _, _ = run(stream_of(sample), ids)
    assert texts[-1].startswith(REPLACEMENT)
    assert not any(REPLACEMENT in piece for piece in texts[:-1])
    assert "".join(texts) == sample.decode(ids)


def test_whole_characters_are_shown_at_once() -> None:
    sample = SAMPLES["byte-level"]
    texts, _, _ = run(stream_of(sample), sample.encode("😀a"))
    assert texts == ["", "", "", "😀", "a", ""]


def test_broken_bytes_delay_nothing_behind_them() -> None:
    """A model that only produces broken bytes: each is shown as soon as it cannot be completed."""
    sample = SAMPLES["byte-level"]
    broken = sample.id_of("ÿ")  # byte 0xFF
    texts, _, _ = run(stream_of(sample), [broken] * 2000)
    assert texts == [REPLACEMENT] * 2000 + [""]


def test_a_byte_token_run_is_exact_however_long() -> None:
    """One invalid byte turns the complete characters before it in the run into U+FFFD too, as the whole decode does."""
    sample = SAMPLES["llama"]
    emoji = [sample.id_of(f"<0x{byte:02X}>") for byte in "😀".encode()]
    word = sample.id_of("▁is")
    for ids in ([*emoji * 300, word], [*emoji * 300, emoji[0], word], [*emoji * 300, emoji[0]]):
        texts, _, _ = run(stream_of(sample, stop=("never",)), ids)
        assert "".join(texts) == sample.decode(ids)


def test_words_keep_their_spaces_token_by_token() -> None:
    sample = SAMPLES["llama"]
    texts, _, _ = run(stream_of(sample), sample.encode("Daenerys is the Khaleesi"))
    assert "".join(texts) == "Daenerys is the Khaleesi"  # C33
    assert all(texts[:-1])


@pytest.mark.parametrize("name", ["llama", "gemma", "metaspace", "byte-level"])
@pytest.mark.parametrize("skip", [True, False])
def test_text_continues_the_prompt(name: str, skip: bool) -> None:
    """Prompt and output joined are the text of all ids, with the space between them."""
    sample = SAMPLES[name]
    prompt, output = sample.encode("The capital of France is"), sample.encode("The capital of France is Paris.")
    output = output[len(prompt) :]
    texts, _, _ = run(stream_of(sample, prompt, skip_special_tokens=skip), output)
    assert "".join(texts) == " Paris."


def test_text_behind_a_turn_marker_starts_anew() -> None:
    sample = SAMPLES["llama"]
    prompt = [*sample.encode("Is it Tokyo?"), sample.id_of("</s>")]
    for skip in (True, False):
        texts, _, _ = run(stream_of(sample, prompt, skip_special_tokens=skip), sample.encode("No, it is"))
        assert "".join(texts) == "No, it is"


def test_a_prompt_that_ends_in_byte_tokens_is_no_part_of_the_output() -> None:
    sample = SAMPLES["llama"]
    prompt, output = sample.encode("is 😀"), sample.encode("is 😀😀 is")
    texts, _, _ = run(stream_of(sample, prompt), output[len(prompt) :])
    assert "".join(texts) == "😀 is"
    only_bytes, _, _ = run(stream_of(sample, output[2:6]), sample.encode("is"))
    assert "".join(only_bytes) == "is"


@pytest.mark.parametrize("token", [-1, 10_000, 2**32])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    stream = stream_of(SAMPLES["byte-level"])
    with pytest.raises(RequestError, match=f"token id between 0 and .*, got: {token}$"):  # C29
        stream.append([5, token])


# --- stop strings ---


def letters(*pieces: str) -> tuple[Sample, list[int]]:
    """A tokenizer whose tokens are exactly these pieces, and their ids in order."""
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=pieces[0]))
    backend.decoder = decoders.Fuse()
    return Sample(backend, len(vocabulary)), [vocabulary[piece] for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "stops", "texts", "kept", "stop"),
    [
        (
            ["A", "B", "C", "D", "E", "FG", "HIJ", "K"],
            ["DEFGHIJ"],
            ["A", "B", "C", "", "", "", "", ""],
            7,
            "DEFGHIJ",
        ),  # C13
        (["be", "ta", " ", "ga", "mma", "!"], ["beta gamma"], ["", "", "", "", "", ""], 5, "beta gamma"),  # C13
        (["why", "?\n"], ["\n"], ["why", "?", ""], 2, "\n"),  # C14
        (["a", "b", "x"], ["bcd"], ["a", "", "bx", ""], 3, None),  # a false alarm is shown in full
        (["a", "b", "c"], ["bcd"], ["a", "", "", "bc"], 3, None),  # C14: held at the end
        (
            ["one ", "two ", "three "],
            ["###", "STOP"],
            ["one ", "two ", "three ", ""],
            3,
            None,
        ),  # C15: no prefix, no delay
        (["x##", "y"], ["###"], ["x", "##y", ""], 2, None),  # C15: only the tail that could match is held
        (["aab", "aac"], ["aaba", "aabaac"], ["", "", ""], 2, "aabaac"),  # the longest of those that begin first
        (["abcde"], ["de", "cd"], ["ab", ""], 1, "cd"),  # the one that begins first
        (["ab", "cde"], ["abcdX", "bc"], ["", "a", ""], 2, "bc"),
        (["pre STOP post", "more"], ["STOP"], ["pre ", ""], 1, "STOP"),  # in the middle of a token
        (["aaa", "aab"], ["aaab"], ["", "aa", ""], 2, "aaab"),  # overlapping beginnings
        (["STOP"], ["STOP"], ["", ""], 1, "STOP"),
    ],
)
def test_stop_strings_cut_the_text(
    pieces: list[str], stops: list[str], texts: list[str], kept: int, stop: str | None
) -> None:
    sample, ids = letters(*pieces)
    assert run(stream_of(sample, stop=tuple(stops)), ids) == (texts, kept, stop)


def test_the_stop_string_is_shown_when_asked_for() -> None:
    sample, ids = letters("so ", "ST", "OP it", "x")
    stream = stream_of(sample, stop=("STOP",), include_stop_str_in_output=True)
    assert run(stream, ids) == (["so ", "", "STOP", ""], 3, "STOP")


def test_tokens_behind_the_stop_string_are_dropped() -> None:
    """As after a verified block of drafts: ids, count and text agree."""
    sample, ids = letters("a", "b", "c", "d", "e")
    stream = stream_of(sample, stop=("bc",))
    assert stream.append(ids) == TextDelta("a", 3, "bc")  # F08
    assert stream.append(ids) == TextDelta("", 0, "bc")
    assert stream.flush() == ""
    assert stream_of(sample, stop=("bc",)).append([]) == TextDelta("", 0, None)


@pytest.mark.parametrize(
    ("min_tokens", "kept", "text"), [(0, 2, "a"), (1, 2, "a"), (2, 4, "aba"), (3, 4, "aba"), (4, 6, "ababa")]
)
def test_stop_strings_wait_for_min_tokens(min_tokens: int, kept: int, text: str) -> None:
    """A stop string that the first `min_tokens` tokens hold is ordinary text, for good."""
    sample, ids = letters("a", "b", "a", "b", "a", "b", "a")
    texts, number, stop = run(stream_of(sample, stop=("b",), min_tokens=min_tokens), ids)
    assert (number, "".join(texts), stop) == (kept, text, "b")  # C19


def test_a_stop_string_may_begin_before_min_tokens() -> None:
    sample, ids = letters("a", "b", "c", "d")
    assert run(stream_of(sample, stop=("bc",), min_tokens=2), ids) == (["a", "", "", ""], 3, "bc")


def test_a_stop_string_of_byte_tokens_ends_the_run_at_once() -> None:
    """The run is still open, but the output ends here, so its characters are final."""
    sample = SAMPLES["llama"]
    ids = sample.encode("is 😀😎😀 is")
    last = sample.encode("is 😀😎")
    texts, kept, stop = run(stream_of(sample, stop=("😎",)), ids)
    assert (kept, stop) == (len(last), "😎")
    assert "".join(texts) == "is 😀"


def first_stop(sample: Sample, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int, str | None]:
    """The slow twin: decode everything after every token and look for every stop string."""
    for number in range(1, len(ids) + 1):
        text = sample.decode(ids[:number]).rstrip(REPLACEMENT)
        if found := [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]:
            start, _, stop = min(found)
            return text[:start], number, stop
    return sample.decode(ids), len(ids), None


@pytest.mark.parametrize("name", WITH_BYTES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_streamed_text_is_the_cut_whole_text(name: str, data: st.DataObject) -> None:
    sample = SAMPLES[name]
    text = data.draw(st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=12).map("".join))
    windows = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = data.draw(st.lists(st.one_of(windows, windows.map(lambda stop: stop + "x")), min_size=1, max_size=3))
    ids = sample.encode(text)
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(ids)))
        ids.insert(position, data.draw(st.integers(0, sample.vocab_size - 1)))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    texts, kept, stop = run(stream_of(sample, stop=tuple(stops)), ids, sizes)
    assert ("".join(texts), kept, stop) == first_stop(sample, ids, stops)  # C13, C14, F08


@settings(deadline=None)
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_the_held_tail_is_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    expected = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
    assert StopStrings(stops).held_length(text) == expected  # C13, C15


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    searched=st.integers(0, 30),
)
def test_the_match_that_begins_first_is_found(text: str, stops: list[str], searched: int) -> None:
    places = [(start, -len(stop)) for stop in stops for start in range(len(text)) if text.startswith(stop, start)]
    expected = min((place for place in places if place[0] - place[1] > searched), default=None)
    match = StopStrings(stops).find(text, searched)
    assert (match and (match.start, -len(match.stop_string))) == expected


def test_stop_strings_of_every_place_and_length_are_seen() -> None:
    text = "the quick brown fox"
    sample, ids = letters(*text)
    for start in range(len(text)):
        for stop in (text[start:end] for end in range(start + 1, len(text) + 1)):
            texts, kept, _ = run(stream_of(sample, stop=(stop,)), ids)
            assert ("".join(texts), kept) == (text[: text.index(stop)], text.index(stop) + len(stop))
