// The conversation: what was said, what is being said, and how fast.

import { events } from "./api.js";
import { render } from "./text.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const hello = $("hello");
const message = $("message");

let said = []; // messages that were answered, at least in part, with their answers
let running = null; // the AbortController of the answer that is being written

export function startChat(model) {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && message.value.trim()) answer(model, message.value.trim());
  });
  message.addEventListener("keydown", (event) => {
    // Enter also ends the composition of a character in some languages.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  message.addEventListener("input", fit);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("new-chat").addEventListener("click", () => {
    running?.abort();
    said = [];
    log.replaceChildren(hello);
    message.focus();
  });
}

async function answer(model, question) {
  const conversation = said;
  const control = (running = new AbortController());
  busy(true);
  hello.remove();
  const asked = bubble("user");
  render(asked.body, question);
  const shown = bubble("assistant");
  shown.item.setAttribute("aria-busy", "true");
  message.value = "";
  fit();
  log.scrollTop = log.scrollHeight;

  const began = performance.now();
  const got = { text: "", thought: "", first: null, last: null, tokens: null, end: null };
  let failure = null;
  let drawing = 0;
  try {
    const request = { method: "POST", signal: control.signal, headers: { "Content-Type": "application/json" } };
    request.body = JSON.stringify(body(model(), [...conversation, { role: "user", content: question }]));
    for await (const { choices, usage } of events("/v1/chat/completions", request)) {
      if (usage) got.tokens = usage.completion_tokens;
      for (const choice of choices) {
        got.end = choice.finish_reason ?? got.end;
        const { content, reasoning_content: thought } = choice.delta;
        if (!content && !thought) continue;
        got.last = performance.now();
        got.first ??= got.last;
        got.text += content ?? "";
        got.thought += thought ?? "";
        drawing ||= requestAnimationFrame(() => {
          drawing = 0;
          follow(() => write(shown, got));
        });
      }
    }
  } catch (error) {
    if (control.signal.aborted) got.end = "stopped";
    else failure = error;
  }
  cancelAnimationFrame(drawing);
  follow(() => {
    write(shown, got);
    shown.note.textContent = speed(got, began);
    if (failure) {
      shown.note.textContent = failure.message;
      shown.note.className = "note error";
    }
  });
  shown.item.removeAttribute("aria-busy");
  running = null;
  busy(false);
  if (conversation !== said) return; // a new chat began meanwhile
  if (got.text || !(failure || got.end === "stopped")) {
    // A model may write NUL, and the server takes none.
    const answer = got.text.replaceAll("\0", "\uFFFD");
    said.push({ role: "user", content: question }, { role: "assistant", content: answer });
  } else if (!message.value) {
    message.value = question; // nothing came of it: it may be sent again
    fit();
  }
}

// Reasoning, where the server splits it off, is folded away as soon as the answer begins.
function write({ item, body }, { text, thought }) {
  if (thought) {
    let folded = item.querySelector("details");
    if (!folded) {
      folded = document.createElement("details");
      folded.open = true;
      folded.append(document.createElement("summary"), document.createElement("div"));
      folded.firstChild.textContent = "Reasoning";
      item.prepend(folded);
    }
    render(folded.lastChild, thought);
    if (text && !body.firstChild) folded.open = false;
  }
  render(body, text);
}

function body(model, messages) {
  const system = $("system").value.trim();
  const asked = { model, stream: true, stream_options: { include_usage: true } };
  asked.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  if ($("temperature").value !== "") asked.temperature = $("temperature").valueAsNumber;
  if ($("max-tokens").value !== "") asked.max_tokens = $("max-tokens").valueAsNumber;
  return asked;
}

function speed({ first, last, tokens, end }, began) {
  const parts = [];
  if (first !== null) parts.push(`TTFT ${seconds(first - began)}`);
  if (tokens > 1 && last > first) parts.push(`${((tokens - 1) / ((last - first) / 1000)).toFixed(1)} tokens/s`);
  if (tokens !== null) parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (end === "stopped") parts.push("stopped");
  if (end === "length") parts.push("cut off at the limit of tokens");
  return parts.join(" · ");
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

function bubble(role) {
  const item = document.createElement("article");
  item.className = role;
  item.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const [text, note] = [document.createElement("div"), document.createElement("p")];
  text.className = "body";
  note.className = "note";
  item.append(text, note);
  log.append(item);
  return { item, body: text, note };
}

// Stays at the end of the conversation while it grows, unless the reader went elsewhere in it.
function follow(change) {
  const there = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (there) log.scrollTop = log.scrollHeight;
}

function busy(is) {
  const focused = document.activeElement;
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (focused === $("send") || focused === $("stop")) (is ? $("stop") : message).focus();
}

function fit() {
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight + 2, 220)}px`;
}
