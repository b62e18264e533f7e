"""How a user's turn may begin: an instruct model that is given a few first words asks about more things than it would by itself.

Half of the beginnings name a subject, a word drawn from the model's own vocabulary, so that no list of subjects need be kept and
none is missing in a language that the model knows. Knows no template and no model.
"""

from __future__ import annotations

import random
from typing import Protocol

OPENINGS = (
    *("Write a", "Explain", "What is the", "How do I", "Why do", "Describe", "Give me", "Create a", "List", "Compare"),
    *("Summarize", "Translate", "Imagine you are", "Design a", "Tell me", "Which", "Solve", "Suggest", "Rewrite"),
    *("Write a Python function that", "What are the main", "How can I", "Compose", "Is it", "Act as", "Calculate"),
    *(
        "Draft",
        "Provide",
        "Identify",
        "Outline",
        "Who was",
        "When",
        "Develop a",
        "Discuss",
        "I have",
        "I need",
        "Can you",
    ),
    *("Should I", "Fix", "Classify", "Where", "If", "You are a", "Given", "Find", "Name", "A", "The", "My"),
)
SUBJECT_OPENINGS = (
    *("What is", "Explain", "Describe", "How does", "Write a poem about", "Write a short story about", "Tell me about"),
    *(
        "What are the benefits of",
        "What is the difference between",
        "Give me three tips for",
        "Why is",
        "How do I make",
    ),
    *("Write an email about", "Write an essay on", "Compare", "List five", "What do you know about", "Plan a"),
    *("What are the advantages and disadvantages of", "Explain to a child what", "How can I improve my", "Define"),
    *("Write a dialogue about", "Create a recipe with", "What would happen if", "Give an example of", "Who invented"),
    *("Write a speech about", "What is the history of", "Write a function that returns", "Imagine a world without"),
    *("Give advice to someone who", "How many", "Summarize the main ideas of", "Invent a name for a", "Argue for"),
    *("What should I know before", "Write a review of a", "Draft a letter to a", "Is there a way to", "Teach me"),
)
LEAST_LETTERS = 4


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    def token(self, token_id: int) -> str:
        """Text of one token."""
        ...


def beginnings(vocabulary: Vocabulary, count: int, seed: int) -> list[str]:
    """First words of `count` turns: of four, one has none, one an opening, two an opening and a subject."""
    numbers, words = random.Random(seed), subjects(vocabulary)
    found = []
    for place in range(count):
        if place % 4 == 0:
            found.append("")
        elif place % 4 == 1 or not words:
            found.append(numbers.choice(OPENINGS))
        else:
            found.append(numbers.choice(SUBJECT_OPENINGS) + numbers.choice(words))
    return found


def subjects(vocabulary: Vocabulary) -> list[str]:
    """Tokens that are whole words in small letters, each with the space before it."""
    tokens = (vocabulary.token(number) for number in range(vocabulary.vocab_size))
    return [t for t in tokens if t[:1] == " " and len(t) > LEAST_LETTERS and t[1:].isalpha() and t.islower()]
