"""What a load test asks for: made conversations and read ones, and when they come."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from triblade.bench.arrivals import arrival_times, fixed, poisson, ramp
from triblade.bench.dataset import Conversation, Turn, read_conversations
from triblade.bench.workload import WORDS, WordText, conversations
from triblade.config import BenchConfig
from triblade.errors import ConfigError

TEXT = WordText(1.0)


def first(count: int, stream: str = "", **options: Any) -> list[Conversation]:
    return list(itertools.islice(conversations(BenchConfig(**options), TEXT, stream), count))


def words(conversation: Conversation) -> list[int]:
    return [len(turn.text.split()) for turn in conversation.turns]


def file_of(folder: Path, *records: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("workload", ["fixed", "random", "shared-prefix", "chat", "document"])
def test_a_seed_repeats_and_another_one_does_not(workload: str) -> None:
    assert first(5, workload=workload) == first(5, workload=workload)
    assert first(5, workload=workload) != first(5, workload=workload, seed=1)
    assert not set(first(5, workload=workload)) & set(first(5, workload=workload, stream="other"))
    assert len(set(first(5, workload=workload))) == 5


def test_lengths() -> None:
    assert {tuple(words(c)) for c in first(3, workload="fixed", prompt_tokens=40)} == {(40,)}
    lengths = [words(c)[0] for c in first(400, workload="random", prompt_tokens=100, length_spread=0.5)]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    assert 95 < sum(lengths) / 400 < 105
    assert [len(c.turns) for c in first(2, workload="chat", turns=3)] == [3, 3]
    (document,) = first(1, workload="document", prompt_tokens=960)
    assert 900 < words(document)[0] < 1000
    assert document.turns[0].text.count("\n\n") == 8
    assert WordText(2.0)(random.Random(0), 100).count(" ") == 49  # two tokens a word


def test_prefixes_are_shared_within_groups() -> None:
    found = first(40, workload="shared-prefix", num_prefixes=3, prefix_tokens=20)
    assert len({c.system for c in found}) == 3
    assert len({c.turns for c in found}) == 40


def test_words_stay_whole() -> None:
    assert all(word.isalpha() and word.islower() for word in WORDS)
    assert len(set(WORDS)) == len(WORDS) > 90


@pytest.mark.parametrize(
    ("record", "turns", "system"),
    [
        ({"prompt": "a"}, ["a"], ""),
        ({"turns": ["a", "b"], "category": "x"}, ["a", "b"], ""),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, ["a"], "s"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "no"},
                    {"from": "human", "value": "b"},
                ]
            },
            ["a", "b"],
            "",
        ),
    ],
)
def test_forms_of_records(tmp_path: Path, record: Any, turns: list[str], system: str) -> None:
    expected = Conversation(tuple(Turn(text, 7) for text in turns), system)
    assert read_conversations(file_of(tmp_path, record, record), 7, TEXT) == [expected] * 2
    (tmp_path / "list.json").write_text(json.dumps([record]), encoding="utf-8")
    assert read_conversations(tmp_path / "list.json", 7, TEXT) == [expected]


def test_a_mooncake_trace_shares_prefixes_and_times(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        {"timestamp": 27_000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 27_500, "input_length": 600, "output_length": 9, "hash_ids": [1, 3]},
    )
    one, two = first(2, workload="replay", dataset=path, arrivals="trace")
    assert (one.arrival_s, two.arrival_s) == (0.0, 0.5)
    assert (words(one), words(two)) == ([700], [600])
    assert (one.turns[0].max_tokens, two.turns[0].max_tokens) == (5, 9)
    shared = len([a for a, b in zip(one.turns[0].text.split(), two.turns[0].text.split(), strict=False) if a == b])
    assert one.turns[0].text.split()[:512] == two.turns[0].text.split()[:512]
    assert shared < 600


def test_a_replay_begins_again_but_a_trace_ends(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    assert [c.turns[0].text for c in first(5, workload="replay", dataset=path)] == list("ababa")
    with pytest.raises(ConfigError, match="not every record has a timestamp"):
        first(1, workload="replay", dataset=path, arrivals="trace")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": 1}', "line 1: no conversation"),
        ('{"prompt": "a"}\n\n{"promt": "b"}', "line 3: no conversation"),
        ("[1]", "record 1: not an object: int"),
        ('{"prompt"', "line 1: not JSON"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "line 1: no conversation"),
        ('{"prompt": "a", "output_length": 0}', "line 1: no conversation"),
        ('{"input_length": 4, "timestamp": "x"}', "line 1: no conversation"),
        ("", "nothing to send"),
        ('{"messages": []}', "nothing to send"),
    ],
)
def test_bad_files_say_where(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "data"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        first(1, workload="replay", dataset=path)
    with pytest.raises(ConfigError, match="cannot read dataset"):
        first(1, workload="replay", dataset=tmp_path / "none")


def test_arrivals() -> None:
    def times(count: int, gap: Any, rate: Any) -> list[float]:
        return list(itertools.islice(arrival_times(gap, rate), count))

    assert times(4, fixed, lambda number: 2.0) == [0.0, 0.5, 1.0, 1.5]
    drawn = times(4001, poisson(3), lambda number: 5.0)
    assert drawn == times(4001, poisson(3), lambda number: 5.0)
    gaps = [b - a for a, b in itertools.pairwise(drawn)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(
        0.04, rel=0.15
    )  # of an exponential: mean ** 2
    rate = ramp(2.0, 6.0, 5)
    assert [rate(number) for number in range(6)] == [2.0, 3.0, 4.0, 5.0, 6.0, 6.0]
    assert ramp(2.0, 6.0, 1)(0) == 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1"),
        ({"request_rate": 0.0}, "request_rate must be a positive number"),
        ({"duration_s": float("nan")}, "duration_s must be a positive number"),
        ({"length_spread": 1.0}, "length_spread"),
        ({"workload": "replay"}, "replay needs a dataset"),
        ({"dataset": Path("x")}, "replay needs a dataset"),
        ({"arrivals": "trace"}, "need a trace"),
        ({"ramp_to_rate": 2.0}, "a ramp needs the rate"),
        ({"request_rate": 1.0, "concurrency": 2}, "concurrency belongs to a closed loop"),
        ({"request_rate": 1.0, "spawn_rate": 2.0}, "spawn_rate belongs to a closed loop"),
        ({"goodput": ("ttft",)}, "cannot read goodput limit: 'ttft'"),
        ({"goodput": ("itl:5",)}, "cannot read goodput limit"),
        ({"goodput": ("ttft:-1",)}, "cannot read goodput limit"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**options)


def test_goodput_limits_are_ms() -> None:
    assert BenchConfig(goodput=("ttft:500", "tpot:12.5")).limits_s() == {"ttft": 0.5, "tpot": 0.0125}
