"""Commands about many replicas: route, simulate."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from triblade import console
from triblade.commands.frame import ROUTE_GROUP, SIMULATE_GROUP, LogLevelFlag, app
from triblade.config import RouteConfig, SimulateConfig, router_environment


@app.command(usage="triblade route URL URL ... [OPTIONS]")
def route(
    *urls: str,
    config: Annotated[RouteConfig, Parameter(name="*", group=ROUTE_GROUP)] = RouteConfig(),  # noqa: B008 - frozen
) -> int:
    """Put one address in front of several OpenAI servers (ours, vLLM, others) until SIGTERM or Ctrl-C.

    Args:
        urls: Addresses of the servers; all serve the same model.
    """
    from triblade.deploy.replicas_run import route as run

    console.setup_logging(config.log_level)
    return run(urls, router_environment(config))


@app.command(usage="triblade simulate --plan FILE | --step-ms MS ... [OPTIONS]")
def simulate(
    *,
    config: Annotated[SimulateConfig, Parameter(name="*", group=SIMULATE_GROUP)] = SimulateConfig(),  # noqa: B008 - frozen
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    log_level: LogLevelFlag = "warning",
) -> None:
    """Say how many replicas a traffic needs, and how many of them should prefill, by simulating router and replicas.

    Args:
        as_json: Print one JSON object.
    """
    from triblade.deploy.simulation_run import answer, write_plan

    console.setup_logging(log_level)
    found = answer(config)
    write_plan(config, found)
    print(json.dumps(found.as_json()) if as_json else found)
