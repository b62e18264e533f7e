"""A trained head on disk: `config.json` (what it is, what it was trained for and how), `model.safetensors` (codes, scales, norms).

Four-bit codes lie two in a byte, the even input in the low half. A head is refused where it cannot work (other sizes, rope,
vocabulary). Another checkpoint of the same model, such as another quantization of it, is allowed and said, because the target
verifies every token anyway. Knows neither training nor engine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError, TribladeError, UnsupportedError
from triblade.files import written_whole
from triblade.models.config import ModelConfig
from triblade.models.json_files import read_json_object
from triblade.models.loader import OpenModel
from triblade.models.tokenizer import Tokenizer
from triblade.ops.backend import Backend, Linear
from triblade.ops.packing import QuantizedMatrix
from triblade.spec.eagle import INNER_NORMS, NORMS, EagleHead, EagleWeights, head_config, matrix_shapes

log = logging.getLogger(__name__)

FORMAT, VERSION = "triblade-eagle", 2
_READABLE = (1, VERSION)  # heads of version 1 read no inner layers
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
_FACTS = ("architecture", *_SIZES, "rms_norm_eps", "activation", "embedding_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleCheckpoint:
    """A head as it was read, checked against its target."""

    config: ModelConfig  # see `head_config`
    weights: EagleWeights[QuantizedMatrix]
    inner_layers: tuple[int, ...]  # of the target, whose states the head reads beside the final ones
    facts: Mapping[str, Any]  # config.json
    digest: str  # SHA-256 of the file of weights (hexadecimal)

    def head(self, embedding: Linear, backend: Backend, context_length: int) -> EagleHead:
        """The head with dense weights beside its target's embedding."""
        return EagleHead(self.config, self.dense(embedding.weight), embedding, backend, context_length)

    def dense(self, like: Tensor) -> EagleWeights[Linear]:
        """The weights in the type and on the device of a tensor."""
        weights = self.weights.mapped(lambda matrix: Linear(matrix.dequantize().to(like.device, like.dtype)))
        norms = {name: norm.to(like.device) for name, norm in weights.norms().items()}
        return EagleWeights.from_parts(weights.matrices(), norms, weights.token_ids.to(like.device))


def target_facts(model: OpenModel) -> dict[str, Any]:
    """What a head depends on in its target, as JSON values."""
    config = model.config
    facts = {name: getattr(config, name) for name in _FACTS}
    facts |= {"rope": asdict(config.ropes[config.layers[-1].rope]), "tokenizer": vocabulary_digest(model.tokenizer)}
    facts["checkpoint"] = model.checkpoint.fingerprint()
    return dict(json.loads(json.dumps(facts)))


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over the strings of all tokens in order (hexadecimal)."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    ordered = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def save_eagle(
    path: Path, target: Mapping[str, Any], weights: EagleWeights[QuantizedMatrix], facts: Mapping[str, Any]
) -> int:
    """Write a head into the folder `path`; returns bytes.

    Args:
        path: made if need be; config.json gets its name last.
        target: see `target_facts`.
        weights: the head.
        facts: more for config.json: `window`, `inner_layers`, `training`.
    """
    path.mkdir(parents=True, exist_ok=True)
    matrices = weights.matrices()
    some = matrices["head"]
    config = {
        "format": FORMAT,
        "version": VERSION,
        "bits": some.bits,
        "draft_vocab_size": len(weights.token_ids),
        "target": dict(target),
        **facts,
    }
    tensors = {name: norm.float().cpu().contiguous() for name, norm in weights.norms().items()}
    tensors["token_ids"] = weights.token_ids.to("cpu", torch.int32)
    for name, matrix in matrices.items():
        codes = matrix.codes.cpu()
        tensors[f"{name}.codes"] = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous() if matrix.bits == 4 else codes
        tensors[f"{name}.scales"] = matrix.scales.cpu().contiguous()
    for name, content in ((WEIGHTS, save(tensors)), (CONFIG, (json.dumps(config, indent=1) + "\n").encode())):
        with written_whole(path / name) as part:
            part.write_bytes(content)
    return sum((path / name).stat().st_size for name in (CONFIG, WEIGHTS))


def load_eagle(path: Path, target: OpenModel) -> EagleCheckpoint:
    """Read a head and check that it fits its target.

    Args:
        path: folder that `triblade align` wrote.
        target: the model to guess for; nothing of its weights is read.

    Raises:
        CheckpointError: files are missing, broken or contradict each other.
        UnsupportedError: written by a later version.
        ConfigError: trained for another model; the message has the first difference.
    """
    if not path.is_dir():
        raise CheckpointError(f"no such folder: {path}", hint="triblade align makes one")
    facts = read_json_object(path / CONFIG)
    _check_format(path, facts)
    _check_target(path, facts["target"], target_facts(target))
    if facts["target"].get("checkpoint") != target.checkpoint.fingerprint():
        log.warning(
            "the head in %s was trained on another checkpoint of such a model: fewer guesses may be right", path
        )
    config = head_config(target.config, facts["window"])
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path / WEIGHTS}: {error}", hint="copy it again") from error
    inner_layers = _inner_layers(path, facts, target.config)
    weights = _weights(path, facts, config, tensors, len(inner_layers))
    digest = hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()
    return EagleCheckpoint(config=config, weights=weights, inner_layers=inner_layers, facts=facts, digest=digest)


def fits(path: Path, target: OpenModel) -> bool:
    """Whether the folder `path` holds a head for such a model."""
    try:
        facts = read_json_object(path / CONFIG)
        _check_format(path, facts)
        _check_target(path, facts["target"], target_facts(target))
    except TribladeError:
        return False
    return True


def _check_format(path: Path, facts: Mapping[str, Any]) -> None:
    if facts.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} holds no eagle head, but: {facts.get('format')!r}", hint="triblade align makes one"
        )
    if facts.get("version") not in _READABLE:
        raise UnsupportedError(
            f"{path} has version {facts.get('version')!r}, read are {_READABLE}", hint="triblade align makes a new one"
        )
    missing = [name for name in ("bits", "draft_vocab_size", "target", "window") if name not in facts]
    if missing or facts["bits"] not in (4, 8):
        raise CheckpointError(f"{path / CONFIG} is incomplete: it lacks {missing or 'a known number of bits'}")


def _check_target(path: Path, trained: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in (*_FACTS, "rope", "tokenizer"):
        if not _same(trained.get(name), found[name]):
            raise ConfigError(
                f"the head in {path} was trained for another model: {name} was {trained.get(name)}, here it is {found[name]}",
                hint="triblade align makes a head for this model",
            )


def _same(trained: Any, found: Any) -> bool:
    """Equal, up to the float32 that some file formats round a constant to."""
    if isinstance(trained, Mapping) and isinstance(found, Mapping):
        return trained.keys() == found.keys() and all(_same(trained[key], found[key]) for key in found)
    if isinstance(trained, float) and isinstance(found, float):
        return math.isclose(trained, found, rel_tol=1e-6)
    return bool(trained == found)


def _inner_layers(path: Path, facts: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    found = facts.get("inner_layers", [])
    known = isinstance(found, list) and all(isinstance(n, int) and 0 <= n < target.num_layers - 1 for n in found)
    if not known or found != sorted(set(found)):
        raise CheckpointError(f"{path / CONFIG}: inner_layers is no ascending list of layers before the last: {found}")
    return tuple(found)


def _weights(
    path: Path, facts: Mapping[str, Any], config: ModelConfig, tensors: Mapping[str, Tensor], num_inner: int
) -> EagleWeights[QuantizedMatrix]:
    shapes = matrix_shapes(config, facts["draft_vocab_size"], num_inner)
    tensors = {INNER_NORMS: torch.empty(0, config.hidden_size), **tensors}
    wanted = {*NORMS, INNER_NORMS, "token_ids", *(f"{name}.{part}" for name in shapes for part in ("codes", "scales"))}
    if wanted != set(tensors):
        raise CheckpointError(f"{path / WEIGHTS} holds other tensors than expected: {sorted(wanted ^ set(tensors))[0]}")
    token_ids = tensors["token_ids"].long()
    known = token_ids.shape == (facts["draft_vocab_size"],) and bool((token_ids.diff() > 0).all())
    if not known or int(token_ids[0]) < 0 or int(token_ids[-1]) >= config.vocab_size:
        raise CheckpointError(f"{path / WEIGHTS}: token_ids is no ascending list of {facts['draft_vocab_size']} tokens")
    matrices = {name: _matrix(path, name, tensors, facts["bits"], shape) for name, shape in shapes.items()}
    norms = {name: tensors[name] for name in (*NORMS, INNER_NORMS)}
    for name, norm in norms.items():
        shape = [num_inner, config.hidden_size] if name == INNER_NORMS else [config.hidden_size]
        if list(norm.shape) != shape:
            raise CheckpointError(f"{path / WEIGHTS}: {name} has shape {list(norm.shape)}, not {shape}")
    return EagleWeights.from_parts(matrices, norms, token_ids)


def _matrix(path: Path, name: str, tensors: Mapping[str, Tensor], bits: int, shape: tuple[int, int]) -> QuantizedMatrix:
    codes, scales = tensors[f"{name}.codes"], tensors[f"{name}.scales"]
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    groups = scales.shape[1] if scales.ndim == 2 else 0
    if codes.shape != shape or not groups or shape[1] % groups or scales.shape[0] != shape[0]:
        raise CheckpointError(
            f"{path / WEIGHTS}: {name} has {list(codes.shape)} codes and {list(scales.shape)} scales, not {list(shape)}"
        )
    return QuantizedMatrix(codes=codes, scales=scales, offsets=None, bits=bits)
