"""The process that compiles grammars: forms in, compiled grammars out, a JSON line each way.

Started by `triblade.structured.compiler`, which ends it when a form takes too long; the memory it may take is limited from
inside, and a form that asks for more ends it. A form that crashes it crashes nothing else. What compiles is rehearsed: a grammar
that is slow to follow, or that leads nowhere, is found out here and not in the engine. Ends with its standard input. Runs at low
priority.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import numpy as np
import psutil
import xgrammar

from triblade.structured.json_schema import ANY_OBJECT, MAX_WHITESPACE

REHEARSALS, REHEARSAL_TOKENS = 2, 64


def main() -> None:
    """Serve until the other end closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the library prints
    vocabulary = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    _limit(int(sys.argv[1]))
    _send(answers, {})
    for line in sys.stdin:
        _send(answers, _answer(compiler, json.loads(line)))


def _limit(memory_bytes: int) -> None:
    process = psutil.Process()
    if sys.platform != "win32":
        import resource

        most = process.memory_info().vms + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        process.nice(10)


def _answer(compiler: xgrammar.GrammarCompiler, form: dict[str, str]) -> dict[str, Any]:
    try:
        grammar = _compile(compiler, form["kind"], form["text"])
        for seed in range(REHEARSALS):
            _rehearse(grammar, random.Random(seed))
        return {"grammar": grammar.serialize_json()}
    except MemoryError:
        raise
    except Exception as error:  # of many types, from C++
        if "bad_alloc" in str(error):
            raise MemoryError from error
        return {"error": str(error).strip() or type(error).__name__}


def _compile(compiler: xgrammar.GrammarCompiler, kind: str, text: str) -> xgrammar.CompiledGrammar:
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "choice":
        return compiler.compile_grammar(_choice(json.loads(text)))
    if kind == "grammar":
        return compiler.compile_grammar(text)
    if kind == "structural_tag":
        return compiler.compile_structural_tag(text)
    schema = ANY_OBJECT if kind == "json_object" else text
    return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)


def _rehearse(grammar: xgrammar.CompiledGrammar, chance: random.Random) -> None:
    """Follow the grammar along random tokens."""
    matcher = xgrammar.GrammarMatcher(grammar)
    bits = xgrammar.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
    stops = set(grammar.tokenizer_info.stop_token_ids)
    for _ in range(REHEARSAL_TOKENS):
        matcher.fill_next_token_bitmask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8).reshape(-1), bitorder="little"))
        if not len(allowed):
            raise ValueError("error: it comes to a point where no token may follow")
        token = int(chance.choice(allowed))
        if token in stops:
            return
        matcher.accept_token(token)


def _choice(texts: list[str]) -> str:
    """One of these texts, in EBNF."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _send(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
