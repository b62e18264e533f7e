"""Products by a package: what the kernels compute, for the numbers of tokens in its table, or one line that says why not."""

from __future__ import annotations

import logging
import sys
from typing import Any

import humming_package
import pytest
import torch
from cuda_models import config_of, cuda_executor, cuda_tiny, kernel_folder, relative
from native_models import sequence
from tiny import prompt

from triblade.engine.linear_choice import choose_products
from triblade.engine.scheduler import ScheduledRequest
from triblade.ops.cuda import humming
from triblade.ops.cuda.humming import HummingProducts, key_of, packed_numbers
from triblade.ops.cuda.packing import pack_codes, unpack, unpack_codes
from triblade.ops.packing import QuantizedMatrix

HOPPER = (9, 0)
COUNT = 3  # sequences of a step


def random_codes(rows: int, inputs: int, bits: int = 4, *, has_offsets: bool = False) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 1 << bits, (rows, inputs), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(rows, inputs // 64, generator=generator) + 0.5).half()
    offsets = torch.randn(rows, inputs // 64, generator=generator).half() if has_offsets else None
    return QuantizedMatrix(codes=codes, scales=scales, offsets=offsets, bits=bits)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("bits", "has_offsets"), [(4, False), (4, True), (8, False)])
def test_codes_come_back(bits: int, *, has_offsets: bool, is_gated: bool) -> None:
    """As they were packed, rows beyond whole tiles and the order of gates included."""
    matrix = random_codes(48 if is_gated else 40, 128, bits, has_offsets=has_offsets)
    found = unpack_codes(pack_codes(matrix, torch.bfloat16, is_gated=is_gated))
    assert torch.equal(found.codes, matrix.codes)
    assert torch.equal(found.scales, matrix.scales)
    if found.offsets is None or matrix.offsets is None:
        assert found.offsets is matrix.offsets
    else:
        assert torch.equal(found.offsets, matrix.offsets)


def test_eight_codes_make_a_number() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=torch.uint8)
    assert packed_numbers(codes).tolist() == [[0xF7654321 - 2**32]]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in humming_package.humming().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def executor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = cuda_tiny("qwen2")
    made = cuda_executor(model.source, config_of(model), kernel_folder(tmp_path_factory), scheme="int4")
    return made


def step_logits(executor: Any, size: int) -> torch.Tensor:
    """Of the last tokens of a step with `size` tokens of each of some sequences."""
    requests = [sequence(number, prompt(size, seed=number)) for number in range(COUNT)]
    executor.forward([ScheduledRequest.next(request, size) for request in requests])
    logits = executor.score([size * (n + 1) - 1 for n in range(COUNT)], with_logits=True).logits
    assert isinstance(logits, torch.Tensor)
    return logits.clone()


def measured(executor: Any, monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, int]) -> list[int]:
    """Every matrix of 4 bits is in the table; counts its tokens."""
    table = {key_of(matrix): tokens for matrix in executor.matrices()}
    monkeypatch.setattr(humming, "measured_ranges", lambda: table)
    monkeypatch.setattr(type(executor), "capability", HOPPER)
    seen: list[int] = []
    multiply = HummingProducts.multiply

    def counted(self: HummingProducts, x: torch.Tensor, matrix: Any) -> torch.Tensor:
        seen.append(len(x))
        return multiply(self, x, matrix)

    monkeypatch.setattr(HummingProducts, "multiply", counted)
    return seen


@pytest.mark.usefixtures("installed")
def test_a_package_multiplies_what_it_is_faster_at(
    executor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of 72 tokens; those of 60 stay with the kernels, and logits are theirs."""
    expected = [step_logits(executor, size) for size in (24, 20)]
    seen = measured(executor, monkeypatch, (65, 80))
    with caplog.at_level(logging.INFO, "triblade.engine.linear_choice"):
        choose_products("humming", executor)
    matrices = [m for m in executor.matrices() if m.bits == 4]
    assert caplog.messages == [f"linear backend humming: asked for, for {len(matrices)} of the model's matrices"]
    seen.clear()
    found = step_logits(executor, 24)
    assert seen == [72] * len(matrices)
    assert relative(found, expected[0]) < 6e-2  # roundings of bfloat16 lie elsewhere
    seen.clear()
    assert torch.equal(step_logits(executor, 20), expected[1])
    assert not seen


class Broken(humming_package.Layer):
    def transform(self) -> None:
        raise RuntimeError("no compiler\nand more")


class Wrong(humming_package.Layer):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 1.1


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Broken, "it fails here (RuntimeError: no compiler)"),
        (Wrong, "it computes something else (off by 10.0%)"),
        (None, "it cannot be imported (No module named 'humming')"),
    ],
)
def test_what_cannot_be_taken_is_said(
    layer: Any, reason: str, executor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured(executor, monkeypatch, (65, 80))
    monkeypatch.setattr(sys, "path", [])  # also where it is installed
    for name, module in humming_package.humming(layer).items() if layer else ():
        monkeypatch.setitem(sys.modules, name, module)
    choose_products("humming", executor)
    assert caplog.messages == [f"linear backend humming is not taken: {reason}; triblade is taken instead"]


@pytest.mark.usefixtures("installed")
def test_only_measured_matrices(
    executor: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of this small model are not; and the table holds no size that our kernels are meant for, 64 tokens and fewer."""
    monkeypatch.setattr(type(executor), "capability", HOPPER)
    choose_products("humming", executor)
    count = sum(matrix.bits == 4 for matrix in executor.matrices())
    assert f"it was not measured to be faster for {count} of the model's {count} packed matrices" in caplog.messages[0]
    assert all(64 < fewest <= most for fewest, most in humming.measured_ranges().values())
    matrix = pack_codes(random_codes(64, 128, has_offsets=True), torch.bfloat16)
    monkeypatch.setattr(humming, "measured_ranges", lambda: {key_of(matrix): (65, 512)})
    assert HummingProducts([matrix], torch.bfloat16).matrices == []
    assert unpack(matrix).shape == (64, 128)
