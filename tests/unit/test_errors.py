"""Errors carry a message, a hint, an exit code and an HTTP status; tables name the nearest entry."""

from __future__ import annotations

import pytest

from triblade import errors
from triblade.errors import ConfigError, RequestError, TribladeError
from triblade.registry import Registry


def every_error() -> list[type[TribladeError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TribladeError)]


def test_message_and_hint_read_as_two_lines() -> None:
    error = RequestError("n must be at least 1, got: 0", hint="leave it out", param="n")
    assert str(error) == "n must be at least 1, got: 0\nhint: leave it out"
    assert (error.message, error.hint, error.param) == ("n must be at least 1, got: 0", "leave it out", "n")
    assert str(TribladeError("only this")) == "only this"


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_an_exit_code_and_a_status(kind: type[TribladeError]) -> None:
    assert kind.exit_code in (1, 2)
    assert 400 <= kind.http_status < 600
    assert kind.error_type.endswith("_error")
    assert kind.__doc__
    asks_for_the_wrong_thing = issubclass(kind, ConfigError | RequestError)
    assert (kind.http_status == 400) == (kind.exit_code == 2) == asks_for_the_wrong_thing


TABLE = Registry("codec", {"join": "os.path:join", "json": "json:dumps", "absent": "no_such_module_anywhere:x"})


def test_registry_imports_on_use() -> None:
    import json

    assert TABLE["json"] is json.dumps
    assert list(TABLE) == ["join", "json", "absent"]
    assert len(TABLE) == 3
    with pytest.raises(ModuleNotFoundError):
        TABLE["absent"]


def test_registry_names_choices_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown codec: 'jsn'") as caught:
        TABLE["jsn"]
    assert caught.value.hint == "did you mean 'json'? choices: absent, join, json"
    with pytest.raises(ConfigError) as far:
        TABLE["quite different"]
    assert "did you mean" not in (far.value.hint or "")
