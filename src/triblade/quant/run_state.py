"""What a quantization has done so far, on disk: a layer that is finished is never computed again, and never believed by accident.

The folder holds one safetensors file per finished layer or table, the hidden states behind the last layer, and `state.json`, which
is written last and says what the layers are worth. Files get their names only when they are complete. Invariant: after a kill at
any moment the folder describes a prefix of the run, and going on gives the same bits as never having stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError
from triblade.files import written_whole
from triblade.models.json_files import read_json_object
from triblade.quant.layer import LayerResult
from triblade.quant.scheme import IntegerMatrix, QuantScheme
from triblade.quant.streams import Streams

_STATE = "state.json"
_PARTS = ("codes", "scales", "zero_points", "bias")
_TABLE, _SCHEME = "table-", "scheme"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What must be the same for a run to be continued."""

    model: str
    calibration: str
    options: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class LayerRecord:
    """Of a finished layer: figures for the report, and the schemes its matrices have."""

    seconds: float
    errors: dict[str, float] = field(default_factory=dict)
    drift: float | None = None
    schemes: dict[str, dict[str, Any]] = field(default_factory=dict)  # by module


class RunState:
    """The folder of one run.

    Args:
        folder: made if need be.
        fingerprint: of this run.
        resume: go on with what the folder holds.

    Raises:
        ConfigError: the folder holds an unfinished run and `resume` is off, or the run there was another one.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, *, resume: bool) -> None:
        self.folder = folder
        self.layers: list[LayerRecord] = []
        self._fingerprint = fingerprint
        if (folder / _STATE).is_file():
            self._continue(resume)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._write()

    def restore(self, streams: Streams) -> None:
        """Bring the streams to behind the last finished layer."""
        streams.load(self._streams_path(len(self.layers)))

    def finish_layer(self, result: LayerResult, seconds: float, streams: Streams | None) -> None:
        """Note the next layer as done; returns when it is on disk."""
        index = len(self.layers)
        tensors = {f"dense.{name}": tensor for name, tensor in result.dense.items()}
        for module, matrix in result.matrices.items():
            parts = {part: getattr(matrix, part) for part in _PARTS}
            tensors.update({f"{part}.{module}": tensor for part, tensor in parts.items() if tensor is not None})
        _save(tensors, self._layer_path(index))
        if streams is not None:
            streams.save(self._streams_path(index + 1))
        schemes = {module: asdict(matrix.scheme) for module, matrix in result.matrices.items()}
        self.layers.append(LayerRecord(seconds=seconds, errors=result.errors, drift=result.drift, schemes=schemes))
        self._write()
        self._streams_path(index).unlink(missing_ok=True)

    def finish_table(self, module: str, matrix: IntegerMatrix) -> None:
        """Note an embedding or a head as done; returns when it is on disk."""
        parts = {part: getattr(matrix, part) for part in _PARTS if getattr(matrix, part) is not None}
        _save(parts, self._table_path(module), {_SCHEME: json.dumps(asdict(matrix.scheme))})

    def has_table(self, module: str) -> bool:
        """Whether an embedding or a head is done."""
        return self._table_path(module).is_file()

    def tables(self) -> list[str]:
        """Embedding and head, as far as they are done."""
        ending = ".safetensors"
        return sorted(p.name.removeprefix(_TABLE).removesuffix(ending) for p in self.folder.glob(f"{_TABLE}*{ending}"))

    def read_table(self, module: str) -> IntegerMatrix:
        """An embedding or a head that is done."""
        with _open(self._table_path(module)) as file:
            return _matrix(file, "", QuantScheme(**json.loads(file.metadata()[_SCHEME])))

    def matrices(self) -> Mapping[str, IntegerMatrix]:
        """All quantized matrices so far, read from disk when asked for."""
        return _Matrices(self)

    def dense(self) -> dict[str, Tensor]:
        """All dense tensors that changed."""
        return {name: tensor for index in range(len(self.layers)) for name, tensor in self._dense(index)}

    def read_matrix(self, index: int, module: str) -> IntegerMatrix:
        """One matrix of a finished layer."""
        with _open(self._layer_path(index)) as file:
            return _matrix(file, f".{module}", QuantScheme(**self.layers[index].schemes[module]))

    def remove(self) -> None:
        """Forget the run."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _dense(self, index: int) -> Iterator[tuple[str, Tensor]]:
        with _open(self._layer_path(index)) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.startswith("dense."):
                    yield name.removeprefix("dense."), file.get_tensor(name)

    def _continue(self, resume: bool) -> None:
        state = read_json_object(self.folder / _STATE)
        if not resume:
            raise ConfigError(
                f"{self.folder} holds an unfinished run of {len(state['layers'])} layers",
                hint="--resume continues it; to begin again delete the folder",
            )
        differences = _differences(state["fingerprint"], asdict(self._fingerprint))
        if differences:
            raise ConfigError(
                f"the unfinished run in {self.folder} is another one: {', '.join(differences)}",
                hint="call it with the same model, calibration data and options, or delete the folder",
            )
        self.layers = [LayerRecord(**record) for record in state["layers"]]

    def _write(self) -> None:
        state = {"fingerprint": asdict(self._fingerprint), "layers": [asdict(record) for record in self.layers]}
        with written_whole(self.folder / _STATE) as part:
            part.write_text(json.dumps(state, indent=1), encoding="utf-8")

    def _layer_path(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.safetensors"

    def _table_path(self, module: str) -> Path:
        return self.folder / f"{_TABLE}{module}.safetensors"

    def _streams_path(self, count: int) -> Path:
        return self.folder / f"streams-{count:05d}.bin"


class _Matrices(Mapping[str, IntegerMatrix]):
    def __init__(self, state: RunState) -> None:
        self._state = state
        self._layers = {module: index for index, record in enumerate(state.layers) for module in record.schemes}
        self._tables = state.tables()

    def __getitem__(self, module: str) -> IntegerMatrix:
        if module in self._tables:
            return self._state.read_table(module)
        return self._state.read_matrix(self._layers[module], module)

    def __contains__(self, module: object) -> bool:
        return module in self._tables or module in self._layers  # the default would read the matrix

    def __iter__(self) -> Iterator[str]:
        return iter((*self._tables, *self._layers))

    def __len__(self) -> int:
        return len(self._tables) + len(self._layers)


def _matrix(file: Any, suffix: str, scheme: QuantScheme) -> IntegerMatrix:
    names = set(file.keys())
    parts: dict[str, Any] = {
        part: file.get_tensor(part + suffix) if part + suffix in names else None for part in _PARTS
    }
    return IntegerMatrix(**parts, scheme=scheme)


def _save(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    with written_whole(path) as part:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, metadata)


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", hint="start again without --resume") from error


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed, in words."""
    changed = [f"the {part} changed" for part in ("model", "calibration") if before[part] != now[part]]
    names = sorted({*before["options"], *now["options"]})
    for name in names:
        old, new = before["options"].get(name), json.loads(json.dumps(now["options"].get(name)))
        if old != new:
            changed.append(f"{name} was {old}, now {new}")
    return changed
