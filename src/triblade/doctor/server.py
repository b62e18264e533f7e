"""The HTTP of a visit: a few requests of an OpenAI server, timed, and its readings. Judges nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from triblade.bench.http_target import api_url, parse_samples
from triblade.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
READING_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Answer:
    """One streamed answer."""

    text: str = ""
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""  # empty: it came to its end


class Server:
    """An OpenAI server, with /metrics and /tokenize where it has them.

    Args:
        url: its address, with or without /v1.
        http: the connections; closed by whoever made them.
    """

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._api = api_url(url)
        self._root = self._api.removesuffix("/v1")
        self._http = http
        self.model = ""
        self.max_model_len: int | None = None
        self._knows_ignore_eos = True

    async def connect(self) -> None:
        """Ask for the model's name and length.

        Raises:
            ConfigError: nobody answers, or not as an OpenAI server does.
        """
        try:
            response = await self._http.get(f"{self._api}/models", timeout=READING_TIMEOUT_S)
            response.raise_for_status()
            card = response.json()["data"][0]
            self.model = str(card["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"no OpenAI server answers at {self._root}: {error}",
                hint="does it run there? a key is taken from TRIBLADE_API_KEY or OPENAI_API_KEY",
            ) from error
        self.max_model_len = card.get("max_model_len")

    async def begin(self, prompt: str) -> None:
        """One token, of which nothing is measured, and whether `ignore_eos` is known: some refuse what the OpenAI API lacks.

        Raises:
            ConfigError: it completes no text at all.
        """
        answer = await self.complete(prompt, 1, ignore_eos=True)
        if answer.error:
            self._knows_ignore_eos = False
            answer = await self.complete(prompt, 1)
        if answer.error:
            raise ConfigError(
                f"{self._root} completes no text: {answer.error}",
                hint="doctor asks /v1/completions; `triblade bench URL --endpoint chat` measures a server of chats alone",
            )

    async def complete(
        self, prompt: str | list[int], max_tokens: int, *, into: Answer | None = None, **options: Any
    ) -> Answer:
        """A streamed completion, as it comes `into` an answer that others watch; a failure is part of it."""
        if not self._knows_ignore_eos:
            options.pop("ignore_eos", None)
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, **options}
        answer, begun = into or Answer(), time.perf_counter()
        last = begun
        try:
            async with self._http.stream("POST", f"{self._api}/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    answer.error = f"status {response.status_code}: {response.text[:200]}"
                    return answer
                async for line in response.aiter_lines():
                    text, error = _event(line)
                    answer.error = error or answer.error
                    if text is None:
                        continue
                    now = time.perf_counter()
                    if answer.first_s is None:
                        answer.first_s = now - begun
                    else:
                        answer.gaps_s.append(now - last)
                    last, answer.text = now, answer.text + text
        except httpx.HTTPError as error:
            answer.error = f"the connection failed: {type(error).__name__}"
        return answer

    async def status(self, prompt: str | list[int]) -> int | None:
        """The status of a completion of one token; None: no answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1}
        try:
            return (await self._http.post(f"{self._api}/completions", json=body)).status_code
        except httpx.HTTPError:
            return None

    async def logprobs(self, text: str) -> list[float]:
        """Log-probability of every token of a text but the first; empty: the server does not score prompts."""
        body = {"model": self.model, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 1.0}
        try:
            response = await self._http.post(f"{self._api}/completions", json=body)
            response.raise_for_status()
            found = response.json()["choices"][0]["logprobs"]["token_logprobs"]
            return [value for value in found if value is not None]
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return []

    async def tokenize(self, text: str) -> list[int]:
        """Ids of a text; empty: the server has no such route."""
        try:
            response = await self._http.post(f"{self._root}/tokenize", json={"model": self.model, "prompt": text})
            response.raise_for_status()
            return [int(token) for token in response.json()["tokens"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []

    async def readings(self) -> Mapping[str, float]:
        """All samples of /metrics; empty: there are none."""
        try:
            response = await self._http.get(f"{self._root}/metrics", timeout=READING_TIMEOUT_S)
            response.raise_for_status()
        except httpx.HTTPError:
            return {}
        return parse_samples(response.text)

    async def planned(self) -> Mapping[str, float]:
        """Figures of the plan that is served, measured ones before predicted ones; empty: none."""
        try:
            response = await self._http.get(f"{self._root}/plan", timeout=READING_TIMEOUT_S)
            response.raise_for_status()
            figures = response.json()["prediction"]
            # Of two with the same name the first counts.
            return {figure["name"]: float(figure["value"]) for figure in reversed(figures)}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return {}


def _event(line: str) -> tuple[str | None, str]:
    """Text of a server-sent event (None: it is none with tokens) and its error."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None, ""
    try:
        event = json.loads(data)
    except ValueError:
        return None, "an event that is no JSON"
    if "error" in event:
        return None, str(
            event["error"].get("message", event["error"]) if isinstance(event["error"], dict) else event["error"]
        )
    choices = event.get("choices") or []
    return (choices[0].get("text", "") if choices and not choices[0].get("finish_reason") else None), ""
