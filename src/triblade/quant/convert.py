"""`triblade convert`: from a model and a text to a quantized checkpoint that was measured, or to a reason why not.

    check everything -> quantize layer by layer -> measure -> gate -> write, read again, name

What is unfinished lies in a folder beside the output and is continued with --resume. Options that only concern the end (measuring,
gate, format of equal scales) may change between the two. Knows the parts, none of their insides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from triblade import host
from triblade.config import ConvertConfig
from triblade.errors import QualityError
from triblade.models.gguf_checkpoint import GGUFCheckpoint
from triblade.models.weights import layer_modules
from triblade.ops.backend import Backend
from triblade.quant.checkpoint_writer import Export, Part, write_checkpoint
from triblade.quant.companions import companion_files
from triblade.quant.convert_inputs import Prepared, method_and_scheme, prepare, state_folder
from triblade.quant.convert_report import ConvertReport, causes, report_page
from triblade.quant.measure import DequantizedSource, Measured, TokenActivations, measure
from triblade.quant.plan import average_bits
from triblade.quant.preflight import needs
from triblade.quant.quantize import Job, quantize_layers
from triblade.quant.run_state import Fingerprint, RunState
from triblade.quant.scheme import QuantScheme
from triblade.quant.tables import EMBEDDING, HEAD

log = logging.getLogger(__name__)

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


def convert(config: ConvertConfig) -> ConvertReport:
    """Make a quantized checkpoint.

    Raises:
        ConfigError, UnsupportedError, MemoryBudgetError, CheckpointError, NumericalError: something is in the way; before any work.
        QualityError: the result is worse than the gate allows; nothing is written.
    """
    started = time.monotonic()
    prepared = prepare(config)
    state = RunState(state_folder(config.output), _fingerprint(prepared), resume=config.resume)
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


def _fingerprint(prepared: Prepared) -> Fingerprint:
    config, calibration = prepared.config, prepared.calibration
    options = {name: getattr(config, name) for name in _FINGERPRINTED}
    options |= {"scale_type": str(prepared.job.scale_type), "rules": list(config.rules)}
    return Fingerprint(
        model=prepared.job.model.checkpoint.fingerprint(),
        calibration="none" if calibration is None else calibration.fingerprint(),
        options=options,
    )


def _measure(prepared: Prepared, state: RunState) -> Measured | None:
    job = prepared.job
    if prepared.measured_on is None:
        return None

    def quantized() -> DequantizedSource:
        return DequantizedSource(job.source(), state.matrices(), state.dense())

    backends: tuple[Backend, Backend] = (job.backend, job.backend)
    if any(scheme is not None and scheme.activation_bits for schemes in job.schemes for scheme in schemes.values()):
        backends = (job.backend, cast(Backend, TokenActivations(job.backend)))
    return measure(job.model, (job.source, quantized), prepared.measured_on, backends, job.device)


def _report(prepared: Prepared, state: RunState, measured: Measured | None, seconds: float) -> ConvertReport:
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


def _write(prepared: Prepared, state: RunState, report: ConvertReport) -> ConvertReport:
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
