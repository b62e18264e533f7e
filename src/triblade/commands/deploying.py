"""The command that hands a plan to a cluster engine: deploy."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from triblade import console
from triblade.commands.frame import DEPLOY_GROUP, LogLevelFlag, app
from triblade.config import DeployConfig


@app.command(usage="triblade deploy PLAN [OPTIONS]")
def deploy(
    config: Annotated[DeployConfig, Parameter(name="*", group=DEPLOY_GROUP)], *, log_level: LogLevelFlag = "info"
) -> int:
    """Serve a plan with vLLM: on this host, with Ray Serve or on Kubernetes.

    Prints what would be done; --output writes it, --run does it. What of the plan has no counterpart is named with what is lost.
    """
    from triblade.deploy.run import deploy as run

    console.setup_logging(log_level)
    return run(config, lambda text: print(text, flush=True))
