"""`triblade convert`: from a model and a text to a quantized checkpoint that was measured, or to a reason why not.

    check everything -> quantize layer by layer -> measure -> gate -> write, read again, name

What is unfinished lies in a folder beside the output and is continued with --resume. Options that only concern the end (measuring,
gate, format of equal scales) may change between the two. Knows the parts, none of their insides.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from triblade import host
from triblade.config import ConvertConfig
from triblade.errors import ConfigError, QualityError
from triblade.models.gguf_checkpoint import GGUFCheckpoint
from triblade.models.loader import OpenModel, open_model
from triblade.models.source import resolve
from triblade.models.weights import layer_modules
from triblade.ops.backend import Backend
from triblade.ops.select import select_backend, select_device
from triblade.quant.calibration import Calibration, load_calibration
from triblade.quant.checkpoint_writer import Export, Part, write_checkpoint
from triblade.quant.companions import companion_files
from triblade.quant.convert_report import ConvertReport, causes, report_page
from triblade.quant.drift import Drift, drift
from triblade.quant.loss_file import load_losses, save_losses
from triblade.quant.measure import DequantizedSource, Measured, TokenActivations, measure
from triblade.quant.passes import Recipe, recipe
from triblade.quant.plan import Schemes, average_bits, uniform_plan
from triblade.quant.preflight import bits_within, check_resources, check_shapes, check_weights, needs
from triblade.quant.quantize import Job, quantize_layers
from triblade.quant.run_state import Fingerprint, RunState
from triblade.quant.scheme import QuantScheme
from triblade.quant.sensitivity import candidates, estimate_losses, spend
from triblade.quant.tables import EMBEDDING, HEAD, table_schemes
from triblade.registry import CHECKPOINT_FORMATS

log = logging.getLogger(__name__)

LEAST_TO_MEASURE = 512  # tokens; fewer say nothing
PAGE = "quantization_report.html"
# Fields of ConvertConfig that change what a layer becomes.
_FINGERPRINTED = (
    "quantization",
    "bits",
    "group_size",
    "symmetric",
    "activation_bits",
    "rules",
    "embeddings",
    "lm_head",
    "bias",
    "average_bits",
    "max_size_mb",
    "dtype",
    "device",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Everything a run needs, checked."""

    config: ConvertConfig
    job: Job
    calibration: Calibration | None
    measured_on: Tensor | None  # ids
    drift: Drift | None


def convert(config: ConvertConfig) -> ConvertReport:
    """Make a quantized checkpoint.

    Raises:
        ConfigError, UnsupportedError, MemoryBudgetError, CheckpointError, NumericalError: something is in the way; before any work.
        QualityError: the result is worse than the gate allows; nothing is written.
    """
    started = time.monotonic()
    prepared = _prepare(config)
    state = RunState(_state_folder(config.output), _fingerprint(prepared), resume=config.resume)
    prepared_s = time.monotonic() - started
    quantize_layers(prepared.job, state)
    started = time.monotonic()
    measured = _measure(prepared, state)
    layers_s = sum(record.seconds for record in state.layers)  # also of runs that were interrupted
    report = _report(prepared, state, measured, prepared_s + layers_s + time.monotonic() - started)
    _gate(config, report)
    report = _write(prepared, state, report)
    state.remove()
    return report


def _prepare(config: ConvertConfig) -> _Prepared:
    if config.output.exists() and not config.overwrite and (not config.output.is_dir() or any(config.output.iterdir())):
        raise ConfigError(f"the output exists: {config.output}", hint="name another one, or pass --overwrite")
    method, scheme = method_and_scheme(config)
    model = open_model(config.engine)
    plan = uniform_plan(model.config, scheme, config.rules)
    tables = table_schemes(model.config, scheme, config.embeddings, config.lm_head)
    bits = config.average_bits if config.max_size_mb is None else bits_within(model, config.max_size_mb * 1e6, tables)
    choices = [] if bits is None else candidates(model.config, scheme, bits)
    for possible in [plan] if not choices else [uniform_plan(model.config, choice) for choice in choices]:
        check_shapes(model.config, possible, config.format, tables)
    device, reason = select_device(config.device)
    log.info("%s on %s (%s): %s, %s", model.name, device, reason, method.name, scheme)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or host.usable_cores())
    calibration = _calibration(config, model, method)
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
        job = replace(job, spill=_state_folder(config.output))
    check_weights(job.source())
    if bits is not None:
        job = replace(job, schemes=_spent(job, config, choices, bits, calibration))
    measured_on = _text_to_measure(config, model, calibration)
    return _Prepared(
        config=config,
        job=job,
        calibration=calibration,
        measured_on=measured_on,
        drift=_drift(config, model, calibration),
    )


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
    path = config.sensitivity or _state_folder(config.output) / "losses.json"
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


def _fingerprint(prepared: _Prepared) -> Fingerprint:
    config, calibration = prepared.config, prepared.calibration
    options = {name: getattr(config, name) for name in _FINGERPRINTED}
    options |= {"scale_type": str(prepared.job.scale_type), "rules": list(config.rules)}
    return Fingerprint(
        model=prepared.job.model.checkpoint.fingerprint(),
        calibration="none" if calibration is None else calibration.fingerprint(),
        options=options,
    )


def _measure(prepared: _Prepared, state: RunState) -> Measured | None:
    job = prepared.job
    if prepared.measured_on is None:
        return None

    def quantized() -> DequantizedSource:
        return DequantizedSource(job.source(), state.matrices(), state.dense())

    backends: tuple[Backend, Backend] = (job.backend, job.backend)
    if any(scheme is not None and scheme.activation_bits for schemes in job.schemes for scheme in schemes.values()):
        backends = (job.backend, cast(Backend, TokenActivations(job.backend)))
    return measure(job.model, (job.source, quantized), prepared.measured_on, backends, job.device)


def _report(prepared: _Prepared, state: RunState, measured: Measured | None, seconds: float) -> ConvertReport:
    job, config = prepared.job, prepared.config
    quality = None
    if measured is not None:
        both = measured.comparison
        quality = {
            "perplexity": both.model.value,
            "original_perplexity": both.original.value,
            "kl": both.kl,
            "top1_agreement": both.top1_agreement,
            "num_tokens": measured.num_tokens,
            "context": measured.context,
        }
    return ConvertReport(
        model=job.model.name,
        output=str(config.output),
        format=config.format,
        method=job.recipe.name,
        scheme=str(method_and_scheme(config)[1]),
        average_bits=average_bits(job.model.config, job.schemes),
        bytes_before=job.model.checkpoint.size_bytes,
        bytes_after=0,
        seconds=seconds,
        peak_memory_bytes=host.peak_rss_bytes(),
        calibration=None if prepared.calibration is None else asdict(prepared.calibration.report),
        drift=None if prepared.drift is None else asdict(prepared.drift),
        tables=_table_names(job),
        layers=[asdict(record) | {"schemes": _scheme_names(record.schemes)} for record in state.layers],
        quality=quality,
        samples=() if measured is None else measured.samples,
    )


def _table_names(job: Job) -> dict[str, str]:
    found = {module: str(scheme) for module, scheme in job.tables.items()}
    if found and job.model.config.tie_word_embeddings:
        found[HEAD] = f"tied to {EMBEDDING}"
    return found


def _scheme_names(schemes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {module.rpartition(".")[2]: str(QuantScheme(**fields)) for module, fields in schemes.items()}


def _gate(config: ConvertConfig, report: ConvertReport) -> None:
    if report.quality is None:
        return
    failures = []
    if config.max_kl is not None and not report.quality["kl"] <= config.max_kl:
        failures.append(f"KL {report.quality['kl']:.4f} exceeds {config.max_kl}")
    increase = report.quality["perplexity"] / report.quality["original_perplexity"] - 1
    if config.max_ppl_increase is not None and not increase <= config.max_ppl_increase:
        failures.append(f"perplexity grew by {increase:.2%}, more than {config.max_ppl_increase:.2%}")
    if failures:
        raise QualityError(
            f"{'; '.join(failures)}; nothing was written",
            hint=f"{'; '.join(causes(report))}; --resume with a looser gate writes what there is",
        )


def _write(prepared: _Prepared, state: RunState, report: ConvertReport) -> ConvertReport:
    job, config = prepared.job, prepared.config
    assert job.path is not None
    companions = companion_files(job.path, job.model.checkpoint)
    weights = needs(job.model, job.schemes, None, job.tables).output
    report = replace(report, bytes_after=weights)
    export = Export(
        target=config.output,
        format=config.format,
        config=job.model.checkpoint.config,
        companions={**companions, PAGE: report_page(report).encode()},
        report=asdict(report),
        overwrite=config.overwrite,
        expected_bytes=weights,
    )
    written = write_checkpoint(export, _parts(job, state))
    return replace(report, bytes_after=written.num_bytes)


def _parts(job: Job, state: RunState) -> Iterator[tuple[str, Part]]:
    """Everything the checkpoint holds: quantized modules, changed tensors, and the rest as it was."""
    matrices, dense, checkpoint = state.matrices(), state.dense(), job.model.checkpoint
    covered = {f"{module}.{kind}" for module in matrices for kind in ("weight", "bias")}
    for name in sorted(checkpoint.names() - covered):
        if name == "lm_head.weight" and job.model.config.tie_word_embeddings:
            continue  # tied stays tied, one tensor
        original = dense[name] if name in dense else checkpoint.tensor(name)
        # A GGUF file's tensors are made from blocks in float32, which says nothing of what they should be stored in.
        yield name, original.to(checkpoint.dtype) if isinstance(checkpoint, GGUFCheckpoint) else original
    for module in _in_order(job, matrices):
        yield module, matrices[module]


def _in_order(job: Job, matrices: Mapping[str, object]) -> Sequence[str]:
    config = job.model.config
    names = [n for i in range(config.num_layers) for parts in layer_modules(config, i).values() for n, _ in parts]
    return [*(name for name in (EMBEDDING, HEAD) if name in matrices), *(name for name in names if name in matrices)]


def _state_folder(output: Path) -> Path:
    """Where an unfinished run lies."""
    return output.with_name(f"{output.name}.unfinished")
