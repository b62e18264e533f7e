"""Instructor: an object by a schema and by a tool, a list of objects, an object that grows as it is streamed."""

# guide: python
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    capital: Literal["Paris", "Rome", "Tokyo"]


server = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
client = instructor.from_openai(server, mode=instructor.Mode.JSON_SCHEMA)
question = [{"role": "user", "content": "What is the capital of Japan?"}]
answer = client.create(model="smollm2-135m", messages=question, response_model=Answer, temperature=0, max_tokens=40)
# end

from checks import check

check("an object by json_schema", isinstance(answer, Answer) and answer.capital == "Tokyo")

greedy = {"model": "smollm2-135m", "messages": question, "temperature": 0, "max_tokens": 60, "max_retries": 0}
by_tool = instructor.from_openai(server, mode=instructor.Mode.TOOLS)
check("an object by a tool", by_tool.create(**greedy, response_model=Answer).capital == "Tokyo")

partial = list(client.create_partial(**greedy, response_model=Answer))
check("an object that grows", partial[-1].capital == "Tokyo" and len(partial) > 1)

made, completion = client.create_with_completion(**greedy, response_model=Answer)
check("the completion beside it", made.capital == "Tokyo" and completion.usage.completion_tokens > 3)
