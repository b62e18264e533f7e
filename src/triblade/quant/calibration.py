"""Calibration text: from a file of text, JSON lines or token ids to sequences of one length, with an account of what was used.

Documents are laid end to end and cut into sequences, so a long one is chunked and a short one is not lost. Nothing is dropped in
silence: blank lines, tokens left over and bytes replaced are counted. Knows no model but its tokenizer.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triblade.errors import ConfigError, RequestError
from triblade.models.tokenizer import Tokenizer
from triblade.sampling_params import check_token_ids

MINIMUM_TOKENS = 8
BYTES_PER_TOKEN = 64  # more than any text needs: how much of a huge file is read
_ID_KEYS = ("token_ids", "input_ids", "ids")
_BOMS = ((codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What became of a file."""

    file: str
    documents: int
    blank_lines: int
    replaced_bytes: int
    available_tokens: int  # in the part of the file that was read
    used_tokens: int
    sequences: int
    sequence_length: int

    def __str__(self) -> str:
        used = f"{self.used_tokens} tokens ({self.sequences} x {self.sequence_length})"
        blank = f", {self.blank_lines} blank lines" if self.blank_lines else ""
        replaced = f", {self.replaced_bytes} bytes that are not UTF-8 replaced" if self.replaced_bytes else ""
        return f"{self.file}: {used} of {self.available_tokens} in {self.documents} documents{blank}{replaced}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Token ids to calibrate on, and those that were left."""

    ids: Tensor  # [N, S] int64
    rest: Tensor  # [R] int64, not used: good for measuring
    report: CalibrationReport

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of the ids."""
        shape = f"{tuple(self.ids.shape)}".encode()
        return hashlib.sha256(shape + self.ids.contiguous().numpy().tobytes()).hexdigest()


@dataclass(slots=True)
class _Count:
    blank_lines: int = 0
    documents: int = 0
    replaced_bytes: int = 0


def load_calibration(
    path: Path, tokenizer: Tokenizer, *, sequences: int = 128, length: int = 512, lenient: bool = False
) -> Calibration:
    """Read calibration text.

    Args:
        path: `.jsonl` (a string, or an object with `text`, `messages` or `token_ids`, per line), `.json` (a list of lists of token
            ids), or any other name: plain text, one running document.
        tokenizer: of the model; its chat template renders messages.
        sequences: how many sequences to use at most.
        length: tokens per sequence; shorter if the whole file has fewer tokens than one sequence.
        lenient: replace bytes that are not UTF-8, and count them, instead of refusing.

    Raises:
        ConfigError: the file cannot be read, or nothing usable is in it; the message has file, line and byte, or the counts.
    """
    count = _Count()
    text = _read(path, sequences * length * BYTES_PER_TOKEN, lenient, count)
    stream: list[int] = []
    for ids in _documents(path, text, tokenizer, count):
        count.documents += 1
        stream += ids
    if len(stream) < MINIMUM_TOKENS:
        raise ConfigError(
            f"{path} has {len(stream)} usable tokens in {count.documents} documents and {count.blank_lines} blank lines; "
            f"the minimum is {MINIMUM_TOKENS}",
            hint="give more text; 500 samples of 256 to 2048 tokens are good",
            param="calibration",
        )
    return _cut(stream, sequences, min(length, len(stream)), path, count)


def _cut(stream: list[int], sequences: int, length: int, path: Path, count: _Count) -> Calibration:
    """A stream of tokens as sequences of one length, and the rest."""
    used = min(sequences, len(stream) // length)
    tokens = torch.tensor(stream, dtype=torch.long)
    report = CalibrationReport(
        file=str(path),
        documents=count.documents,
        blank_lines=count.blank_lines,
        replaced_bytes=count.replaced_bytes,
        available_tokens=len(stream),
        used_tokens=used * length,
        sequences=used,
        sequence_length=length,
    )
    return Calibration(ids=tokens[: used * length].view(used, length), rest=tokens[used * length :], report=report)


def _read(path: Path, most_bytes: int, lenient: bool, count: _Count) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the calibration text: {path}: {error.strerror}", param="calibration") from error
    if len(data) > most_bytes:
        data = data[: data.rfind(b"\n") + 1] or data
    for mark, name in _BOMS:
        if data.startswith(mark):
            raise ConfigError(
                f"the calibration text is {name}, not UTF-8: {path}", hint="convert it, for example with iconv"
            )
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if not lenient:
            line = data.count(b"\n", 0, error.start) + 1
            raise ConfigError(
                f"the calibration text is not UTF-8: {path}: line {line}, byte 0x{data[error.start]:02x} at offset {error.start}",
                hint="convert it, or pass --calibration-lenient to replace such bytes",
            ) from error
    text = data.decode("utf-8", errors="replace")
    count.replaced_bytes = text.count("\ufffd") - data.count("\ufffd".encode())
    return text


def _documents(path: Path, text: str, tokenizer: Tokenizer, count: _Count) -> Iterator[list[int]]:
    """Token ids of every document that is not blank."""
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                count.blank_lines += 1
                continue
            yield _record(_json(path, line, number), tokenizer, f"{path}: line {number}")
        return
    if path.suffix == ".json":
        records = _json(path, text, 1)
        if not isinstance(records, list):
            raise ConfigError(f"{path} must hold a list, got: {type(records).__name__}")
        for number, record in enumerate(records, 1):
            yield _record(record, tokenizer, f"{path}: entry {number}")
        return
    count.blank_lines = sum(not line.strip() for line in text.splitlines())
    if text.strip():
        yield tokenizer.encode(text, add_special_tokens=False)


def _json(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: line {line} is not JSON: {error}") from error


def _record(record: Any, tokenizer: Tokenizer, place: str) -> list[int]:
    try:
        if isinstance(record, str):
            return tokenizer.encode(record)
        if isinstance(record, list):
            return _checked_ids(record, tokenizer)
        if isinstance(record, Mapping):
            if isinstance(record.get("text"), str):
                return tokenizer.encode(record["text"])
            if isinstance(record.get("messages"), list):
                return tokenizer.encode_chat(record["messages"], add_generation_prompt=False)
            for key in _ID_KEYS:
                if isinstance(record.get(key), list):
                    return _checked_ids(record[key], tokenizer)
    except RequestError as error:
        raise ConfigError(f"{place}: {error.message}", hint=error.hint) from error
    known = "a string, a list of token ids, or an object with text, messages or token_ids"
    raise ConfigError(f"{place} is not a document", hint=f"known: {known}")


def _checked_ids(ids: list[Any], tokenizer: Tokenizer) -> list[int]:
    check_token_ids("token_ids", ids, tokenizer.vocab_size)
    return ids
