"""Every quantization pass beats rounding to nearest on a fixed layer, in every scheme, and combinations beat their parts."""

from __future__ import annotations

import pytest
import torch
from layers import FixedLayer, fixed_layer, quantized

from triblade.errors import ConfigError
from triblade.quant.passes import METHODS, recipe
from triblade.quant.scheme import QuantScheme
from triblade.registry import PASSES

SCHEMES = [
    QuantScheme(bits=bits, group_size=group, symmetric=symmetric)
    for bits in (2, 3, 4, 8)
    for group in (32, None)
    for symmetric in (False, True)
]


@pytest.fixture(scope="module")
def layer() -> FixedLayer:
    return fixed_layer()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("name", list(PASSES))
def test_a_pass_beats_rounding_to_nearest(name: str, scheme: QuantScheme, layer: FixedLayer) -> None:
    error = layer.error if PASSES[name].compares else layer.rounding_error
    plain, better = error(quantized(layer, "rtn", scheme)), error(quantized(layer, name, scheme))
    # "smooth" is made for rounded activations, whose error the layer does not have; it must not do harm beyond a little.
    allowed = 1.3 if name == "smooth" else 1.0
    assert better <= plain * allowed
    assert better < plain * allowed or name == "rtn"


@pytest.mark.parametrize("scheme", SCHEMES[:-4], ids=str)
def test_the_combination_beats_its_parts(scheme: QuantScheme, layer: FixedLayer) -> None:
    parts = [layer.rounding_error(quantized(layer, name, scheme)) for name in ("awq", "gptq")]
    both = quantized(layer, "awq+gptq", scheme)
    assert layer.rounding_error(both) < min(parts) * 1.02
    assert layer.error(quantized(layer, "best", scheme)) < layer.error(both)


def test_passes_run_in_the_order_of_their_stage() -> None:
    assert recipe("gptq+awq").passes == recipe("awq+gptq").passes
    assert recipe("best").passes[0] is PASSES["balance"]
    assert set(METHODS["best"].split("+")) <= set(PASSES)


@pytest.mark.parametrize("method", ["awq+balance", "rtn+range", "gptq+gptq"])
def test_two_passes_of_one_stage_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="do the same step"):
        recipe(method)


def test_an_unknown_pass_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="quantization pass: 'gtpq'") as error:
        recipe("awq+gtpq")
    assert "did you mean 'gptq'" in str(error.value)


def test_the_order_of_batches_does_not_matter(layer: FixedLayer) -> None:
    scheme = SCHEMES[0]
    assert torch.equal(quantized(layer, "best", scheme), quantized(layer, "best", scheme))
