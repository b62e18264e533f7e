// The chat box: one conversation over /v1/chat/completions, streamed.

const byId = (id) => document.getElementById(id);

export function startChat(ask, modelName) {
  const messages = [];
  let running = null;

  function add(role, text) {
    const item = document.createElement("li");
    item.className = role;
    item.textContent = text;
    byId("talk").append(item);
    return item;
  }

  function setRunning(controller) {
    running = controller;
    byId("send").disabled = controller !== null;
    byId("stop").disabled = controller === null;
  }

  async function answer(item) {
    const begun = performance.now();
    let first = null, tokens = 0, text = "";
    const body = {
      model: modelName(), messages, stream: true, stream_options: {include_usage: true},
      temperature: Number(byId("temperature").value), max_tokens: Number(byId("max-tokens").value),
    };
    const response = await ask("/v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), headers: {"Content-Type": "application/json"}, signal: running.signal,
    });
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices?.[0]?.delta?.content;
      if (piece) {
        first ??= performance.now();
        text += piece;
        item.textContent = text;
      }
      if (event.usage) tokens = event.usage.completion_tokens;
    }
    messages.push({role: "assistant", content: text});
    const seconds = (performance.now() - (first ?? begun)) / 1e3;
    const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
    note(item, `${tokens} tokens, first after ${((first ?? begun) - begun).toFixed(0)} ms${rate}`);
  }

  function note(item, text) {
    const small = document.createElement("small");
    small.textContent = text;
    item.append(small);
  }

  byId("chat").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = byId("message").value.trim();
    if (!text || running) return;
    byId("message").value = "";
    messages.push({role: "user", content: text});
    add("user", text);
    const item = add("assistant", "…");
    setRunning(new AbortController());
    try {
      await answer(item);
    } catch (error) {
      // The half answer stays on the page; the conversation goes on from before the question.
      messages.pop();
      item.classList.toggle("failed", error.name !== "AbortError");
      if (error.name === "AbortError") note(item, "stopped");
      else item.textContent = error.message;
    } finally {
      setRunning(null);
    }
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("forget").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    byId("talk").replaceChildren();
  });
}

// Server-sent events as objects, until [DONE].
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
