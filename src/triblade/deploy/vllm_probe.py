"""Asks an installed vLLM what it accepts. Runs by path in vLLM's own Python, so it imports the standard library and vLLM alone.

Prints one JSON object in its last line: version, device, and the option names of the configuration classes. Knows no plan.
"""

import importlib
import importlib.util
import json
import sys
from argparse import ArgumentParser
from dataclasses import fields
from typing import Any, get_args

PACKAGES = ("arctic_inference", "nixl", "nixl_cu12", "nixl_cu13", "ray", "humming", "flashinfer", "flash_attn")


def names(kind: Any) -> list[str]:
    """The fields of a configuration class."""
    return [field.name for field in fields(kind)]


def flat(choices: Any) -> list[str]:
    """Strings of a `Literal`, nested ones included."""
    found = get_args(choices)
    return [name for choice in found for name in ([choice] if isinstance(choice, str) else flat(choice))]


def parser_options() -> list[str]:
    """Options of the server's command line, as its own parser knows them."""
    utilities = importlib.import_module("vllm.utils.argparse_utils")
    arguments = find("make_arg_parser", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    parser: ArgumentParser = arguments(utilities.FlexibleArgumentParser())
    return sorted({action.dest for action in parser._actions if action.option_strings})


def find(name: str, *modules: str) -> Any:
    """The first of the modules that has it; releases moved things."""
    for module in modules:
        if importlib.util.find_spec(module.rpartition(".")[0]) and importlib.util.find_spec(module):
            return getattr(importlib.import_module(module), name)
    raise SystemExit("this vLLM has no " + name)


def main() -> None:
    """Print what this vLLM accepts."""
    vllm = importlib.import_module("vllm")
    platform = importlib.import_module("vllm.platforms").current_platform
    speculative = importlib.import_module("vllm.config.speculative")
    cache = importlib.import_module("vllm.config.cache")
    transfer = importlib.import_module("vllm.config.kv_transfer")
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    engine_options = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    answer = {
        "version": vllm.__version__,
        "device": platform.device_type,
        "engine": sorted({*names(engine_options), *parser_options()}),
        "speculative": names(speculative.SpeculativeConfig),
        "transfer": names(transfer.KVTransferConfig),
        "methods": flat(speculative.SpeculativeMethod),
        "kv_dtypes": flat(cache.CacheDType),
        "connectors": sorted(factory.KVConnectorFactory._registry),
        "packages": [name for name in PACKAGES if importlib.util.find_spec(name)],
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
