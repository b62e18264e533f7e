"""`triblade deploy`: read a plan, ask what vLLM accepts, translate, then print, write or run.

The order is fixed: nothing is written or started before every option was checked and every loss was said.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from triblade.config import DeployConfig, Plan, read_toml
from triblade.deploy.accepted import Accepted, installed, release
from triblade.deploy.checkpoint import check_checkpoint, head_method
from triblade.deploy.flags import flags, losses
from triblade.deploy.kubernetes import manifests
from triblade.deploy.ray_app import ray_files
from triblade.deploy.ray_run import check_application, run_ray
from triblade.deploy.speculative import DraftFacts
from triblade.deploy.translation import ServedRole, Translation, translate
from triblade.errors import ModelNotFoundError, TribladeError
from triblade.files import written_whole

log = logging.getLogger(__name__)

Say = Callable[[str], None]


def deploy(config: DeployConfig, say: Say) -> int:
    """Carry a plan out with another engine.

    Args:
        config: which plan, and where.
        say: gets what is for the user, in pieces.

    Returns:
        The exit code.

    Raises:
        TribladeError: the plan cannot be read or translated, or what was started failed.
    """
    plan = read_toml(Plan, config.plan)
    accepted = installed(config.vllm_python) if config.vllm_python else release(config.vllm_version, _device(plan))
    log.info("vLLM %s on %s", accepted.version, accepted.device)
    translation = translate(plan, config, accepted, _draft_facts(plan, config))
    _check_model(plan, config, accepted, translation)
    for line in losses(translation.losses):
        log.log(logging.WARNING if translation.losses else logging.INFO, "%s", line)
    if config.run and config.target == "local":
        return _run_local(plan, config, accepted, translation, say)
    files = _files(config, accepted, translation)
    if config.vllm_python and config.target == "ray" and (config.run or "ray" in accepted.packages):
        log.info("Ray %s takes the application", check_application(files, config.vllm_python))
    if config.run:
        return run_ray(config, files, translation.names[0], lambda url: say(f"ready: {url}"))
    if config.output is None:
        say("\n".join([*losses(translation.losses), "", *_shown(files)]))
    else:
        _write(files, config.output)
        say("\n".join(f"written: {config.output / name}" for name in files))
    return 0


def _device(plan: Plan) -> str:
    """What the plan computes on, where no vLLM can be asked."""
    if plan.decode.device != "auto":
        return plan.decode.device
    return "cpu" if plan.hardware.startswith("cpu") else "cuda"


def _check_model(plan: Plan, config: DeployConfig, accepted: Accepted, translation: Translation) -> None:
    """Refuse a checkpoint that vLLM does not load, or that was not made yet."""
    dtype = translation.roles[-1].options.get("dtype", "auto")
    check_checkpoint(plan.decode, accepted.device, accepted.packages, dtype)
    if config.run and config.model is None and plan.weights.convert and not Path(plan.decode.model).exists():
        raise ModelNotFoundError(
            f"the checkpoint of the plan is not there: {plan.decode.model}", hint=f"make it: {plan.weights.convert}"
        )


def _draft_facts(plan: Plan, config: DeployConfig) -> DraftFacts:
    """Draft lengths from the cost model, where the model's shape and the hardware are known here."""
    if plan.decode.drafter is None:
        return DraftFacts()
    head = head_method(plan.decode)
    if not config.draft_table or plan.decode.draft_policy != "adaptive" or plan.decode.drafter == "self":
        return DraftFacts(head=head)
    from triblade.deploy.draft_table import draft_table
    from triblade.tune.hardware import find_hardware
    from triblade.tune.open_shape import open_shape
    from triblade.tune.profile import this_machine

    try:
        hardware = this_machine() if plan.hardware == "here" else find_hardware(plan.hardware)
        return DraftFacts(head=head, table=draft_table(plan, open_shape(plan.decode.model), hardware))
    except TribladeError as error:
        log.warning("no draft lengths by batch size: %s", error.message)
        return DraftFacts(head=head)


def _files(config: DeployConfig, accepted: Accepted, translation: Translation) -> Mapping[str, str]:
    """Name and content of what a target needs."""
    if config.target == "ray":
        return ray_files(config, translation, accepted.device)
    if config.target == "kubernetes":
        return manifests(config, accepted, translation)
    lines = [
        "#!/bin/sh",
        *(f"# {line}".rstrip() for line in losses(translation.losses)),
        *map(_command, translation.roles),
    ]
    return {"serve.sh": "\n".join(lines) + "\n"}


def _command(role: ServedRole) -> str:
    return shlex.join(["vllm", "serve", *flags(role.options)])


def _shown(files: Mapping[str, str]) -> list[str]:
    return [f"--- {name}\n{content}" for name, content in files.items()]


def _write(files: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with written_whole(folder / name) as part:
            part.write_text(content, encoding="utf-8")


def _run_local(plan: Plan, config: DeployConfig, accepted: Accepted, translation: Translation, say: Say) -> int:
    assert config.vllm_python is not None  # `DeployConfig` refuses to run without
    from triblade.deploy.local import LocalRun, run_local

    run = LocalRun(plan=plan, config=config, translation=translation, accepted=accepted, python=config.vllm_python)
    return run_local(run, lambda url: say(f"ready: {url}"))
