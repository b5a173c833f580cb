// The conversation: it is sent to /v1/chat/completions, and the answer streams in.

import { call, count, find, make, rounded } from "./dom.js";

let messages = [];
let running = null;

/** The events of a stream of server-sent events, as parsed JSON. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function article(kind, who, text) {
  const body = make("p", { className: "text", textContent: text });
  const log = find("log");
  log.append(make("article", { className: kind }, make("p", { className: "who", textContent: who }), body));
  log.scrollTop = log.scrollHeight;
  return body;
}

function setRunning(controller) {
  running = controller;
  find("stop").disabled = controller === null;
  find("send").disabled = controller !== null;
  find("log").setAttribute("aria-busy", String(controller !== null)); // a screen reader waits for the whole answer
}

/** Show in the settings the values that the server uses for empty fields. sampling: values that the model recommends. */
export function showSampling(sampling) {
  const all = Object.entries(sampling).map(([name, value]) => `${name} ${value}`);
  find("temperature").placeholder = `${sampling.temperature ?? 1}`;
  find("sampling").textContent = all.length
    ? `The model recommends ${all.join(", ")}.`
    : "The model recommends no sampling, so tokens are sampled at temperature 1.";
}

function body(served) {
  const model = served?.served_as?.[0];
  const system = find("system").value.trim();
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"),
    max_completion_tokens: number("max-tokens"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** The folded element for an answer's reasoning, made at its first token. */
function reasoningOf(answer) {
  const before = answer.previousElementSibling;
  if (before?.tagName === "DETAILS") return before.lastElementChild;
  const body = make("p", { className: "text" });
  answer.before(make("details", {}, make("summary", { textContent: "Reasoning" }), body));
  return body;
}

async function send(text, served) {
  const chat = messages;
  chat.push({ role: "user", content: text });
  article("user", "You", text);
  const answer = article("assistant", served?.served_as?.[0] ?? "Model", "");
  const controller = new AbortController();
  setRunning(controller);
  find("chat-status").textContent = "waiting for the first token";
  const began = performance.now();
  let first = null, usage = null, reason = null, fault = null;
  try {
    const reply = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body(served)),
      signal: controller.signal,
    });
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      const written = choice?.delta?.content, thought = choice?.delta?.reasoning;
      if (!written && !thought) continue;
      if (first === null) {
        first = performance.now();
        find("chat-status").textContent = thought ? "reasoning" : "answering";
      }
      const log = find("log");
      const below = log.scrollHeight - log.scrollTop - log.clientHeight < 40; // a reader who has scrolled up stays there
      if (thought) reasoningOf(answer).append(thought);
      if (written) answer.append(written);
      if (below) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") fault = error;
  } finally {
    setRunning(null);
  }
  if (chat !== messages) return; // a new chat has begun
  answer.normalize();
  finish(text, answer, fault);
  find("chat-status").textContent = fault ? "" : summary(began, first, usage, reason, controller.signal.aborted);
}

/** Keep the answer as the model's turn. If there is none, the question goes back into its field. */
function finish(text, answer, fault) {
  if (fault) article("error", "Error", fault.message);
  if (answer.textContent) {
    messages.push({ role: "assistant", content: answer.textContent });
    return;
  }
  messages.pop();
  if (answer.previousElementSibling?.tagName === "DETAILS") return; // the reasoning used all the tokens
  answer.parentElement.remove();
  if (!find("prompt").value) find("prompt").value = text;
}

function summary(began, first, usage, reason, stopped) {
  const how = stopped ? "stopped" : reason === "length" ? "reached the maximum number of tokens" : "done";
  if (first === null) return how;
  const parts = [how, `first token after ${rounded(first - began)} ms`];
  const seconds = (performance.now() - first) / 1000;
  if (usage) {
    parts.push(`${count(usage.completion_tokens)} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${rounded((usage.completion_tokens - 1) / seconds)} tokens/s`);
  }
  return parts.join(", ");
}

/** served: returns the answer of /headway/table, or null until it has arrived. */
export function startChat(served) {
  const prompt = find("prompt");
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || running) return;
    prompt.value = "";
    send(text, served());
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("ask").requestSubmit();
  });
  find("stop").addEventListener("click", () => {
    running?.abort();
    prompt.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  find("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    find("log").replaceChildren();
    find("chat-status").textContent = "";
    prompt.focus();
  });
}
