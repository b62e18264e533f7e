"""Which scheme every matrix of a model gets: one for all, rules for some, and what loaders need.

Matrices that are read with one input (q, k, v; gate, up) are one product in every engine, so they get one scheme: the most precise
that any of them was given. Knows no weights: a plan follows from the configuration alone, and is checked before anything starts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from triblade.errors import ConfigError
from triblade.models.config import ModelConfig
from triblade.models.weights import layer_modules
from triblade.quant.scheme import QuantScheme

log = logging.getLogger(__name__)

Schemes = Mapping[str, QuantScheme | None]  # of one layer, by field of LayerWeights; None stays dense
Losses = Sequence[
    Mapping[str, Mapping[QuantScheme, float]]
]  # by layer, product and scheme: estimated loss, nats per token
_SPEC = re.compile(r"(?P<bits>\d+)(g(?P<group>\d+)|(?P<row>row))?(?P<kind>sym|asym)?")


def uniform_plan(config: ModelConfig, scheme: QuantScheme, rules: Sequence[str] = ()) -> list[Schemes]:
    """The schemes of every layer: `scheme`, except where a rule says otherwise; the last rule that fits counts."""
    parsed = [_rule(rule, scheme) for rule in rules]
    plan = [_layer(config, index, scheme, parsed) for index in range(config.num_layers)]
    _warn_unused(config, rules, parsed)
    return plan


def inputs_of(config: ModelConfig, field: str) -> int:
    """Columns of the matrices of a field."""
    return {"output": config.q_size, "down": config.intermediate_size}.get(field, config.hidden_size)


def check_divisibility(config: ModelConfig, plan: Sequence[Schemes]) -> None:
    """Refuse group sizes that do not divide a row.

    Raises:
        ConfigError: naming the matrices, and a size that divides all rows.
    """
    failing: dict[str, int] = {}
    for schemes in plan:
        for field, scheme in schemes.items():
            inputs = inputs_of(config, field)
            if scheme is not None and scheme.group_size is not None and inputs % scheme.group_size:
                failing[field] = inputs
                size = scheme.group_size
    if not failing:
        return
    widths = {inputs_of(config, field) for field in ("qkv", "output", "gate_up", "down")}
    fitting = [other for other in (128, 64, 32, 16) if all(width % other == 0 for width in widths)]
    what = ", ".join(f"{_modules(config, field)} ({inputs} inputs)" for field, inputs in failing.items())
    raise ConfigError(
        f"group size {size} does not divide the rows of {what}",
        hint=f"use --group-size {fitting[0]}" if fitting else "use --group-size -1 (one scale per row)",
        param="group_size",
    )


def average_bits(config: ModelConfig, plan: Sequence[Schemes], dense_bits: int = 16) -> float:
    """Bits per weight of the layers' matrices, scales and zero points included."""
    bits = weights = 0.0
    for index, schemes in enumerate(plan):
        for field, scheme in schemes.items():
            count = elements(config, index, field)
            bits += count * (dense_bits if scheme is None else scheme.bits_per_weight(inputs_of(config, field)))
            weights += count
    return bits / weights


def elements(config: ModelConfig, index: int, field: str) -> int:
    """Weights of all matrices of a field."""
    return sum(rows for _, rows in layer_modules(config, index)[field]) * inputs_of(config, field)


def _modules(config: ModelConfig, field: str) -> str:
    return ", ".join(name.rpartition(".")[2] for name, _ in layer_modules(config, 0)[field])


def parse_scheme(spec: str, default: QuantScheme, param: str = "rules") -> QuantScheme | None:
    """`8`, `4g32`, `3g64sym`, `8row` or `dense`; what is left out is as in `default`, `param` is what errors name.

    Raises:
        ConfigError: none of these.
    """
    if spec == "dense":
        return None
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(f"not a scheme: {spec!r}", hint="examples: 8, 4g32, 3g64sym, 8row, dense", param=param)
    group = int(match["group"]) if match["group"] else None if match["row"] else default.group_size
    symmetric = default.symmetric if match["kind"] is None else match["kind"] == "sym"
    bits = int(match["bits"])
    return replace(default, bits=bits, group_size=group, symmetric=symmetric, activation_bits=None)


_Rule = tuple[re.Pattern[str], QuantScheme | None]


def _rule(rule: str, default: QuantScheme) -> _Rule:
    pattern, equals, spec = rule.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(f"not a rule: {rule!r}", hint="PATTERN=SCHEME, such as self_attn=8", param="rules")
    try:
        expression = re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else re.escape(pattern))
    except re.error as error:
        raise ConfigError(f"not a regular expression: {pattern!r}: {error}", param="rules") from error
    return expression, parse_scheme(spec, default)


def _layer(config: ModelConfig, index: int, scheme: QuantScheme, rules: Sequence[_Rule]) -> Schemes:
    schemes: dict[str, QuantScheme | None] = {}
    for field, modules in layer_modules(config, index).items():
        wanted = {name: _scheme_of(name, scheme, rules) for name, _ in modules}
        schemes[field] = max(wanted.values(), key=_precision)
        if len(set(wanted.values())) > 1:
            log.info("%s share a product; all get %s", ", ".join(wanted), schemes[field] or "no quantization")
    return schemes


def _scheme_of(name: str, scheme: QuantScheme, rules: Sequence[_Rule]) -> QuantScheme | None:
    found: QuantScheme | None = scheme
    for pattern, given in rules:
        if pattern.search(name):
            found = given
    return found


def _precision(scheme: QuantScheme | None) -> tuple[float, float, bool]:
    if scheme is None:
        return (16.0, 0.0, False)
    return (float(scheme.bits), -float(scheme.group_size or 1 << 30), not scheme.symmetric)


def _warn_unused(config: ModelConfig, rules: Sequence[str], parsed: Sequence[_Rule]) -> None:
    names = [name for i in range(config.num_layers) for parts in layer_modules(config, i).values() for name, _ in parts]
    for rule, (pattern, _) in zip(rules, parsed, strict=True):
        if not any(pattern.search(name) for name in names):
            raise ConfigError(
                f"the rule fits no module: {rule!r}", hint=f"modules are named like {names[0]}", param="rules"
            )
