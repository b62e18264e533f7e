"""`triblade align`: from a model to a head that guesses what it says.

    open the target -> it writes conversations -> train on most, measure on some that are held out -> write the head, read it again

Everything before the last step is kept beside the output and continued with --resume. Knows the parts, none of their insides. What
int8 kernels round in activations is not modelled: hidden states are those of the dequantized weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from triblade import host
from triblade.config import AlignConfig
from triblade.console import progress
from triblade.errors import ConfigError
from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_backend, select_device
from triblade.spec.align.acceptance import Acceptance, measure_acceptance
from triblade.spec.align.batches import Batches, frequent_tokens
from triblade.spec.align.state import AlignState
from triblade.spec.align.text import USER_TOKENS, Conversation, TextSource, check_prompts, read_prompts
from triblade.spec.align.trainer import Recipe, Trainer, batch_order
from triblade.spec.align.writer import BatchWriter, Writer, lane_bytes
from triblade.spec.eagle_files import load_eagle, save_eagle, target_facts

log = logging.getLogger(__name__)

WRITING_SHARE = 0.4  # of the minutes
HELD_OUT = 48  # conversations; at most an eighth of all
LEAST_CONVERSATIONS = 8
MEASURED_GUESSES = 4
CHECKPOINTS = 20  # over a training
TIMED_STEPS = 4  # steps that say how many fit into the minutes
TEMPLATE_TOKENS = 64  # that a chat template may add to the user's
SEQUENCES = {"cuda": 8192, "cpu": 32}  # in lock step, where memory allows
LANES_SHARE = 0.8  # of the free memory, for those sequences
BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
KEEP_SHARE = 0.4  # of the free memory, for hidden states
# Fields of AlignConfig that change the text, and those that change what is made of it.
_TEXT_OPTIONS = ("answer_tokens", "seed", "dtype")
_TRAINING_OPTIONS = ("draft_vocab_size", "inner_layers", "bits", "window", "unrolled", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignReport:
    """What became of a run; times in seconds."""

    target: str
    output: str
    num_bytes: int
    conversations: int
    tokens: int
    steps: int
    tokens_per_step: float
    acceptance: tuple[float, ...]  # by position, on held-out text
    writing_s: float
    training_s: float

    def __str__(self) -> str:
        shares = " ".join(f"{share:.0%}" for share in self.acceptance)
        return (
            f"{self.output}: {self.num_bytes / 1e6:.1f} MB, {self.tokens_per_step:.2f} tokens per step on held-out text "
            f"(accepted by position: {shares}), from {self.conversations} conversations and {self.steps} training steps"
        )


def align(config: AlignConfig, make_writer: Callable[[], Writer] | None = None) -> AlignReport:
    """Train a head for a target.

    Args:
        config: what to make.
        make_writer: makes what writes the text, when it is needed; None: the model itself, dense.

    Raises:
        ConfigError, UnsupportedError, CheckpointError: something is in the way, or the folder holds another run.
    """
    session = Session(config)
    if not session.state.progress.text_complete:
        write_text(session, session.batch_writer() if make_writer is None else make_writer())
    conversations = session.state.conversations()
    trainer, acceptance = train(session, conversations)
    report = _report(session, conversations, acceptance)
    facts = {"window": config.window, "inner_layers": session.inner_layers, "training": _facts(session, report)}
    num_bytes = save_eagle(config.output, session.facts, trainer.quantized(), facts)
    load_eagle(config.output, session.model)
    session.state.remove()
    return AlignReport(**{**asdict(report), "num_bytes": num_bytes})


class Session:
    """One run: the target, where it computes, and the folder of its state."""

    def __init__(self, config: AlignConfig) -> None:
        output = config.output
        if output.exists() and not config.overwrite and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"the output exists: {output}", hint="name another one, or pass --overwrite")
        self.config = config
        self.device, reason = select_device(config.device)
        self.model: OpenModel = open_model(config.engine)
        log.info("aligning to %s on %s (%s)", self.model.name, self.device, reason)
        self.facts = target_facts(self.model)
        self.inner_layers = spread_layers(self.model.config.num_layers, config.inner_layers)
        room = self.model.config.context_length - config.answer_tokens
        if room < TEMPLATE_TOKENS:
            raise ConfigError(
                f"{config.answer_tokens} tokens of answer leave no room in a context of {self.model.config.context_length}",
                hint="lower --answer-tokens",
                param="answer_tokens",
            )
        self.most_prompt_tokens = min(USER_TOKENS + TEMPLATE_TOKENS, room)
        self.source = self._text_source()
        folder = output.with_name(f"{output.name}.unfinished")
        self.state = AlignState(folder, self._fingerprint(), resume=config.resume)

    @cached_property
    def decoder(self) -> Decoder:
        """The target with dense weights: bfloat16 on CUDA, float32 on a CPU unless the user says otherwise."""
        if self.device.type == "cpu":
            torch.set_num_threads(self.config.threads or host.usable_cores())
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if self.config.dtype != "auto":
            dtype = getattr(torch, self.config.dtype)
        backend, _ = select_backend(
            "auto", deterministic=False, softcap=self.model.config.attention_softcap is not None
        )
        model = OpenModel(**{name: getattr(self.model, name) for name in OpenModel.__slots__} | {"dtype": dtype})
        return model.load(self.most_prompt_tokens + self.config.answer_tokens, backend, self.device)

    def batch_writer(self) -> Writer:
        """The dense target as a writer."""
        at_once = SEQUENCES[self.device.type]
        if self.device.type == "cuda":
            width = self.most_prompt_tokens + self.config.answer_tokens
            lane = lane_bytes(self.model.config, width, self.decoder.dtype)
            at_once = max(1, min(at_once, int(torch.cuda.mem_get_info()[0] * LANES_SHARE) // lane))
        return BatchWriter(self.decoder, self.model.vocab_size, self.model.eos_token_ids, at_once)

    def batches(self, conversations: Sequence[Conversation]) -> Batches:
        """Training batches."""
        free = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else host.memory().available_bytes
        most_tokens = BATCH_TOKENS[self.device.type]
        return Batches(self.decoder, self.inner_layers, conversations, most_tokens, int(free * KEEP_SHARE))

    def _text_source(self) -> TextSource:
        config, tokenizer = self.config, self.model.tokenizer
        prompts = None
        if config.prompts is not None:
            prompts = check_prompts(read_prompts(config.prompts), tokenizer, self.most_prompt_tokens)
        most_tokens = (self.most_prompt_tokens, config.answer_tokens)
        return TextSource(tokenizer, self.model.eos_token_ids, prompts, most_tokens, config.seed)

    def _fingerprint(self) -> dict[str, dict[str, Any]]:
        options = {name: getattr(self.config, name) for name in _TEXT_OPTIONS}
        prompts = None if self.config.prompts is None else read_prompts(self.config.prompts)
        text = {**options, "prompts": prompts, "target": self.facts["checkpoint"], "device": self.device.type}
        return {"text": text, "training": {name: getattr(self.config, name) for name in _TRAINING_OPTIONS}}


def write_text(session: Session, write: Writer) -> None:
    """Write shards until there are the conversations asked for, or writing took its share of the minutes."""
    state, config = session.state, session.config
    written = len(state.conversations())
    with progress("writing conversations", config.conversations, unit="conversations") as advance:
        advance(written)
        while _is_wanted(session, written):
            began = time.monotonic()
            shard = session.source.shard(state.progress.shards, write.at_once, write)
            state.add_shard(shard, time.monotonic() - began)
            written += len(shard)
            advance(len(shard))
    if written < LEAST_CONVERSATIONS:
        raise ConfigError(
            f"{session.model.name} wrote {written} usable conversations, at least {LEAST_CONVERSATIONS} are needed",
            hint="give it prompts: --prompts FILE",
        )
    state.finish_text()


def train(session: Session, conversations: Sequence[Conversation]) -> tuple[Trainer, Acceptance]:
    """Train, or go on training; the trained parameters and what they are worth."""
    state, config = session.state, session.config
    held_out, rest = hold_out(conversations)
    batches, measured = session.batches(rest), session.batches(held_out)
    token_ids = torch.tensor(frequent_tokens(rest, config.draft_vocab_size, session.model.vocab_size))
    if state.progress.total_steps is None:
        state.plan_training(config.steps or _affordable(session, token_ids, batches))
    total = state.progress.total_steps
    assert total is not None
    trainer = _trainer(session, token_ids, batches, total)
    if (saved := state.load_training()) is not None:
        trainer.restore(saved)
    acceptance, began, every = None, time.monotonic(), -(-total // CHECKPOINTS)
    with progress("training", total, unit="steps") as advance:
        advance(state.progress.steps)
        for number, index in enumerate(batch_order(config.seed, len(batches), total)):
            if number < state.progress.steps:
                continue
            loss = trainer.step(number, batches[index])
            advance(1)
            if (number + 1) % every == 0 or number + 1 == total:
                acceptance = measure_acceptance(trainer.head(), measured, MEASURED_GUESSES)
                log.info("step %d of %d: loss %.3f, held out %s", number + 1, total, float(loss), acceptance)
                state.save_training(trainer.state(), number + 1, time.monotonic() - began)
                began = time.monotonic()
    return trainer, acceptance or measure_acceptance(trainer.head(), measured, MEASURED_GUESSES)


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Up to `count` layers at equal distances from each other and from both ends."""
    count = min(count, num_layers - 1)
    return tuple((place + 1) * num_layers // (count + 1) - 1 for place in range(count))


def hold_out(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Greedy conversations to measure on, and all others."""
    most = min(HELD_OUT, max(1, len(conversations) // 8))
    chosen = [i for i, c in enumerate(conversations) if c.is_greedy and len(c.token_ids) - c.first > 2][:most]
    if not chosen:
        raise ConfigError("the target's greedy answers are empty", hint="give it other prompts: --prompts FILE")
    apart = set(chosen)
    return [conversations[i] for i in chosen], [c for i, c in enumerate(conversations) if i not in apart]


def _is_wanted(session: Session, written: int) -> bool:
    """Whether to write one more shard."""
    done, config = session.state.progress, session.config
    if config.conversations is not None:
        return written < config.conversations and done.shards <= 2 * config.conversations  # some shards come out empty
    per_shard_s = done.writing_s / max(1, done.shards)
    return done.writing_s + per_shard_s / 2 < config.minutes * 60 * WRITING_SHARE


def _trainer(session: Session, token_ids: torch.Tensor, batches: Batches, total_steps: int) -> Trainer:
    config = session.config
    recipe = Recipe(
        bits=config.bits,
        window=config.window,
        inner_layers=session.inner_layers,
        unrolled=config.unrolled,
        total_steps=total_steps,
        learning_rate=config.learning_rate,
        seed=config.seed,
    )
    return Trainer(session.decoder, token_ids, recipe, batches[0], session.decoder.context_length)


def _affordable(session: Session, token_ids: torch.Tensor, batches: Batches) -> int:
    """Steps that the rest of the minutes pays for: a batch costs more when it is first seen."""
    some = min(TIMED_STEPS, len(batches))
    trainer = _trainer(session, token_ids, batches, total_steps=10 * some)
    trainer.step(0, batches[0])  # kernels are loaded, memory is taken
    rounds_s = []
    for _ in range(2):
        began = time.monotonic()
        for number in range(some):
            index = (number + 1) % len(batches)
            trainer.step(number + 9 * some, batches[index])  # late steps, which round, are the slowest
        rounds_s.append((time.monotonic() - began) / some)
    first_s, again_s = max(rounds_s), rounds_s[1]
    left_s = session.config.minutes * 60 - session.state.progress.writing_s
    left_s = max(left_s, session.config.minutes * 60 * (1 - WRITING_SHARE) / 2)
    epoch_s = first_s * len(batches)
    steps = left_s / first_s if left_s < epoch_s else len(batches) + (left_s - epoch_s) / again_s
    return max(1, int(steps))


def _report(session: Session, conversations: Sequence[Conversation], acceptance: Acceptance) -> AlignReport:
    done = session.state.progress
    return AlignReport(
        target=session.model.name,
        output=str(session.config.output),
        num_bytes=0,
        conversations=len(conversations),
        tokens=sum(len(c.token_ids) for c in conversations),
        steps=done.steps,
        tokens_per_step=acceptance.tokens_per_step,
        acceptance=acceptance.per_position,
        writing_s=done.writing_s,
        training_s=done.training_s,
    )


def _facts(session: Session, report: AlignReport) -> dict[str, Any]:
    """How the head was made, for its config.json."""
    options = {name: getattr(session.config, name) for name in (*_TEXT_OPTIONS, *_TRAINING_OPTIONS)}
    measured = {k: v for k, v in asdict(report).items() if k not in ("output", "num_bytes")}
    measured["target"] = session.model.name.rpartition("/")[2]  # a path says nothing elsewhere
    prompts = "the target's own" if session.config.prompts is None else session.config.prompts.name
    return {**measured, "options": options, "prompts": prompts, "device": session.device.type}
