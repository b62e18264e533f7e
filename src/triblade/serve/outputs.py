"""The outputs of all prompts of a request, as one stream.

Each prompt has an iterator of the engine; they are read at the same time and merged as they come. Leaving the stream,
for whatever reason, ends them all, which makes the engine drop the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from triblade.engine.client import EngineClient
from triblade.engine.outputs import RequestOutput
from triblade.serve.jobs import Job

Numbered = tuple[int, RequestOutput]  # (number of the prompt, its output)


@asynccontextmanager
async def open_outputs(client: EngineClient, job: Job, label: str) -> AsyncIterator[AsyncIterator[Numbered]]:
    """Start generating; the block reads the outputs. Nothing is left running after it."""
    outputs = _single(client, job, label) if len(job.prompts) == 1 else _merged(client, job, label)
    try:
        yield outputs
    finally:
        await outputs.aclose()


async def _single(client: EngineClient, job: Job, label: str) -> AsyncGenerator[Numbered, None]:
    """The common case needs no task and no queue."""
    async with _generation(client, job, 0, label) as outputs:
        async for output in outputs:
            yield 0, output


async def _merged(client: EngineClient, job: Job, label: str) -> AsyncGenerator[Numbered, None]:
    """One reader per prompt, one queue; a prompt's error ends the whole stream with it."""
    news: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue()
    readers = [asyncio.create_task(_read(client, job, number, label, news)) for number in range(len(job.prompts))]
    try:
        open_readers = len(readers)
        while open_readers:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_readers -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    client: EngineClient, job: Job, number: int, label: str, news: asyncio.Queue[Numbered | BaseException | None]
) -> None:
    try:
        async with _generation(client, job, number, f"{label}-{number}") as outputs:
            async for output in outputs:
                news.put_nowait((number, output))
    except Exception as error:
        news.put_nowait(error)
    else:
        news.put_nowait(None)


@asynccontextmanager
async def _generation(
    client: EngineClient, job: Job, number: int, label: str
) -> AsyncIterator[AsyncIterator[RequestOutput]]:
    """The engine's iterator for one prompt, closed at the end: a generator left behind would go on until collected."""
    prompt = job.prompts[number]
    outputs = client.generate(prompt.token_ids, prompt.params, request_id=label, priority=job.priority)
    try:
        yield outputs
    finally:
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
