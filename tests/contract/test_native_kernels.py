"""The contract of the native kernels, on every instruction set that this processor runs: each against a plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native_kernels import ADD, GELU, ISAS, SILU, Inputs, Ops, integers, randn, random_codes
from torch import Tensor

from triblade.ops.packing import PackedMatrix, interleaved_halves, pack_dense, pack_quantized, unpack
from triblade.spec.distribution import WEIGHT_OF_BEST, weights_of
from triblade.spec.token_mask import packed as packed_mask

TOKENS = (*range(1, 10), 23, 24, 25, 40)
EPS = 1e-5


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return Ops(request.param)


def assert_product(y: Tensor, x: Inputs, bias: Tensor | None = None, into: Tensor | None = None) -> None:
    """y = x W^T + b (+ into), with the error of summing in float32 in another order."""
    weight, values = unpack(x.matrix).double(), x.values().double()
    shift = (0 if bias is None else bias) + (0 if into is None else into)
    error = (y.double() - (values @ weight.T + shift)).abs()
    assert (error <= 1e-6 * (values.abs() @ weight.abs().T) + 1e-6).all()


def random_inputs(matrix: PackedMatrix, columns: int, tokens: int, seed: int = 0) -> Tensor:
    """[T, C] with rows of very different size."""
    return randn(tokens, columns, seed=seed) * torch.logspace(-2, 2, tokens)[:, None]


@pytest.mark.parametrize("affine", [False, True], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_integer_linear(ops: Ops, bits: int, group: int, affine: bool) -> None:
    matrix = random_codes(83, 3 * group, bits, group, offsets=affine, bias=affine)
    packed = pack_quantized(matrix)
    torch.testing.assert_close(unpack(packed), matrix.dequantize())
    for tokens in TOKENS:
        x = ops.quantize(random_inputs(packed, 3 * group, tokens), packed)
        assert_product(ops.linear(x), x, matrix.bias)


@pytest.mark.parametrize("tokens", TOKENS)
def test_integer_dot_products_are_exact(ops: Ops, tokens: int) -> None:
    """With scales of a power of two every sum is a whole number that float32 holds: any wrong code or sign shows."""
    for bits in (4, 8):
        matrix = random_codes(48, 128, bits, 64)
        matrix.scales.fill_(2.0**-4)
        packed = pack_quantized(matrix)
        x = torch.randint(-127, 128, (tokens, 128), generator=torch.Generator().manual_seed(bits)).float()
        x[:, ::64] = 127  # so that the scale is 1
        assert torch.equal(ops.linear(ops.quantize(x, packed)), x @ unpack(packed).T)


@pytest.mark.parametrize("inputs", [1, 2, 7, 33, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_linear(ops: Ops, dtype: torch.dtype, inputs: int) -> None:
    weight, bias = randn(37, inputs, seed=1).to(dtype), randn(37, seed=2)
    packed = pack_dense(weight, bias)
    assert packed.num_inputs == inputs + (inputs % 2 if dtype == torch.bfloat16 else 0)
    for tokens in TOKENS:
        source = random_inputs(packed, inputs, tokens)
        x = ops.quantize(source, packed)
        assert torch.equal(x.values()[:, :inputs], source.to(dtype).float())
        assert_product(ops.linear(x), x, bias)


def any_matrix(kind: str, rows: int, inputs: int) -> PackedMatrix:
    if kind in ("float32", "bfloat16"):
        return pack_dense(randn(rows, inputs, seed=1).to(getattr(torch, kind)), None)
    return pack_quantized(
        random_codes(rows, inputs, 4 if kind.startswith("int4") else 8, 32, offsets=kind.endswith("z"))
    )


KINDS = ["int4", "int4z", "int8", "int8z", "bfloat16", "float32"]


@pytest.mark.parametrize("kind", KINDS)
def test_add_epilogue(ops: Ops, kind: str) -> None:
    matrix = any_matrix(kind, 53, 64)
    for tokens in (1, 5, 8, 25):
        x, residual = ops.quantize(randn(tokens, 64), matrix), randn(tokens, 53, seed=7)
        assert_product(ops.linear(x, ADD, residual.clone()), x, None, residual)


@pytest.mark.parametrize(("epilogue", "activation"), [(SILU, F.silu), (GELU, lambda x: F.gelu(x, approximate="tanh"))])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_epilogues(ops: Ops, kind: str, epilogue: int, activation: object) -> None:
    assert callable(activation)
    half = 48
    plain = randn(2 * half, 64, seed=1) * 0.3
    order = interleaved_halves(2 * half)
    if kind in ("float32", "bfloat16"):
        matrix = pack_dense(plain.to(getattr(torch, kind))[order], None)
    else:
        codes = random_codes(2 * half, 64, 4 if kind.startswith("int4") else 8, 32, offsets=kind.endswith("z"))
        matrix = pack_quantized(codes.rows(order))
    weight = torch.empty_like(plain)
    weight[order] = unpack(matrix)
    for tokens in (1, 4, 9, 24, 40):
        x = ops.quantize(randn(tokens, 64), matrix)
        gate, up = (x.values() @ weight.T).chunk(2, -1)
        torch.testing.assert_close(ops.linear(x, epilogue), activation(gate) * up, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epilogue", [0, SILU])
def test_shares_of_a_team_are_the_whole_bit_for_bit(ops: Ops, kind: str, epilogue: int) -> None:
    matrix = any_matrix(kind, 96, 64)
    x = ops.quantize(randn(25, 64), matrix)
    assert torch.equal(ops.linear(x, epilogue, members=3), ops.linear(x, epilogue))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_others(ops: Ops, kind: str) -> None:  # E14
    """Tiles of 1 to 8 tokens and unpacked blocks all sum a row in the same order."""
    matrix = any_matrix(kind, 40, 96)
    rows = randn(40, 96)
    alone = torch.cat([ops.linear(ops.quantize(rows[t : t + 1], matrix)) for t in range(40)])
    for tokens in TOKENS:
        assert torch.equal(ops.linear(ops.quantize(rows[:tokens].contiguous(), matrix)), alone[:tokens])


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_quantized_activations_are_those_of_the_formula(ops: Ops, group: int) -> None:
    packed = pack_quantized(random_codes(16, 256, 8, group))
    x = random_inputs(packed, 256, 9)
    x[4] = 0
    made = ops.quantize(x, packed)
    groups = x.unflatten(1, (-1, group))
    top = groups.abs().amax(-1)
    codes = (groups * torch.where(top > 0, 127 / top, 0)[..., None]).round()
    assert torch.equal(made.codes, codes.flatten(1).to(torch.int8))
    assert torch.equal(made.scales, top / 127)
    assert torch.equal(made.sums, codes.sum(-1).to(torch.int32))
    assert ((made.values() - x).abs() <= top.repeat_interleave(group, 1) / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [32, 96, 160])
def test_norm_and_quantize(ops: Ops, kind: str, columns: int) -> None:
    matrix, weight = any_matrix(kind, 16, columns), randn(columns, seed=1)
    x = random_inputs(matrix, columns, 7)
    normed = F.rms_norm(x, (columns,), weight, EPS)
    made = ops.norm(x, weight, matrix, EPS)
    twin = ops.quantize(normed, matrix)
    step = normed.abs().amax(-1, keepdim=True) * (
        2**-8 if kind == "bfloat16" else 1e-5 if kind == "float32" else 1 / 127
    )
    assert ((made.values() - twin.values()).abs() <= step * 1.01).all()  # a last bit may tip a rounding
    if kind != "float32":
        codes = "halves" if kind == "bfloat16" else "codes"
        assert (getattr(made, codes) != getattr(twin, codes)).float().mean() < 0.02
    rows = integers([6, 0, 6, 3])
    for name in ("codes", "scales", "sums", "halves", "floats"):
        assert torch.equal(getattr(ops.norm(x, weight, matrix, EPS, rows), name), getattr(made, name)[rows])


@pytest.mark.parametrize("columns", [16, 24, 47])
def test_odd_columns_of_norms(ops: Ops, columns: int) -> None:
    x, weight = randn(5, columns) * 3, randn(columns, seed=1)
    residual = randn(5, columns, seed=2)
    normed = F.rms_norm(x, (columns,), weight, EPS)
    torch.testing.assert_close(ops.norm_add(x, weight, EPS, residual), residual + normed, atol=1e-5, rtol=1e-5)
    dense = pack_dense(randn(3, columns), None)
    torch.testing.assert_close(ops.norm(x, weight, dense, EPS).values(), normed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding(ops: Ops, kind: str) -> None:
    table, ids = any_matrix(kind, 45, 64), integers([44, 0, 17, 16, 15, 44])
    rows = unpack(table)[ids]
    torch.testing.assert_close(ops.embed(table, ids, 1.0, 64), rows, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ops.embed(table, ids, 5.5, 64), rows * 5.5, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 15, 16, 33])
def test_soft_cap(ops: Ops, count: int) -> None:
    x = randn(count) * 40
    torch.testing.assert_close(ops.softcap(x, 30.0), 30 * torch.tanh(x / 30), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 500])
@pytest.mark.parametrize("part", [16, 512])
def test_best_token(ops: Ops, count: int, part: int) -> None:
    x = -randn(count).abs() - 1
    for place in sorted({0, count // 2, count - 1}):
        x[place] = 5.0 + place
        assert ops.find_best(x, part) == place
    x[: count // 2 + 1] = x.max()  # the first one among equals
    assert ops.find_best(x, part) == 0
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in {0, count // 2, count - 1}:
            faulty = x.clone()
            faulty[place] = bad
            assert ops.find_best(faulty, part) == -1  # A22


@pytest.mark.parametrize("count", [1, 15, 16, 17, 500])
def test_barred_tokens_get_the_least_number(ops: Ops, count: int) -> None:
    x = randn(count, seed=1)
    allowed = randn(count, seed=2) > 0
    allowed[:32], allowed[32:64] = False, True
    barred = ops.bar(x, packed_mask(allowed))
    assert torch.equal(barred, x.where(allowed, torch.finfo(torch.float32).min))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256])
@pytest.mark.parametrize(("temperature", "least"), [(0.7, 0.0), (2.0, 0.01), (1e-3, 0.0)])
def test_weights_are_those_of_the_sampler(ops: Ops, count: int, temperature: float, least: float) -> None:
    x = randn(count, seed=count) * 12
    x[count // 2 :] -= 40  # near and below the smallest weights
    weights, total = ops.weigh(x, float(x.max()), temperature, least * WEIGHT_OF_BEST)
    expected = weights_of(x[None], temperature)[0]
    kept = expected * (expected >= least * WEIGHT_OF_BEST)
    torch.testing.assert_close(weights, kept, rtol=1e-6, atol=1.0)  # e^x may be rounded otherwise
    assert torch.equal(weights, weights.floor())
    assert total == sum(int(weight) for weight in weights)
    assert weights.max() == WEIGHT_OF_BEST


def test_a_barred_token_weighs_nothing(ops: Ops) -> None:
    x = torch.tensor([3.0, torch.finfo(torch.float32).min, 2.0])
    weights, total = ops.weigh(x, 3.0, 1e-5, 0.0)
    assert weights.tolist() == [WEIGHT_OF_BEST, 0.0, 0.0]
    assert total == WEIGHT_OF_BEST


def test_activations_at_extreme_values(ops: Ops) -> None:
    """Nothing overflows where exp would: a gate of -1e4 gives 0, of 1e4 itself."""
    weight = torch.zeros(32, 2)
    weight[:16, 0], weight[16:, 1] = 1, 1
    matrix = pack_dense(weight, None)
    x = torch.tensor([[-1e4, 2.0], [1e4, 2.0], [0.0, 2.0], [-88.5, 1.0], [-20.0, 1.0]])
    for epilogue, activation in ((SILU, F.silu), (GELU, lambda v: F.gelu(v, approximate="tanh"))):
        out = ops.linear(ops.quantize(x, matrix), epilogue)[:, 0]
        torch.testing.assert_close(out, activation(x[:, 0]) * x[:, 1], atol=1e-6, rtol=1e-5)
