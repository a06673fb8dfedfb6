// Drawing by hand: sharp canvases, the grid of blocks, bars of steps, and small lines.

export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A colour of its own for each request, far from those of its neighbours in number: golden-angle steps of the hue.
export function colour(id) {
  const [request = 0, choice = 0] = (id.match(/\d+/g) ?? []).map(Number);
  return `oklch(${ink("request-light")} 0.14 ${((request + 5 * choice) * 137.508 + 265) % 360})`;
}

// The context of a canvas in CSS pixels, empty, and its size.
function open(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (height !== undefined) canvas.style.height = `${height}px`;
  const tall = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(tall * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width, tall];
}

// `cells` are [fill, owner] in order. Returns a function from a place on the canvas to the number of its cell.
export function grid(canvas, cells, fills) {
  const count = cells.length;
  const width = canvas.clientWidth;
  let pitch = 18;
  while (pitch > 5 && Math.ceil(count / Math.floor(width / pitch)) * pitch > 330) pitch--;
  const columns = Math.max(1, Math.floor(width / pitch));
  pitch = width / columns;
  const [context] = open(canvas, Math.ceil(count / columns) * pitch);
  const side = pitch - (pitch > 8 ? 2 : 1);
  cells.forEach((cell, i) => {
    const [x, y] = [(i % columns) * pitch, Math.floor(i / columns) * pitch];
    context.fillStyle = fills(cell);
    context.beginPath();
    context.roundRect(x, y, side, side, pitch > 8 ? 2.5 : 1);
    context.fill();
    if (cell === 2) {
      // Shared blocks are crossed, so that they are told apart without colour.
      context.strokeStyle = ink("panel");
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(x + 1, y + side - 1);
      context.lineTo(x + side - 1, y + 1);
      context.stroke();
    }
  });
  return (x, y) => {
    const column = Math.floor(x / pitch);
    const at = Math.floor(y / pitch) * columns + column;
    return column < columns && at >= 0 && at < count ? at : null;
  };
}

// The newest step on the right. Prefill and decode have a lane and a scale each: a prompt of 512 tokens would hide
// the few tokens of the decodes.
export function bars(canvas, steps) {
  const [context, width, height] = open(canvas);
  const lane = (height - 10) / 2;
  const pitch = 5;
  const shown = steps.slice(-Math.floor((width - 34) / pitch));
  [["prefill_tokens", "prefill"], ["decode_tokens", "decode"]].forEach(([field, name], row) => {
    const base = Math.round(lane * (row + 1) + 10 * row);
    const most = Math.max(1, ...shown.map((step) => step[field]));
    context.fillStyle = ink("line");
    context.fillRect(0, base - 1, width, 1);
    context.fillStyle = ink(name);
    shown.forEach((step, i) => {
      if (!step[field]) return;
      const tall = Math.max(2, (step[field] / most) * (lane - 8));
      context.fillRect(width - (shown.length - i) * pitch, base - 1 - tall, pitch - 1, tall);
    });
    context.fillStyle = ink("muted");
    context.font = "11px ui-monospace, monospace";
    context.textBaseline = "top";
    if (shown.length) context.fillText(String(most), 0, base - lane + 2);
  });
}

// `points` are [x, y] with x in 0..1; the largest y touches the top.
export function line(canvas, points, name) {
  const [context, width, height] = open(canvas);
  context.fillStyle = ink("line");
  context.fillRect(0, height - 1, width, 1);
  if (!points.length) return;
  const most = Math.max(...points.map((point) => point[1])) || 1;
  const at = ([x, y]) => [x * (width - 4) + 2, height - 2 - (y / most) * (height - 6)];
  context.strokeStyle = context.fillStyle = ink(name);
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.beginPath();
  points.forEach((point) => context.lineTo(...at(point)));
  context.stroke();
  context.lineTo(at(points.at(-1))[0], height - 1);
  context.lineTo(at(points[0])[0], height - 1);
  context.globalAlpha = 0.12;
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  context.arc(...at(points.at(-1)), 2.5, 0, 7);
  context.fill();
}
