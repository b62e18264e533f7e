"""An environment with stand-ins for vLLM and Ray: what is asked for option names, and a server that answers without a model.

Ray's `serve run` is that server at the address of its file. The server appends a JSON line to `$FAKE_VLLM_LOG` for its start, each
request, each client that left, and its end. Its text says which role answered. `FAKE_VLLM_FAIL=prefill` lets prefill engines refuse
every request with 500.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ENGINE = """
    model: str = ""
    served_model_name: list = None
    dtype: str = "auto"
    max_model_len: int = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int = None
    num_gpu_blocks_override: int = None
    max_num_seqs: int = None
    max_num_batched_tokens: int = None
    enable_prefix_caching: bool = None
    max_logprobs: int = 20
    seed: int = 0
    tensor_parallel_size: int = 1
    speculative_config: dict = None
    kv_transfer_config: dict = None
    shutdown_timeout: int = 0
"""
CLASS = "from dataclasses import dataclass\nfrom typing import Literal\n@dataclass\nclass {}:\n{}"
RAY_CONFIG = """
class LLMConfig:
    def __init__(self, model_loading_config, engine_kwargs, deployment_config, placement_group_config):
        self.engine = engine_kwargs
    def get_engine_config(self):
        if self.engine.get("seed") == 13:
            raise ValueError("Unknown engine argument: seed")
"""
RAY_SCRIPTS = """
import os, sys, yaml
assert sys.argv[1] == "run"
with open(sys.argv[2]) as file:
    document = yaml.safe_load(file)
(model,) = document["applications"][0]["args"]["llm_configs"]
where = document["http_options"]
words = ["--served-model-name", model["model_loading_config"]["model_id"], "--host", where["host"], "--port", str(where["port"])]
server = os.path.join(os.path.dirname(__file__), "..", "..", "vllm", "entrypoints", "openai", "api_server.py")
os.execv(sys.executable, [sys.executable, server, *words])
"""
SERVER = Path(__file__).with_name("fake_vllm_server.py")
FILES = {
    "vllm/__init__.py": "__version__ = '0.32.0'\n",
    "vllm/platforms.py": "class current_platform:\n    device_type = 'cpu'\n",
    "vllm/config/__init__.py": "",
    "vllm/config/speculative.py": "from typing import Literal\nSpeculativeMethod = Literal['ngram', Literal['eagle']]\n"
    + CLASS.format(
        "SpeculativeConfig",
        "    method: str = ''\n    num_speculative_tokens: int = 0\n    prompt_lookup_max: int = 0\n"
        "    prompt_lookup_min: int = 0\n    num_speculative_tokens_per_batch_size: list = None\n",
    ),
    "vllm/config/cache.py": "from typing import Literal\nCacheDType = Literal['auto', 'fp8', 'int8_per_token_head']\n",
    "vllm/config/kv_transfer.py": CLASS.format(
        "KVTransferConfig",
        "    kv_connector: str = ''\n    kv_role: str = ''\n    kv_load_failure_policy: str = ''\n",
    ),
    "vllm/distributed/kv_transfer/kv_connector/factory.py": (
        "class KVConnectorFactory:\n    _registry = {'NixlConnector': None}\n"
    ),
    "vllm/engine/arg_utils.py": CLASS.format("EngineArgs", ENGINE),
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    "ray/__init__.py": "__version__ = '2.60.0'\n",
    "ray/serve/__init__.py": "",
    "ray/serve/llm.py": RAY_CONFIG,
    "ray/serve/scripts.py": RAY_SCRIPTS,
    "vllm/entrypoints/openai/cli_args.py": "def make_arg_parser(p):\n    p.add_argument('--port')\n    return p\n",
}


def fake_vllm(folder: Path) -> Path:
    """Make the environment; returns its Python."""
    for name, content in {**FILES, "vllm/entrypoints/openai/api_server.py": SERVER.read_text(encoding="utf-8")}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return python


def events(log: Path, kind: str) -> list[dict[str, Any]]:
    """What servers wrote of one kind, in order."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]
