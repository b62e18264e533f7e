"""The official Python client: completions, chat, responses, embeddings, streams, schemas, tools, errors."""

# guide: python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
question = [{"role": "user", "content": "What is the capital of Japan?"}]
answer = client.chat.completions.create(model="smollm2-135m", messages=question, temperature=0, max_tokens=16)
# end

import asyncio
import math
from typing import Literal

import openai
from openai import AsyncOpenAI
from pydantic import BaseModel

from checks import check

MODEL = "smollm2-135m"
GREEDY = {"model": MODEL, "temperature": 0}


class City(BaseModel):
    """What an answer may be."""

    capital: Literal["Paris", "Rome", "Tokyo"]
    letters: int


text = answer.choices[0].message.content
check("a chat", "Tokyo" in text)

stream = client.chat.completions.create(
    **GREEDY, messages=question, max_tokens=16, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
check("a stream is the whole answer", "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text)
check("usage of a stream", chunks[-1].usage.total_tokens == answer.usage.total_tokens)

completion = client.completions.create(**GREEDY, prompt="The capital of France is", max_tokens=3, logprobs=2, echo=True)
found = completion.choices[0]
check("a completion with echo", found.text.startswith("The capital of France is Paris"))
check("log-probabilities", found.logprobs.token_logprobs[0] is None and max(found.logprobs.token_logprobs[1:]) <= 0)

several = client.completions.create(
    model=MODEL, prompt=["Once upon a time", "Two plus two is"], n=2, seed=7, max_tokens=4
)
check("choices in order", [choice.index for choice in several.choices] == [0, 1, 2, 3])

parsed = client.chat.completions.parse(**GREEDY, messages=question, response_format=City, max_tokens=40)
check("a schema, parsed", parsed.choices[0].message.parsed.capital == "Tokyo")

weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Tokyo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
asked = {
    "messages": [{"role": "user", "content": "What is the weather in Tokyo?"}],
    "tools": [weather],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 40,
}
(call,) = client.chat.completions.create(**GREEDY, **asked).choices[0].message.tool_calls
check("a tool call", (call.function.name, call.function.arguments.replace(" ", "")) == ("weather", '{"city":"Tokyo"}'))
with client.chat.completions.stream(**GREEDY, **asked) as events:
    (streamed,) = events.get_final_completion().choices[0].message.tool_calls
check("the same call, streamed", streamed.function.arguments == call.function.arguments)

response = client.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=16)
check("a response", response.output_text == text and response.usage.total_tokens == answer.usage.total_tokens)
with client.responses.stream(model=MODEL, input=question, temperature=0, max_output_tokens=16) as events:
    check("a response, streamed", events.get_final_response().output_text == text)
formed = client.responses.parse(model=MODEL, input=question, temperature=0, max_output_tokens=40, text_format=City)
check("a response by a schema", formed.output_parsed == parsed.choices[0].message.parsed)

sentences = ["Paris is the capital of France.", "France's capital city is Paris.", "def add(a, b): return a + b"]
embedded = client.embeddings.create(model=MODEL, input=sentences, extra_body={"pooling": "mean"})
one, same, other = (vector.embedding for vector in embedded.data)
check(
    "embeddings, of length one",
    all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in (one, same, other)),
)
check("the same meaning is nearer", math.dist(one, same) < math.dist(one, other))
in_json = client.embeddings.create(
    model=MODEL, input=sentences[0], encoding_format="float", extra_body={"pooling": "mean"}
)
check("the same as numbers in JSON", math.dist(in_json.data[0].embedding, one) < 1e-5)

check("models", [model.id for model in client.models.list()] == [MODEL])

try:
    client.with_options(max_retries=0).chat.completions.create(model="other", messages=question)
except openai.NotFoundError as error:
    check("an unknown model", error.code == "model_not_found" and "other" in error.message)
try:
    client.completions.create(model=MODEL, prompt="x", max_tokens=1, temperature=-1, stream=True)
except openai.BadRequestError as error:
    check("a wrong value, streamed", error.param == "temperature")


async def ask_together() -> list[str]:
    """The same question several times at once."""
    async with AsyncOpenAI(base_url=str(client.base_url), api_key="none") as several:
        ask = several.chat.completions.create
        answers = await asyncio.gather(*(ask(**GREEDY, messages=question, max_tokens=16) for _ in range(3)))
    return [one.choices[0].message.content for one in answers]


check("several at once", asyncio.run(ask_together()) == [text] * 3)
