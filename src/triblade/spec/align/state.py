"""What an alignment has done so far, on disk: text shards, the plan of the training, and its newest checkpoint.

`state.json` is written last and says what the other files are worth; every file gets its name only when it is complete. Invariant:
after a kill at any moment the folder describes a prefix of the run, and going on gives the same bits as never having stopped (on a
CPU; kernels of other devices may add in another order).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from triblade.errors import CheckpointError, ConfigError
from triblade.files import written_whole
from triblade.models.json_files import read_json_object
from triblade.spec.align.text import Conversation

_STATE = "state.json"
_CHECKPOINT = "training.pt"


@dataclass(slots=True, kw_only=True)
class Progress:
    """The content of `state.json` beside the fingerprint."""

    shards: int = 0
    writing_s: float = 0.0
    text_complete: bool = False
    total_steps: int | None = None  # fixed when the training begins
    steps: int = 0  # in the checkpoint
    training_s: float = 0.0


class AlignState:
    """The folder of one run.

    Args:
        folder: made if need be.
        fingerprint: what must be the same for a run to be continued: options of the "text", and of the "training" once it began.
        resume: go on with what the folder holds.

    Raises:
        ConfigError: the folder holds an unfinished run and `resume` is off, or the run there was another one.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Mapping[str, Any]], *, resume: bool) -> None:
        self.folder = folder
        self.progress = Progress()
        self._fingerprint = json.loads(json.dumps(fingerprint, default=str))
        if (folder / _STATE).is_file():
            self._continue(resume)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._write()

    def add_shard(self, conversations: Sequence[Conversation], seconds: float) -> None:
        """Note the next shard as written; returns when it is on disk."""
        tokens = [torch.tensor(c.token_ids, dtype=torch.int32) for c in conversations]
        facts = [[len(c.token_ids), c.first, int(c.is_greedy)] for c in conversations]
        tensors = {
            "token_ids": torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int32),
            "facts": torch.tensor(facts, dtype=torch.int32).view(-1, 3),
        }
        with written_whole(self._shard_path(self.progress.shards)) as part:
            save_file(tensors, part)
        self.progress.shards += 1
        self.progress.writing_s += seconds
        self._write()

    def conversations(self) -> list[Conversation]:
        """Everything written so far, in order."""
        found = []
        for number in range(self.progress.shards):
            tensors = self._load(self._shard_path(number))
            lengths = tensors["facts"][:, 0].tolist()
            pieces = tensors["token_ids"].split(lengths) if lengths else ()
            for ids, (_, first, greedy) in zip(pieces, tensors["facts"].tolist(), strict=True):
                found.append(Conversation(ids.tolist(), first, bool(greedy)))
        return found

    def finish_text(self) -> None:
        """No more shards will come."""
        self.progress.text_complete = True
        self._write()

    def plan_training(self, total_steps: int) -> None:
        """Fix how long the training is."""
        self.progress.total_steps = total_steps
        self._write()

    def save_training(self, content: Mapping[str, Any], steps: int, seconds: float) -> None:
        """Replace the checkpoint by one after `steps` steps, made in `seconds` since the last one."""
        with written_whole(self._checkpoint_path(steps)) as part:
            torch.save(dict(content), part)
        before = self._checkpoint_path(self.progress.steps)
        self.progress.steps, self.progress.training_s = steps, self.progress.training_s + seconds
        self._write()
        if self.progress.steps and before != self._checkpoint_path(steps):
            before.unlink(missing_ok=True)

    def load_training(self) -> dict[str, Any] | None:
        """The checkpoint; None: the training has not begun."""
        if not self.progress.steps:
            return None
        path = self._checkpoint_path(self.progress.steps)
        try:
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}", hint="start again without --resume") from error
        return loaded

    def remove(self) -> None:
        """Forget the run."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _continue(self, resume: bool) -> None:
        state = read_json_object(self.folder / _STATE)
        if not resume:
            raise ConfigError(
                f"{self.folder} holds an unfinished run", hint="--resume continues it; to begin again delete the folder"
            )
        self.progress = Progress(**state["progress"])
        parts = ("text", "training") if self.progress.total_steps is not None else ("text",)
        changed = [line for part in parts for line in _changes(state["fingerprint"][part], self._fingerprint[part])]
        if changed:
            raise ConfigError(
                f"the unfinished run in {self.folder} is another one: {'; '.join(changed)}",
                hint="call it with the same target and options, or delete the folder",
            )

    def _write(self) -> None:
        state = {"fingerprint": self._fingerprint, "progress": asdict(self.progress)}
        with written_whole(self.folder / _STATE) as part:
            part.write_text(json.dumps(state, indent=1), encoding="utf-8")

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}", hint="start again without --resume") from error

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"text-{number:05d}.safetensors"

    def _checkpoint_path(self, steps: int) -> Path:
        name, _, suffix = _CHECKPOINT.partition(".")
        return self.folder / f"{name}-{steps:07d}.{suffix}"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted({*before, *now})
    return [f"{n} was {before.get(n)}, now {now.get(n)}" for n in names if before.get(n) != now.get(n)]
