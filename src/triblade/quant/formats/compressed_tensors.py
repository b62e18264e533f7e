"""compressed-tensors: codes in words along the inputs (`pack-quantized`), or as bytes (`int-quantized`, `naive-quantized`).

    weight_packed int32 [out, words]   weight_shape int64 [2]   weight_scale [out, G]   weight_zero_point int32 [words, G]
    weight int8 [out, in]              weight_scale [out, G]    weight_zero_point int8 [out, G]

Codes and zero points are signed numbers; in words both are stored with 2 ** (b - 1) added. Zero points are packed along the
outputs, and there are none in a symmetric matrix. Three bits exist in two incompatible layouts under one name (see `bit_packing`);
the number of words tells which. Written is the dense one, as the library does from 0.20 on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from triblade.errors import CheckpointError
from triblade.quant.formats import compressed_tensors_config as settings
from triblade.quant.formats.base import (
    CheckpointFormat,
    QuantizedModule,
    StoredMatrix,
    TensorStore,
    expect_tensor,
    groups_of,
    prefixes,
)
from triblade.quant.formats.bit_packing import dense_words, pack, padded_words, unpack, unpack_padded
from triblade.quant.scheme import IntegerMatrix, QuantScheme

_FLOATS = ("F16", "BF16", "F32")
_PADDED, _BYTES = "padded", "bytes"


class CompressedTensors(CheckpointFormat):
    """Reads and writes compressed-tensors with integer weights."""

    name = settings.NAME
    holds_embeddings = True
    group_index = "weight_g_idx"

    def modules(self, store: TensorStore, quantization: Mapping[str, Any]) -> dict[str, QuantizedModule]:
        """See `CheckpointFormat`."""
        config = settings.parse(quantization)
        found = {}
        for name in prefixes(store, "weight_packed"):
            found[name] = _packed_module(store, name, config.group_of(name))
        for name in prefixes(store, "weight_scale"):
            if name not in found:
                found[name] = _bytes_module(store, name, config.group_of(name))
        return found

    def read(self, store: TensorStore, module: QuantizedModule) -> StoredMatrix:
        """See `CheckpointFormat`."""
        name, scheme = module.name, module.scheme
        order = self.input_order(store, module)
        codes = _bytes(store, module) if module.layout == _BYTES else _words(store, module)
        groups = scheme.groups(module.inputs)
        matrix = IntegerMatrix(
            codes=codes if order is None else codes[:, order],
            scales=store.tensor(f"{name}.weight_scale").reshape(-1, groups).expand(module.rows, -1).contiguous(),
            zero_points=None if scheme.symmetric else _zero_points(store, module),
            scheme=scheme,
        )
        return StoredMatrix(matrix=matrix, input_order=order)

    def why_not(self, scheme: QuantScheme, rows: int, inputs: int) -> str | None:
        """See `CheckpointFormat`."""
        if scheme.activation_bits is not None and scheme.group_size is not None:
            return f"weights under 8-bit activations have one scale per row, not {scheme}"
        return None

    def tensors(self, matrix: IntegerMatrix) -> dict[str, Tensor]:
        """See `CheckpointFormat`."""
        if settings.layout_of(matrix.scheme) == settings.INTEGERS:
            stored = {"weight": _signed(matrix.codes), "weight_scale": matrix.scales}
            return stored if matrix.zero_points is None else stored | {"weight_zero_point": _signed(matrix.zero_points)}
        bits = matrix.scheme.bits
        stored = {
            "weight_packed": pack(matrix.codes, bits),
            "weight_scale": matrix.scales,
            "weight_shape": torch.tensor(matrix.codes.shape, dtype=torch.int64),
        }
        if matrix.zero_points is not None:
            stored["weight_zero_point"] = pack(matrix.zero_points.T.contiguous(), bits).T.contiguous()
        return stored

    def quantization_config(self, schemes: Mapping[str, QuantScheme], dense: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointFormat`."""
        return settings.written(schemes, dense)

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """See `CheckpointFormat`."""
        return torch.float16 if model_dtype == torch.float16 else torch.bfloat16

    def is_stored_tensor_ignored(self, name: str) -> bool:
        """Scales of a cache in fewer bits: this engine's cache brings its own."""
        return name.endswith((".k_scale", ".v_scale"))


def _packed_module(store: TensorStore, name: str, group: settings.ModuleGroup) -> QuantizedModule:
    scheme, bits = group.scheme, group.scheme.bits
    if group.layout != settings.PACKED:
        raise CheckpointError(f"{name} is stored in words, the configuration says {group.layout}")
    expect_tensor(store, f"{name}.weight_shape", (2,), ["I64", "I32"])
    rows, inputs = (int(size) for size in store.tensor(f"{name}.weight_shape"))
    words = {dense_words(inputs, bits): "", padded_words(inputs, bits): _PADDED}
    shape = store.info(f"{name}.weight_packed").shape
    if len(shape) != 2 or shape[1] not in words:
        raise CheckpointError(
            f"{name}.weight_packed of {inputs} inputs and {bits} bits cannot have the shape {list(shape)}",
            hint=f"it should have {' or '.join(map(str, sorted(words)))} columns; is num_bits right?",
        )
    tensors = [f"{name}.weight_shape", expect_tensor(store, f"{name}.weight_packed", (rows, shape[1]), ["I32"])]
    tensors += _scales(store, name, group, rows, inputs)
    layout = "" if shape[1] == dense_words(inputs, bits) else _PADDED
    if not scheme.symmetric:
        count = padded_words if layout else dense_words
        grid = (count(rows, bits), scheme.groups(inputs))
        tensors.append(expect_tensor(store, f"{name}.weight_zero_point", grid, ["I32"]))
    if f"{name}.weight_g_idx" in store.names():
        tensors.append(expect_tensor(store, f"{name}.weight_g_idx", (inputs,), ["I32", "I64"]))
    return QuantizedModule(
        name=name, scheme=scheme, rows=rows, inputs=inputs, tensors=frozenset(tensors), layout=layout
    )


def _bytes_module(store: TensorStore, name: str, group: settings.ModuleGroup) -> QuantizedModule:
    if group.layout == settings.PACKED:
        raise CheckpointError(f"{name} has scales but no weight_packed", hint="is the download complete?")
    if f"{name}.weight" not in store.names():
        raise CheckpointError(f"{name} has scales but no weight", hint="is the download complete?")
    shape = store.info(f"{name}.weight").shape
    if len(shape) != 2:
        raise CheckpointError(f"{name}.weight must have two dimensions, got: {list(shape)}")
    rows, inputs = shape
    tensors = [expect_tensor(store, f"{name}.weight", (rows, inputs), ["I8"])]
    tensors += _scales(store, name, group, rows, inputs)
    if not group.scheme.symmetric:
        grid = store.info(f"{name}.weight_scale").shape
        tensors.append(expect_tensor(store, f"{name}.weight_zero_point", grid, ["I8"]))
    return QuantizedModule(
        name=name, scheme=group.scheme, rows=rows, inputs=inputs, tensors=frozenset(tensors), layout=_BYTES
    )


def _scales(store: TensorStore, name: str, group: settings.ModuleGroup, rows: int, inputs: int) -> list[str]:
    if group.is_tensor_wise:
        shape = store.info(f"{name}.weight_scale").shape
        if shape not in ((), (1,), (1, 1)):
            raise CheckpointError(f"{name}.weight_scale has shape {list(shape)}, a scale for the whole matrix is [1]")
        return [expect_tensor(store, f"{name}.weight_scale", shape, _FLOATS)]
    groups = groups_of(group.scheme, name, inputs)
    return [expect_tensor(store, f"{name}.weight_scale", (rows, groups), _FLOATS)]


def _words(store: TensorStore, module: QuantizedModule) -> Tensor:
    """Codes [out, in]."""
    take = unpack_padded if module.layout == _PADDED else unpack
    return take(store.tensor(f"{module.name}.weight_packed"), module.scheme.bits, module.inputs)


def _bytes(store: TensorStore, module: QuantizedModule) -> Tensor:
    """Codes [out, in]; fewer than 8 bits may be stored in bytes as well."""
    codes = store.tensor(f"{module.name}.weight").short() + module.scheme.zero_point
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) > module.scheme.max_code):
        raise CheckpointError(f"{module.name}.weight has numbers outside {module.scheme.bits} bits")
    return codes.to(torch.uint8)


def _zero_points(store: TensorStore, module: QuantizedModule) -> Tensor:
    """[out, G]."""
    stored = store.tensor(f"{module.name}.weight_zero_point")
    scheme, groups = module.scheme, module.scheme.groups(module.inputs)
    if module.layout == _BYTES:
        zeros = (stored.short() + scheme.zero_point).to(torch.uint8)
        return zeros.reshape(-1, groups).expand(module.rows, -1).contiguous()
    take = unpack_padded if module.layout == _PADDED else unpack
    return take(stored.T, scheme.bits, module.rows).T.contiguous()


def _signed(codes: Tensor) -> Tensor:
    """8-bit codes as signed bytes."""
    return (codes.short() - 128).to(torch.int8)
