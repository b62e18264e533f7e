"""The command that measures combinations: tune."""

from __future__ import annotations

import signal
from typing import Annotated

from cyclopts import Parameter

from triblade import console
from triblade.commands.frame import TUNE_GROUP, LogLevelFlag, app
from triblade.config import TuneConfig


@app.command(usage="triblade tune MODEL [OPTIONS]")
def tune(
    config: Annotated[TuneConfig, Parameter(name="*", group=TUNE_GROUP)], *, log_level: LogLevelFlag = "info"
) -> None:
    """Measure bits, drafts and workers together on this machine, choose, and write the plan and a report.

    Each trial converts the model if it must, serves a plan and drives the workload against it. Killed and started again with
    --resume, it goes on at the next trial.
    """
    from triblade.tune.run import tune as run

    console.setup_logging(log_level)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server of a trial is ended, too
    print(run(config))
