"""Calibration files of every kind: what is used, what is counted, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_folders import tiny_folder, words

from triblade.errors import ConfigError
from triblade.models.tokenizer import Tokenizer
from triblade.quant.calibration import load_calibration
from triblade.quant.drift import divergence, drift


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_folder(tmp_path_factory.mktemp("model")))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_long_document_is_cut_not_dropped(tokenizer: Tokenizer, tmp_path: Path) -> None:  # B05
    path = write(tmp_path / "one.txt", words(5000))
    found = load_calibration(path, tokenizer, sequences=10, length=2048)
    assert found.ids.shape == (2, 2048)
    assert torch.equal(torch.cat((found.ids.flatten(), found.rest)), torch.tensor(tokenizer.encode(words(5000))))
    assert (found.report.used_tokens, found.report.available_tokens) == (4096, 5000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0 usable tokens in 0 documents and 0 blank lines; the minimum is 8"),
        ("\n\n \n", "0 usable tokens in 0 documents and 3 blank lines"),
        ("w1 w2 w3", "3 usable tokens in 1 documents"),
    ],
)
def test_nothing_usable_says_what_there_was(
    content: str, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:  # B04
    with pytest.raises(ConfigError, match=message):
        load_calibration(write(tmp_path / "x.txt", content), tokenizer)


def test_json_lines_of_every_kind(tokenizer: Tokenizer, tmp_path: Path) -> None:
    records = [
        {"text": "w10 w11 w12"},
        {"messages": [{"role": "user", "content": "w20 w21"}, {"role": "assistant", "content": "w22"}]},
        {"token_ids": [30, 31]},
        "w40 w41",
        [50, 51],
    ]
    lines = "\n\n".join(json.dumps(record) for record in records)
    found = load_calibration(write(tmp_path / "x.jsonl", lines), tokenizer, length=12)
    assert found.ids.tolist() == [[10, 11, 12, 20, 21, 22, 30, 31, 40, 41, 50, 51]]
    assert found.report.documents == 5
    assert found.report.blank_lines == 4
    assert "4 blank lines" in str(found.report)


def test_token_ids_as_json(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "ids.json", json.dumps([[5] * 6, [6] * 6]))
    assert load_calibration(path, tokenizer, length=4).ids.tolist() == [[5] * 4, [5, 5, 6, 6], [6] * 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"txt": "w1"}', "line 2 is not a document"),
        ("[96]", "line 2"),
        ("[-1]", "line 2"),
        ('{"messages": 3}', "line 2"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_calibration(write(tmp_path / "x.jsonl", f'"w1"\n{line}\n'), tokenizer)


def test_bytes_that_are_not_utf8(tokenizer: Tokenizer, tmp_path: Path) -> None:  # B30
    path = write(tmp_path / "x.txt", words(20).encode() + b"\nw1 \x80 w2\n")
    offset = len(words(20)) + 4
    with pytest.raises(ConfigError, match=f"line 2, byte 0x80 at offset {offset}") as error:
        load_calibration(path, tokenizer)
    assert "--calibration-lenient" in str(error.value)
    found = load_calibration(path, tokenizer, length=8, lenient=True)
    assert found.report.replaced_bytes == 1
    assert "1 bytes that are not UTF-8 replaced" in str(found.report)


def test_utf16_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:  # B30
    with pytest.raises(ConfigError, match="UTF-16"):
        load_calibration(write(tmp_path / "x.txt", words(20).encode("utf-16")), tokenizer)


def test_a_byte_order_mark_of_utf8_is_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = load_calibration(write(tmp_path / "x.txt", words(8).encode("utf-8-sig")), tokenizer)
    assert found.ids.tolist() == [tokenizer.encode(words(8))]


def test_a_short_file_is_one_short_sequence(tokenizer: Tokenizer, tmp_path: Path) -> None:  # B09
    assert load_calibration(write(tmp_path / "x.txt", words(9)), tokenizer).ids.shape == (1, 9)


def test_a_long_corpus_raises_no_alarm(
    tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # B08
    load_calibration(write(tmp_path / "x.txt", words(20000)), tokenizer, sequences=2, length=64)
    assert capfd.readouterr() == ("", "")


def test_a_huge_file_is_read_as_far_as_needed(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triblade.quant.calibration.BYTES_PER_TOKEN", 4)
    path = write(tmp_path / "x.txt", "\n".join(words(10, seed) for seed in range(100)))
    found = load_calibration(path, tokenizer, sequences=2, length=50)
    assert 100 <= found.report.available_tokens < 200 or found.report.used_tokens <= 100


def test_ids_decide_the_fingerprint(tokenizer: Tokenizer, tmp_path: Path) -> None:  # B26
    first, second = (write(tmp_path / f"{seed}.txt", words(64, seed)) for seed in (0, 1))
    cases = ((first, 32), (second, 32), (first, 16))
    prints = [load_calibration(path, tokenizer, length=length).fingerprint() for path, length in cases]
    assert len(set(prints)) == 3
    assert prints[0] == load_calibration(first, tokenizer, length=32).fingerprint()


def test_divergence_is_a_distance_in_bits() -> None:
    a, b = torch.tensor([1.0, 1, 0, 0]), torch.tensor([0.0, 0, 5, 5])
    assert divergence(a, b) == pytest.approx(1)
    assert divergence(a, 7 * a) == pytest.approx(0)
    half = torch.tensor([1.0, 0, 1, 0])  # shares one of two tokens
    assert divergence(a, half) == pytest.approx(0.5)


def test_drift_tells_other_text_from_the_same(tokenizer: Tokenizer) -> None:
    def ids(seed: int, low: int, high: int) -> torch.Tensor:
        return torch.tensor(tokenizer.encode(words(3000, seed, low, high)))

    calibration = ids(0, 3, 60)
    same, other = drift(calibration, ids(1, 3, 60), 96), drift(calibration, ids(2, 40, 96), 96)
    assert not same.is_noticeable
    assert same.unseen == 0
    assert other.is_noticeable
    assert other.unseen == pytest.approx(36 / 56, abs=0.05)
    assert "calibrate on text like the traffic" in str(other)
