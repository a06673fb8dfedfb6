// A live picture of the engine, for as long as it is looked at.

import { NoKey, events } from "./api.js";
import { bars, colour, grid, ink, line } from "./draw.js";

const $ = (id) => document.getElementById(id);
const MINUTE = 60;
const RETRY = 2000;
const STEPS = 512;
const FIRST_TOKENS = 64;

let watching = null; // the AbortController of the stream
let now = null; // the last picture
let steps = [];
let firstTokens = [];
let rates = []; // { time, tokens } of the last minute; tokens counts from the server's start
let cells = []; // what each cell of the grid holds
let cellAt = () => null;
let pointed = null; // the request whose row is pointed at

export function startEngine() {
  if (!watching) watch((watching = new AbortController()));
}

export function stopEngine() {
  watching?.abort();
  watching = null;
}

async function watch(control) {
  while (!control.signal.aborted) {
    try {
      for await (const picture of events("/v1/engine/events", { signal: control.signal })) {
        if (control.signal.aborted) return;
        $("lost").hidden = true;
        $("lost").textContent = "";
        take(picture);
        draw();
      }
    } catch (error) {
      if (control.signal.aborted) return;
      const again = error instanceof NoKey ? "" : " Trying again.";
      $("lost").textContent = `No picture of the engine: ${error.message}.${again}`;
      $("lost").hidden = false;
      if (!again) return;
    }
    $("lost").textContent ||= "The server is shutting down.";
    $("lost").hidden = false;
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

function take(picture) {
  if (now && picture.time < now.time) steps = firstTokens = rates = []; // another start of the server
  const known = steps.at(-1)?.step ?? -1;
  steps = [...steps, ...picture.steps.filter((step) => step.step > known)].slice(-STEPS);
  const last = firstTokens.at(-1)?.time ?? -Infinity;
  firstTokens = [...firstTokens, ...picture.first_tokens.filter((first) => first.time > last)].slice(-FIRST_TOKENS);
  rates = [...rates, { time: picture.time, tokens: picture.output_tokens }];
  rates = rates.filter(({ time }) => picture.time - time <= MINUTE);
  now = picture;
}

function draw() {
  if (!now || $("engine").hidden) return;
  const { kv, requests } = now;
  put("running", now.num_running);
  put("waiting", now.num_waiting);
  put("usage", `${kv.used && Math.max(0.1, (100 * kv.used) / kv.total).toFixed(kv.used * 10 < kv.total ? 1 : 0)}%`);
  put("hits", now.prefix_queries ? `${Math.round((100 * now.prefix_hits) / now.prefix_queries)}%` : "–");
  $("drafts").hidden = !now.num_draft_tokens; // most servers draft none
  put("accepted", `${Math.round((100 * now.num_accepted_tokens) / (now.num_draft_tokens || 1))}%`);
  const speeds = rates.slice(1).map((rate, i) => {
    const before = rates[Math.max(0, i - 3)]; // over a second
    return [1 - (now.time - rate.time) / MINUTE, (rate.tokens - before.tokens) / (rate.time - before.time || 1)];
  });
  put("rate", (speeds.at(-1)?.[1] ?? 0).toFixed(1));
  line($("rate-line"), speeds, "decode");
  const first = firstTokens.at(-1)?.seconds;
  put("ttft", first === undefined ? "–" : first < 1 ? `${Math.round(1000 * first)} ms` : `${first.toFixed(2)} s`);
  line(
    $("ttft-line"),
    firstTokens.map(({ seconds }, i) => [firstTokens.length > 1 ? i / (firstTokens.length - 1) : 1, seconds]),
    "prefill",
  );
  put("free", kv.free);
  put("cached", kv.cached);
  put("shared", kv.shared);
  put("own", kv.used - kv.shared);
  put("blocks-note", `${kv.total.toLocaleString("en")} of ${kv.block_size} tokens${kv.blocks_per_cell > 1 ? `, ${kv.blocks_per_cell} in a cell` : ""}`);
  drawGrid();
  bars($("steps"), steps);
  rows(requests, now.num_waiting);
}

function drawGrid() {
  const { kv, requests } = now;
  cells = kv.cells.flatMap(([what, count]) => Array(count).fill(what));
  const fixed = [ink("free"), ink("cached"), ink("shared")];
  const colours = requests.map(({ id }) => colour(id));
  const faded = ink("faded");
  cellAt = grid($("grid"), cells, (what) => {
    if (what < 3) return pointed && what === 2 ? faded : fixed[what];
    return pointed && requests[what - 3].id !== pointed ? faded : colours[what - 3];
  });
  $("grid").setAttribute("aria-label", `KV blocks: ${kv.used} of ${kv.total} in use, ${kv.cached} cached`);
}

function rows(requests, waiting) {
  const shown = requests.map((request) => {
    const row = document.createElement("tr");
    row.dataset.id = request.id;
    const swatch = document.createElement("i");
    swatch.style.background = request.blocks ? colour(request.id) : "transparent";
    const state = document.createElement("span");
    state.className = `state ${request.state}`;
    state.textContent = request.state;
    const cached = request.cached_tokens ? ` (${request.cached_tokens} cached)` : "";
    const numbers = [`${request.prompt_tokens}${cached}`, request.computed_tokens, request.output_tokens];
    for (const content of [[swatch, request.id], [state], ...numbers.map((n) => [n]), [request.blocks], [age(request.age)]]) {
      const cell = document.createElement("td");
      cell.append(...content);
      row.append(cell);
    }
    return row;
  });
  const more = waiting - requests.filter(({ state }) => state === "waiting" || state === "preempted").length;
  if (more > 0) {
    const row = document.createElement("tr");
    const cell = document.createElement("td");
    cell.colSpan = 7;
    cell.className = "muted";
    cell.textContent = `and ${more} more that wait`;
    row.append(cell);
    shown.push(row);
  }
  $("rows").replaceChildren(...shown);
  $("nobody").hidden = shown.length > 0;
}

function age(seconds) {
  return seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

function put(id, value) {
  $(id).textContent = value;
}

function point(id) {
  if (id === pointed) return;
  pointed = id;
  if (now) drawGrid();
}

$("rows").addEventListener("pointermove", (event) => point(event.target.closest("tr")?.dataset.id ?? null));
$("rows").addEventListener("pointerleave", () => point(null));
$("grid").addEventListener("pointermove", (event) => {
  const at = cellAt(event.offsetX, event.offsetY);
  const per = now?.kv.blocks_per_cell;
  const where = per > 1 ? `blocks ${at * per} to ${Math.min(now.kv.total, (at + 1) * per) - 1}` : `block ${at}`;
  const what = ["free", "cached prefix", "shared"][cells[at]] ?? now?.requests[cells[at] - 3]?.id;
  put("cell", at === null ? "" : `${where}: ${what}`);
});
$("grid").addEventListener("pointerleave", () => put("cell", ""));
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
