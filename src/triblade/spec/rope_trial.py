"""Which rope settings a model was trained with, asked of the model itself: its loss on a short text under each.

Weights do not say it and a configuration may be wrong, but a model read with foreign positions predicts worse from the first
sentences on. Knows no target: `draft_fit` decides what is tried.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from triblade.models.decoder import Decoder
from triblade.models.loader import OpenModel
from triblade.ops.select import select_backend
from triblade.quant.quality import perplexity
from triblade.spec.draft_fit import DraftFit, Ropes, compare

MAX_TOKENS = 512
# Plain prose whose later sentences come back to earlier ones, since distances are what the settings change.
TEXT = """The harbour town had two bakeries, and for as long as anyone could remember they had stood on opposite sides of the
same square. Mrs. Hallam ran the older one. She opened at five in the morning, sold rye bread, barley rolls and a dark
fruit cake, and closed when the shelves were empty. Mr. Dewitt ran the other. He opened at seven, sold white bread and
pastries, and closed at six in the evening whether the shelves were empty or not. In the winter of the great storm the
mill on the river lost its roof, and for three weeks there was no flour to be had. Mrs. Hallam still had eleven sacks
in her cellar, because her father had taught her to buy in autumn. Mr. Dewitt had none. On the fourth morning he
crossed the square, took off his hat, and asked her whether she would sell him two sacks of flour. She told him that
she would not sell them, but that he could have four, and that he could give them back when the mill had a roof again.
From that day on the two bakeries were never quite rivals. When the mill was repaired in the spring, Mr. Dewitt
returned four sacks of flour, and with them a box of pastries. Mrs. Hallam sent back a dark fruit cake. The children
of the town noticed that the rye bread was now also sold on the west side of the square, and that the older bakery had
begun to sell pastries on Sundays. Nobody ever announced it. When people asked Mrs. Hallam about it, she said that
flour keeps best when it is lent, and when they asked Mr. Dewitt, he took off his hat and said that she had taught him
to buy in autumn."""


def fit_of_draft(target: OpenModel, draft: OpenModel) -> DraftFit:
    """Compare a draft with its target; the weights of the draft are read only if its rope settings are in doubt.

    Returns:
        The report, with the configuration that the draft should run with. It may be a refusal: see `DraftFit.check`.
    """
    return compare(target, draft, loss)


def loss(model: OpenModel, ropes: Ropes) -> float:
    """Nats per token on the text under rope settings, computed on the CPU in the model's own type."""
    config = replace(model.config, ropes=ropes)
    length = min(MAX_TOKENS, config.context_length)
    ids = torch.tensor(model.tokenizer.encode(" ".join(TEXT.split()), add_special_tokens=False)[:length])
    backend, _ = select_backend("auto", deterministic=False, softcap=config.attention_softcap is not None)
    weights = model.load(length, backend, torch.device("cpu")).weights
    return math.log(perplexity(Decoder(config, weights, backend, length), ids, length).value)
