"""LiteLLM: chat, streams, completions, a schema, a tool, several at once, errors as its own classes."""

# guide: python
from litellm import completion

server = {"model": "hosted_vllm/smollm2-135m", "api_base": "http://127.0.0.1:8000/v1", "api_key": "none"}
question = [{"role": "user", "content": "What is the capital of Japan?"}]
answer = completion(**server, messages=question, temperature=0, max_tokens=16)
# end

import asyncio
import json

import litellm

from checks import check

text = answer.choices[0].message.content
check("a chat", "Tokyo" in text)
openai_name = server | {"model": "openai/smollm2-135m"}
check(
    "the same as openai/...",
    completion(**openai_name, messages=question, temperature=0, max_tokens=16).choices[0].message.content == text,
)

greedy = {**server, "messages": question, "temperature": 0}
stream = list(completion(**greedy, max_tokens=16, stream=True, stream_options={"include_usage": True}))
check("a stream is the whole answer", "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text)
check("usage of a stream", litellm.stream_chunk_builder(stream).usage.total_tokens == answer.usage.total_tokens)

plain = litellm.text_completion(**openai_name, prompt="The capital of France is", temperature=0, max_tokens=3)
check("a completion", plain.choices[0].text.startswith(" Paris"))

schema = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome", "Tokyo"]}},
    "required": ["capital"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
formed = completion(**greedy, max_tokens=40, response_format=form)
check("a schema", json.loads(formed.choices[0].message.content) == {"capital": "Tokyo"})

tool = {"type": "function", "function": {"name": "capital", "parameters": schema}}
(call,) = (
    completion(**greedy, max_tokens=60, tools=[tool], tool_choice={"type": "function", "function": {"name": "capital"}})
    .choices[0]
    .message.tool_calls
)
check("a tool call", json.loads(call.function.arguments) == {"capital": "Tokyo"})


async def ask_together() -> list[str]:
    """The same question several times at once."""
    answers = await asyncio.gather(*(litellm.acompletion(**greedy, max_tokens=16) for _ in range(3)))
    return [one.choices[0].message.content for one in answers]


check("several at once", asyncio.run(ask_together()) == [text] * 3)

try:
    completion(**greedy | {"temperature": -1}, max_tokens=1)
except litellm.BadRequestError as error:
    check("a wrong value", "temperature" in str(error))
try:
    completion(**greedy | {"model": "hosted_vllm/other"}, max_tokens=1)
except litellm.NotFoundError as error:
    check("an unknown model", "other" in str(error))
