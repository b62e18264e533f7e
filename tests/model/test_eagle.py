"""The eagle head: paged equals dense, unrolled training equals a chain of guesses, and its file says when it does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import WINDOW, random_head, random_sequences, random_weights, target
from safetensors.torch import load_file, save_file
from tiny_engine import open_tiny
from torch import Tensor
from torch.nn.functional import pad

from triblade.engine.attend import PagedAttend
from triblade.engine.batch import AttentionGroup, Batch
from triblade.errors import CheckpointError, ConfigError, TribladeError, UnsupportedError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.decoder import DenseAttend
from triblade.models.loader import OpenModel
from triblade.spec.align.acceptance import measure_acceptance
from triblade.spec.align.unroll import Sequences, unroll
from triblade.spec.eagle import EagleHead
from triblade.spec.eagle_files import load_eagle, save_eagle, target_facts

BLOCK = 4


@pytest.fixture(scope="module")
def model() -> OpenModel:
    return target()


@pytest.fixture(scope="module")
def head(model: OpenModel) -> EagleHead:
    return random_head(model)


@pytest.fixture
def folder(model: OpenModel, tmp_path: Path) -> Path:
    save_eagle(
        tmp_path / "head", target_facts(model), random_weights(model, bits=4), {"window": WINDOW, "inner_layers": [0]}
    )
    return tmp_path / "head"


def before(hidden: Tensor) -> Tensor:
    """The hidden state of the token before each."""
    return torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))


def paged_step(cache: KVCache, head: EagleHead, positions: range) -> PagedAttend:
    """One sequence in blocks 3, 5, 7, ..."""
    device = torch.device("cpu")
    blocks = [3 + 2 * i for i in range(-(-positions.stop // BLOCK))]
    slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
    flat = torch.tensor(list(positions), device=device)
    group = AttentionGroup(0, flat[None], torch.tensor([blocks]), positions.stop, None)
    batch = Batch(flat, flat, torch.tensor(slots), [group])
    return PagedAttend(batch, cache, head.config, head.backend)


@torch.inference_mode()
def test_a_head_over_paged_keys_in_chunks_equals_one_over_the_whole_text(model: OpenModel, head: EagleHead) -> None:
    text = random_sequences(model, 1, 19)
    ids, previous, positions = text.ids[0], before(text.hidden[0]), torch.arange(19)
    whole = head.forward(ids, previous, positions, DenseAttend(head.config, head.backend, 19))
    config = head.config
    layout = KVLayout(
        num_layers=1, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, block_size=BLOCK, codec="float32"
    )
    cache = KVCache(layout, 16, torch.float32)
    parts = []
    for span in (range(7), range(7, 12), range(12, 13), range(13, 19)):
        rows = slice(span.start, span.stop)
        parts.append(head.forward(ids[rows], previous[rows], positions[rows], paged_step(cache, head, span)))
    assert whole.shape == (19, config.hidden_size)
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
    logits = head.logits(whole)
    assert logits.shape == (19, 40)
    assert logits.dtype == torch.float32
    assert torch.equal(head.greedy(whole), head.weights.token_ids[logits.argmax(-1)])


@torch.inference_mode()
def test_an_entry_depends_on_no_later_token(model: OpenModel, head: EagleHead) -> None:
    """So that a slot of the cache stays valid for whatever continues the prefix."""
    text = random_sequences(model, 1, 12)
    changed = text.ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % model.config.vocab_size
    attend = DenseAttend(head.config, head.backend, 12)
    one, other = (head.forward(ids[0], before(text.hidden[0]), torch.arange(12), attend) for ids in (text.ids, changed))
    assert torch.equal(one[:8], other[:8])
    assert not torch.equal(one[8], other[8])


@pytest.mark.parametrize("window", [None, 6])
@torch.inference_mode()
def test_unrolled_steps_are_what_a_chain_of_guesses_computes(model: OpenModel, window: int | None) -> None:
    head, steps, begin = random_head(model, window), 3, 9
    text = random_sequences(model, 2, 14)
    unrolled = unroll(head, text, steps)
    for row in range(2):
        ids, hidden = text.ids[row], text.hidden[row]
        own: list[Tensor] = []
        for step in range(steps):  # everything again for each guess, from the plainest attention there is
            length = begin + 1 + step
            previous = before(hidden)[: begin + 1]
            previous = torch.cat((previous, *(pad(state, (0, hidden.shape[1] - state.shape[1])) for state in own)))
            attend = DenseAttend(head.config, head.backend, length)
            state = head.forward(ids[:length], previous, torch.arange(length), attend)
            own.append(state[-1:])
            torch.testing.assert_close(state[-1], unrolled[step][row, begin + step], atol=1e-5, rtol=1e-4)


def test_hidden_states_that_are_not_known_are_zero(model: OpenModel, head: EagleHead) -> None:
    text = random_sequences(model, 1, 8)
    known = torch.ones(1, 8, dtype=torch.bool)
    known[0, 5] = False
    zeroed = replace(text, hidden=text.hidden.clone())
    zeroed.hidden[0, 4] = 0
    assert torch.equal(unroll(head, text, 1, known)[0][0, 5], unroll(head, zeroed, 1)[0][0, 5])


class Oracle(EagleHead):
    """Guesses the text's next token in all places but some."""

    def __init__(self, head: EagleHead, text: Sequences, wrong: set[tuple[int, int]]) -> None:
        self.__dict__.update(head.__dict__)
        self._text, self._wrong, self._step = text, wrong, 0

    def greedy(self, hidden: Tensor) -> Tensor:
        """See EagleHead; `wrong` holds (position, step)."""
        guesses = self._text.ids.roll(-1, 1).clone()
        for position, step in self._wrong:
            if step == self._step:
                guesses[:, position] += 1
        self._step += 1
        return guesses.flatten()


def test_acceptance_is_that_of_decoding_the_text_in_steps(model: OpenModel, head: EagleHead) -> None:
    text = random_sequences(model, 1, 15)  # tokens 3 .. 14 are to be made: 12
    perfect = measure_acceptance(Oracle(head, text, set()), [text], 2)
    assert perfect.per_position == (1.0, 1.0)
    assert perfect.tokens_per_step == 12 / 4
    assert perfect.num_tokens == 12
    # Steps begin behind token 2: guesses for 3 and 4, both right, token 5 is the target's; behind 5: the second is wrong; behind 7:
    # the first is wrong; behind 8, 11: right; behind 14 there is nothing left.
    spoiled = measure_acceptance(Oracle(head, text, {(6, 1), (7, 0)}), [text], 2)
    assert spoiled.tokens_per_step == 12 / 5
    assert spoiled.per_position == (4 / 5, 3 / 4)


def test_a_head_comes_back_from_its_file(model: OpenModel, folder: Path) -> None:
    written = random_weights(model, bits=4)
    read = load_eagle(folder, model)
    for name, matrix in written.matrices().items():
        assert torch.equal(read.weights.matrices()[name].codes, matrix.codes)
        assert torch.equal(read.weights.matrices()[name].scales, matrix.scales)
    assert torch.equal(read.weights.token_ids, written.token_ids)
    assert all(torch.equal(read.weights.norms()[name], norm) for name, norm in written.norms().items())
    assert read.config.layers[0].window == WINDOW
    assert read.config.num_layers == 1


def test_a_head_of_version_1_reads_no_inner_layers(model: OpenModel, tmp_path: Path) -> None:
    written = random_weights(model, bits=4, num_inner=0)
    save_eagle(tmp_path, target_facts(model), written, {"window": WINDOW})
    _edit(tmp_path / "config.json", version=1)
    _without(tmp_path / "model.safetensors", "inner_norms")
    read = load_eagle(tmp_path, model)
    assert read.inner_layers == ()
    assert read.weights.inner_norms.shape == (0, model.config.hidden_size)
    assert torch.equal(read.weights.fc.codes, written.fc.codes)


def test_another_checkpoint_of_the_same_model_is_allowed_and_said(
    model: OpenModel, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = json.loads((folder / "config.json").read_text())
    facts["target"]["checkpoint"] = "another"
    rounded = torch.tensor(model.config.rms_norm_eps, dtype=torch.float32).item()  # as a GGUF file has it
    assert rounded != model.config.rms_norm_eps
    facts["target"]["rms_norm_eps"] = rounded
    (folder / "config.json").write_text(json.dumps(facts))
    load_eagle(folder, model)
    assert "another checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "difference"),
    [
        ({"hidden_size": 96, "intermediate_size": 96}, "hidden_size was 64, here it is 96"),
        ({"rope_theta": 500.0}, "rope was"),
        ({"vocabulary": 95}, "tokenizer was"),
    ],
)
def test_a_head_for_another_target_is_refused(folder: Path, overrides: dict[str, Any], difference: str) -> None:
    other = open_tiny("llama", **{"hidden_size": 64, "intermediate_size": 96, **overrides})
    with pytest.raises(ConfigError, match=difference):
        load_eagle(folder, other)


def _edit(path: Path, **changes: Any) -> None:
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, **changes}))


def _without(path: Path, name: str) -> None:
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def _with(path: Path, name: str, value: Tensor) -> None:
    save_file({**load_file(path), name: value}, path)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), CheckpointError, "cannot read"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12345"), CheckpointError, "cannot read"),
        (lambda f: _edit(f / "config.json", format="peft"), CheckpointError, "no eagle head"),
        (lambda f: _edit(f / "config.json", version=9), UnsupportedError, "version 9"),
        (lambda f: _edit(f / "config.json", bits=3), CheckpointError, "incomplete"),
        (lambda f: _edit(f / "config.json", draft_vocab_size=39), CheckpointError, "token_ids"),
        (lambda f: _edit(f / "config.json", inner_layers=0), CheckpointError, "inner_layers is no ascending list"),
        (lambda f: _edit(f / "config.json", inner_layers=[99]), CheckpointError, "inner_layers is no ascending list"),
        (lambda f: _without(f / "model.safetensors", "inner_norms"), CheckpointError, "inner_norms has shape"),
        (lambda f: _without(f / "model.safetensors", "fc.scales"), CheckpointError, "fc.scales"),
        (lambda f: _with(f / "model.safetensors", "input_norm", torch.ones(3)), CheckpointError, "input_norm"),
        (lambda f: _with(f / "model.safetensors", "down.scales", torch.ones(64, 5)), CheckpointError, "down has"),
    ],
)
def test_a_damaged_head_is_refused(
    model: OpenModel, folder: Path, damage: Any, error: type[TribladeError], message: str
) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        load_eagle(folder, model)


def test_a_folder_that_is_not_there(model: OpenModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_eagle(tmp_path / "nothing", model)
