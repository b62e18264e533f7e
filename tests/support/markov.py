"""A model whose next token depends on the last one alone, drafters that know it more or less, and a test of what was sampled.

The hidden state of a token is its own place in the hidden vector: attention and feed-forward parts give nothing, and the head reads
a row of a table. So every token of every answer is a draw from a distribution that is known exactly, whatever came before, but for
penalties, which `distributions` follows from the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from drafters import model_drafter, speculate
from eagle_heads import WINDOW
from tiny import StateDictSource, TinyModel, tiny_model
from tiny_engine import EOS, DictionaryCheckpoint, tiny_llm, word_tokenizer
from torch import Tensor

from triblade.llm import LLM, Completion
from triblade.models.config import model_config
from triblade.models.loader import OpenModel
from triblade.ops.packing import QuantizedMatrix
from triblade.quant.rtn import round_to_nearest
from triblade.sampling_params import SamplingParams
from triblade.spec.eagle import NORMS, EagleWeights, head_config, matrix_shapes
from triblade.spec.eagle_files import save_eagle, target_facts
from triblade.spec.self_draft import rounded
from triblade.spec.suffix import SuffixDrafter

VOCABULARY = 12
HIDDEN = 64
PROMPT = [3, 5, 4, 7, 5, 4, 8, 3]
DRAFTERS = ("suffix", "draft", "drawn draft", "self", "eagle")
CELL = 10.0  # draws expected of a token at least, to be a cell of its own


def table(seed: int = 0) -> Tensor:
    """[V, V]: logits of the next token (columns) after each (rows); one of them is likelier than not."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    favourites = torch.randperm(VOCABULARY, generator=generator)
    logits[torch.arange(VOCABULARY), favourites] += 3.2
    return logits


def markov_model(logits: Tensor) -> OpenModel:
    """The model of a table [V, V]."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 1}
    tiny = tiny_model("llama", seed=1, max_position_embeddings=256, **sizes)
    tensors = dict(tiny.source.tensors)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] = torch.zeros_like(tensors[f"model.layers.0.{name}.weight"])
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["model.embed_tokens.weight"] = torch.eye(VOCABULARY, HIDDEN)
    tensors["lm_head.weight"] = _head_of(logits)
    config = model_config(tiny.hf_config)
    return OpenModel(
        name="markov",
        config=config,
        checkpoint=DictionaryCheckpoint(TinyModel(tiny.oracle, tiny.hf_config, StateDictSource(tensors))),
        tokenizer=word_tokenizer(VOCABULARY),
        dtype=torch.float32,
        eos_token_ids=frozenset({EOS}),
        generation_config={},
    )


def _head_of(logits: Tensor) -> Tensor:
    """[V, HIDDEN]: normalised, the state of a token is sqrt(HIDDEN) in its own place and 0 elsewhere."""
    head = torch.zeros(VOCABULARY, HIDDEN)
    head[:, :VOCABULARY] = logits.T / HIDDEN**0.5
    return head


def knowing_head(model: OpenModel, logits: Tensor) -> EagleWeights[QuantizedMatrix]:
    """An eagle head that reads the last token and says what the table says, as far as four bits can."""
    shapes = matrix_shapes(head_config(model.config, WINDOW), VOCABULARY, 0)
    matrices = {name: torch.zeros(shape) for name, shape in shapes.items()}
    matrices["fc"][:, :HIDDEN] = torch.eye(HIDDEN)
    matrices["head"] = _head_of(logits)
    packed = {name: round_to_nearest(matrix, 4, 32) for name, matrix in matrices.items()}
    return EagleWeights.from_parts(packed, {name: torch.ones(HIDDEN) for name in NORMS}, torch.arange(VOCABULARY))


def markov_llm(drafter: str, length: int, **options: Any) -> LLM:
    """An engine around the model of `table()`, with one of DRAFTERS asked for `length` tokens in every step."""
    model = markov_model(table())
    if drafter == "eagle":
        settings = {"draft_policy": "fixed", "num_speculative_tokens": length, "draft_confidence": 0.0}
        with TemporaryDirectory() as folder:
            weights = knowing_head(model, table())
            save_eagle(Path(folder), target_facts(model), weights, {"window": WINDOW, "inner_layers": []})
            return tiny_llm(model, drafter="eagle", draft_model=folder, **settings, **options)
    llm = tiny_llm(model, **options)
    if drafter == "suffix":
        return speculate(llm, SuffixDrafter(), length)
    if drafter == "self":
        return speculate(llm, model_drafter(llm, rounded(model, 4)), length)
    other = markov_model(
        table() + 0.7 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(9))
    )
    return speculate(llm, model_drafter(llm, other, 1.2 if drafter == "drawn draft" else 0.0), length)


@dataclass(frozen=True)
class Draws:
    """What was sampled, one row per token.

    Attributes:
        tokens: [N].
        last: [N], the token before each.
        positions: [N], of each token in its step: 0 is the first one verified (or drawn plainly).
        expected: [N, V] float64, exact probabilities.
    """

    tokens: Tensor
    last: Tensor
    positions: Tensor
    expected: Tensor

    @property
    def num_impossible(self) -> int:
        """Tokens that should never have been drawn."""
        return int((self.expected.gather(-1, self.tokens.unsqueeze(-1)) == 0).sum())

    def joined(self, other: Draws) -> Draws:
        """Both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Draws(*(torch.cat(pair) for pair in pairs))

    def chi_square(self) -> tuple[float, int, float]:
        """Statistic, degrees of freedom, and the probability of one as large, over groups of equal position and last token.

        In a group, what was counted less what was expected has the covariance C = sum of diag(p) - p p^T over its draws, also where
        p depends on earlier draws (a sum of martingale differences), so that z^T C^-1 z is chi-square. Where all p are equal it is
        Pearson's statistic. A group is chosen before its token is drawn: the position in a step says only that those before it
        were accepted.
        """
        statistic, freedom = 0.0, 0
        groups = self.positions * VOCABULARY + self.last
        for group in groups.unique().tolist():
            chosen = groups == group
            found = _group_statistic(self.tokens[chosen], self.expected[chosen])
            statistic, freedom = statistic + found[0], freedom + found[1]
        halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
        return statistic, freedom, float(torch.special.gammaincc(halves[0], halves[1]))


def _group_statistic(tokens: Tensor, expected: Tensor) -> tuple[float, int]:
    """Of tokens [n] with probabilities [n, V]: rare tokens share a cell, and one cell follows from the others."""
    order = expected.sum(0).argsort()
    cumulative = expected.sum(0)[order].cumsum(0)
    rare = order[cumulative < CELL]
    common = order[len(rare) :]
    if len(rare) and cumulative[len(rare) - 1] > 0:  # those together and the next one are enough for a cell
        rare, common = order[: len(rare) + 1], common[1:]
    if len(common) + bool(len(rare)) < 2:
        return 0.0, 0
    cells = torch.cat([expected[:, common], expected[:, rare].sum(-1, keepdim=True)], -1)  # [n, cells + 1]
    counts = torch.nn.functional.one_hot(tokens, VOCABULARY).double()
    counts = torch.cat([counts[:, common], counts[:, rare].sum(-1, keepdim=True)], -1)
    used = slice(0, len(common) - (0 if len(rare) and cells[:, -1].sum() > 0 else 1))
    p, z = cells[:, used], (counts - cells)[:, used].sum(0)
    covariance = p.sum(0).diag() - p.T @ p
    return float(z @ torch.linalg.solve(covariance, z)), len(z)


def draws_of(choices: Sequence[Completion], params: SamplingParams) -> Draws:
    """All tokens of some answers to PROMPT, with what each was drawn from."""
    answers = torch.tensor([choice.token_ids for choice in choices])  # [S, T]
    whole = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], -1)
    before = torch.nn.functional.one_hot(answers, VOCABULARY).cumsum(1) - torch.nn.functional.one_hot(
        answers, VOCABULARY
    )
    last = whole[:, len(PROMPT) - 1 : -1]  # [S, T]
    positions = torch.tensor([_positions(choice) for choice in choices])
    expected = distributions(last.flatten(), before.flatten(0, 1), params)
    return Draws(answers.flatten(), last.flatten(), positions.flatten(), expected)


def _positions(choice: Completion) -> list[int]:
    assert choice.speculation is not None
    return [position for _, accepted in choice.speculation.trace for position in range(accepted + 1)]


def distributions(last: Tensor, before: Tensor, params: SamplingParams) -> Tensor:
    """[N, V] float64: what each token is drawn from, by the definitions of the options.

    Args:
        last: [N], the token before.
        before: [N, V], how often each token stands in the output so far.
        params: penalties and filters.
    """
    logits = table().double()[last]
    seen = (before > 0) | (torch.bincount(torch.tensor(PROMPT), minlength=VOCABULARY) > 0)
    repeated = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    logits = torch.where(seen, repeated, logits)
    logits = logits - params.presence_penalty * (before > 0) - params.frequency_penalty * before
    p = (logits / params.temperature).softmax(-1)
    p = _at_least(p, params.min_p * p.amax(-1, keepdim=True))
    if params.top_k > 0:
        p = _at_least(p, p.topk(params.top_k).values[:, -1:])
    if params.top_p < 1.0:
        ordered = p.sort(dim=-1, descending=True).values
        is_needed = ordered.cumsum(-1) - ordered < params.top_p * ordered.sum(
            -1, keepdim=True
        )  # those before are not enough
        p = _at_least(p, ordered.gather(-1, is_needed.sum(-1, keepdim=True) - 1))
    return p / p.sum(-1, keepdim=True)


def _at_least(p: Tensor, threshold: Tensor) -> Tensor:
    """Equal tokens stay or go together; what differs by less than float32 can tell is equal."""
    return p.where(p >= threshold * (1.0 - 1e-6), 0.0)


def sampled(llm: LLM, params: SamplingParams, number: int, seed: int = 0) -> Draws:
    """At least `number` draws, in answers of `params.max_tokens` tokens, `params.n` at a time."""
    assert params.max_tokens is not None
    parts = list[Draws]()
    for piece in range(-(-number // (params.n * params.max_tokens))):
        (choices,) = llm.generate([PROMPT], replace(params, seed=seed + piece))
        parts.append(draws_of(choices, params))
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.joined(part)
    return joined
