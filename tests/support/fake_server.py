"""A server process over a fake engine, for tests of signals and of starting: `python fake_server.py PORT [OPTIONS]`."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from fake_client import FakeClient, Script

from triblade.config import EngineConfig, ServerConfig
from triblade.errors import CheckpointError, TribladeError
from triblade.serve.run import serve


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--load-fails", action="store_true")
    parser.add_argument("--drain-s", type=float, default=30.0)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    class Engine(FakeClient):
        def close(self) -> None:
            sys.stderr.write("engine closed\n")

    def start(config: EngineConfig) -> FakeClient:
        time.sleep(options.load_s)
        if options.load_fails:
            raise CheckpointError("the checkpoint is broken")
        pause = {"short": Script(b"x" * 20, pause_s=0.05), "long": Script(b"x" * 4000, pause_s=0.05)}
        return Engine(max_model_len=5000, scripts=pause)

    config = ServerConfig(host=options.host, port=options.port, drain_timeout_s=options.drain_s)
    try:
        return serve(EngineConfig(model="fake"), config, start=start)
    except TribladeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
