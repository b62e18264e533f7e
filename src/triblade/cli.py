"""The `triblade` command: find the command that is meant, run it, turn what goes wrong into a message and an exit code.

Answers go to standard output and nothing else does; logs, progress and errors go to standard error. Flags are the
fields of the config dataclasses, so a new field is a new flag. Exit codes: 0 done, 1 failed, 2 wrong options, 130
interrupted. Nothing heavy is imported before a command runs: `triblade --help` loads no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from triblade import __version__, console
from triblade.commands import deploying, inference, making, measuring, planning, routing, tuning  # noqa: F401 - registers the commands
from triblade.commands.frame import BAD_OPTIONS, BROKEN_PIPE, INTERRUPTED, app
from triblade.conversation import print_error
from triblade.errors import TribladeError

MODEL_OPTIONS = {  # of the commands that take the model as first argument, too
    **dict.fromkeys(
        ("generate", "chat", "serve", "worker", "eval", "convert", "kv-calibrate", "bench", "plan", "tune", "doctor"),
        "--model",
    ),
    "align": "--target",
    "deploy": "--plan",
}
FIRST_ARGUMENTS = {"deploy": "plan"}  # of commands whose first argument is no model


@app.command
def version() -> None:
    """Print the version."""
    print(__version__)  # noqa: T201 - the answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's own arguments) and return its exit code."""
    console.prepare_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        flags = planning.with_plan(_name_the_model(arguments))
        exit_code: int | None = app(flags, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except TribladeError as error:
        return _fail(error.message, error.hint, error.exit_code)
    except CycloptsError as error:
        return _fail(*_what_is_wrong(error, arguments), BAD_OPTIONS)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        return _fail(str(error), None, 1)
    return exit_code or 0


def _name_the_model(arguments: Sequence[str]) -> list[str]:
    """`serve NAME ...` as `serve --model NAME ...`, `align NAME ...` as `align --target NAME ...`."""
    if len(arguments) > 1 and not arguments[1].startswith("-"):
        option = MODEL_OPTIONS.get(arguments[0])
        return [arguments[0], option, *arguments[1:]] if option else list(arguments)
    return list(arguments)


def _what_is_wrong(error: CycloptsError, arguments: Sequence[str]) -> tuple[str, str]:
    """Message and hint about options that cannot be read."""
    command, hint = arguments[0], _where_to_look(arguments)
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument: {' '.join(error.unused_tokens or ())}", hint
    if isinstance(error, MissingArgumentError) and error.keyword is None and error.argument is not None:
        if error.argument.name == MODEL_OPTIONS.get(command):
            what = FIRST_ARGUMENTS.get(command, "model")
            return f"missing: the {what}", f"it comes first: triblade {command} {what.upper()}; {hint}"
        return f"missing: {error.argument.name}", hint
    return " ".join(str(error).split()), hint


def _where_to_look(arguments: Sequence[str]) -> str:
    if arguments and arguments[0] in app:
        return f"triblade {arguments[0]} --help lists its options"
    return "triblade --help lists the commands"


def _fail(message: str, hint: str | None, exit_code: int) -> int:
    print_error(message, hint)
    return exit_code


def _reader_left() -> int:
    """Keep the interpreter's own flush at exit from complaining about the pipe that is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
