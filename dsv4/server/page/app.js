// The chat page. What the model says is only ever set as text.

import { events, refusal } from "./stream.js";
import { Rounds } from "./rounds.js";

const at = (id) => document.getElementById(id);
const main = document.querySelector("main");
let model = null;
let messages = []; // as the server takes them
let running = null; // AbortController of the answer that is coming

function add(parent, name, className, text) {
  const element = parent.appendChild(document.createElement(name));
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function show(role, title) {
  const article = add(at("log"), "article", role);
  add(article, "h2", "", title);
  return article;
}

// Change the page, and stay at the bottom if it was there.
function follow(change) {
  const low = main.scrollHeight - main.scrollTop - main.clientHeight < 60;
  change();
  if (low) main.scrollTop = main.scrollHeight;
}

class Answer {
  constructor() {
    this.article = show("assistant", "Answer");
    this.article.setAttribute("aria-busy", "true");
    this.thought = add(this.article, "details", "thought");
    this.thought.open = true;
    this.thought.hidden = true;
    add(this.thought, "summary", "", "Thinking");
    this.reasoning = add(this.thought, "div", "text");
    this.content = add(this.article, "div", "text");
    this.stats = add(this.article, "div", "stats");
    this.rounds = new Rounds();
    this.article.append(this.rounds.element);
    this.start = performance.now();
    this.first = null;
  }

  take(chunk) {
    this.first ??= performance.now();
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.reasoning_content) {
      this.thought.hidden = false;
      this.reasoning.append(delta.reasoning_content);
    }
    if (delta.content) this.content.append(delta.content);
    for (const call of delta.tool_calls ?? []) {
      this.content.append(`${call.function.name}(${call.function.arguments})\n`);
    }
    this.rounds.add(chunk.dsv4_rounds ?? []);
    const tokens = chunk.usage?.completion_tokens ?? this.rounds.tokens + 1;
    this.stats.textContent = this.words(tokens, chunk.choices[0]?.finish_reason);
  }

  words(tokens, reason) {
    this.reason = reason ?? this.reason;
    const seconds = (performance.now() - this.first) / 1000;
    const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const wait = ((this.first - this.start) / 1000).toFixed(2);
    const end = this.reason === "length" ? ", cut at the limit" : "";
    return `${tokens} tokens, first after ${wait} s${speed}${end}`;
  }

  finish() {
    this.article.removeAttribute("aria-busy");
    this.thought.open = false;
  }

  get message() {
    const reasoning = this.reasoning.textContent;
    return { role: "assistant", content: this.content.textContent, ...(reasoning && { reasoning_content: reasoning }) };
  }
}

function request(chat) {
  const number = (id) => (at(id).value === "" ? null : Number(at(id).value));
  const system = at("system").value;
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...chat],
    stream: true,
    stream_options: { include_usage: true },
    dsv4_rounds: true,
    reasoning_effort: at("thinking").value,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
  };
}

async function answer(text, signal) {
  const chat = messages; // a new chat has a list of its own
  let coming = null;
  const asked = show("user", "You");
  follow(() => add(asked, "div", "text", text));
  chat.push({ role: "user", content: text });
  try {
    if (!model) await findModel();
    follow(() => (coming = new Answer()));
    const body = JSON.stringify(request(chat));
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const chunk of events(response)) follow(() => coming.take(chunk));
  } catch (error) {
    const words = error.name === "AbortError" ? "Stopped." : error.message;
    follow(() => add(coming?.article ?? asked, "div", "error", words).setAttribute("role", "alert"));
  }
  coming?.finish();
  if (coming?.first) {
    chat.push(coming.message);
  } else if (chat === messages) {
    chat.pop(); // nothing came: the text goes back to where it can be mended
    at("input").value = text;
  }
}

async function send() {
  const text = at("input").value;
  if (running || !text.trim()) return;
  running = new AbortController();
  at("input").value = "";
  at("send").disabled = true;
  at("stop").disabled = false;
  const own = running;
  await answer(text, own.signal);
  if (running === own) idle();
}

function idle() {
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  at("input").focus();
}

async function findModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await refusal(response));
  model = (await response.json()).data[0].id;
  at("model").textContent = model;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("reset").addEventListener("click", () => {
  running?.abort();
  idle();
  messages = [];
  at("log").replaceChildren();
});
findModel().catch((error) => (at("model").textContent = error.message)); // asked again with the first message
