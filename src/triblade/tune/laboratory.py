"""What a trial needs done: a checkpoint, its quality, a server to measure. Here by commands that a user could type.

Conversion, evaluation and server are processes of their own, so that what one of them does to memory or threads, or dies of, is
none of the next one's business. Checkpoints and quality are kept under names made of what they depend on: model content, options,
text. A process that a killed run left behind is ended before another one starts.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from triblade.bench.run import bench
from triblade.config import EngineConfig, Plan, TuneConfig, Workload, to_toml
from triblade.errors import TuneError
from triblade.files import written_whole
from triblade.tune.candidates import SCHEMES
from triblade.tune.measured import Quality, Run, run_of
from triblade.tune.points import Point
from triblade.tune.trial_plan import Checkpoint, traffic

SERVED_NAME = "tuned"
ADDRESS = re.compile(rf"serving {SERVED_NAME} at (http://\S+)/v1")
PLAIN_METHODS = frozenset({"rtn", "range"})  # need no text
SCALING_PASSES = frozenset({"best", "awq", "balance", "smooth"})  # rescale channels
EVAL_CONTEXT = 1024
POLL_S = 0.05
END_S = 20.0
TAIL = 300  # characters of what a process said last

Process = subprocess.Popen[bytes]
Measure = Callable[[int], Run]  # the figures of run number so and so


class Laboratory(Protocol):
    """Does what a trial needs."""

    def checkpoint(self, point: Point) -> Checkpoint:
        """The weights of a point, made if they are not there.

        Raises:
            TuneError: they cannot be made.
        """
        ...

    def quality(self, point: Point, checkpoint: Checkpoint) -> Quality | None:
        """What the weights lose; None: nobody knows.

        Raises:
            TuneError: it cannot be measured.
        """
        ...

    def serving(self, name: str, plan: Plan) -> AbstractContextManager[Measure]:
        """A plan being served while the block runs.

        Raises:
            TuneError: it does not start.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommandLaboratory:
    """By the command line.

    Args:
        config: of the tuning run.
        workload: what is asked for.
        fingerprint: of the model's content.
    """

    config: TuneConfig
    workload: Workload
    fingerprint: str

    def checkpoint(self, point: Point) -> Checkpoint:
        """See `Laboratory`."""
        if not point.is_quantized:
            return Checkpoint(model=self.config.model)
        options = self._conversion(point)
        calibration = (
            [] if self._is_plain else [str(self.config.calibration_samples), self.config.calibration or "self"]
        )
        output = self._checkpoints / f"{point.weights}-{self._digest([*options, *calibration])}"
        words = ["convert", self.config.model, "--output", str(output), *options, *self._calibration()]
        if not output.exists():
            self._convert(words, output)
        return Checkpoint(model=str(output), convert=shlex.join(["triblade", *words]))

    def quality(self, point: Point, checkpoint: Checkpoint) -> Quality | None:
        """See `Laboratory`."""
        if self.config.text is None:
            kept = _quality_file(Path(checkpoint.model))
            found = json.loads(kept.read_text(encoding="utf-8")) if point.is_quantized and kept.exists() else None
            return Quality() if not point.is_quantized else None if found is None else Quality(**found)
        options = ["--text", str(self.config.text), "--context", str(EVAL_CONTEXT)]
        options += ["--max-tokens", str(self.config.text_tokens), "--json"]
        name = self._digest([checkpoint.model if point.is_quantized else "as it is", *options])
        kept = self.config.output / "quality" / f"{name}.json"
        if not kept.exists():
            against = ["--against", self.config.model] if point.is_quantized else []
            report = json.loads(self._run("eval", [checkpoint.model, *options, *against]))
            _keep(kept, _quality(report, report.get("against_perplexity")))
        return Quality(**json.loads(kept.read_text(encoding="utf-8")))

    @contextmanager
    def serving(self, name: str, plan: Plan) -> Iterator[Measure]:
        """See `Laboratory`."""
        folder = self.config.output / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        file, log = folder / f"{name}.toml", folder / f"{name}.log"
        file.write_text(to_toml(plan), encoding="utf-8")
        words = ["serve", "--plan", str(file), "--host", "127.0.0.1", "--port", "0", "--served-model-name", SERVED_NAME]
        with log.open("wb") as errors, self._process(words, errors, errors) as process:
            url = self._wait(process, log)
            yield lambda run: self._measure(url, process.pid, run)

    @contextmanager
    def _process(self, words: Sequence[str], output: int | IO[bytes], errors: int | IO[bytes]) -> Iterator[Process]:
        """A command of ours, known by a file while it runs, ended when the block ends."""
        self.config.output.mkdir(parents=True, exist_ok=True)
        end_leftover(self._process_file)
        command = _command(words)
        with subprocess.Popen(
            command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                started = {"pid": process.pid, "created": psutil.Process(process.pid).create_time()}
                self._process_file.write_text(json.dumps(started), encoding="utf-8")
                yield process
            finally:
                _end(process)
                self._process_file.unlink(missing_ok=True)

    def _measure(self, url: str, pid: int, run: int) -> Run:
        load = replace(
            traffic(self.config, self.workload, run), server_pid=pid, duration_s=60 * self.config.trial_minutes
        )
        result = bench(EngineConfig(model=url), load)
        if result.interrupted:
            raise KeyboardInterrupt
        return run_of(result.summary)

    def _wait(self, process: Process, log: Path) -> str:
        """The server's address, as soon as it answers."""
        late = time.monotonic() + 60 * self.config.trial_minutes
        while time.monotonic() < late:
            found = ADDRESS.search(log.read_text(encoding="utf-8", errors="replace"))
            if found:
                return found.group(1)
            if process.poll() is not None:
                raise TuneError(f"serve ended with exit code {process.returncode}: {_tail(log.read_bytes())}")
            time.sleep(POLL_S)
        raise TuneError(f"the server was not ready after {self.config.trial_minutes:g} min: {_tail(log.read_bytes())}")

    def _convert(self, words: Sequence[str], output: Path) -> None:
        from triblade.quant.convert_inputs import state_folder

        output.parent.mkdir(parents=True, exist_ok=True)
        again = ["--resume"] if state_folder(output).exists() else []
        report = json.loads(self._run(words[0], [*words[1:], *again, "--json"]))
        if report["quality"] is not None:
            _keep(_quality_file(output), _quality(report["quality"], report["quality"]["original_perplexity"]))

    def _conversion(self, point: Point) -> list[str]:
        """Options that make the weights of a point."""
        method = f"smooth+{self.config.quantization}" if point.smoothed else self.config.quantization
        options = ["--bits", str(SCHEMES[point.weights]), "--quantization", method]
        options += ["--embeddings", "8row", "--lm-head", "8row"] if self._has_cpu_tables else []
        return options

    def _calibration(self) -> list[str]:
        """The text to calibrate on: the given one, else what the model wrote for an earlier conversion, else its own."""
        if self._is_plain:
            return []
        written = (str(path) for path in sorted(self._checkpoints.glob("*.calibration.json")))
        text = self.config.calibration or next(written, "self")
        return ["--calibration", text, "--calibration-samples", str(self.config.calibration_samples)]

    @property
    def _is_plain(self) -> bool:
        """Whether conversions do without a text."""
        return self.config.calibration is None and self.config.quantization in PLAIN_METHODS

    @property
    def can_smooth(self) -> bool:
        """Whether rescaling channels would add something to conversions."""
        has_scales = SCALING_PASSES & set(self.config.quantization.split("+"))
        return self.config.calibration is not None and not has_scales

    @property
    def _has_cpu_tables(self) -> bool:
        import torch

        return not torch.cuda.is_available()

    @property
    def _checkpoints(self) -> Path:
        return self.config.output / "checkpoints"

    @property
    def _process_file(self) -> Path:
        return self.config.output / "process.json"

    def _digest(self, words: Sequence[str]) -> str:
        """A short name for the content of a model and of the files among these words."""
        found = hashlib.sha256(self.fingerprint.encode())
        for word in words:
            path = Path(word)
            found.update(path.read_bytes() if path.is_file() else word.encode())
        return found.hexdigest()[:12]

    def _run(self, command: str, options: Sequence[str]) -> str:
        """What a command prints.

        Raises:
            TuneError: it failed, or took too long.
        """
        with self._process([command, *options], subprocess.PIPE, subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=60 * self.config.trial_minutes)
            except subprocess.TimeoutExpired as error:
                raise TuneError(f"{command} took longer than {self.config.trial_minutes:g} min") from error
        if process.returncode:
            raise TuneError(f"{command} ended with exit code {process.returncode}: {_tail(errors)}")
        return output.decode()


def end_leftover(file: Path) -> None:
    """End the process that this file tells of, if it still runs."""
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        started: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        process = psutil.Process(started["pid"])
        if process.create_time() == started["created"]:  # and not another one that got its number
            process.kill()
            process.wait(END_S)


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "triblade", *words]


def _end(process: Process) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(said: bytes) -> str:
    """The last lines of what a process said, in one."""
    return " ".join(said.decode(errors="replace").split())[-TAIL:]


def _quality_file(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.quality.json")


def _quality(report: dict[str, Any], original: float | None) -> Quality:
    increase = 0.0 if original is None else report["perplexity"] / original - 1
    return Quality(
        perplexity=report["perplexity"],
        ppl_increase=increase,
        kl=report.get("kl") or 0.0,
        num_tokens=report["num_tokens"],
    )


def _keep(path: Path, quality: Quality) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as part:
        part.write_text(json.dumps(asdict(quality)), encoding="utf-8")
