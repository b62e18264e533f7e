"""Products by humming-kernels on the GPU itself, beside ours, against float32: a matrix of its table, with bias and residual."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_support import CUDA, cuda_device, random_codes

from triblade.ops.cuda.humming import HummingProducts, token_range
from triblade.ops.cuda.linear import ROWS, Activations, LinearKernels
from triblade.ops.cuda.packing import pack_codes, unpack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the package's own


def test_products() -> None:
    torch.manual_seed(0)
    packed = pack_codes(random_codes(3584, 3584, 128, 4, has_offsets=False), torch.bfloat16)
    found = token_range(packed)
    assert found is not None
    assert HummingProducts.why_not(torch.cuda.get_device_capability()) is None
    kernels = LinearKernels(cuda_device(), torch.bfloat16, CUDA)
    kernels.reserve([packed])
    kernels.multiply_by(HummingProducts([packed], torch.bfloat16))
    weight = unpack(packed)
    for tokens in (*found, found[1] + 1):
        x, before = (torch.randn(tokens, 3584, device=CUDA).bfloat16() for _ in "xr")
        assert kernels.layout(tokens) == ROWS
        assert packed.bias is not None
        expected = F.linear(x.float(), weight, packed.bias.float()) + before.float()
        out = before.clone()
        kernels.multiply(Activations(x, tokens, ROWS), packed, out, out)
        assert float((out.float() - expected).norm() / expected.norm()) < 8e-3, tokens
