"""An engine of this process as a target: what it can do without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from triblade.bench.metrics import Usage
from triblade.bench.target import Ask, Piece, TargetError
from triblade.config import EngineConfig
from triblade.engine.client import EngineLoad
from triblade.engine.local import LocalClient
from triblade.errors import RequestError, TribladeError
from triblade.sampling_params import SamplingParams


class EngineTarget:
    """A model loaded into this process.

    Args:
        client: the engine; closed with the target.
        chat: whether messages go through the chat template, or are joined.
    """

    def __init__(self, name: str, client: LocalClient, *, chat: bool) -> None:
        self.name = name
        self._client = client
        self._chat = chat

    @classmethod
    async def start(cls, config: EngineConfig, *, chat: bool) -> EngineTarget:
        """Load the model."""
        client = await asyncio.to_thread(LocalClient.start, config)
        return cls(config.model, client, chat=chat)

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """See `Target`."""
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=ask.temperature, ignore_eos=ask.ignore_eos)
        try:
            async for output in self._client.generate(self._prompt(ask), params):
                if output.error is not None:
                    raise TargetError(output.error)
                usage = Usage(output.num_prompt_tokens, output.num_cached_tokens, output.num_output_tokens)
                yield Piece(output.text, bool(output.token_ids), usage, output.finish_reason)
        except RequestError as error:
            raise TargetError(error.message) from error
        except TribladeError as error:
            raise TargetError(f"the engine failed: {error.message}") from error

    async def readings(self) -> Mapping[str, float]:
        """See `Target`."""
        return _readings(self._client.load())

    async def close(self) -> None:
        """End the engine."""
        await asyncio.to_thread(self._client.close)

    def _prompt(self, ask: Ask) -> list[int]:
        tokenizer = self._client.tokenizer
        if self._chat:
            return tokenizer.encode_chat(ask.messages)
        return tokenizer.encode(ask.text)


def _readings(load: EngineLoad) -> dict[str, float]:
    used = load.num_kv_blocks - load.num_free_kv_blocks
    return {
        "num_requests_running": load.num_running,
        "num_requests_waiting": load.num_waiting,
        "kv_cache_usage_perc": used / load.num_kv_blocks if load.num_kv_blocks else 0.0,
        "num_preemptions_total": load.num_preemptions,
        "prefix_cache_queries_total": load.num_prompt_tokens,
        "prefix_cache_hits_total": load.num_cached_prompt_tokens,
        "spec_decode_num_drafts_total": load.speculation.num_drafts,
        "spec_decode_num_draft_tokens_total": load.speculation.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": load.speculation.num_accepted_tokens,
    }
