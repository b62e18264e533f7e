"""Lets an installed Ray read the engines of applications. Runs by path in Ray's Python: the standard library and Ray alone.

Reads the applications of a `serve run` file as JSON from standard input, and prints one JSON object in its last line. Starts no
cluster, as Ray's builders would. What Ray or its vLLM does not know raises here as it would in a cluster.
"""

import importlib
import json
import sys


def main() -> None:
    """Make the configuration of each engine."""
    known = importlib.import_module("ray.serve.llm").LLMConfig
    for application in json.load(sys.stdin):
        arguments = application["args"]
        sides = [arguments[side] for side in ("prefill_config", "decode_config") if side in arguments]
        for engine in [*arguments.get("llm_configs", ()), *sides]:
            known(**engine).get_engine_config()
    sys.stdout.write(json.dumps({"version": importlib.import_module("ray").__version__}) + "\n")


if __name__ == "__main__":
    main()
