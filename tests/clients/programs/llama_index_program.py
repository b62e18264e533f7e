"""LlamaIndex: completions, chat, streams, an object of a class, a tool."""

# guide: python
from llama_index.llms.openai_like import OpenAILike

server = {"api_base": "http://127.0.0.1:8000/v1", "api_key": "none", "is_chat_model": True, "context_window": 1024}
model = OpenAILike(model="smollm2-135m", temperature=0, max_tokens=40, is_function_calling_model=True, **server)
answer = model.complete("What is the capital of Japan?")
# end

import asyncio
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from checks import check


class City(BaseModel):
    """Where something is."""

    capital: Literal["Paris", "Rome", "Tokyo"]


def capital_of(country: Literal["France", "Japan"]) -> str:
    """The capital of a country."""
    return {"France": "Paris", "Japan": "Tokyo"}[country]


question = [ChatMessage(role="user", content="What is the capital of Japan?")]
text = answer.text
check("a prompt", "Tokyo" in text)
check("a chat", model.chat(question).message.content == text)
check("a stream is the whole answer", "".join(piece.delta for piece in model.stream_chat(question)) == text)
check("from a coroutine", asyncio.run(model.achat(question)).message.content == text)

plain = OpenAILike(model="smollm2-135m", temperature=0, max_tokens=3, **server | {"is_chat_model": False})
check("a completion", plain.complete("The capital of France is").text.startswith(" Paris"))

formed = model.as_structured_llm(City).complete("What is the capital of Japan?")
check("an object of a class", formed.raw == City(capital="Tokyo"))

calling = model.chat_with_tools(
    [FunctionTool.from_defaults(capital_of)], "What is the capital of Japan?", tool_required=True
)
calls = model.get_tool_calls_from_response(calling)
check("a tool call", (calls[0].tool_name, calls[0].tool_kwargs) == ("capital_of", {"country": "Japan"}))
