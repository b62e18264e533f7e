"""Commands that make something out of a model: convert, align, kv-calibrate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from triblade import console
from triblade.commands.frame import ALIGN_GROUP, CONVERT_GROUP, KV_GROUP, LogLevelFlag, app, print_report
from triblade.config import AlignConfig, ConvertConfig, KVCalibrateConfig


@app.command(usage="triblade convert MODEL --output DIR --calibration FILE [OPTIONS]")
def convert(
    config: Annotated[ConvertConfig, Parameter(name="*", group=CONVERT_GROUP)],
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "info",
) -> None:
    """Quantize a model into a checkpoint that this and other engines serve, and measure what it lost.

    Args:
        as_json: Print the whole report as one JSON object.
    """
    from triblade.quant.convert import convert as run

    console.setup_logging(log_level)
    if config.calibration == "self":
        config = replace(config, calibration=str(_own_text(config)))
    report = run(config)
    print_report(report, as_json)


@app.command(usage="triblade align TARGET --output DIR [OPTIONS]")
def align(
    config: Annotated[AlignConfig, Parameter(name="*", group=ALIGN_GROUP)],
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "info",
) -> None:
    """Train a head that guesses a model's next tokens, on text that the model writes as it is served.

    Args:
        as_json: Print the whole report as one JSON object.
    """
    from triblade.writing import align_head

    console.setup_logging(log_level)
    report = align_head(config)
    print_report(report, as_json)


@app.command(name="kv-calibrate", usage="triblade kv-calibrate MODEL --text FILE --output TABLE.safetensors [OPTIONS]")
def kv_calibrate(
    config: Annotated[KVCalibrateConfig, Parameter(name="*", group=KV_GROUP)],
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "info",
) -> None:
    """Make a table with which keys and values travel small between workers (codec pca-lut), and measure what that costs.

    Args:
        as_json: Print the whole report as one JSON object.
    """
    from triblade.kv.calibration import calibrate

    console.setup_logging(log_level)
    print_report(calibrate(config), as_json)


def _own_text(config: ConvertConfig) -> Path:
    """Calibration text that the model writes itself, kept beside the output for --resume."""
    from triblade.llm import LLM
    from triblade.writing import write_own_text

    path = config.output.with_name(f"{config.output.name}.calibration.json")
    if not path.is_file():
        write_own_text(LLM(config.engine), config.calibration_samples, config.calibration_length, path)
    return path
