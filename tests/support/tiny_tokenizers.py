"""Small tokenizers of the kinds that models ship, trained on a few lines: byte-level BPE and SentencePiece-style BPE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "Daenerys is the Khaleesi of the great grass sea, and the mother of dragons.",
    "The café serves naïve crème brûlée. Das Mädchen läuft über die Brücke. 12345 + 67 = 12412",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "你好，世界！こんにちは 안녕하세요 🙂👍🏽 \u0300e\u0301",
    "the the the quick brown fox don't they'll we've I'm HTTPServer camelCase",
] * 4
CORPUS = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n \n\t\t x",
    "Daenerys is the Khaleesi",
    "  leading and trailing  ",
    "Café déjà vu, naïve coöperation — „Anführung“",
    "1 22 333 4444 55555 3.14159 1,000,000 ½ Ⅷ ٣",
    "x  1  22   333",
    "你好，世界！日本語のテキスト。한국어 텍스트입니다",
    "🙂👍🏽👨\u200d👩\u200d👧\u200d👦🇩🇪 ok",
    "def f(x):\n    if x > 0:\n        return x**2\n\treturn None  # done\r\n",
    "don't they'll WE'VE I'm it's HTTPServerError camelCaseName snake_case",
    "a\u00a0b\u3000c\u2028d\u200be",
    "e\u0301 and \u00e9, \ufb01ne, \U0001d539",
    "<b>bold</b> <table><tr><td>1</td></tr></table>",
    "\x00\x01\x7f",
    "▁under▁score <0x41> <unk>",
    "word" * 200,
]


def byte_level(special: list[str] | None = None, pattern: str | None = None, vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it."""
    backend = Tokenizer(models.BPE())
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special or [], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def sentencepiece_parts() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a SentencePiece BPE model: controls, bytes, user-defined tokens, pieces by rank."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    merged = ["".join(pair) for pair in state["merges"]]
    characters = [token for token in state["vocab"] if len(token) == 1]
    controls, defined = ["<unk>", "<s>", "</s>", "<turn>"], ["\n", "\n\n", "  ", "   ", "<table>"]
    dropped = {*controls, *defined, "▁▁", "▁▁▁"}
    pieces = [token for token in dict.fromkeys([*merged, *characters]) if token not in dropped]
    tokens = [*controls, *(f"<0x{b:02X}>" for b in range(256)), *defined, *pieces]
    types = [2, 3, 3, 3, *[6] * 256, *[4] * len(defined), *[1] * len(pieces)]
    scores = [0.0] * 260 + [-1000.0] * len(defined) + [-float(i) for i in range(len(pieces))]
    return tokens, scores, types


def sentencepiece(*, prefix: bool) -> Tokenizer:
    """What transformers writes to tokenizer.json for such a model (Llama 2 with `prefix`, Gemma without)."""
    tokens, scores, types = sentencepiece_parts()
    spelled = ["▁" * len(token) if token.strip(" ") == "" else token for token in tokens]
    # Runs of spaces are merged first, shortest first; then the pieces by score.
    runs = [(-1.0 + i / 100, token) for i, token in enumerate(t for t in spelled if set(t) == {"▁"} and len(t) > 1)]
    pieces = [(-score, token) for token, score, kind in zip(spelled, scores, types, strict=True) if kind == 1]
    ranked = [token for _, token in sorted(runs + pieces)]
    splits = ((token[:i], token[i:]) for token in ranked for i in range(1, len(token)))
    merges = [(left, right) for left, right in splits if left in ranked and right in ranked]
    vocab = {token: i for i, token in enumerate(spelled)}
    backend = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens[:4]])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def save(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """A tokenizer folder: tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def gguf_entries(backend: Tokenizer, pre: str, special: list[str]) -> dict[str, Any]:
    """The metadata a converter writes for a byte-level tokenizer."""
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
    }
