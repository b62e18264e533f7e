"""Reads the tokenizer of a Hugging Face model folder into `TokenizerParts`.

`tokenizer.json` is taken as it is; `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
the chat template files add what it does not hold. Knows nothing of GGUF. No Python code of a model is run, no pickle
opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from triblade.errors import CheckpointError, UnsupportedError
from triblade.models.json_files import read_json_object_if_present
from triblade.models.pretokenizers import pre_tokenization
from triblade.models.tokenizer_parts import TokenizerParts, set_special_rule

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Classes whose vocab.json + merges.txt are byte-level BPE -> how they cut words (names of `pretokenizers`).
_BYTE_LEVEL_CLASSES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_SLOW_FILES = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json")
_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer_folder(folder: Path) -> TokenizerParts:
    """Read the tokenizer in `folder`.

    Raises:
        CheckpointError: there is no tokenizer, or a file of it is broken.
        UnsupportedError: only a slow tokenizer that cannot be converted is there.
    """
    settings = read_json_object_if_present(folder / "special_tokens_map.json")
    settings |= read_json_object_if_present(folder / "tokenizer_config.json")
    backend = _backend(folder, settings)
    try:
        return _parts(folder, backend, settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the configuration of the tokenizer in {folder} makes no sense: {said}") from error


def _parts(folder: Path, backend: Tokenizer, settings: Mapping[str, Any]) -> TokenizerParts:
    special = {name: text for name in _SPECIAL_NAMES if (text := _text(settings.get(name))) is not None}
    _add_missing_tokens(backend, _listed_tokens(folder, settings, special), settings, special)
    bos, eos = special.get("bos_token"), special.get("eos_token")
    if not (folder / "tokenizer.json").is_file():  # which has a rule of its own
        adds_bos, adds_eos = settings.get("add_bos_token", False), settings.get("add_eos_token", False)
        set_special_rule(backend, bos=bos if adds_bos else None, eos=eos if adds_eos else None)
    return TokenizerParts(
        backend=backend,
        special_tokens=special,
        bos_token_id=backend.token_to_id(bos) if bos is not None else None,
        eos_token_ids=_eos_token_ids(folder, backend, eos),
        chat_templates=_chat_templates(folder, settings),
    )


def _backend(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot read {path}: {error}", hint="it may be cut short; fetch it again") from error
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_vocabulary_and_merges(folder, settings)
    slow = [name for name in _SLOW_FILES if (folder / name).is_file()]
    if slow:
        raise _slow(folder, ", ".join(slow))
    raise CheckpointError(
        f"no tokenizer in {folder}: tokenizer.json is missing",
        hint="fetch the model again, or name another tokenizer: --tokenizer FOLDER",
    )


def _from_vocabulary_and_merges(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE from its two old files, for the classes whose word splitting is known."""
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in _BYTE_LEVEL_CLASSES:
        raise _slow(folder, f"vocab.json and merges.txt of class {kind or 'unknown'!r}")
    rules = pre_tokenization(_BYTE_LEVEL_CLASSES[kind])
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"cannot read vocab.json and merges.txt in {folder}: {error}") from error
    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = rules.pre_tokenizer(), decoders.ByteLevel()
    if (normalizer := rules.normalizer()) is not None:
        backend.normalizer = normalizer
    return backend


def _slow(folder: Path, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"the tokenizer in {folder} has no tokenizer.json, only: {found}",
        hint="load it once with transformers' AutoTokenizer and save it (save_pretrained): that writes tokenizer.json",
    )


def _listed_tokens(folder: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> list[AddedToken]:
    """The added tokens of tokenizer_config.json, or of the older added_tokens.json, in the order of their ids."""
    entries = settings.get("added_tokens_decoder")
    if entries is None:
        older = read_json_object_if_present(folder / "added_tokens.json")
        entries = {i: {"content": token, "special": token in special.values()} for token, i in older.items()}
    return [_added_token(entry) for _, entry in sorted(entries.items(), key=lambda item: int(item[0]))]


def _add_missing_tokens(
    backend: Tokenizer, listed: Sequence[AddedToken], settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Add the listed tokens that the tokenizer does not have yet, then the special ones."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in listed if token.content not in known])
    known.update(token.content for token in listed)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    texts = [*special.values(), *_texts(extra.values() if isinstance(extra, Mapping) else extra)]
    new = [AddedToken(text, normalized=False, special=True) for text in texts if text not in known]
    backend.add_special_tokens(new)


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in _ADDED_TOKEN_FLAGS if flag in entry})


def _texts(values: Iterable[Any]) -> list[str]:
    return [text for value in values if (text := _text(value)) is not None]


def _text(value: Any) -> str | None:
    """A special token is written as its text, or as an object that holds the text and flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _eos_token_ids(folder: Path, backend: Tokenizer, eos: str | None) -> frozenset[int]:
    given = read_json_object_if_present(folder / "generation_config.json").get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return frozenset(i for i in (*ids, backend.token_to_id(eos) if eos is not None else None) if isinstance(i, int))


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source. Template files win over tokenizer_config.json, which has one string or a list of named ones."""
    given = settings.get("chat_template")
    if isinstance(given, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in given}
    else:
        templates = {"default": given} if isinstance(given, str) else {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path)
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
