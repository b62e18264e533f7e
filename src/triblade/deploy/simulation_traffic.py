"""Requests to simulate: when they come, how long they are, what earlier ones they begin like. Pure; equal seeds, equal traffic.

A conversation has several turns; each prompt is the whole conversation so far, so its beginning was computed for the turn before.
All conversations begin with the same system prompt. Tokens are counted, never named.
"""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass, field

from triblade.deploy.replicas_prompt import BLOCK_BYTES, BYTES_PER_TOKEN, Prompt

BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
SHARED = -1  # the conversation that a system prompt belongs to
LONG_AGO = 3  # times the mean length of a conversation


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """One request, and what became of it.

    Attributes:
        conversation: whose turn it is.
        shared_tokens: of the prompt that all conversations begin with.
        known_tokens: of the prompt that the turn before had, its answer included; at least the shared ones.
    """

    arrival_s: float
    conversation: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    known_tokens: int = 0
    cached_tokens: int = 0
    first_s: float = field(default=0.0)
    end_s: float = field(default=0.0)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Per further token."""
        return (self.end_s - self.first_s) / max(1, self.output_tokens - 1)

    def prompt(self) -> Prompt:
        """As a router sees it: blocks named by the conversation and their place in it."""
        shared = self.shared_tokens // BLOCK_TOKENS
        owners = (SHARED if at < shared else self.conversation for at in range(self.prompt_tokens // BLOCK_TOKENS))
        blocks = tuple(f"{owner}:{at}".encode() for at, owner in enumerate(owners))
        return Prompt(blocks, self.prompt_tokens * BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked for.

    Attributes:
        request_rate: requests per second, turns of all conversations together.
        prompt_tokens: mean that a turn adds to its prompt; the first one's own prompt.
        output_tokens: mean of an answer.
        shared_tokens: of a system prompt.
        turns: of a conversation.
        think_s: mean from an answer's expected end to the next turn.
        spread: lengths are uniform within this share of their mean.
    """

    request_rate: float
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    turns: int = 1
    think_s: float = 5.0
    spread: float = 0.5

    def requests(self, count: int, seed: int) -> list[SimulatedRequest]:
        """So many requests in the order of their arrival, from 0 on.

        Conversations begin as a Poisson process, long before 0, so that first and later turns come as they will for ever.
        """
        chance = random.Random(seed)
        found: list[SimulatedRequest] = []
        begin_s, conversation = -LONG_AGO * (self.turns - 1) * self.think_s, 0
        while len(found) < count or begin_s < found[count - 1].arrival_s:
            begin_s += chance.expovariate(self.request_rate / self.turns)
            turns = self._conversation(chance, conversation, begin_s)
            for one in turns:
                if one.arrival_s >= 0:
                    insort(found, one, key=_arrival)
            conversation += 1
        return found[:count]

    def _conversation(self, chance: random.Random, number: int, begin_s: float) -> list[SimulatedRequest]:
        found: list[SimulatedRequest] = []
        arrival_s, known, prompt = begin_s, self.shared_tokens, self.shared_tokens
        for _ in range(self.turns):
            prompt += self._length(chance, self.prompt_tokens)
            output = self._length(chance, self.output_tokens)
            found.append(SimulatedRequest(arrival_s, number, prompt, output, self.shared_tokens, known))
            prompt += output
            known = prompt
            arrival_s += chance.expovariate(1 / self.think_s)
        return found

    def _length(self, chance: random.Random, mean: int) -> int:
        return max(1, round(mean * chance.uniform(1 - self.spread, 1 + self.spread)))


def _arrival(request: SimulatedRequest) -> float:
    return request.arrival_s
