"""Plans: the TOML round trip, the decision tables, gates, bills, what is chosen where, and what the command line makes of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_shapes import EIGHT, LLAMA_8B, SEVENTY, SMALL

from triblade.cli import main
from triblade.commands.planning import with_plan
from triblade.config import (
    DeployConfig,
    Figure,
    Plan,
    PlanConfig,
    TopologyConfig,
    WeightPlan,
    Workload,
    parse_toml,
    read_toml,
    to_toml,
)
from triblade.config.engine import EngineConfig
from triblade.deploy.accepted import release
from triblade.deploy.translation import translate
from triblade.errors import ConfigError, ModelNotFoundError, UnsupportedError
from triblade.tune.bill import HOURS_PER_MONTH, break_even_months, machines, monthly_bill, per_million_tokens
from triblade.tune.hardware import Hardware, find_hardware, hardware_names
from triblade.tune.make_plan import commands, kv_bytes, make_plan, memory_gb
from triblade.tune.plan_report import as_json, describe
from triblade.tune.planner import Decision, decide, sequences_of
from triblade.tune.rules import advice, fitting_rules, workload_of
from triblade.tune.serving import wire_codec
from triblade.tune.shape import ModelShape

H200 = find_hardware("h200")


def chosen(hardware: str | Hardware, shape: ModelShape = EIGHT, **options: Any) -> Decision:
    where = find_hardware(hardware) if isinstance(hardware, str) else hardware
    return decide(PlanConfig(model=shape.name, **options), shape, where)


def plan_of(hardware: str, **options: Any) -> Plan:
    config = PlanConfig(model=EIGHT.name, hardware=hardware, **options)
    return make_plan(decide(config, EIGHT, find_hardware(hardware)), config)


def test_a_plan_survives_its_file() -> None:
    for made in (plan_of("h200"), plan_of("h200", devices=2, workload="document", concurrency=64.0)):
        assert parse_toml(Plan, to_toml(made)) == made


def test_text_in_a_plan_file_is_escaped() -> None:
    odd = 'a "quote", a \\, a line\nand \x7f'
    made = replace(plan_of("h200"), reasons=(odd, ""))
    assert parse_toml(Plan, to_toml(made)).reasons == (odd, "")


def test_an_unknown_key_names_the_nearest_one() -> None:
    text = to_toml(plan_of("h200")).replace("max_num_seqs", "max_num_seq")
    with pytest.raises(ConfigError, match="max_num_seq") as caught:
        parse_toml(Plan, text)
    assert caught.value.hint is not None
    assert "'max_num_seqs'" in caught.value.hint


def test_paths_in_a_plan_file_are_paths() -> None:
    made = plan_of("h200")
    made = replace(made, decode=replace(made.decode, chat_template=Path("t.jinja")))
    assert parse_toml(Plan, to_toml(made)).decode.chat_template == Path("t.jinja")


@pytest.mark.parametrize("field", ["concurrency", "request_rate", "price_per_hour", "ttft_ms"])
def test_numbers_must_be_positive(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        resolved(PlanConfig(model="m"), field)


def resolved(config: PlanConfig, field: str) -> object:
    """Everything that is made of a configuration in which a field is 0."""
    broken = replace(config, **{field: 0})
    return workload_of(broken), broken.goals


def test_every_data_sheet_reads_and_names_its_source() -> None:
    assert {"t4", "a10", "l4", "rtx4090", "a100-40gb", "a100-80gb", "h100", "h200", "b200"} <= set(hardware_names())
    for name in hardware_names():
        sheet = find_hardware(name)
        assert sheet.source
        assert sheet.int8 >= sheet.float16 > 0


def test_an_unknown_name_of_hardware_has_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        find_hardware("h20")
    assert "'h200'" in (caught.value.hint or "")


@pytest.mark.parametrize(("prompt", "output", "share"), [(512, 256, 0.5), (256, 64, 5 / 12), (8, 64, 0.9)])
def test_a_second_turn_finds_the_first_one_in_the_cache(prompt: int, output: int, share: float) -> None:
    """Prompts of 256 and answers of 64: 149 + 64 of 362 tokens are known, of both turns 213 of 512."""
    config = PlanConfig(model="m", workload="chat", prompt_tokens=prompt, output_tokens=output)
    assert workload_of(config).prefix_share == pytest.approx(share, abs=1e-3)
    assert workload_of(replace(config, prefix_share=0.2)).prefix_share == 0.2


@pytest.mark.parametrize(
    ("hardware", "options", "wanted"),
    [
        ("cpu-edge", {}, {"bits": 4, "placement": "one", "split": "30:70"}),
        ("rtx4090", {"devices": 2}, {"bits": 4, "speculate": True, "draft_length": 4, "placement": "two"}),
        ("a100-40gb", {"devices": 2}, {"bits": 4, "speculate": True, "draft_length": 4, "placement": "two"}),
        ("h100", {"devices": 8}, {"bits": 4, "speculate": True, "placement": "two"}),
        ("h100", {"workload": "short"}, {"bits": 4, "speculate": False, "placement": "one", "split": "30:70"}),
        ("h100", {"workload": "long-output"}, {"bits": 4, "speculate": True, "draft_length": 6}),
        ("h100", {"max_ppl_increase": 0.01}, {"bits": 8, "placement": "one", "split": "50:50"}),
        ("cpu-edge", {"max_ppl_increase": 0.25}, {"bits": 3, "placement": "one", "split": "20:80"}),
        ("h100", {}, {}),
    ],
)
def test_the_decision_tables_say_what_their_rows_say(hardware: str, options: Any, wanted: Any) -> None:
    """Rows J3 and J4 of the requirements."""
    config = PlanConfig(model="m", **options)
    rules = fitting_rules(find_hardware(hardware), config.devices, workload_of(config), config.max_ppl_increase)
    assert advice(rules) == wanted
    assert all(rule.source for rule in rules)


def test_one_long_answer_is_speculated_and_a_full_device_is_not() -> None:
    alone = chosen("h200", workload="long-output", concurrency=1.0).chosen.candidate
    assert alone.drafter is not None
    full = chosen("h200", workload="random", concurrency=128.0).chosen.candidate
    assert full.drafter is None


def test_a_card_of_8_gb_gets_4_bits() -> None:
    small = replace(find_hardware("h200"), memory_gb=8.5)
    assert chosen(small, concurrency=1.0).chosen.candidate.weights.bits == 4
    rejected = chosen(small, concurrency=1.0).rejected
    assert {one.candidate.weights.scheme for one in rejected if one.gate == "memory"} >= {"bf16", "int8"}


def test_precision_first_keeps_8_bits() -> None:
    decision = chosen("h200", max_ppl_increase=0.01, concurrency=1.0)
    assert decision.chosen.candidate.weights.bits == 8
    assert {one.candidate.weights.scheme for one in decision.rejected if one.gate == "quality"} == {"int4", "int3"}


def test_other_gpus_are_planned_for_another_engine() -> None:
    config = PlanConfig(model=EIGHT.name, hardware="l4")
    decision = decide(config, EIGHT, find_hardware("l4"))
    made = make_plan(decision, config)
    assert made.serving_engine == "vllm"
    assert any("8.9" in one.reason for one in decision.rejected if one.gate == "hardware")
    assert commands(made, config)[-1].startswith("triblade deploy")


@pytest.mark.parametrize(
    ("hardware", "devices", "dtype"),
    [("b200", 8, None), ("b200", 1, None), ("l4", 1, None), ("t4", 1, "float16")],  # no bfloat16 below capability 8.0
)
def test_another_engine_is_told_of_all_devices_and_of_floats_that_they_have(
    hardware: str, devices: int, dtype: str | None
) -> None:
    config = PlanConfig(model=EIGHT.name, hardware=hardware, devices=devices, workload="long-output", concurrency=256.0)
    made = make_plan(decide(config, EIGHT, find_hardware(hardware)), config)
    (role,) = translate(made, DeployConfig(plan=Path("plan.toml")), release("0.33.0", "cuda")).roles
    assert (role.replicas * role.devices, role.options.get("dtype")) == (devices, dtype)


def test_a_rate_gets_room_for_its_bursts() -> None:
    """Two in flight on average: 2 + 3 x 1.41 at once; of a closed loop, where no more come, half as many again."""
    decision = chosen("h200", request_rate=5.0)
    mean = decision.chosen.outcome.in_flight
    assert sequences_of(decision.chosen, decision.task) == math.ceil(mean + 3 * math.sqrt(mean))
    closed = chosen("h200", concurrency=4.0)
    assert sequences_of(closed.chosen, closed.task) == 6


def test_a_model_for_several_devices_is_split_over_them() -> None:
    config = PlanConfig(model=SEVENTY.name, hardware="a100-80gb", devices=4)
    made = make_plan(decide(config, SEVENTY, find_hardware("a100-80gb")), config)
    assert made.tensor_parallel == 4
    assert commands(made, config)[-1] == "triblade deploy plan.toml"


def test_what_cannot_be_is_refused_with_the_gates() -> None:
    with pytest.raises(ConfigError, match=r"goals.*TTFT \d+ ms, wanted 0.001 ms") as caught:
        chosen("h200", ttft_ms=0.001)
    assert caught.value.hint
    with pytest.raises(ConfigError, match=r"1e\+06 requests/s, [\d.]+ at most"):
        chosen("h200", request_rate=1e6)
    with pytest.raises(ConfigError, match="memory"):
        chosen("cpu-edge", SEVENTY)


def test_cheap_is_not_quick() -> None:
    """What can do most requests per second is ranked first, within the model's error; it is slower for each of them."""
    options: dict[str, Any] = {"workload": "random", "concurrency": 4.0}
    cheap, quick = chosen("h200", objective="cost", **options), chosen("h200", **options)
    best = max(one.outcome.capacity_requests_per_s for one in cheap.ranked)
    assert cheap.chosen.outcome.capacity_requests_per_s >= best / 1.1
    assert quick.chosen.outcome.e2el_s < cheap.chosen.outcome.e2el_s


def test_goals_are_kept() -> None:
    decision = chosen("h200", concurrency=4.0, tpot_ms=3.0)
    assert all(one.outcome.tpot_s <= 0.003 for one in decision.ranked)


def pauses(**options: Any) -> Decision:
    """Long prompts beside streams, on a host without accelerator."""
    load: dict[str, Any] = {"prompt_tokens": 1500, "output_tokens": 200, "concurrency": 6.0, "max_ppl_increase": 0.0}
    return chosen("cpu-laptop", SMALL, **{**load, **options})


PAUSES = [(None, "together", None), (350.0, "together", 256), (200.0, "together", 128), (40.0, "one", None)]


@pytest.mark.parametrize(("pause_ms", "placement", "chunk"), PAUSES)
def test_a_short_pause_takes_smaller_steps_and_a_shorter_one_workers(
    pause_ms: float | None, placement: str, chunk: int | None
) -> None:
    decision = pauses(pause_ms=pause_ms)
    found = decision.chosen.candidate
    assert (found.placement, found.chunk) == (placement, chunk)
    assert pause_ms is None or all(one.outcome.pause_s * 1e3 <= pause_ms for one in decision.ranked)
    plan = make_plan(decision, PlanConfig(model=SMALL.name))
    assert plan.decode.max_num_batched_tokens == (chunk or 512)
    assert plan.figure("pause") == pytest.approx(decision.chosen.outcome.pause_s * 1e3, abs=1e-3)


def test_both_roles_on_one_device_hold_the_weights_once() -> None:
    """Rows J3 and J4: what comes twice is the cache and the buffers."""
    apart, together = pauses(pause_ms=40.0), pauses()
    topology = make_plan(apart, PlanConfig(model=SMALL.name)).topology
    assert (topology.prefill_workers, topology.decode_workers, topology.pd_isolation) == (1, 1, "thread")
    assert apart.chosen.memory.weight_bytes == together.chosen.memory.weight_bytes
    caches = [kv_bytes(decision, sequences_of(decision.chosen, decision.task)) for decision in (apart, together)]
    buffers = apart.chosen.memory.activation_bytes
    assert memory_gb(apart) * 1e9 - caches[0] == pytest.approx(memory_gb(together) * 1e9 - caches[1] + buffers)


def test_alone_nobody_pauses_for_others() -> None:
    outcome = pauses(concurrency=1.0).chosen.outcome
    assert outcome.pause_s < 1.2 * outcome.tpot_s


def test_a_rate_becomes_requests_in_flight() -> None:
    """Little: as many as the rate times the time that one takes."""
    outcome = chosen("h200", request_rate=5.0).chosen.outcome
    assert outcome.in_flight == pytest.approx(5 * outcome.e2el_s, rel=0.05)
    assert outcome.requests_per_s == 5


def test_the_wire_codec_is_a_break_even() -> None:
    """Encoding 0.6 GB/s to 0.51 of the size pays below 0.294 GB/s."""
    assert wire_codec(0.29e9) == "int8"
    assert wire_codec(0.30e9) == "raw"


def test_bills_by_hand() -> None:
    assert per_million_tokens(3.6, 1000.0) == pytest.approx(1.0)
    assert machines(7.0, 10.0) == 1
    assert machines(7.1, 10.0) == 2
    month_s = HOURS_PER_MONTH * 3600
    assert monthly_bill(14 * month_s, 10.0, 2.0) == pytest.approx(2 * 2.0 * HOURS_PER_MONTH)
    assert break_even_months(1000.0, 700.0, 200.0) == pytest.approx(2.0)
    assert break_even_months(1000.0, 200.0, 200.0) is None


def test_bills_need_a_price() -> None:
    with pytest.raises(ConfigError, match="price"):
        PlanConfig(model="m", requests_per_month=1e6)


def test_the_report_says_everything() -> None:
    config = PlanConfig(
        model=EIGHT.name,
        hardware="h200",
        workload="short",
        price_per_hour=3.0,
        requests_per_month=1e9,
        one_time_cost=10.0,
    )
    decision = decide(config, EIGHT, H200)
    made = make_plan(decision, config)
    text, data = describe(decision, made, config), as_json(decision, made, config)
    for part in (
        H200.source,
        "none of the three",
        "rule many-short",
        "runner-up",
        "quality: ",
        "USD",
        "triblade serve --model=",
    ):
        assert part in text
    assert len(data["rejected"]) == len(decision.rejected)
    assert {figure["label"] for figure in data["prediction"].values()} == {"rule", "predicted"}


def test_what_is_quantized_already_stays() -> None:
    decision = decide(PlanConfig(model="m.gguf"), replace(EIGHT, stored_bits=4), H200)
    assert {one.candidate.weights.scheme for one in decision.ranked} == {"stored"}
    assert make_plan(decision, PlanConfig(model="m.gguf")).weights.convert == ""


def write(path: Path, **fields: Any) -> Path:
    made = Plan(
        hardware="h200",
        decode=EngineConfig(model="m", drafter="suffix", max_num_seqs=7),
        weights=WeightPlan(scheme="bf16"),
        workload=Workload(name="chat", prompt_tokens=1, output_tokens=1, concurrency=1),
        prediction=(Figure(name="ttft", value=1.0, unit="ms", label="predicted"),),
    )
    path.write_text(to_toml(replace(made, **fields)), encoding="utf-8")
    return path


def test_options_of_a_plan_are_flags_and_those_of_the_user_win(tmp_path: Path) -> None:
    file = str(write(tmp_path / "plan.toml"))
    assert with_plan(["serve", "--plan", file]) == [
        "serve", "--model=m", "--max-num-seqs=7", "--drafter=suffix", "--plan", file,
    ]  # fmt: skip
    user = ["serve", "--model", "other", f"--plan={file}", "--max_num_seqs", "3"]
    assert with_plan(user) == ["serve", "--drafter=suffix", *user[1:]]
    assert with_plan(["serve", "--model", "m"]) == ["serve", "--model", "m"]


def test_the_command_line_serves_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, served = write(tmp_path / "plan.toml"), list[EngineConfig]()

    def serve(engine: EngineConfig, *_: Any, plan: Plan, **__: Any) -> int:
        served.append(engine)
        assert plan == read_toml(Plan, file)
        return 0

    monkeypatch.setattr("triblade.serve.run.serve", serve)
    assert main(["serve", "--plan", str(file), "--max-num-seqs", "3"]) == 0
    assert main(["serve", "other", f"--plan={file}"]) == 0
    assert [(one.model, one.max_num_seqs, one.drafter) for one in served] == [
        ("m", 3, "suffix"),
        ("other", 7, "suffix"),
    ]


def test_the_command_line_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    file = tmp_path / "plan.toml"
    assert main(["plan", str(tmp_path), "--hardware", "h200", "--output", str(file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["prediction"]["ttft"]["value"] == read_toml(Plan, file).figure("ttft")


def test_a_plan_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    file = write(tmp_path / "plan.toml", weights=WeightPlan(scheme="int4", convert="triblade convert m --output m"))
    with pytest.raises(ModelNotFoundError) as caught:
        with_plan(["serve", "--plan", str(file)])
    assert caught.value.hint == "make it: triblade convert m --output m"
    with pytest.raises(UnsupportedError, match="vllm"):
        with_plan(["serve", f"--plan={write(tmp_path / 'other.toml', serving_engine='vllm')}"])
    engines = {"decode": EngineConfig(model="m"), "prefill": EngineConfig(model="m", quantization="int8")}
    mixed = write(tmp_path / "mixed.toml", topology=TopologyConfig(prefill_workers=1, decode_workers=1), **engines)
    with pytest.raises(UnsupportedError, match="differ"):
        with_plan(["serve", f"--plan={mixed}"])
    with pytest.raises(ConfigError, match=r"none\.toml"):
        with_plan(["serve", "--plan", str(tmp_path / "none.toml")])


def test_a_figure_that_is_not_there_is_named() -> None:
    made = plan_of("h200")
    assert made.figure("ttft") > 0
    with pytest.raises(ConfigError, match="predicts no tftf"):
        made.figure("tftf")
