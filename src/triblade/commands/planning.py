"""Commands that choose how to serve: plan; and `serve --plan`, whose options a plan file gives.

A plan's options become flags before the command line is read, and those that the user typed take their places: explicit flags win.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from triblade import console
from triblade.commands.frame import PLAN_GROUP, LogLevelFlag, app
from triblade.config import Plan, PlanConfig, read_toml, to_flags, to_toml
from triblade.errors import ModelNotFoundError, UnsupportedError

PLAN_FLAG = "--plan"


@app.command(usage="triblade plan MODEL [OPTIONS]")
def plan(
    config: Annotated[PlanConfig, Parameter(name="*", group=PLAN_GROUP)],
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "warning",
) -> None:
    """Choose bits, drafter, KV codec and workers for a model, hardware and workload, in seconds and without loading it.

    Args:
        as_json: Print one JSON object, with every candidate that was rejected and why.
    """
    from triblade.tune import plan_report
    from triblade.tune.hardware import find_hardware
    from triblade.tune.make_plan import make_plan
    from triblade.tune.open_shape import open_shape
    from triblade.tune.planner import decide

    console.setup_logging(log_level)
    shape = open_shape(config.model)
    if config.hardware == "here":
        from triblade.tune.profile import this_machine

        hardware = this_machine()
    else:
        hardware = find_hardware(config.hardware)
    decision = decide(config, shape, hardware)
    made = make_plan(decision, config)
    if config.output is not None:
        config.output.write_text(to_toml(made), encoding="utf-8")
    if as_json:
        print(json.dumps(plan_report.as_json(decision, made, config)))
    else:
        print(plan_report.describe(decision, made, config))
    if config.output is not None:
        print(f"plan written: {config.output}", file=sys.stderr)


def with_plan(arguments: Sequence[str]) -> list[str]:
    """`serve --plan FILE ...` with the plan's options in front of the others, less those that the user gave.

    Raises:
        ConfigError: the file is no plan.
        UnsupportedError: see `check_runs_here`.
        ModelNotFoundError: the plan's checkpoint was not made yet; the hint has the command.
    """
    path = plan_file(arguments)
    if path is None:
        return list(arguments)
    found = read_toml(Plan, path)
    given = {_option(word) for word in arguments if word.startswith("--")}
    check_runs_here(found, path)
    if "model" not in given:
        check_is_made(found)
    flags = [*to_flags(found.decode), *to_flags(found.topology), *to_flags(found.transfer)]
    return [arguments[0], *(flag for flag in flags if _option(flag) not in given), *arguments[1:]]


def plan_file(arguments: Sequence[str]) -> Path | None:
    """The file that `serve` is to take its options from, if there is one."""
    if not arguments or arguments[0] != "serve":
        return None
    for position, word in enumerate(arguments):
        if word.startswith(f"{PLAN_FLAG}="):
            return Path(word.partition("=")[2])
        if word == PLAN_FLAG and position + 1 < len(arguments):
            return Path(arguments[position + 1])
    return None


def check_runs_here(found: Plan, path: Path) -> None:
    """Refuse a plan that this command cannot carry out.

    Raises:
        UnsupportedError: it is for another engine, or its two roles differ.
    """
    if found.serving_engine != "triblade":
        raise UnsupportedError(
            f"the plan is for {found.serving_engine}: {path}",
            hint=f"triblade deploy {path} serves it",
            param="plan",
        )
    if found.prefill not in (None, found.decode):
        raise UnsupportedError(
            f"[prefill] and [decode] differ, and all workers of a server have one configuration: {path}",
            hint="make them equal, or start workers of your own with triblade worker",
            param="plan",
        )


def check_is_made(found: Plan) -> None:
    """Refuse a plan whose checkpoint is not there.

    Raises:
        ModelNotFoundError: the hint has the command that makes it.
    """
    if found.weights.convert and not Path(found.decode.model).exists():
        raise ModelNotFoundError(
            f"the checkpoint of the plan is not there: {found.decode.model}",
            hint=f"make it: {found.weights.convert}",
            param="plan",
        )


def _option(word: str) -> str:
    """`--no-deterministic=...` -> `deterministic`: the option that a flag sets."""
    return word.partition("=")[0].removeprefix("--").replace("_", "-").removeprefix("no-")
