// The AI SDK: text, streams, an object, a tool.

// guide: javascript
import { generateText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const server = createOpenAICompatible({ name: "triblade", baseURL: "http://127.0.0.1:8000/v1", supportsStructuredOutputs: true });
const model = server("smollm2-135m");
const answer = await generateText({ model, prompt: "What is the capital of Japan?", temperature: 0, maxOutputTokens: 16 });
// end

import { Output, streamText, tool } from "ai";
import { z } from "zod";
import { check } from "./checks.mjs";

const asked = { model, prompt: "What is the capital of Japan?", temperature: 0 };
check("a text", answer.text.includes("Tokyo"));
check("usage", answer.usage.outputTokens > 3);

const stream = streamText({ ...asked, maxOutputTokens: 16 });
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
check("a stream is the whole text", streamed === answer.text);

const city = z.object({ capital: z.enum(["Paris", "Rome", "Tokyo"]) });
const formed = await generateText({ ...asked, maxOutputTokens: 40, output: Output.object({ schema: city }) });
check("an object", formed.output.capital === "Tokyo");

const capitalOf = tool({
  description: "The capital of a country.",
  inputSchema: z.object({ country: z.enum(["France", "Japan"]) }),
  execute: async ({ country }) => ({ France: "Paris", Japan: "Tokyo" })[country],
});
const named = { type: "tool", toolName: "capitalOf" };
const called = await generateText({ ...asked, maxOutputTokens: 60, tools: { capitalOf }, toolChoice: named });
check("a tool call", called.toolCalls[0].input.country === "Japan" && called.toolResults[0].output === "Tokyo");

const plain = await generateText({
  model: server.completionModel("smollm2-135m"),
  prompt: "The capital of France is",
  temperature: 0,
  maxOutputTokens: 3,
});
check("a completion", plain.text.length > 0);
