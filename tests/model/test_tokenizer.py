"""Tokenizers of model folders: ids as transformers gives them, exact bytes, special tokens, templates."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_tokenizers import CORPUS, byte_level, save, sentencepiece
from tokenizers import AddedToken, processors

from triblade.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from triblade.models.tokenizer import Tokenizer

CHAT_SPECIAL = ["<|end|>", "<|start|>", "<|im_end|>"]
LLAMA3_STYLE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    with_bos = byte_level(CHAT_SPECIAL)
    with_bos.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", 1)]
    )
    return {
        "byte-level": save(root / "a", byte_level(CHAT_SPECIAL), eos_token="<|im_end|>", chat_template=LLAMA3_STYLE),
        "byte-level-bos": save(
            root / "b", with_bos, bos_token="<|start|>", eos_token="<|im_end|>", chat_template=LLAMA3_STYLE
        ),
        "sentencepiece": save(
            root / "c", sentencepiece(prefix=True), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ),
        "sentencepiece-plain": save(root / "d", sentencepiece(prefix=False), bos_token="<s>", eos_token="</s>"),
    }


KINDS = ("byte-level", "byte-level-bos", "sentencepiece", "sentencepiece-plain")
WITH_SPECIAL = {
    "byte-level": "<|start|>user\nhi<|im_end|> and <|end|><|end|>x",
    "sentencepiece": "<s>user\nhi</s> and <turn><turn>x",
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_transformers(kind: str, folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer.load(folders[kind]), transformers.AutoTokenizer.from_pretrained(folders[kind])
    assert ours.vocab_size == len(theirs)
    for text in [*CORPUS, *WITH_SPECIAL.values()]:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_bytes_are_the_text(kind: str, folders: dict[str, Path]) -> None:  # C33
    tokenizer = Tokenizer.load(folders[kind])
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8")
        expected = text.replace("▁", " ") if kind.startswith("sentencepiece") else text  # one character for both there
        assert joined == (" " + expected if kind == "sentencepiece" and text else expected)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_spaces_survive_token_by_token_decoding(folders: dict[str, Path]) -> None:  # C33
    tokenizer = Tokenizer.load(folders["sentencepiece"])
    ids = tokenizer.encode("Daenerys is the Khaleesi", add_special_tokens=False)
    assert len(ids) > 3
    assert "".join(tokenizer.token(i) for i in ids) == " Daenerys is the Khaleesi"


def test_text_after_a_special_token_gets_no_space(folders: dict[str, Path]) -> None:  # C34
    tokenizer = Tokenizer.load(folders["sentencepiece-plain"])
    for text in ["<turn>user", "<turn> user", "a<turn>\n\nb </s>c", *CORPUS]:
        if "▁" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
    turn, user = (
        tokenizer.encode("<turn>", add_special_tokens=False),
        tokenizer.encode("user", add_special_tokens=False),
    )
    assert tokenizer.encode("<turn>user", add_special_tokens=False) == turn + user


def test_a_chat_has_the_bos_of_its_template_and_no_other(folders: dict[str, Path]) -> None:  # C35
    tokenizer = Tokenizer.load(folders["byte-level-bos"])
    ids = tokenizer.encode_chat(HI)
    text = tokenizer.render_chat(HI)
    assert text == "<|start|><|start|>user\nhi<|im_end|><|start|>assistant\n"
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text)[0:2] == [tokenizer.bos_token_id] * 2  # what must not happen on this path
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(1) == 3  # template: bos, user, assistant
    assert tokenizer.encode("raw")[0] == tokenizer.bos_token_id  # the tokenizer's own rule holds for raw text
    assert Tokenizer.load(folders["byte-level"]).encode("raw")[0] != tokenizer.bos_token_id


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_text_of_single_tokens(kind: str, folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders[kind])
    ids = tokenizer.encode("🧿é", add_special_tokens=False)  # the emoji is in no training text: bytes
    assert b"".join(map(tokenizer.token_bytes, ids)).endswith("🧿é".encode())
    single = [i for i in ids if len(tokenizer.token_bytes(i)) == 1 and tokenizer.token_bytes(i) > b"\x7f"]
    assert single
    assert all(tokenizer.token(i) == "\ufffd" for i in single)
    for i in range(tokenizer.vocab_size):
        assert tokenizer.token(i) != ""
        assert tokenizer.token_bytes(i).decode("utf-8", errors="replace") == tokenizer.token(i)


@pytest.mark.parametrize("bad", [[-1], [2**32], [3, 10**6]])
def test_ids_outside_the_vocabulary_are_refused(bad: list[int], folders: dict[str, Path]) -> None:  # C29
    tokenizer = Tokenizer.load(folders["byte-level"])
    with pytest.raises(RequestError, match=str(bad[-1])):
        tokenizer.decode(bad)
    with pytest.raises(RequestError, match=str(bad[-1])):
        tokenizer.token_bytes(bad[-1])


def test_half_a_surrogate_pair_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="not valid Unicode at character 2"):
        Tokenizer.load(folders["byte-level"]).encode("ab\ud800")


def test_long_text_is_tokenized_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:  # B08
    backend = byte_level(CHAT_SPECIAL)
    backend.enable_truncation(16)
    backend.enable_padding(length=32)
    tokenizer = Tokenizer.load(save(tmp_path, backend, model_max_length=16))
    text = "the quick brown fox " * 5000
    with caplog.at_level(logging.DEBUG):
        ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text  # neither cut nor padded
    assert len(tokenizer.encode("a")) == 1
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_special_tokens_are_added_by_the_rule_of_the_files(add_bos: bool, add_eos: bool, tmp_path: Path) -> None:
    """tokenizer.json has its own rule, which transformers follows too; without it tokenizer_config.json says."""
    eos = {"content": "<|end|>", "__type": "AddedToken"}
    rule = {"add_bos_token": add_bos, "add_eos_token": add_eos, "bos_token": "<|start|>", "eos_token": eos}
    backend = byte_level(CHAT_SPECIAL)
    folder = save(tmp_path, backend, **rule, tokenizer_class="GPT2Tokenizer")
    plain = Tokenizer.load(folder).encode("the fox")
    assert plain == transformers.AutoTokenizer.from_pretrained(folder).encode("the fox")
    (folder / "tokenizer.json").unlink()
    backend.model.save(str(folder))
    ids = Tokenizer.load(folder).encode("the fox")
    assert ids == transformers.AutoTokenizer.from_pretrained(folder).encode("the fox")
    assert ids == [1] * add_bos + plain + [0] * add_eos


def test_added_tokens_of_tokenizer_config_join_the_vocabulary(tmp_path: Path) -> None:  # A24
    backend = byte_level(CHAT_SPECIAL)
    size = backend.get_vocab_size()
    decoder = {
        str(size + 1): {"content": "<second>", "special": False},
        str(size): {"content": "<first é>", "special": True},
        "0": {"content": "<|end|>", "special": True},
    }
    folder = save(
        tmp_path, backend, added_tokens_decoder=decoder, extra_special_tokens=["<third>"], pad_token="<|end|>"
    )
    tokenizer, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == size + 3
    text = "a<second>b<first é>c<third>"
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert [size + 1, size, size + 2] == [i for i in ids if i >= size]
    assert tokenizer.token_bytes(size) == "<first é>".encode()
    assert tokenizer.token(size) == "<first é>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ends_of_a_text_come_from_every_tokenizer_file(tmp_path: Path) -> None:  # C18
    folder = save(tmp_path, byte_level(CHAT_SPECIAL), eos_token="<|im_end|>")
    assert Tokenizer.load(folder).eos_token_ids == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 99999]}')
    assert Tokenizer.load(folder).eos_token_ids == {0, 2}
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|start|>"}}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert Tokenizer.load(folder).eos_token_ids == {1, 2}


def test_bpe_files_of_known_classes_are_read(tmp_path: Path) -> None:
    backend = byte_level(CHAT_SPECIAL)
    backend.model.save(str(tmp_path))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|end|>",
        "bos_token": "<|end|>",
        "unk_token": "<|end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, theirs = Tokenizer.load(tmp_path), transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in [*CORPUS, "a<|end|>b"]:
        assert tokenizer.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("files", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["tekken.json"], ["vocab.json"]])
def test_slow_tokenizers_are_refused_with_the_way_out(files: list[str], tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(UnsupportedError, match=files[0]) as error:
        Tokenizer.load(tmp_path)
    assert "save_pretrained" in str(error.value)


def test_older_added_tokens_file(tmp_path: Path) -> None:
    backend = byte_level(CHAT_SPECIAL)
    backend.model.save(str(tmp_path))
    size = backend.get_vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<b>": size + 1, "<a>": size}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<a>"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<a><b>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<b>"  # the special one is not shown
    assert tokenizer.eos_token_ids == {size}


@pytest.mark.parametrize(
    "config", ['{"added_tokens_decoder": [1]}', '{"added_tokens_decoder": {"x": {}}}', '{"extra_special_tokens": 3}']
)
def test_senseless_configuration_is_a_clean_error(config: str, tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match="makes no sense"):
        Tokenizer.load(tmp_path)


def test_absent_and_broken_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot read"):
        Tokenizer.load(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(tmp_path)


class TestTemplates:
    """Which chat template is used, and what it is given."""

    def load(self, folder: Path, **config: Any) -> Tokenizer:
        return Tokenizer.load(save(folder, byte_level(CHAT_SPECIAL), **config))

    def test_a_file_wins_over_the_configuration(self, tmp_path: Path) -> None:
        assert self.load(tmp_path, chat_template="config").chat_template == "config"
        (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
        assert self.load(tmp_path, chat_template="config").render_chat(HI) == "file é"

    def test_a_given_file_replaces_all(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "m", byte_level(), chat_template=[{"name": "tool_use", "template": "t"}])
        (tmp_path / "own.jinja").write_text("own")
        tokenizer = Tokenizer.load(folder, chat_template=tmp_path / "own.jinja")
        assert tokenizer.render_chat(HI, tools=[{"x": 1}]) == "own"
        with pytest.raises(ConfigError, match=r"absent\.jinja"):
            Tokenizer.load(folder, chat_template=tmp_path / "absent.jinja")

    def test_named_templates(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ tools | length }}"}]
        tokenizer = self.load(tmp_path, chat_template=named)
        assert tokenizer.render_chat(HI) == "d"
        assert tokenizer.render_chat(HI, tools=[]) == "d"
        assert tokenizer.render_chat(HI, tools=[{"type": "function"}]) == "t1"
        assert tokenizer.render_chat(HI, chat_template="tool_use", template_kwargs={}, tools=[{}, {}]) == "t2"
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
        assert Tokenizer.load(tmp_path).render_chat(HI, chat_template="rag") == "r"

    def test_without_a_template_the_error_says_what_to_do(self, tmp_path: Path) -> None:
        tokenizer = self.load(tmp_path)
        assert tokenizer.chat_template is None
        with pytest.raises(RequestError, match="no chat template") as error:
            tokenizer.encode_chat(HI)
        assert "--chat-template" in str(error.value)
        assert tokenizer.render_chat(HI, chat_template="{{ messages[0].content }}") == "hi"

    def test_variables(self, tmp_path: Path) -> None:
        source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ mood }}{{ add_generation_prompt }}{{ tools }}"
        tokenizer = self.load(tmp_path, bos_token="<|start|>", eos_token="<|end|>", chat_template=source)
        assert tokenizer.render_chat(HI) == "<|start|><|end|>TrueNone"
        options: Any = {"template_kwargs": {"mood": "good", "bos_token": "!"}, "add_generation_prompt": False}
        assert tokenizer.render_chat(HI, **options) == "!<|end|>goodFalseNone"
        for name in ("messages", "tools", "add_generation_prompt"):
            with pytest.raises(RequestError, match=name) as error:
                tokenizer.render_chat(HI, template_kwargs={name: 1})
            assert error.value.param == "template_kwargs"

    def test_continuing_excludes_a_new_turn(self, folders: dict[str, Path]) -> None:
        tokenizer = Tokenizer.load(folders["byte-level"])
        messages = [*HI, {"role": "assistant", "content": "So "}]
        assert tokenizer.render_chat(messages, continue_final_message=True).endswith("<|start|>assistant\nSo ")
        with pytest.raises(RequestError, match="exclude each other"):
            tokenizer.render_chat(messages, continue_final_message=True, add_generation_prompt=True)

    def test_string_and_parts_give_the_same_ids(self, folders: dict[str, Path]) -> None:  # D17
        tokenizer = Tokenizer.load(folders["byte-level"])
        content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        assert tokenizer.encode_chat([{"role": "user", "content": content}]) == tokenizer.encode_chat(HI)


def test_other_decoders_fall_back_to_decoding(tmp_path: Path) -> None:
    """A tokenizer with no decoder joins tokens with spaces; a token alone is its own text."""
    backend = byte_level(CHAT_SPECIAL)
    backend.decoder = None
    backend.add_tokens([AddedToken("<x>")])
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert tokenizer.token_bytes(tokenizer.encode("the")[0]).decode() == tokenizer.backend.id_to_token(
        tokenizer.encode("the")[0]
    )
