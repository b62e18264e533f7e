#!/usr/bin/env python3
"""One plan with prefill and decode workers, deployed in many ways: each connector of vLLM, and Ray Serve.

    python benchmarks/deploy_ways.py PLAN.toml --vllm-python ENVIRONMENT/bin/python --output FILE.json WAY ...

A WAY is a connector, or a name in the table below. One engine alone (`one-engine`, kept in the file) answers first; each deployment
then gets the same prompts at temperature 0, and an answer is equal or parts at a near tie. What did not start is recorded with the
first error that it wrote. That keys and values moved is read from the decode engine: `external_prefix_cache_hits_total` counts
tokens of prompts that it got from a connector and did not compute. `connectors` asks which of them can be made here at all, and
`ray-files` lets the installed Ray read applications for clusters that are not here. The file is written after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from deployed import Answer, NotReadyError, answer, deployed, first_error, parting, stored
from openai import OpenAIError

from triblade.config import DeployConfig, Plan, read_toml
from triblade.deploy.accepted import release
from triblade.deploy.ray_app import FILE, ray_files
from triblade.deploy.ray_run import check_application
from triblade.deploy.translation import translate

ALONE, MADE, RAY_FILES = "one-engine", "connectors", "ray-files"
PEER = Path(__file__).resolve().parent / "peers" / "vllm_connectors.py"
PROMPTS = Path(__file__).resolve().parent / "prompts" / "edit.jsonl"
SINGLE_PROMPTS = 7  # and a longer one of several
LONG_CHARACTERS = 2400
COUNTED = (
    "prompt_tokens_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "nixl_xfer_time_seconds_count",
    "nixl_xfer_time_seconds_sum",
    "nixl_bytes_transferred_sum",
    "nixl_num_failed_transfers_total",
)
INNER = '[{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]'
WAYS: dict[str, tuple[str, ...]] = {  # options of the deployment; FOLDER is one that both engines see
    ALONE: ("prefill-replicas=0",),
    "ray": ("target=ray", "prefill-replicas=0"),
    "ray-prefill-decode": ("target=ray",),
    "ExampleConnector": (
        "kv-connector=ExampleConnector",
        "kv-connector-option=shared_storage_path=FOLDER",
        "vllm-option=max_num_batched_tokens=2048",
    ),
    "MultiConnector": ("kv-connector=MultiConnector", f"kv-connector-option=connectors={INNER}"),
}
TWO_NODES = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
CLUSTERS: dict[str, dict[str, Any]] = {  # of H200, by their deployment
    "one engine, up to 4": {"prefill_replicas": 0, "max_replicas": 4},
    "one engine on 2 nodes of 8": {"prefill_replicas": 0, **TWO_NODES},
    "2 prefill, 3 to 6 decode": {"prefill_replicas": 2, "decode_replicas": 3, "max_replicas": 6},
    "prefill and decode on 2 nodes of 8 each": {"prefill_replicas": 1, "decode_replicas": 1, **TWO_NODES},
}


def main() -> None:
    """Try one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("names", nargs="+", metavar="WAY")
    parser.add_argument("--vllm-python", required=True, help="of the environment with vLLM")
    parser.add_argument("--deploy-option", action="append", default=[], help="NAME=VALUE of `deploy`, without dashes")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for name in args.names:
        special = {MADE: connectors, RAY_FILES: ray_applications}
        write(args.output, name, special.get(name, tried)(args, name))


def connectors(args: argparse.Namespace, _: str) -> dict[str, str]:
    """Each that this vLLM has -> ok, or why it cannot be made here."""
    model = read_toml(Plan, args.plan).decode.model
    done = subprocess.run([args.vllm_python, str(PEER), model], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def ray_applications(args: argparse.Namespace, _: str) -> dict[str, Any]:
    """Cluster -> what its file asks for, once Ray has taken it."""
    found = {}
    for name, options in CLUSTERS.items():
        config = DeployConfig(plan=args.plan, target="ray", served_model_name=("model",), **options)
        plan = replace(read_toml(Plan, args.plan), hardware="h200")
        accepted = release(config.vllm_version, "cuda")
        files = ray_files(config, translate(plan, config, accepted), accepted.device)
        (application,) = yaml.safe_load(files[FILE])["applications"]
        version = check_application(files, Path(args.vllm_python))
        engines = {side: asked(one) for side, one in sides(application["args"]).items()}
        found[name] = {"builder": application["import_path"], "taken_by_ray": version, **engines}
    return found


def sides(arguments: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Of a builder: name -> LLMConfig."""
    if "llm_configs" in arguments:
        return {"engine": arguments["llm_configs"][0]}
    return {name: arguments[name] for name in ("prefill_config", "decode_config")}


def asked(config: Mapping[str, Any]) -> dict[str, Any]:
    """What one LLMConfig asks of a cluster."""
    bundles, engine = config["placement_group_config"]["bundles"], config["engine_kwargs"]
    sizes = {name: engine[name] for name in ("tensor_parallel_size", "pipeline_parallel_size") if name in engine}
    return {"bundles": len(bundles), "bundle": bundles[0], **sizes, **config["deployment_config"]}


def tried(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What one deployment did."""
    ways = WAYS.get(name, (f"kv-connector={name}",))
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log, tempfile.TemporaryDirectory() as folder:
        options = [*args.deploy_option, *(way.replace("FOLDER", folder) for way in ways)]
        try:
            with deployed(args.plan, args.vllm_python, options, log) as there:
                answers = [answer(there.url, prompt, args.new_tokens) for prompt in prompts()]
                found = {"ready_s": round(there.ready_s, 1), "decode_engine": there.counted(COUNTED)}
        except NotReadyError as error:
            return {"options": list(ways), "said": str(error).replace(folder, "FOLDER")}
        except OpenAIError as error:
            return {"options": list(ways), "said": f"{type(error).__name__}: {error}; {first_error(log)}"}
    if name == ALONE:
        return {**found, "answers": stored(answers)}
    alone = [Answer(**one) for one in content(args.output)["results"][ALONE]["answers"]]
    return {"options": list(ways), **compared(alone, answers), **found}


def compared(alone: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    """With the answers of one engine."""
    pairs = zip(alone, answers, strict=True)
    partings = [found for one, two in pairs if (found := parting(one, two, ("one_engine", "deployed"))) is not None]
    return {"equal": len(answers) - len(partings), "of": len(answers), "partings": partings}


def prompts() -> list[str]:
    """Each long enough for a prefill engine."""
    with PROMPTS.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["turns"][0] for line in lines]
    return [*texts[:SINGLE_PROMPTS], " ".join(texts[SINGLE_PROMPTS:])[:LONG_CHARACTERS]]


def content(path: Path) -> dict[str, Any]:
    """Of the file, or of an empty one."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"results": {}}
    return found


def write(path: Path, name: str, record: dict[str, Any]) -> None:
    """The file with one more record, or another one."""
    whole = content(path)
    whole["results"][name] = record
    path.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps({name: {key: value for key, value in record.items() if key != "answers"}}), flush=True)


if __name__ == "__main__":
    main()
