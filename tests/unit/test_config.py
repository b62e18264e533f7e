"""Configuration: ranges, refusals with hints, mappings and TOML, and the environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from triblade import config
from triblade.config import EngineConfig, ServerConfig, from_mapping
from triblade.errors import ConfigError, UnsupportedError


def test_configs_are_frozen_and_hold_no_mutable_default() -> None:
    for kind in (EngineConfig, ServerConfig):
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        for field in dataclasses.fields(kind):
            hash(field.default)
            assert field.default_factory is dataclasses.MISSING


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 0),
        ("num_kv_blocks", 0),
        ("kv_cache_memory_bytes", 0),
        ("threads", 0),
        ("max_logprobs", -1),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
    ],
)
def test_engine_values_out_of_range_are_refused_with_the_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        EngineConfig(model="m", **{field: value})
    assert str(value) in caught.value.message


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("value", [0, 2])
def test_parallelism_is_refused_not_ignored(field: str, value: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{field} must be 1") as caught:
        EngineConfig(model="m", **{field: value})
    assert caught.value.hint


def test_unknown_quantization_at_load_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"awq.*\n.*int4, int8"):
        EngineConfig(model="m", quantization="awq")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_deterministic_mode_is_float32(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=dtype):
        EngineConfig(model="m", deterministic=True, dtype=dtype)
    assert EngineConfig(model="m", deterministic=True, dtype="float32").deterministic


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("max_queued_requests", 0),
        ("rate_limit_per_minute", 0),
        ("max_body_bytes", 0),
        ("drain_timeout_s", -0.1),
        ("request_timeout_s", -1.0),
        ("request_timeout_s", float("nan")),
        ("drain_timeout_s", float("inf")),
    ],
)
def test_server_values_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**{field: value})


def test_limits_of_ranges_are_accepted() -> None:
    assert EngineConfig(model="m", gpu_memory_utilization=1.0, max_logprobs=0, block_size=1).block_size == 1
    assert ServerConfig(port=0, drain_timeout_s=0.0).port == 0
    assert ServerConfig(port=65535).port == 65535


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_model_length") as caught:
        from_mapping(EngineConfig, {"model": "m", "max_model_length": 4})
    assert "max_model_len" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_num_seqs", "8", "a whole number"),
        ("max_num_seqs", True, "a whole number"),
        ("max_num_seqs", 8.0, "a whole number"),
        ("gpu_memory_utilization", "half", "a number"),
        ("deterministic", 1, "true or false"),
        ("dtype", "float8", "one of auto, float32, bfloat16, float16"),
        ("draft_model", 3, "text"),
        ("cpu_cores", [0, "1"], "a list, each item a whole number"),
        ("cpu_cores", 0, "a list, each item a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type_that_is_wanted(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be {wanted}, got: "):
        from_mapping(EngineConfig, {"model": "m", name: value})


def test_values_that_stand_for_a_type_are_taken() -> None:
    taken = from_mapping(
        EngineConfig, {"model": "m", "gpu_memory_utilization": 1, "cpu_cores": [0, 1], "max_model_len": None}
    )
    assert (taken.gpu_memory_utilization, taken.cpu_cores, taken.max_model_len) == (1, (0, 1), None)


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="misses: model"):
        from_mapping(EngineConfig, {"seed": 1})


def test_api_key_from_the_environment_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ServerConfig(api_key=("flag",))
    assert config.with_environment(given) is given
    monkeypatch.setenv("TRIBLADE_API_KEY", "secret")
    assert config.with_environment(given).api_key == ("flag", "secret")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TRIBLADE_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/triblade"),
        ({"HOME": "/h"}, "/h/.cache/triblade"),
    ],
)
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("TRIBLADE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert config.cache_dir() == Path(expected)


def test_cache_dir_of_a_user_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:  # H07
    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for name in ("TRIBLADE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", "/scratch")
    assert config.cache_dir() == Path("/scratch/triblade")


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_offline(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRIBLADE_OFFLINE", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert config.offline() is expected
