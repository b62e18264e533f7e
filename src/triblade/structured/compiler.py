"""From the form a request asks for to constraints, compiled once per form, in processes that can be ended.

Knows no engine. Nothing of xgrammar is imported before the first form is asked for. Life of a form: cached -> done; asked for by
another thread -> wait for it; else ask a compiling process, for at most `limit_s`. Forms that failed are remembered, too.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from triblade.errors import RequestError, UnsupportedError
from triblade.models.tokenizer import Tokenizer
from triblade.sampling_params import StructuredOutputs
from triblade.spec.constraint import TokenConstraint
from triblade.structured.json_schema import narrowed
from triblade.structured.patience import SLOW, Abandoned, Worker
from triblade.structured.processes import CompilePool, CompileProcess

if TYPE_CHECKING:
    import xgrammar

    from triblade.structured.matcher import Vocabulary

Found: TypeAlias = "xgrammar.CompiledGrammar | RequestError"

PARAM = "structured_outputs"
COMPILE_LIMIT_S = 5.0
MAX_TEXT = 2**18  # characters of a form
CACHE_BYTES = 2**28
CACHE_FORMS = 512
CACHE_SLOW = 64
MAX_MEMORY_BYTES = 2**30  # of a compiling process, beyond what it has when it starts
# Forms that hold expressions of the client's own: what following them costs is up to the client.
SUSPECT_KINDS = ("regex", "grammar")
SUSPECT_MARKS = ('"pattern', '"regex"', '"grammar"')
MAX_ABANDONED = 4


class GrammarCompiler:
    """Compiles forms for one vocabulary. Safe to use from several threads.

    Args:
        tokenizer: spells tokens.
        vocab_size: tokens that may be chosen are below.
        limit_s: seconds for one form.
        memory_bytes: of a compiling process.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        limit_s: float = COMPILE_LIMIT_S,
        memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, Found] = OrderedDict()
        self._pending: dict[StructuredOutputs, Future[Found]] = {}
        self._pool = CompilePool(self._start, limit_s)
        self._abandoned = Abandoned()
        self._slow: deque[StructuredOutputs] = deque(maxlen=CACHE_SLOW)

    def compile(self, form: StructuredOutputs, stops: frozenset[int]) -> Callable[[], TokenConstraint]:
        """What makes constraints of this form, whose output the tokens `stops` may end. May take seconds.

        Raises:
            RequestError: the form is wrong, or takes too long or too much memory.
            QueueFullError: too many others are being compiled.
            UnsupportedError: xgrammar is not installed.
        """
        _require_library()
        if len(form.text) > MAX_TEXT:
            raise RequestError(f"at most {MAX_TEXT} characters, got: {len(form.text)}", param=PARAM)
        if form.kind == "json_schema":
            form = replace(form, text=narrowed(form.text))
        from triblade.structured.matcher import GrammarConstraint

        if form in self._slow:
            raise RequestError(SLOW, param=PARAM)
        found = self._found(form)
        if isinstance(found, RequestError):
            raise RequestError(found.message, hint=found.hint, param=PARAM)
        is_suspect = _is_suspect(form)
        if is_suspect and len(self._abandoned) >= MAX_ABANDONED:
            hint = "try again later"
            raise RequestError("too many grammars are too slow to follow at the moment", hint=hint, param=PARAM)
        give_up = partial(self._give_up, form)
        return partial(GrammarConstraint, found, self._vocabulary, stops, give_up, is_suspect=is_suspect)

    def _give_up(self, form: StructuredOutputs, worker: Worker | None) -> None:
        """Refuse a form from now on. Called by the engine's thread, which waits for nothing here."""
        self._slow.append(form)
        if worker is not None:
            self._abandoned.put(worker)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        from triblade.structured.matcher import read_vocabulary

        return read_vocabulary(self._tokenizer, self._vocab_size)

    def _found(self, form: StructuredOutputs) -> Found:
        """What became of a form, now or before; who asks for one that is being compiled waits for the first to ask."""
        with self._lock:
            found = self._cache.get(form)
            if found is not None:
                self._cache.move_to_end(form)
                return found
            pending = self._pending.get(form)
            mine = self._pending.setdefault(form, Future())
        if pending is not None:
            return pending.result()
        try:
            mine.set_result(self._compiled(form))
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._pending[form]
        return mine.result()

    def _start(self) -> CompileProcess:
        return CompileProcess(self._vocabulary.info.serialize_json(), self._memory_bytes)

    def _compiled(self, form: StructuredOutputs) -> Found:
        """Ask a process, and remember."""
        found = self._answer(form)
        with self._lock:
            self._cache[form] = found
            self._shrink()
        return found

    def _answer(self, form: StructuredOutputs) -> Found:
        import xgrammar

        try:
            line = self._pool.ask(json.dumps(asdict(form)))
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            spent = f"more than {self._limit_s:g} s" if isinstance(error, TimeoutError) else "too much memory"
            return RequestError(f"the {form.kind} takes {spent} to compile and to follow", hint="simplify it")
        answer = json.loads(line)
        if "error" in answer:
            return RequestError(f"the {form.kind} cannot be used: {_brief(answer['error'])}")
        return xgrammar.CompiledGrammar.deserialize_json(answer["grammar"], self._vocabulary.info)

    def _shrink(self) -> None:
        """Drop the forms that were not used for longest."""
        sizes = [0 if isinstance(v, RequestError) else v.memory_size_bytes for v in self._cache.values()]
        total = sum(sizes)
        for size in sizes[:-1]:
            if total <= CACHE_BYTES and len(self._cache) <= CACHE_FORMS:
                return
            self._cache.popitem(last=False)
            total -= size


def _is_suspect(form: StructuredOutputs) -> bool:
    return form.kind in SUSPECT_KINDS or any(mark in form.text for mark in SUSPECT_MARKS)


def _require_library() -> None:
    if find_spec("xgrammar") is None:
        hint = "pip install 'triblade[structured]' where the server runs"
        raise UnsupportedError("structured output needs the package xgrammar", hint=hint, param=PARAM)


def _brief(message: str) -> str:
    """A message of the library without where in its code it stands."""
    return message.splitlines()[0].rpartition("] ")[2].partition(": ")[2][:300] or message[:300]
