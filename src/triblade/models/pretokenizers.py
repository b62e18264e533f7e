"""How byte-level BPE vocabularies cut text into words before merging, by the name a GGUF file gives it.

A vocabulary was trained on words cut in one way; another cut gives ids that the model has never seen. So a name that
is not in the table is an error and never a guess. Knows no file format.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from triblade.errors import UnsupportedError

# Contractions, words, groups of up to three digits, punctuation, line ends, spaces: the pattern of cl100k and Llama 3.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Words are cut where lower case turns to upper case: o200k, and Mistral's Tekken without the contractions.
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class PreTokenization:
    """How text becomes words, and two rules that the same families share."""

    pattern: str | None  # None: the pattern of GPT-2
    split_digits: bool = False  # before the pattern, every digit is a word of its own
    nfc: bool = False  # text is brought to Unicode NFC first
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # when the file does not say whether a BOS is added

    def pre_tokenizer(self) -> PreTokenizer:
        """A fresh pre-tokenizer; ends in the byte alphabet."""
        steps: list[PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if self.split_digits else []
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Normalizer | None:
        """A fresh normalizer, or None."""
        return normalizers.NFC() if self.nfc else None


_GPT2_RULES = PreTokenization(None)
_DIGITS_RULES = PreTokenization(None, split_digits=True)
_LLAMA3_RULES = PreTokenization(_LLAMA3, ignore_merges=True, add_bos=True)
_CL100K_RULES = PreTokenization(_LLAMA3)
_QWEN2_RULES = PreTokenization(_QWEN2, nfc=True)

# `tokenizer.ggml.pre` -> rules. Names and groups are llama.cpp's; rules are those of the models' own tokenizer.json.
_RULES = {
    "gpt-2": _GPT2_RULES,
    "phi-2": _GPT2_RULES,
    "smollm": _DIGITS_RULES,
    "starcoder": _DIGITS_RULES,
    "refact": _DIGITS_RULES,
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "llama-bpe": _LLAMA3_RULES,
    "falcon3": _LLAMA3_RULES,
    "dbrx": _CL100K_RULES,
    "smaug-bpe": _CL100K_RULES,
    "qwen2": _QWEN2_RULES,
    "megrez": _QWEN2_RULES,
    "deepseek-r1-qwen": PreTokenization(_QWEN2),
    "tekken": PreTokenization(_TEKKEN, ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenization(_O200K),
}


def pre_tokenization(name: str) -> PreTokenization:
    """The rules that go by `name`.

    Raises:
        UnsupportedError: the name is not known; lists the known ones.
    """
    if name not in _RULES:
        raise UnsupportedError(
            f"unknown pre-tokenizer in the GGUF file (tokenizer.ggml.pre): {name!r}",
            hint="give the original tokenizer's folder: --tokenizer FOLDER; known: " + ", ".join(sorted(_RULES)),
        )
    return _RULES[name]
