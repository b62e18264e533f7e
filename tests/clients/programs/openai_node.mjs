// The official client for JavaScript: chat, streams, schemas, tools, errors, a reader who leaves.

// guide: javascript
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const question = [{ role: "user", content: "What is the capital of Japan?" }];
const answer = await client.chat.completions.create({ model: "smollm2-135m", messages: question, temperature: 0, max_tokens: 16 });
// end

import { check } from "./checks.mjs";

const greedy = { model: "smollm2-135m", temperature: 0 };
const text = answer.choices[0].message.content;
check("a chat", text.includes("Tokyo"));

const stream = await client.chat.completions.create({
  ...greedy,
  messages: question,
  max_tokens: 16,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
check("a stream is the whole answer", streamed === text);
check("usage of a stream", usage.total_tokens === answer.usage.total_tokens);

const completion = await client.completions.create({ ...greedy, prompt: "The capital of France is", max_tokens: 3, logprobs: 2 });
check("a completion", completion.choices[0].text.startsWith(" Paris"));
check("log-probabilities", completion.choices[0].logprobs.token_logprobs.every((value) => value <= 0));

const schema = {
  type: "object",
  properties: { capital: { enum: ["Paris", "Rome", "Tokyo"] } },
  required: ["capital"],
  additionalProperties: false,
};
const formed = await client.chat.completions.parse({
  ...greedy,
  messages: question,
  max_tokens: 40,
  response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } },
});
check("a schema", JSON.parse(formed.choices[0].message.content).capital === "Tokyo");

const tool = { type: "function", function: { name: "capital", parameters: schema, strict: true } };
const called = client.chat.completions.stream({
  ...greedy,
  messages: question,
  max_tokens: 40,
  tools: [tool],
  tool_choice: { type: "function", function: { name: "capital" } },
});
const [call] = (await called.finalChatCompletion()).choices[0].message.tool_calls;
check("a tool call, streamed", JSON.parse(call.function.arguments).capital === "Tokyo");

const models = await client.models.list();
check("models", models.data.map((model) => model.id).includes("smollm2-135m"));

const failure = await client.chat.completions.create({ model: "other", messages: question }).catch((error) => error);
check("an unknown model", failure instanceof OpenAI.NotFoundError && failure.code === "model_not_found");

const endless = await client.completions.create({ ...greedy, prompt: "One two", max_tokens: 900, stream: true });
for await (const chunk of endless) {
  if (chunk.choices[0].text) break;
}
const after = await client.chat.completions.create({ ...greedy, messages: question, max_tokens: 16 });
check("the next answer after leaving one", after.choices[0].message.content === text);
