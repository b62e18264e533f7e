"""Which of vLLM's connectors can be made on a CPU: both sides of each, for an engine that is configured and not started.

    python vllm_connectors.py CHECKPOINT > connectors.json

Prints connector -> `ok`, or the error of the first side that cannot be made. Everything else goes to standard error. Runs in an
environment of its own and knows nothing of triblade; `deploy_ways.py` asks it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from importlib import import_module
from typing import Any

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
PATIENCE_S = 20
BLOCKS, BLOCK_TOKENS = 64, 128
LAYOUT = "LBHNC"  # which the engine of a CPU chooses
EXTRA: dict[str, dict[str, Any]] = {  # without which they refuse whatever the machine is
    "OffloadingConnector": {"cpu_bytes_to_use": 1 << 28},
    "MultiConnector": {"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]},
}


def main() -> None:
    """Make each, print what came of it, and leave what they started behind."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the connectors log to standard output
    os.environ.update(SETTINGS)
    transfer: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    signal.signal(signal.SIGALRM, late)
    found = {}
    for name in sorted(transfer.KVConnectorFactory._registry):
        signal.alarm(PATIENCE_S)
        try:
            make(transfer.KVConnectorFactory, sys.argv[1], name)
            found[name] = "ok"
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
    output.write(json.dumps(found) + "\n")
    output.flush()
    os._exit(0)


def make(factory: Any, checkpoint: str, name: str) -> None:
    """The scheduler's side and the worker's."""
    base: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    arguments: Any = import_module("vllm.engine.arg_utils")
    configs: Any = import_module("vllm.config")
    extra = EXTRA.get(name, {})
    transfer = configs.KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
    engine = arguments.EngineArgs(model=checkpoint, max_model_len=2048, enforce_eager=True, kv_transfer_config=transfer)
    config = engine.create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT
    with configs.set_current_vllm_config(config):
        join_alone()
        for side in (base.KVConnectorRole.SCHEDULER, base.KVConnectorRole.WORKER):
            factory.create_connector(config, side, cache(config))


def join_alone() -> None:
    """A group of one process, which workers' sides ask for their rank."""
    parallel: Any = import_module("vllm.distributed.parallel_state")
    if parallel.model_parallel_is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parallel.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    parallel.initialize_model_parallel(1, 1)


def cache(config: Any) -> Any:
    """The KV cache of the model's layers, as one group."""
    interface: Any = import_module("vllm.v1.kv_cache_interface")
    model, parallel = config.model_config, config.parallel_config
    spec = interface.FullAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(model.get_num_layers(parallel))]
    group = interface.KVCacheGroupSpec(layers, spec)
    page = spec.page_size_bytes
    tensor = interface.KVCacheTensor(
        size=len(layers) * BLOCKS * page, layers=layers, layer_stride=BLOCKS * page, block_stride=page
    )
    return interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[group])


def late(*_: object) -> None:
    """Instead of waiting for ever."""
    raise TimeoutError(f"not made after {PATIENCE_S} s")


if __name__ == "__main__":
    main()
