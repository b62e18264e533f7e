"""Lets an installed Ray make applications of its own builders. Runs by path in Ray's Python: the standard library and Ray alone.

Reads the applications of a `serve run` file as JSON from standard input, and prints one JSON object in its last line. Starts no
cluster. What Ray or vLLM does not know raises here as it would in a cluster.
"""

import importlib
import json
import sys


def main() -> None:
    """Build each application."""
    for application in json.load(sys.stdin):
        module, _, name = application["import_path"].partition(":")
        build = getattr(importlib.import_module(module), name)
        build(application["args"])
    sys.stdout.write(json.dumps({"version": importlib.import_module("ray").__version__}) + "\n")


if __name__ == "__main__":
    main()
