"""Rebuilds a tokenizer from the metadata of a GGUF file.

Two kinds exist under our architectures: byte-level BPE ("gpt2") and SentencePiece BPE with scores and byte fallback
("llama"). Ids must equal those of the model's own tokenizer.json; where the metadata does not say enough for that,
the file is refused, or a warning says what was assumed. Knows no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from triblade.errors import CheckpointError, UnsupportedError
from triblade.models.gguf_file import GGUFFile
from triblade.models.pretokenizers import PreTokenization, pre_tokenization
from triblade.models.tokenizer_parts import TokenizerParts, set_special_rule

_PREFIX = "tokenizer.ggml."
_NO_ID = 0xFFFFFFFF  # -1 in an unsigned type: there is no such token

_log = logging.getLogger(__name__)

_SPACE = "\u2581"  # SentencePiece writes a space so
_UNSTATED = ("", "default")
# Metadata key of a special token -> its name in chat templates.
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_END_KEYS = ("eos", "eot", "eom")
# Control tokens that end a turn. One counts when the file's own chat template writes it; files older than the key
# tokenizer.ggml.eot_token_id have no other way to say so.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MERGED_TYPES = (TokenType.NORMAL, TokenType.UNUSED)


@dataclass(frozen=True)
class _Vocabulary:
    """Token ids are positions in these lists."""

    tokens: Sequence[str]
    types: Sequence[int]

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer in the GGUF file at `path`.

    Raises:
        CheckpointError: the file is corrupt, or its tokenizer is incomplete.
        UnsupportedError: the kind of tokenizer, or the way it cuts words, is not known.
    """
    return tokenizer_from_metadata(GGUFFile(path).metadata)


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Like `read_gguf_tokenizer`, from metadata that was read before.

    Raises:
        CheckpointError: there is no tokenizer in it, or a damaged one.
        UnsupportedError: it is of a kind that is not known.
    """
    values = {k.removeprefix(_PREFIX): v for k, v in metadata.items() if k.startswith(_PREFIX)}
    kind = values.get("model")
    if kind is None:
        raise CheckpointError("the GGUF file holds no tokenizer", hint="give one: --tokenizer FOLDER")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"unknown tokenizer in the GGUF file: {kind!r}", hint="give another: --tokenizer FOLDER")
    vocabulary = _vocabulary(values)
    if kind == "gpt2":
        rules = _rules(values.get("pre"))
        backend, adds_bos = _byte_level(vocabulary, _list(values, "merges"), rules), rules.add_bos
    else:
        backend, adds_bos = _sentencepiece(vocabulary, values, metadata.get("general.architecture")), True
    return _parts(backend, vocabulary, {"add_bos_token": adds_bos, **values}, metadata.get("tokenizer.chat_template"))


def _vocabulary(values: Mapping[str, Any]) -> _Vocabulary:
    tokens = _list(values, "tokens")
    types = values.get("token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type: {len(types)} types for {len(tokens)} tokens")
    return _Vocabulary(tokens, types)


def _parts(backend: Tokenizer, vocabulary: _Vocabulary, values: Mapping[str, Any], template: Any) -> TokenizerParts:
    ids = {key: _token_id(vocabulary, values, key) for key in (*_SPECIAL, *_END_KEYS)}
    special = {name: vocabulary.tokens[i] for key, name in _SPECIAL.items() if (i := ids[key]) is not None}
    set_special_rule(
        backend,
        bos=special.get("bos_token") if values["add_bos_token"] else None,
        eos=special.get("eos_token") if values.get("add_eos_token") else None,
    )
    ends = {i for key in _END_KEYS if (i := ids[key]) is not None}
    if isinstance(template, str) and ids["eot"] is None:
        controls = vocabulary.of_type(TokenType.CONTROL)
        ends |= {vocabulary.tokens.index(token) for token in _TURN_ENDS if token in controls and token in template}
    return TokenizerParts(
        backend=backend,
        special_tokens=special,
        bos_token_id=ids["bos"],
        eos_token_ids=frozenset(ends),
        chat_templates={"default": template} if isinstance(template, str) else {},
    )


def _token_id(vocabulary: _Vocabulary, values: Mapping[str, Any], key: str) -> int | None:
    token_id = values.get(f"{key}_token_id")
    if token_id is None or token_id == _NO_ID:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(vocabulary.tokens):
        raise CheckpointError(f"tokenizer.ggml.{key}_token_id is not in the vocabulary, got: {token_id!r:.80}")
    return token_id


def _byte_level(vocabulary: _Vocabulary, merges: Sequence[str], rules: PreTokenization) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (entry.partition(" ") for entry in merges)]
    backend = Tokenizer(_bpe(vocabulary, pairs, ignore_merges=rules.ignore_merges))
    backend.pre_tokenizer, backend.decoder = rules.pre_tokenizer(), decoders.ByteLevel()
    if (normalizer := rules.normalizer()) is not None:
        backend.normalizer = normalizer
    _add_whole_tokens(backend, vocabulary)
    return backend


def _rules(pre: str | None) -> PreTokenization:
    if pre is None or pre in _UNSTATED:
        _log.warning(
            "the GGUF file does not say how its tokenizer cuts words (tokenizer.ggml.pre: %r); assuming GPT-2's way. "
            "If the model is not of that kind, its token ids and its answers are poor: convert it again, "
            "or give the original tokenizer with --tokenizer FOLDER",
            pre,
        )
        return pre_tokenization("gpt-2")
    return pre_tokenization(pre)


def _sentencepiece(vocabulary: _Vocabulary, values: Mapping[str, Any], architecture: Any) -> Tokenizer:
    """SentencePiece BPE: the pair whose union has the best score is merged first, unknown characters become bytes."""
    scores = _list(values, "scores")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"tokenizer.ggml.scores: {len(scores)} scores for {len(vocabulary.tokens)} tokens")
    unknown = _token_id(vocabulary, values, "unknown")
    vocabulary, scores = _merge_spaces(vocabulary, scores)
    normal = zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
    merges = merges_from_scores({token: score for token, kind, score in normal if kind in _MERGED_TYPES})
    unknown_token = None if unknown is None else vocabulary.tokens[unknown]
    backend = Tokenizer(_bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown_token))
    _set_spaces(backend, add_prefix=bool(values.get("add_space_prefix", True)), every=architecture == "phi3")
    _add_whole_tokens(backend, vocabulary)
    return backend


def _merge_spaces(vocabulary: _Vocabulary, scores: Sequence[float]) -> tuple[_Vocabulary, list[float]]:
    """Turn user-defined runs of spaces into ordinary tokens that merge before all others.

    SentencePiece takes the longest such token first. The tokenizer.json files made from it merge spaces like other
    pieces, which differs beyond the longest run (Gemma: 32 spaces become 16 + 16, not 31 + 1). Ids here are those of
    tokenizer.json.
    """
    tokens, types, new_scores = list(vocabulary.tokens), list(vocabulary.types), list(scores)
    best = max(scores)
    for i, token in enumerate(tokens):
        if types[i] == TokenType.USER_DEFINED and token and not token.strip(" "):
            tokens[i], types[i] = _SPACE * len(token), TokenType.NORMAL
            new_scores[i] = best + 1 / len(token)
    return _Vocabulary(tokens, types), new_scores


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merge list of a vocabulary that ranks tokens, not pairs: every way to build a token from two, best first."""
    merges = []
    for token in sorted(scores, key=scores.__getitem__, reverse=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


def _set_spaces(backend: Tokenizer, *, add_prefix: bool, every: bool) -> None:
    """Spell spaces. `add_prefix`: put one before the text, or before `every` piece of it between special tokens."""
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", _SPACE)
    if not add_prefix:
        backend.normalizer = replace
    elif every:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    if add_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)


def _add_whole_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are matched whole in text, the longest one at each place: control tokens, then user-defined ones."""
    controls = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    defined = vocabulary.of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary.ids(), merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the GGUF file's tokenizer is not consistent: {error}") from error


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    value = values.get(key)
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"the GGUF file's tokenizer is incomplete: {_PREFIX}{key} is missing")
    return value
