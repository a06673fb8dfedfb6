// The two views, and what the server says about its model.

import { call } from "./api.js";
import { startChat } from "./chat.js";
import { startEngine, stopEngine } from "./engine.js";

const $ = (id) => document.getElementById(id);
const views = ["chat", "engine"];
let model = null;

function show(name) {
  for (const view of views) {
    const on = view === name;
    $(view).hidden = !on;
    $(`tab-${view}`).setAttribute("aria-selected", String(on));
    $(`tab-${view}`).tabIndex = on ? 0 : -1;
  }
  $("toggle-side").hidden = name !== "chat";
  history.replaceState(null, "", name === "chat" ? "/" : `#${name}`);
  look();
}

// The engine is watched only while somebody can see it.
function look() {
  if (!$("engine").hidden && !document.hidden) startEngine();
  else stopEngine();
}

for (const view of views) {
  $(`tab-${view}`).addEventListener("click", () => show(view));
  $(`tab-${view}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = views[1 - views.indexOf(view)];
    show(other);
    $(`tab-${other}`).focus();
  });
}
document.addEventListener("visibilitychange", look);
$("toggle-side").addEventListener("click", () => {
  const open = $("side").classList.toggle("open");
  $("toggle-side").setAttribute("aria-expanded", String(open));
});

async function describe() {
  const [entry] = (await (await call("/v1/models")).json()).data;
  model = entry.id;
  document.title = `${model} · qserve`;
  $("model-name").textContent = $("serving").textContent = model;
  const { stored_bytes: bytes, quality_card: card } = entry.qserve;
  $("model-facts").textContent = `${size(bytes)} · context ${entry.max_model_len.toLocaleString("en")}`;
  if (!card) {
    $("model-scope").textContent = "It has no quality card: nobody measured what quantization cost.";
    return;
  }
  row("KL divergence", `${card.kl_mean.toFixed(4)} nats`);
  row("Perplexity", card.perplexity.toFixed(2));
  row("Perplexity, base", card.perplexity_base.toFixed(2));
  row("Top-1 agreement", `${(100 * card.top1_agreement).toFixed(1)}%`);
  $("model-scope").textContent = `Against ${card.base_name}, ${card.tokens.toLocaleString("en")} tokens of ${card.data_name}`;
}

function row(name, value) {
  const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
  term.textContent = name;
  detail.textContent = value;
  $("model-card").append(term, detail);
}

function size(bytes) {
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
}

startChat(() => model ?? undefined);
show(location.hash === "#engine" ? "engine" : "chat");
describe().catch((error) => {
  $("model-name").textContent = "no model";
  $("model-facts").textContent = error.message;
});
