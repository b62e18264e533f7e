"""From a model and text to a table for `pca-lut`: open, gather, fit, measure, save (`triblade kv-calibrate`).

Quality is measured on text behind that used for fitting, as the table will be used: a prefix is sent from a bfloat16 cache to an
int8 one, and the text goes on from what arrived. A table that is too far off is not written. Knows the parts of a calibration, none
of their insides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from triblade import host
from triblade.config import EngineConfig, KVCalibrateConfig
from triblade.console import progress
from triblade.errors import ConfigError, QualityError
from triblade.kv.calibration_collect import Collector, Taps
from triblade.kv.calibration_fit import FitOptions, fit_table
from triblade.kv.calibration_statistics import KVStatistics, Moments
from triblade.kv.layout import KVLayout
from triblade.kv.wire_components import Components, Errors
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_quality import CodecQuality, Route, measure_codecs
from triblade.kv.wire_rotation import Rotation, rope_identity
from triblade.kv.wire_table import KVTable, TableModel
from triblade.models.config import ModelConfig
from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_backend, select_device
from triblade.quant.calibration import load_calibration

log = logging.getLogger(__name__)

WINDOW_TOKENS = 1280  # of text that quality is measured on, at most; four fifths of it are sent
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCalibrationReport:
    """What `triblade kv-calibrate` prints: errors as shares of the squared length of keys and of values, KL in nats per token."""

    table: str
    model: str
    tokens: int
    bits_per_number: float
    components: int
    bytes_per_token: float  # of one that is not exact
    bfloat16_bytes_per_token: int
    nats: float  # expected change of predictions per rebuilt token, by second order
    keys: float
    values: float
    worst: float  # of the keys, or of the values, of a layer
    perplexity: float
    raw_perplexity: float
    kl: float
    top1_agreement: float
    seconds: float

    def __str__(self) -> str:
        ratio = self.bfloat16_bytes_per_token / self.bytes_per_token
        return "\n".join(
            (
                f"{self.table}: {self.bits_per_number:.2f} bits per number, {self.components} components, "
                f"{self.bytes_per_token:.0f} bytes per token, {ratio:.1f} times less than bfloat16",
                f"errors: keys {self.keys:.2e}, values {self.values:.2e}, at most {self.worst:.2e} in a layer; "
                f"{self.nats:.2e} nats per token expected",
                f"decoding on rebuilt KV: perplexity {self.perplexity:.4f} (raw {self.raw_perplexity:.4f}), "
                f"KL {self.kl:.6f} nats/token, top-1 agreement {self.top1_agreement:.2%}",
                f"made from {self.tokens} tokens in {self.seconds:.0f} s",
            )
        )


def calibrate(config: KVCalibrateConfig) -> KVCalibrationReport:
    """Make a table, measure it, write it.

    Raises:
        ConfigError: the text is unusable or too short, or the output is there already.
        QualityError: the table is further off than `max_kl`; nothing was written.
    """
    start = time.monotonic()
    if config.output.exists() and not config.overwrite:
        raise ConfigError(
            f"output exists: {config.output}", hint="name another file, or add --overwrite", param="output"
        )
    device, _ = select_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or host.usable_cores())
    model = open_model(_engine(config, device))
    used, rest = _text(config, model)
    windows = _windows(config, rest, model.config)
    decoder = _load(model, device, max(used.shape[1], len(windows[0])))
    moments = gather(decoder, used, config)
    table, quality = _measured(fit_table(_table_model(model), moments, _fit_options(config)), model, decoder, windows)
    report = _report(config, table, quality, moments.num_tokens, time.monotonic() - start)
    if config.max_kl is not None and report.kl > config.max_kl:
        raise QualityError(
            f"the table changes predictions by {report.kl:.6f} nats per token, allowed are {config.max_kl}",
            hint="raise --bits, or give text that is more like the traffic",
        )
    table.save(config.output)
    return report


def gather(decoder: Decoder, sequences: Tensor, config: KVCalibrateConfig) -> Moments:
    """Keys and values of sequences [N, S], with gradients of as many of them as `config` says."""
    statistics = KVStatistics(decoder.config.num_layers, decoder.config.kv_size, config.sample_tokens, config.seed)
    rotation = Rotation(rope_identity(decoder.config, decoder.context_length))
    collector = Collector(decoder, rotation, statistics, skip=config.exact_first, seed=config.seed)
    with_gradients = config.gradient_samples if config.weighting == "predictions" else 0
    with progress(f"reading keys and values of {config.model}", len(sequences), unit="sequences") as advance:
        for number, ids in enumerate(sequences):
            collector.add(ids, with_gradients=number < with_gradients)
            advance(1)
    return statistics.moments()


def expected_errors(decoder: Decoder, table: KVTable, windows: Sequence[Tensor]) -> Errors:
    """What the table does to keys and values of windows [S], the exact tokens at their beginnings left out."""
    rotation, components = (
        Rotation(rope_identity(decoder.config, decoder.context_length)),
        Components(table, decoder.device),
    )
    pieces = []
    for window in windows:
        positions, taps = torch.arange(len(window), device=decoder.device), Taps(decoder, len(window))
        with torch.inference_mode():
            decoder.forward(window.to(decoder.device), positions, taps)
            vectors = taps.vectors()
            rotation.undo(vectors[:, 0], positions)
            pieces.append(vectors[:, :, table.exact_first :].flatten(3))
    return components.errors(torch.cat(pieces, 2))


def _engine(config: KVCalibrateConfig, device: torch.device) -> EngineConfig:
    engine = config.engine
    return replace(engine, dtype="float32") if config.dtype == "auto" and device.type == "cpu" else engine


def _text(config: KVCalibrateConfig, model: OpenModel) -> tuple[Tensor, Tensor]:
    """Sequences [N, S] of all files, as many from each, and what is left of them [R]."""
    length = min(config.length, model.config.context_length)
    share = -(-config.samples // len(config.text))
    read = [load_calibration(path, model.tokenizer, sequences=share, length=length) for path in config.text]
    for each in read:
        log.info("%s", each.report)
    shortest = min(each.ids.shape[1] for each in read)
    ids = torch.cat([each.ids[:, :shortest] for each in read])
    return ids, torch.cat([each.rest for each in read])


def _windows(config: KVCalibrateConfig, rest: Tensor, model: ModelConfig) -> list[Tensor]:
    """Windows [S] to measure on."""
    length = min(WINDOW_TOKENS, model.context_length, len(rest))
    least = 2 * (config.exact_first + config.exact_last + _BLOCK_SIZE)
    if length < least:
        raise ConfigError(
            f"{len(rest)} tokens of the text are left to measure on, {least} are needed",
            hint="give more text, or lower --samples or --exact-last",
            param="text",
        )
    count = max(1, min(config.eval_tokens, len(rest)) // length)
    return list(rest[: count * length].view(count, length))


def _load(model: OpenModel, device: torch.device, context: int) -> Decoder:
    softcap = model.config.attention_softcap is not None
    backend, reason = select_backend("auto", deterministic=False, softcap=softcap)
    log.info("backend %s, %s", backend.name, reason)
    decoder = model.load(context, backend, device)
    model.checkpoint.release()
    return decoder


def _fit_options(config: KVCalibrateConfig) -> FitOptions:
    return FitOptions(
        bits=config.bits,
        variance=config.variance,
        use_metric=config.weighting == "predictions",
        exact_first=config.exact_first,
        exact_last=config.exact_last,
    )


def _table_model(model: OpenModel) -> TableModel:
    config = model.config
    return TableModel(
        model_hash=model.checkpoint.fingerprint(),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _measured(
    table: KVTable, model: OpenModel, decoder: Decoder, windows: Sequence[Tensor]
) -> tuple[KVTable, CodecQuality]:
    """The table with its figures, and the quality of decoding on what it rebuilds."""
    layout = KVLayout(
        **asdict(table.model),
        block_size=_BLOCK_SIZE,
        codec="bfloat16",
        rope=rope_identity(model.config, decoder.context_length),
    )
    receiver = replace(layout, codec="int8")
    route = Route(PcaLutWire(layout, table, "int8"), layout, receiver)
    errors = expected_errors(decoder, table, windows[:2])
    found = measure_codecs(decoder, windows, len(windows[0]) * 4 // 5, {"pca-lut": route})
    quality, raw = found["pca-lut"], found[""]
    figures = {
        **asdict(errors),
        "kl": quality.kl_nats,
        "perplexity": quality.perplexity,
        "raw_perplexity": raw.perplexity,
    }
    return replace(table, figures=figures), quality


def _report(
    config: KVCalibrateConfig, table: KVTable, quality: CodecQuality, tokens: int, seconds: float
) -> KVCalibrationReport:
    return KVCalibrationReport(
        table=str(config.output),
        model=config.model,
        tokens=tokens,
        bits_per_number=table.bits_per_token / table.mean.numel(),
        components=int((table.bits > 0).sum()),
        bytes_per_token=table.bits_per_token / 8,
        bfloat16_bytes_per_token=2 * table.mean.numel(),
        top1_agreement=quality.top1_agreement,
        seconds=seconds,
        **table.figures,
    )
