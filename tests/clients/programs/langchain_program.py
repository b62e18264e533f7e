"""LangChain: a chat model called, streamed, in a batch, with a schema, with a tool; and the plain completion model."""

# guide: python
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="smollm2-135m", base_url="http://127.0.0.1:8000/v1", api_key="none", temperature=0)
answer = model.invoke("What is the capital of Japan?", max_tokens=16)
# end

from typing import Literal

from langchain_core.messages import ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import OpenAI
from pydantic import BaseModel

from checks import check


class City(BaseModel):
    """Where something is."""

    capital: Literal["Paris", "Rome", "Tokyo"]


@tool
def capital_of(country: Literal["France", "Japan"]) -> str:
    """The capital of a country."""
    return {"France": "Paris", "Japan": "Tokyo"}[country]


check("a call", "Tokyo" in answer.content)
check("usage", answer.usage_metadata["output_tokens"] > 3)

pieces = list(model.stream("What is the capital of Japan?", max_tokens=16, stream_usage=True))
check("a stream is the whole answer", "".join(piece.content for piece in pieces) == answer.content)
check("usage of a stream", sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 3)

chain = ChatPromptTemplate.from_template(
    "What is the capital of {country}? Answer in one short sentence."
) | model.bind(max_tokens=16)
both = chain.batch([{"country": "Japan"}, {"country": "France"}])
check("a chain, in a batch", "Tokyo" in both[0].content and "Paris" in both[1].content)

for method in ("json_schema", "function_calling"):
    formed = model.with_structured_output(City, method=method).invoke("What is the capital of Japan?")
    check(f"an object by {method}", formed == City(capital="Tokyo"))

calling = model.bind_tools([capital_of], tool_choice="capital_of").invoke("What is the capital of Japan?")
(call,) = calling.tool_calls
result = capital_of.invoke(call)
check("a tool call", call["args"] == {"country": "Japan"} and isinstance(result, ToolMessage))
check("the result goes back", model.invoke([("user", "The capital?"), calling, result], max_tokens=8).content)

plain = OpenAI(model="smollm2-135m", base_url="http://127.0.0.1:8000/v1", api_key="none", temperature=0, max_tokens=3)
check("a completion", plain.invoke("The capital of France is").startswith(" Paris"))
