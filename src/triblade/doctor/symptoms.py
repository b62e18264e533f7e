"""What a visit to a server showed, and what follows from it: pure judgement over figures, one function for each symptom.

Knows no HTTP and measures nothing. Invariant: a finding names figures that were measured, one cause that they point to, and an
option or a command that changes it; where figures are missing there is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

MIN_TOKENS_PER_STEP = 1.5  # of steps with a draft; below it drafts cost about what they save
MIN_BUSY = 0.4
ONE_CORE = (0.8, 1.2)  # busy cores of a program that computes in one thread
MIN_FIRST_ACCEPTANCE = 0.2  # a draft of another model is right about by chance
STALL_FACTOR, STALL_S = 5.0, 0.05  # a gap that people notice, and that the model's own speed does not explain
MAX_REPETITION = 0.25  # of sampled text; sound models stay under a tenth
MAX_PERPLEXITY_GROWTH = 0.05
LATE_FACTOR = 1.5  # slower than the plan says
FOREIGN_CORES = 0.5
LEAK_SHARE, LEAK_BYTES = 0.01, 8 * 2**20  # growth that an allocator explains


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something is wrong."""

    symptom: str
    evidence: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.symptom}: {self.evidence}\n  cause: {self.cause}\n  do: {self.remedy}"


@dataclass(slots=True, kw_only=True)
class LongPrompt:
    """A prompt of nearly the length that the server says it takes."""

    tokens: int
    error: str = ""  # empty: it was answered
    lives: bool = True  # the server answered a short prompt afterwards
    first_s: float = 0.0
    gaps_s: Sequence[float] = ()  # between the pieces of another answer, meanwhile


@dataclass(slots=True, kw_only=True)
class Visit:
    """Everything that was seen of one server. Empty or None: not seen."""

    model: str = ""
    max_model_len: int | None = None
    first_s: float | None = None  # of a request alone
    gaps_s: Sequence[float] = ()  # between its pieces
    most_waiting: float = 0.0  # while more requests than one ran
    most_running: float = 0.0
    asked_at_once: int = 0
    most_kv_usage: float = 0.0
    growth: Mapping[str, float] = field(default_factory=dict)  # of counters, over the visit
    busy_share: float | None = None  # of the device, while it had enough to do
    busy_cores: float | None = None  # of the server, on a CPU
    cores: int | None = None
    foreign_cores: float | None = None  # that other programs kept busy meanwhile
    long: LongPrompt | None = None
    too_long_status: int | None = None  # of a prompt longer than the server takes
    repetition: float | None = None
    perplexity: float | None = None
    expected_perplexity: float | None = None
    memory_bytes: Sequence[float] = ()  # resident, after each round of equal requests, once the whole KV cache was used
    idle_running: float | None = None  # sequences that run when nobody asks
    idle_kv_usage: float | None = None
    planned: Mapping[str, float] = field(default_factory=dict)  # predicted figures of the plan that is served


def diagnose(visit: Visit) -> list[Finding]:
    """All findings, the gravest first."""
    return [finding for check in CHECKS for finding in check(visit)]


def crash_on_long_text(visit: Visit) -> Iterator[Finding]:
    """The longest prompts that are promised must be answered, and longer ones refused."""
    name, tried = "crash on long text", visit.long
    if tried is not None and tried.error:
        evidence = f"a prompt of {tried.tokens} tokens, of {visit.max_model_len} promised, failed: {tried.error}"
        if not tried.lives:
            cause, remedy = (
                "the server died or hangs: a step of this prompt needs more memory than there is",
                "lower --max-num-batched-tokens (smaller chunks) or --max-model-len; read the end of the server's log",
            )
        else:
            cause, remedy = (
                "the server says it takes more tokens than it can hold",
                "lower --max-model-len to what the log calls the context, or give the cache more: --kv-cache-dtype int8",
            )
        yield Finding(symptom=name, evidence=evidence, cause=cause, remedy=remedy)
    if visit.too_long_status is not None and visit.too_long_status != 400:
        yield Finding(
            symptom=name,
            evidence=f"a prompt beyond {visit.max_model_len} tokens was answered with status {visit.too_long_status}, not 400",
            cause="prompts are cut or computed beyond what the model was made for",
            remedy="set --max-model-len to the model's context length",
        )


def leak(visit: Visit) -> Iterator[Finding]:
    """Equal work must not take more memory each time, and nothing may be held when nobody asks."""
    memory = visit.memory_bytes
    grown = memory[-1] - memory[0] if memory else 0.0
    if grown > max(LEAK_BYTES, LEAK_SHARE * memory[0] if memory else 0.0) and list(memory) == sorted(set(memory)):
        yield Finding(
            symptom="leak",
            evidence=f"resident memory grew by {grown / 2**20:.0f} MiB over {len(memory) - 1} rounds of the same requests",
            cause="something of every request is kept",
            remedy="restart on a schedule until it is mended, and report it with the options of the server",
        )
    if visit.idle_running:
        yield Finding(
            symptom="leak",
            evidence=f"{visit.idle_running:.0f} sequences run unasked, in {visit.idle_kv_usage or 0:.0%} of the KV cache",
            cause="other clients are connected, or requests of clients that left were not ended",
            remedy="if no other client is connected, restart the server and report it; --request-timeout-s bounds it meanwhile",
        )


def quality_drop(visit: Visit) -> Iterator[Finding]:
    """Perplexity through the API against what the original has on the same text."""
    if visit.perplexity is None or visit.expected_perplexity is None:
        return
    growth = visit.perplexity / visit.expected_perplexity - 1
    if growth > MAX_PERPLEXITY_GROWTH:
        yield Finding(
            symptom="quality drop",
            evidence=f"perplexity {visit.perplexity:.2f} on the text, {visit.expected_perplexity:.2f} expected ({growth:+.0%})",
            cause="the weights are rounded too coarsely: --quantization int4 rounds to nearest, without calibration",
            remedy="triblade convert MODEL --calibration YOUR_TEXT, with more bits or --group-size 32",
        )


def repetition(visit: Visit) -> Iterator[Finding]:
    """Drawn text that says the same again and again."""
    if visit.repetition is not None and visit.repetition > MAX_REPETITION:
        yield Finding(
            symptom="repetition",
            evidence=f"{visit.repetition:.0%} of pieces of four words occurred before in the same answer, at temperature 0.8",
            cause="weights of few bits, a chat template that is not the model's, or drawing that is turned off on the server",
            remedy="triblade eval --generations 8 --against ORIGINAL shows rounding; else --chat-template, repetition_penalty 1.1",
        )


def low_acceptance(visit: Visit) -> Iterator[Finding]:
    """Drafts that are thrown away."""
    drafts = visit.growth.get("spec_decode_num_drafts_total", 0.0)
    if not drafts:
        return
    per_step = 1 + visit.growth.get("spec_decode_num_accepted_tokens_total", 0.0) / drafts
    if per_step >= MIN_TOKENS_PER_STEP:
        return
    drafted = visit.growth.get("spec_decode_num_draft_tokens_total", 0.0)
    accepted = (per_step - 1) * drafts / drafted if drafted else 0.0
    if accepted < MIN_FIRST_ACCEPTANCE:
        cause, remedy = (
            "the draft does not fit: another tokenizer or rope, or aligned to weights other than those served",
            "triblade doctor --target TARGET --draft DRAFT names the difference; triblade align trains a head that fits",
        )
    else:
        cause, remedy = (
            "this text is hard to guess, or guesses are too long for how often they are right",
            "--draft-policy adaptive, --num-speculative-tokens 2, or --drafter suffix for text that repeats its prompt",
        )
    evidence = f"{per_step:.2f} tokens per step with a draft, {accepted:.0%} of drafted tokens kept"
    yield Finding(symptom="acceptance under 1.5", evidence=evidence, cause=cause, remedy=remedy)


def idle_device(visit: Visit) -> Iterator[Finding]:
    """A device that waits although requests wait for it."""
    if visit.busy_share is None or visit.busy_share >= MIN_BUSY:
        return
    if visit.most_waiting and visit.most_running < visit.asked_at_once:
        cause, remedy = _why_requests_wait(visit)
    elif (
        visit.busy_cores is not None
        and visit.cores is not None
        and ONE_CORE[0] <= visit.busy_cores <= ONE_CORE[1] < visit.cores
    ):
        cause, remedy = (
            f"one of {visit.cores} cores works",
            f"--threads {visit.cores}; in a container, check its CPU quota and affinity",
        )
    else:
        cause, remedy = (
            "too few requests come at once for this device, or they are waited for on the way (network, proxy)",
            "send more at once; with one user at a time, --drafter eagle or suffix uses the rest",
        )
    yield Finding(
        symptom="device under 40 % busy",
        evidence=f"{visit.busy_share:.0%} busy with {visit.asked_at_once} requests at once",
        cause=cause,
        remedy=remedy,
    )


def slow(visit: Visit) -> Iterator[Finding]:
    """Time that is lost, by where it is lost."""
    yield from _queue(visit)
    yield from _stalls(visit)
    if visit.foreign_cores is not None and visit.foreign_cores > FOREIGN_CORES:
        yield Finding(
            symptom="slow",
            evidence=f"other programs kept {visit.foreign_cores:.1f} cores busy",
            cause="threads of the server wait for a core at every step",
            remedy="stop them, or leave them cores: --threads and --cpu-cores",
        )
    yield from _later_than_planned(visit)


def _queue(visit: Visit) -> Iterator[Finding]:
    preemptions = visit.growth.get("num_preemptions_total", 0.0)
    if preemptions:
        yield Finding(
            symptom="slow",
            evidence=f"{preemptions:.0f} sequences were pushed back and computed again",
            cause="the KV cache is too small for so many at once",
            remedy="lower --max-num-seqs, or a larger cache: --kv-cache-memory-bytes, --kv-cache-dtype int8",
        )
    elif visit.most_waiting and visit.most_running < visit.asked_at_once:
        cause, remedy = _why_requests_wait(visit)
        evidence = f"of {visit.asked_at_once} requests at once {visit.most_running:.0f} ran and {visit.most_waiting:.0f} waited"
        yield Finding(symptom="slow", evidence=evidence, cause=cause, remedy=remedy)


def _stalls(visit: Visit) -> Iterator[Finding]:
    if visit.long is None or not visit.long.gaps_s or not visit.gaps_s:
        return
    usual, worst = median(visit.gaps_s), max(visit.long.gaps_s)
    if worst > max(STALL_FACTOR * usual, STALL_S):
        yield Finding(
            symptom="slow",
            evidence=f"a stream paused {worst * 1e3:.0f} ms, not {usual * 1e3:.0f}, at a prompt of {visit.long.tokens} tokens",
            cause="chunks of long prompts and the streams share every step",
            remedy="--prefill-workers 1 --decode-workers 1, or smaller chunks: --max-num-batched-tokens 128",
        )


def _later_than_planned(visit: Visit) -> Iterator[Finding]:
    measured = {"ttft": visit.first_s, "tpot": median(visit.gaps_s) if visit.gaps_s else None}
    for name, seconds in measured.items():
        planned = visit.planned.get(name)
        if planned and seconds is not None and seconds * 1e3 > LATE_FACTOR * planned:
            yield Finding(
                symptom="slow",
                evidence=f"{name} {seconds * 1e3:.1f} ms for a request alone, the plan promises {planned:.1f} ms under load",
                cause="the machine is not the one that was planned for, or other kernels run: the log's first lines name them",
                remedy="delete the cached hardware profile and plan again, or triblade tune",
            )


def _why_requests_wait(visit: Visit) -> tuple[str, str]:
    if visit.most_kv_usage > 0.9:
        return "the KV cache is full", "--kv-cache-dtype int8, --kv-cache-memory-bytes, or a lower --max-model-len"
    return f"at most {visit.most_running:.0f} sequences are computed at once", "raise --max-num-seqs"


CHECKS: tuple[Callable[[Visit], Iterator[Finding]], ...] = (
    crash_on_long_text,
    leak,
    quality_drop,
    repetition,
    low_acceptance,
    idle_device,
    slow,
)
