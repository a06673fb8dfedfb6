"""Static beside continuous batching as an animated HTML page: time on one axis, slots on the other.

It draws two runs of the real scheduler over the same requests, not a sketch. The page needs no network and no library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape

from qserve.evals.simulator.cost import CostModel
from qserve.evals.simulator.fleet import Fleet, FleetConfig
from qserve.evals.simulator.replica import ReplicaConfig
from qserve.evals.simulator.traffic import Arrival

SLOTS = 8
REQUESTS = 40


@dataclass(frozen=True)
class Bar:
    """One request in its slot: its prompt is computed from ``start``, its tokens come from ``first`` to ``end``."""

    request: int
    slot: int
    start: float
    first: float
    end: float
    output: int


def page(arrivals: Sequence[Arrival], replica: ReplicaConfig, cost: CostModel, title: str) -> str:
    """The page for the first 40 of ``arrivals``, which all wait at the beginning, on 8 slots."""
    waiting = [replace(arrival, time=0.0) for arrival in arrivals[:REQUESTS]]
    slots = min(SLOTS, replica.scheduler.max_num_seqs)
    # The pool holds them all and the queue is long enough, so that they compete for places alone.
    config = replace(
        replica,
        scheduler=replace(replica.scheduler, max_num_seqs=slots, max_waiting=REQUESTS, max_waiting_tokens=1 << 40),
        num_blocks=sum(-(-(each.prompt + each.output) // replica.block_size) + 1 for each in waiting),
    )
    runs = {
        name: [asdict(bar) for bar in bars(waiting, replace(config, static=static), cost)]
        for name, static in (("static", True), ("continuous", False))
    }
    data = json.dumps({"slots": slots, "runs": runs}, allow_nan=False)
    seconds = {name: max((bar["end"] for bar in run), default=0.0) for name, run in runs.items()}
    tokens = sum(bar["output"] for bar in runs["static"])
    summary = (
        f"{len(runs['static'])} requests with {tokens:,} output tokens on {slots} slots: static batching takes "
        f"{seconds['static']:.2f} s, continuous batching {seconds['continuous']:.2f} s, "
        f"{seconds['static'] / max(seconds['continuous'], 1e-12):.2f} times the throughput."
    )
    return _PAGE.replace("@TITLE@", escape(title)).replace("@SUMMARY@", escape(summary)).replace("@DATA@", data)


def bars(arrivals: Sequence[Arrival], config: ReplicaConfig, cost: CostModel) -> list[Bar]:
    """The requests of one run, each in its slot: the lowest that was free when it began to run."""
    records = Fleet(FleetConfig(config), cost).run(arrivals).records
    found = []
    until = [0.0] * config.scheduler.max_num_seqs
    for start, index, first, end, output in sorted(
        zip(records.scheduled, records.index, records.first, records.end, records.output)
    ):
        slot = next(slot for slot, busy in enumerate(until) if busy <= start)
        until[slot] = end
        found.append(Bar(index, slot, start, first, end, output))
    return found


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --ink: #1c2126; --soft: #69727c; --page: #fbfbfa; --bubble: #00000012; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #98a1aa; --page: #15181b; --bubble: #ffffff10; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .3rem; display: flex; gap: 1rem; }
h2 span { color: var(--soft); font-weight: normal; font-variant-numeric: tabular-nums; }
canvas { width: 100%; display: block; }
.bar { height: .8rem; border-radius: .2rem; background: var(--bubble); margin: .4rem 0 0; overflow: hidden; }
.bar div { height: 100%; width: 0; background: #2a9d6f; } #static-bar { background: #e6842a; }
.controls { display: flex; gap: 1rem; align-items: center; margin: 1.2rem 0; }
.controls input { flex: 1; } button { font: inherit; padding: .2rem .9rem; }
.key { color: var(--soft); } .key i { display: inline-block; width: 1.1em; height: .8em; margin: 0 .3em 0 1em; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
<p>@SUMMARY@ Both are the engine's own scheduler; a static batch starts when the one before it has ended.</p>
<h2>Static batching <span id="static-text"></span></h2>
<canvas id="static" role="img" aria-label="Slots over time with static batching"></canvas>
<div class="bar"><div id="static-bar"></div></div>
<h2>Continuous batching <span id="continuous-text"></span></h2>
<canvas id="continuous" role="img" aria-label="Slots over time with continuous batching"></canvas>
<div class="bar"><div id="continuous-bar"></div></div>
<div class="controls"><button id="play">Pause</button>
<input id="time" type="range" min="0" max="1" step="0.001" value="0" aria-label="Time"></div>
<p class="key"><i style="background:#3182bd"></i>tokens come<i style="background:#3182bd66"></i>the prompt is computed
<i style="background:repeating-linear-gradient(45deg,#c8588f99 0 3px,transparent 3px 6px)"></i>bubble: an empty slot
while others run. The bars are output tokens per second so far.</p>
<script>
"use strict";
const data = @DATA@;
const names = ["static", "continuous"];
const colours = ["#3182bd", "#2a9d6f", "#8a7fd1", "#b0912f", "#4fb3bf", "#d05a4e", "#6b8e3d", "#7a6a5d"];
const ends = {};
for (const name of names) ends[name] = Math.max(...data.runs[name].map(bar => bar.end));
const total = Math.max(ends.static, ends.continuous);
const byId = id => document.getElementById(id);
const made = (bar, t) => t <= bar.start ? 0 : t >= bar.end ? bar.output : t < bar.first ? 0
  : 1 + (bar.output - 1) * (t - bar.first) / Math.max(bar.end - bar.first, 1e-12);
const rate = (name, t) => {
  const until = Math.min(t, ends[name]);
  return until > 0 ? data.runs[name].reduce((sum, bar) => sum + made(bar, until), 0) / until : 0;
};
const best = Math.max(...names.map(name => {
  let most = 0;
  for (let i = 1; i <= 200; i++) most = Math.max(most, rate(name, total * i / 200));
  return most;
}));
function stripes(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = "#c8588f99";
  pen.lineWidth = 1.5;
  for (const x of [-8, 0, 8]) { pen.moveTo(x, 8); pen.lineTo(x + 8, 0); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
function draw(name, t) {
  const canvas = byId(name), ratio = devicePixelRatio || 1, width = canvas.clientWidth, row = 22;
  const height = data.slots * row + 18;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d"), style = getComputedStyle(document.body);
  context.scale(ratio, ratio);
  const x = s => s / total * (width - 2) + 1;
  const until = Math.min(t, ends[name]);
  context.fillStyle = stripes(context);
  for (let slot = 0; slot < data.slots; slot++) context.fillRect(x(0), slot * row + 1, x(until) - x(0), row - 3);
  for (const bar of data.runs[name]) {
    if (bar.start >= t) continue;
    const top = bar.slot * row + 1, stop = Math.min(bar.end, t);
    context.clearRect(x(bar.start), top, x(stop) - x(bar.start), row - 3);
    context.fillStyle = colours[bar.request % colours.length];
    context.globalAlpha = 0.4;
    context.fillRect(x(bar.start), top, x(Math.min(bar.first, stop)) - x(bar.start), row - 3);
    context.globalAlpha = 1;
    if (stop > bar.first) context.fillRect(x(bar.first), top, Math.max(1, x(stop) - x(bar.first) - 1), row - 3);
    if (x(stop) - x(bar.start) > 24) {
      context.fillStyle = "#fff";
      context.font = "11px system-ui, sans-serif";
      context.fillText(bar.request + 1, x(bar.start) + 5, top + 14);
    }
  }
  context.fillStyle = style.getPropertyValue("--soft");
  context.font = "11px system-ui, sans-serif";
  for (let i = 0; i <= 5; i++) {
    const text = (total * i / 5).toPrecision(2) + " s", at = x(total * i / 5);
    context.textAlign = i === 0 ? "left" : i === 5 ? "right" : "center";
    context.fillText(text, at, height - 4);
  }
  context.textAlign = "left";
  context.fillRect(x(until), 0, 1, data.slots * row);
  let held = 0;
  for (const bar of data.runs[name]) held += Math.max(0, Math.min(bar.end, t) - bar.start);
  const busy = until > 0 ? held / (until * data.slots) : 0;
  const speed = rate(name, t);
  byId(name + "-bar").style.width = 100 * speed / best + "%";
  byId(name + "-text").textContent = speed.toFixed(speed < 10 ? 2 : 0) + " tokens/s, slots in use "
    + (100 * busy).toFixed(0) + " %" + (t >= ends[name] ? ", done after " + ends[name].toPrecision(3) + " s" : "");
}
let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, at = playing ? 0 : 1, before = 0;
const show = () => { for (const name of names) draw(name, at * total); byId("time").value = at; };
const label = () => { byId("play").textContent = playing ? "Pause" : at >= 1 ? "Again" : "Play"; };
function tick(now) {
  if (playing) {
    at = Math.min(1, at + (before ? now - before : 0) / 14000);
    if (at >= 1) playing = false;
    show();
    label();
  }
  before = now;
  requestAnimationFrame(tick);
}
byId("play").onclick = () => { if (!playing && at >= 1) at = 0; playing = !playing; label(); };
byId("time").oninput = event => { at = Number(event.target.value); playing = false; show(); label(); };
addEventListener("resize", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
label();
show();
requestAnimationFrame(tick);
</script>
</body>
</html>
"""
