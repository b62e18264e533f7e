"""GGUF headers: what a writer writes is read back; what no writer would write is an error of ours, never a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import TYPES, header, pair, random_tensor, record, string, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triblade.errors import CheckpointError, TribladeError, UnsupportedError
from triblade.models.gguf_file import GGUFFile

UINT32, STRING, ARRAY = 4, 8, 9
KEY = pair("general.alignment", UINT32, struct.pack("<I", 32))


def read(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "x.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def padded(content: bytes, data: bytes = b"") -> bytes:
    return content + b"\0" * (-len(content) % 32) + data


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    tensors = {
        "a.weight": (random_tensor(3, 64), TYPES.Q8_0),
        "b.weight": (random_tensor(5), TYPES.F32),
        "c.weight": (random_tensor(2, 32, seed=1), TYPES.F16),
    }
    other = {"a.text": "é", "a.list": ["x", "yy", ""], "a.numbers": [1.5, 2.5], "a.flag": True}
    return write(tmp_path / "valid.gguf", "llama", {"block_count": 3, "eps": 1e-5}, tensors, other)


def test_reads_what_a_writer_wrote(valid: Path) -> None:
    file = GGUFFile(valid)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["llama.eps"] == 1e-5  # stored as float32, read as the number that was meant
    assert file.metadata["a.text"] == "é"
    assert file.metadata["a.list"] == ["x", "yy", ""]
    assert file.metadata["a.numbers"] == [1.5, 2.5]
    assert file.metadata["a.flag"] is True
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        "a.weight": (3, 64),
        "b.weight": (5,),
        "c.weight": (2, 32),
    }
    assert file.blocks("a.weight").shape == (3, 68)
    np.testing.assert_array_equal(file.blocks("b.weight").view(np.float32), random_tensor(5).numpy())
    reference = gguf.GGUFReader(valid)
    assert {t.name: t.data_offset for t in reference.tensors} == {n: t.offset for n, t in file.tensors.items()}


def test_tensors_are_read_without_the_metadata(valid: Path) -> None:
    file = GGUFFile(valid)
    file.forget_metadata()
    assert file.metadata == {}
    np.testing.assert_array_equal(file.blocks("b.weight").view(np.float32), random_tensor(5).numpy())


@pytest.mark.parametrize("keep", [0, 1, 4, 23, 24, 60, 0.5, -1])  # A09
def test_a_file_cut_short_is_a_clean_error(valid: Path, tmp_path: Path, keep: float) -> None:
    content = valid.read_bytes()
    length = int(len(content) * keep) if isinstance(keep, float) else keep
    with pytest.raises(CheckpointError, match=r"cut short|cannot read|not a GGUF"):
        read(tmp_path, content[:length])


def test_a_tensor_cut_short_names_it_and_the_sizes(valid: Path, tmp_path: Path) -> None:  # A09
    content = valid.read_bytes()
    last = max(GGUFFile(valid).tensors.values(), key=lambda tensor: tensor.offset)
    end = last.offset + last.num_bytes
    with pytest.raises(CheckpointError, match=f"'{last.name}' needs bytes up to {end}, .* has {end - 1}"):
        read(tmp_path, content[: end - 1])


HOSTILE = {
    # A11: a dimension of 0 (88 bytes), an empty key
    "zero dimension": (padded(header(1, 0) + record("t.weight", [4, 0]), b"\0" * 8), "dimension of 0"),
    "empty key": (header(0, 1) + pair("", UINT32, b"\1\0\0\0"), "empty key"),
    "empty tensor name": (padded(header(1, 0) + record("", [4]), b"\0" * 16), "tensor ''"),
    # A12: products and counts beyond 64 bits
    "product wraps to 0": (padded(header(1, 0) + record("t", [1 << 32, 1 << 32])), "tensor larger than file"),
    "product wraps to 4": (padded(header(1, 0) + record("t", [(1 << 62) + 1, 4]), b"\0" * 16), "larger than file"),
    "offset wraps": (padded(header(1, 0) + record("t", [4], offset=2**64 - 32), b"\0" * 16), "larger than file"),
    "too many tensors": (header(2**64 - 1, 0) + record("t", [4]), "18446744073709551615 tensors cannot fit"),
    "too many pairs": (header(0, 2**63) + KEY, "key-value pairs cannot fit"),
    "long key": (header(0, 1) + struct.pack("<Q", 2**64 - 1) + b"k" * 30, "bytes needed"),
    "long array": (header(0, 1) + pair("a", ARRAY, struct.pack("<IQ", UINT32, 2**62)), "bytes needed"),
    "long array of strings": (header(0, 1) + pair("a", ARRAY, struct.pack("<IQ", STRING, 2**62)), "cannot fit"),
    "array of arrays": (header(0, 1) + pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1)), "array of arrays"),
    "unknown value type": (header(0, 1) + pair("a", 99, b"\0" * 8), "unknown value type 99"),
    "key twice": (header(0, 2) + KEY + KEY, "given twice"),
    "tensor twice": (padded(header(2, 0) + record("t", [4]) * 2, b"\0" * 16), "given twice"),
    "tensors overlap": (padded(header(2, 0) + record("t", [8]) + record("u", [8]), b"\0" * 32), "overlap"),
    "unaligned": (padded(header(1, 0) + record("t", [4], offset=16), b"\0" * 64), "not aligned"),
    "no dimensions": (padded(header(1, 0) + record("t", []) + b"\0" * 16), "has 0 dimensions"),
    "many dimensions": (padded(header(1, 0) + record("t", [1] * 5), b"\0" * 4), "has 5 dimensions"),
    "partial block": (padded(header(1, 0) + record("t", [33], kind=8), b"\0" * 99), "no whole Q8_0 blocks"),
    "key is not text": (header(0, 1) + pair(b"\xff\xfe", UINT32, b"\0" * 4), "not UTF-8"),
    "alignment 0": (header(0, 1) + pair("general.alignment", UINT32, b"\0" * 4), "power of two"),
    "alignment 3": (header(0, 1) + pair("general.alignment", UINT32, b"\3\0\0\0"), "power of two"),
    "other magic": (header(0, 0, magic=b"GGML"), "not a GGUF file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize(("version", "said"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_versions_that_are_not_read_are_named(tmp_path: Path, version: int, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        read(tmp_path, header(0, 0, version=version))


def test_unknown_tensor_type_is_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="unknown type: 4"):  # Q4_2, removed from the format
        read(tmp_path, padded(header(1, 0) + record("t", [32], kind=4), b"\0" * 99))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_header_crashes(valid: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes change, the file is read or refused with an error of ours, and what is read lies in the file."""
    content = bytearray(valid.read_bytes())
    end = GGUFFile(valid).data_start
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    try:
        file = read(tmp_path, bytes(content))
    except TribladeError:
        return
    for name in file.tensors:
        assert file.blocks(name).nbytes == file.tensors[name].num_bytes


def test_an_empty_metadata_string_is_fine(tmp_path: Path) -> None:
    assert read(tmp_path, header(0, 1) + pair("k", STRING, string(""))).metadata == {"k": ""}
