"""Training a head: the text it is trained on, the same bits after a kill, and more right guesses as it learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import open_tiny, plain_decoder, plain_greedy, tiny_llm
from tiny_folders import tiny_folder

from triblade import cli
from triblade.config import AlignConfig, EngineConfig, from_mapping
from triblade.errors import ConfigError
from triblade.models.decoder import DenseAttend
from triblade.models.loader import open_model
from triblade.spec.align import run
from triblade.spec.align.batches import Batches, frequent_tokens, target_hidden
from triblade.spec.align.loss import cross_entropy
from triblade.spec.align.openings import OPENINGS, SUBJECT_OPENINGS, beginnings, subjects
from triblade.spec.align.run import align, spread_layers
from triblade.spec.align.state import AlignState
from triblade.spec.align.text import (
    Conversation,
    TextSource,
    check_prompts,
    read_prompts,
    shard_seed,
    user_beginning,
    without_loop,
)
from triblade.spec.align.trainer import Trainer, batch_order
from triblade.spec.align.writer import BatchWriter
from triblade.spec.eagle_files import load_eagle
from triblade.writing import EngineWriter

TEMPLATE = "{% for m in messages %}w5 w6 {{ m['content'] }} w2 {% endfor %}{% if add_generation_prompt %}w7 {% endif %}"
PROMPTS = [[3, 4, 5], [9], [7, 7, 8, 9, 10, 11], [20, 21]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_folder(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=256)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture
def config(model: Path, tmp_path: Path) -> AlignConfig:
    return AlignConfig(
        target=str(model),
        output=tmp_path / "head",
        conversations=40,
        steps=10,
        answer_tokens=24,
        draft_vocab_size=48,
        device="cpu",
        threads=1,
    )


# Writing


def test_the_batch_writer_writes_what_the_model_would() -> None:
    model = open_tiny()
    decoder = plain_decoder(model)
    wanted = [plain_greedy(decoder, prompt, 40) for prompt in PROMPTS]
    cut = [answer[: answer.index(2) + 1] if 2 in answer else answer for answer in wanted]
    for at_once in (4, 3, 1):
        write = BatchWriter(decoder, model.vocab_size, model.eos_token_ids, at_once)
        assert write(PROMPTS, 40, [0.0] * 4, seed=0) == cut


def test_sampled_text_follows_from_its_seed_and_finished_sequences_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triblade.spec.align.writer.LOOK_EVERY", 2)
    model = open_tiny()
    write = BatchWriter(plain_decoder(model), model.vocab_size, frozenset(range(30)), at_once=16)
    prompts, warm = PROMPTS * 4, [1.0] * 16
    first = write(prompts, 30, warm, seed=1)
    assert first == write(prompts, 30, warm, seed=1) != write(prompts, 30, warm, seed=2)
    assert all(1 <= len(answer) <= 30 for answer in first)
    assert all(token >= 30 for answer in first for token in answer[:-1])  # an end token ends
    assert len({len(answer) for answer in first}) > 3


def test_a_drawn_token_has_the_probability_of_its_temperature() -> None:
    from triblade.spec.align.writer import _draw

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(40_000, 1)
    for temperature in (0.5, 1.0):
        drawn = _draw(logits, torch.full((40_000,), temperature), torch.Generator().manual_seed(0))
        shares = drawn.bincount(minlength=4) / 40_000
        torch.testing.assert_close(shares, (logits[0] / temperature).softmax(-1), atol=0.01, rtol=0)


def test_the_engine_writes_the_same_greedy_text_as_the_batch_writer() -> None:
    model = open_tiny()
    engine = EngineWriter(tiny_llm(model))
    batch = BatchWriter(plain_decoder(model), model.vocab_size, model.eos_token_ids, 4)
    assert engine(PROMPTS, 30, [0.0] * 4, 3) == batch(PROMPTS, 30, [0.0] * 4, 3)
    warm = engine(PROMPTS, 30, [1.0] * 4, 3)
    assert warm == engine(PROMPTS, 30, [1.0] * 4, 3) != engine(PROMPTS, 30, [1.0] * 4, 4)


# Text


class Words:
    """A vocabulary without a tokenizer."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self.vocab_size = len(tokens)

    def token(self, token_id: int) -> str:
        """See `Vocabulary`."""
        return self._tokens[token_id]


def test_turns_begin_with_nothing_an_opening_or_an_opening_and_a_word_of_the_vocabulary(model: Path) -> None:
    tokenizer = Words(["<unk>", " the", " lake", " Lake", "lake", " x1", " meadow", " of", " nautilus"])
    assert subjects(tokenizer) == [" lake", " meadow", " nautilus"]
    found = beginnings(tokenizer, 400, seed=1)
    assert found == beginnings(tokenizer, 400, seed=1) != beginnings(tokenizer, 400, seed=2)
    assert set(found[0::4]) == {""}
    assert set(found[1::4]) <= {*OPENINGS}
    assert all(turn.rpartition(" ")[0] in SUBJECT_OPENINGS for turn in found[2::4] + found[3::4])
    assert {turn.rpartition(" ")[2] for turn in found[2::4]} == {"lake", "meadow", "nautilus"}


class Scripted:
    """A writer that says what it is told, and remembers what it was asked."""

    at_once = 4

    def __init__(self, answers: dict[int, list[list[int]]]) -> None:
        self.answers = answers
        self.calls: list[tuple[list[list[int]], list[float], int]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], seed: int
    ) -> list[list[int]]:
        self.calls.append(([list(p) for p in prompts], list(temperatures), seed))
        return self.answers[len(self.calls)][: len(prompts)]


def test_a_shard_from_nothing_holds_usable_prompts_once(model: Path) -> None:
    tokenizer = open_model(EngineConfig(model=str(model))).tokenizer
    first_words = beginnings(tokenizer, 5, shard_seed(3, 0))
    turns = [[10, 11, 2], [10, 12], [10, 12], [2], [10, 11, 2]]
    write = Scripted({1: turns, 2: [[30, 31, 2], [32]]})
    found = TextSource(tokenizer, frozenset({2}), None, (32, 16), seed=3).shard(0, 5, write)
    assert write.calls[0][0] == [user_beginning(tokenizer, words) for words in first_words]
    assert write.calls[0][0][0] == write.calls[0][0][4] == [5, 6]  # nothing; the model says the same after it
    prompts = [[5, 6, 10, 11, 2, 7], tokenizer.encode_chat([{"role": "user", "content": first_words[3]}])]
    assert write.calls[1][0] == prompts  # two turns have no end
    assert [c.token_ids for c in found] == [[*prompts[0], 30, 31, 2], [*prompts[1], 32]]
    assert [c.first for c in found] == [len(prompt) for prompt in write.calls[1][0]]
    assert found[0].is_greedy
    assert write.calls[0][2] != write.calls[1][2]


def test_prompts_that_are_given_are_taken_in_turn(model: Path) -> None:
    tokenizer = open_model(EngineConfig(model=str(model))).tokenizer
    prompts = [[{"role": "user", "content": f"w{i}"}] for i in (20, 21, 22)]
    write = Scripted({1: [[30]] * 4, 2: [[30]] * 4})
    source = TextSource(tokenizer, frozenset({2}), prompts, (32, 16), seed=0)
    asked = [[c.token_ids[2] for c in source.shard(number, 4, write)] for number in (0, 1)]
    assert asked == [[20, 21, 22, 20], [21, 22, 20, 21]]


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (list(range(100)), 100),
        ([*range(20), *[7] * 200], 20 - 0 + 1 + 48),  # one 7 is text, 48 are repetition
        ([*range(50), *list(range(60, 90)) * 6], 50 + 30 + 60),
        ([*[1, 2] * 60, *range(10, 90)], 200),  # it left the loop
        ([], 0),
    ],
)
def test_text_is_cut_where_it_only_repeats_itself(ids: list[int], kept: int) -> None:
    assert without_loop(ids) == ids[:kept]


def test_prompts_are_read_from_lines_and_json_lines(tmp_path: Path) -> None:
    lines, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\n two \n")
    assert [prompt[0]["content"] for prompt in read_prompts(lines)] == ["one", "two"]
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records.write_text("\n".join(map(json.dumps, ["plain", {"prompt": "asked"}, {"messages": conversation}])))
    assert [prompt[-1]["content"] for prompt in read_prompts(records)] == ["plain", "asked", "a"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", " \n", "no prompt"),
        ("p.jsonl", '"a"\n{', "line 2 is not JSON"),
        ("p.jsonl", "7", "line 1 is not a prompt"),
        ("p.jsonl", '{"messages": [{"role": "system", "content": "x"}]}', "no message of a user"),
    ],
)
def test_a_file_of_no_prompts_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / name)


def test_prompts_that_are_too_long_are_left_out_or_refused(model: Path) -> None:
    tokenizer = open_model(EngineConfig(model=str(model))).tokenizer
    short, long = ([{"role": "user", "content": "w9 " * n}] for n in (3, 50))
    assert check_prompts([short, long], tokenizer, 20) == [short]
    with pytest.raises(ConfigError, match="more than 20 tokens"):
        check_prompts([long], tokenizer, 20)


# Batches


def test_batches_hold_every_usable_conversation_and_the_targets_hidden_states() -> None:
    decoder = plain_decoder(open_tiny(max_position_embeddings=128))
    conversations = [Conversation([3 + i % 50] * n, 2, True) for i, n in enumerate((9, 30, 2, 12, 31, 8, 3))]
    for keep_bytes in (0, 1 << 20):
        batches = Batches(decoder, (0,), conversations, 64, keep_bytes)
        assert len(batches) == 2  # 31 and 30; 12, 9, 8; those with an answer of one token or none are left out
        again = [batches[i] for i in range(2)]
        for index in range(2):
            batch = batches[index]
            assert batch.ids.shape[0] * batch.ids.shape[1] <= 64
            assert torch.equal(batch.hidden, again[index].hidden)
            for row, length in enumerate(batch.lengths.tolist()):
                alone = target_hidden(decoder, batch.ids[row : row + 1, :length], (0,)).bfloat16().float()
                torch.testing.assert_close(batch.hidden[row, :length], alone[0], atol=0.02, rtol=0.02)
            assert batch.counted(1)[0].tolist() == [3 <= p < batch.lengths[0] - 1 for p in range(batch.ids.shape[1])]


def test_the_draft_vocabulary_is_what_answers_hold_most() -> None:
    conversations = [Conversation([1, 1, 1, 5, 6, 6], 3, True), Conversation([5, 9, 6], 1, False)]
    assert frequent_tokens(conversations, 2, 20) == [5, 6]
    assert frequent_tokens(conversations, 5, 20) == [0, 1, 5, 6, 9]
    assert frequent_tokens(conversations, 99, 10) == list(range(10))


def test_inner_layers_are_spread_over_the_target() -> None:
    assert [spread_layers(30, count) for count in (0, 1, 2, 3)] == [(), (14,), (9, 19), (6, 14, 21)]
    assert spread_layers(2, 5) == (0,)
    assert spread_layers(1, 2) == ()


def test_states_of_inner_layers_stand_behind_the_final_ones() -> None:
    decoder = plain_decoder(open_tiny())
    ids, seen = torch.tensor([[3, 4, 5, 6]]), dict[int, torch.Tensor]()
    attend = DenseAttend(decoder.config, decoder.backend, 4)
    final = decoder.forward(ids[0], torch.arange(4), attend, seen.__setitem__)
    assert sorted(seen) == list(range(decoder.config.num_layers))
    found = target_hidden(decoder, ids, (0,))[0]
    torch.testing.assert_close(found, torch.cat((final, seen[0]), -1), atol=1e-5, rtol=1e-5)
    last = decoder.config.num_layers - 1
    norm = decoder.backend.rms_norm(seen[last], decoder.weights.final_norm, decoder.config.rms_norm_eps)
    torch.testing.assert_close(norm, final)


def test_the_loss_and_its_gradient_are_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, requires_grad=True)
    wanted = torch.randn(5, 7, generator=generator).softmax(-1)
    spelled = -(wanted * logits.log_softmax(-1)).sum()
    found = cross_entropy(logits, wanted)
    torch.testing.assert_close(found, spelled)
    (expected,) = torch.autograd.grad(3 * spelled, logits)
    (gradient,) = torch.autograd.grad(3 * found, logits)
    torch.testing.assert_close(gradient, expected)


def test_every_epoch_takes_all_batches_in_another_order() -> None:
    order = list(batch_order(0, 5, 12))
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert len(order) == 12
    assert order[:5] != order[5:10]
    assert order == list(batch_order(0, 5, 12))


# The whole


def test_acceptance_grows_while_a_head_learns(config: AlignConfig, caplog: pytest.LogCaptureFixture) -> None:
    """The target's layers do nothing, so that its next token follows from the last one."""
    weights = Path(config.target) / "model.safetensors"
    original = load_file(weights)
    idle = {n: t * 0 if "o_proj" in n or "down_proj" in n else t.clone() for n, t in original.items()}
    try:
        save_file(idle, weights)
        with caplog.at_level("INFO", "triblade"):
            report = align(replace(config, steps=40))
    finally:
        save_file({name: tensor.clone() for name, tensor in original.items()}, weights)
    seen = [float(r.message.split("held out ")[1].split()[0]) for r in caplog.records if "held out" in r.message]
    assert len(seen) == run.CHECKPOINTS
    assert seen[-1] > seen[0] + 0.3
    assert report.tokens_per_step == pytest.approx(seen[-1], abs=0.01)
    facts = json.loads((config.output / "config.json").read_text())
    assert facts["training"]["steps"] == 40
    assert facts["window"] == config.window
    head = load_eagle(config.output, open_model(config.engine))
    assert len(head.weights.token_ids) == 48
    assert not config.output.with_name("head.unfinished").exists()


class Killed(Exception):
    """In place of a signal."""


def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    config: AlignConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    align(config)
    interrupted = replace(config, output=tmp_path / "again")

    def die(*_: object, **__: object) -> None:
        raise Killed

    step = Trainer.step
    with monkeypatch.context() as patch:  # while it writes
        patch.setattr(AlignState, "finish_text", die)
        with pytest.raises(Killed):
            align(interrupted)
    with pytest.raises(ConfigError, match="unfinished"):
        align(interrupted)
    with monkeypatch.context() as patch:  # in the middle of the training, off a checkpoint
        patch.setattr(run, "CHECKPOINTS", 3)
        patch.setattr(Trainer, "step", lambda self, number, batch: die() if number == 6 else step(self, number, batch))
        with pytest.raises(Killed):
            align(replace(interrupted, resume=True))
    with pytest.raises(ConfigError, match="learning_rate was"):
        align(replace(interrupted, resume=True, learning_rate=1.0))
    align(replace(interrupted, resume=True))
    for name in ("model.safetensors",):
        assert (config.output / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_text_is_kept_when_only_the_training_changes(config: AlignConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(AlignState, "plan_training", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            align(config)
    with pytest.raises(ConfigError, match="answer_tokens was 24, now 25"):
        align(replace(config, resume=True, answer_tokens=25))
    monkeypatch.setattr(run, "write_text", lambda *_: pytest.fail("it wrote again"))
    assert align(replace(config, resume=True, draft_vocab_size=16)).steps == 10


def test_the_same_options_make_the_same_head(config: AlignConfig, tmp_path: Path) -> None:
    other = replace(config, output=tmp_path / "other", seed=1)
    heads = [align(config), align(replace(config, output=tmp_path / "same")), align(other)]
    weights = [(Path(report.output) / "model.safetensors").read_bytes() for report in heads]
    assert weights[0] == weights[1] != weights[2]


def test_minutes_decide_where_nothing_else_does(config: AlignConfig) -> None:
    report = align(replace(config, conversations=None, steps=None, minutes=0.05))
    assert report.conversations >= run.LEAST_CONVERSATIONS
    assert report.steps >= 1


def test_an_output_that_is_there_is_kept(config: AlignConfig) -> None:
    config.output.mkdir()
    (config.output / "notes").touch()
    with pytest.raises(ConfigError, match="the output exists"):
        align(config)
    assert align(replace(config, overwrite=True, steps=1)).steps == 1


def test_answers_must_leave_room_for_prompts(config: AlignConfig) -> None:
    with pytest.raises(ConfigError, match="no room in a context of 256"):
        align(replace(config, answer_tokens=200))


@pytest.mark.parametrize("values", [{"steps": 0}, {"conversations": 3}, {"minutes": 0}, {"learning_rate": -1.0}])
def test_impossible_options_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        from_mapping(AlignConfig, {"target": "x", "output": Path("y"), **values})


def test_the_command_trains_a_head(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triblade.console.setup_logging", lambda level: None)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"w{i} w{i + 1}" for i in range(20, 40)))
    options = ["--conversations", "24", "--steps", "2", "--answer-tokens", "16", "--draft-vocab-size", "32"]
    options += ["--prompts", str(prompts), "--device", "cpu", "--threads", "1"]
    assert cli.main(["align", str(model), "--output", str(tmp_path / "head"), "--json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 2
    assert report["num_bytes"] > 0
    load_eagle(tmp_path / "head", open_model(EngineConfig(model=str(model))))
