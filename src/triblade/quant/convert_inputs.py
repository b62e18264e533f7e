"""Everything a conversion needs, opened and checked before any work: model, schemes, calibration, what to measure on.

Whatever is in the way is said here, with what to change; what comes after can only fail for the result's sake. Knows nothing of how
layers are quantized, measured or written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from triblade import host
from triblade.config import ConvertConfig
from triblade.errors import ConfigError
from triblade.models.loader import OpenModel, open_model
from triblade.models.source import resolve
from triblade.ops.select import select_backend, select_device
from triblade.quant.calibration import Calibration, load_calibration
from triblade.quant.drift import Drift, drift
from triblade.quant.loss_file import load_losses, save_losses
from triblade.quant.passes import Recipe, recipe
from triblade.quant.plan import Schemes, average_bits, uniform_plan
from triblade.quant.preflight import bits_within, check_resources, check_shapes, check_weights, needs
from triblade.quant.quantize import Job
from triblade.quant.scheme import QuantScheme
from triblade.quant.sensitivity import candidates, estimate_losses, spend
from triblade.quant.tables import table_schemes
from triblade.registry import CHECKPOINT_FORMATS

log = logging.getLogger(__name__)

LEAST_TO_MEASURE = 512  # tokens; fewer say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything a run needs, checked."""

    config: ConvertConfig
    job: Job
    calibration: Calibration | None
    measured_on: Tensor | None  # ids
    drift: Drift | None


def prepare(config: ConvertConfig) -> Prepared:
    """Open and check.

    Raises:
        ConfigError, UnsupportedError, MemoryBudgetError, CheckpointError: something is in the way.
    """
    if config.output.exists() and not config.overwrite and (not config.output.is_dir() or any(config.output.iterdir())):
        raise ConfigError(f"the output exists: {config.output}", hint="name another one, or pass --overwrite")
    method, scheme = method_and_scheme(config)
    model = open_model(config.engine)
    tables = table_schemes(model.config, scheme, config.embeddings, config.lm_head)
    bits = config.average_bits if config.max_size_mb is None else bits_within(model, config.max_size_mb * 1e6, tables)
    choices = [] if bits is None else candidates(model.config, scheme, bits)
    plan = uniform_plan(model.config, scheme, config.rules)
    for possible in [plan] if not choices else [uniform_plan(model.config, choice) for choice in choices]:
        check_shapes(model.config, possible, config.format, tables)
    calibration = _calibration(config, model, method)
    job = _job(config, model, plan, tables, calibration)
    if bits is not None:
        job = replace(job, schemes=_spent(job, config, choices, bits, calibration))
    return Prepared(
        config=config,
        job=job,
        calibration=calibration,
        measured_on=_text_to_measure(config, model, calibration),
        drift=_drift(config, model, calibration),
    )


def _job(
    config: ConvertConfig,
    model: OpenModel,
    plan: list[Schemes],
    tables: Mapping[str, QuantScheme],
    calibration: Calibration | None,
) -> Job:
    """What to quantize and how, if device, memory, disk and weights allow it."""
    method, scheme = method_and_scheme(config)
    device, reason = select_device(config.device)
    log.info("%s on %s (%s): %s, %s", model.name, device, reason, method.name, scheme)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or host.usable_cores())
    backend, _ = select_backend("auto", deterministic=False, softcap=model.config.attention_softcap is not None)
    job = Job(
        model=model,
        recipe=method,
        schemes=plan,
        scale_type=CHECKPOINT_FORMATS[config.format]().scale_dtype(model.checkpoint.dtype),
        ids=None if calibration is None else calibration.ids,
        backend=backend,
        device=device,
        tables=tables,
        bias=config.bias,
        path=resolve(model.name, revision=config.revision),
    )
    if check_resources(needs(model, plan, job.stream_sizes, tables), config.output, device):
        job = replace(job, spill=state_folder(config.output))
    check_weights(job.source())
    return job


def method_and_scheme(config: ConvertConfig) -> tuple[Recipe, QuantScheme]:
    """The passes and the scheme that the options ask for; `int8` is both."""
    if config.quantization == "int8":
        scheme = QuantScheme(bits=8, group_size=None, symmetric=True, activation_bits=8)
        return recipe("int8"), scheme
    group = None if config.group_size == -1 else config.group_size
    scheme = QuantScheme(
        bits=config.bits, group_size=group, symmetric=config.symmetric, activation_bits=config.activation_bits
    )
    is_int8 = config.quantization == "best" and scheme.activation_bits is not None
    return recipe("int8" if is_int8 else config.quantization), scheme


def _spent(
    job: Job, config: ConvertConfig, choices: Sequence[QuantScheme], bits: float, calibration: Calibration | None
) -> list[Schemes]:
    """The schemes that lose least within a budget, as estimated now or by an earlier run."""
    if calibration is None:
        raise ConfigError("a budget of bits needs calibration text", hint="--calibration FILE", param="average_bits")
    made_from = {
        "model": job.model.checkpoint.fingerprint(),
        "calibration": calibration.fingerprint(),
        "dtype": str(job.model.dtype),
    }
    path = config.sensitivity or state_folder(config.output) / "losses.json"
    losses = load_losses(path, choices, made_from)
    if losses is None:
        losses = estimate_losses(job, choices)
        save_losses(path, losses, made_from)
    plan = spend(job.model.config, losses, bits)
    counts = Counter(str(scheme) for schemes in plan for scheme in schemes.values())
    log.info("%.3f bits per weight: %s", average_bits(job.model.config, plan), dict(counts))
    return plan


def _calibration(config: ConvertConfig, model: OpenModel, method: Recipe) -> Calibration | None:
    if config.calibration is None:
        if method.calibrated:
            raise ConfigError(
                f"{method.name} needs calibration text",
                hint="--calibration FILE, or --calibration self; rtn and range do without",
                param="calibration",
            )
        return None
    length = min(config.calibration_length, model.config.context_length)
    found = load_calibration(
        Path(config.calibration),
        model.tokenizer,
        sequences=config.calibration_samples,
        length=length,
        lenient=config.calibration_lenient,
    )
    if int(found.ids.max()) >= model.config.vocab_size:
        raise ConfigError(f"the calibration text has ids beyond the model's {model.config.vocab_size}")
    log.info("calibration: %s", found.report)
    return found


def _text_to_measure(config: ConvertConfig, model: OpenModel, calibration: Calibration | None) -> Tensor | None:
    """Token ids to measure on, if there are enough."""
    if config.eval_text is not None:
        text = load_calibration(
            config.eval_text,
            model.tokenizer,
            sequences=1,
            length=config.eval_tokens,
            lenient=config.calibration_lenient,
        )
        return text.ids[0]
    rest = None if calibration is None else calibration.rest[: config.eval_tokens]
    if rest is not None and len(rest) >= LEAST_TO_MEASURE:
        return rest
    if config.max_kl is not None or config.max_ppl_increase is not None:
        raise ConfigError("a gate needs text to measure on", hint="--eval-text FILE", param="eval_text")
    return None


def _drift(config: ConvertConfig, model: OpenModel, calibration: Calibration | None) -> Drift | None:
    if config.traffic is None or calibration is None:
        return None
    sample = load_calibration(config.traffic, model.tokenizer, sequences=1, length=1 << 20, lenient=True)
    found = drift(calibration.ids, sample.ids, model.config.vocab_size)
    log.log(logging.WARNING if found.is_noticeable else logging.INFO, "traffic: %s", found)
    return found


def state_folder(output: Path) -> Path:
    """Where an unfinished run lies."""
    return output.with_name(f"{output.name}.unfinished")
