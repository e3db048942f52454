"use strict";
// The time line on a canvas, drawn from the page's data. Times in seconds (or units), bytes in bytes.
//   data.runs      one, or predicted and measured: records, bubbles, critical path, memory curves
//   data.chunks    of the plan, which all runs share
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas");
const context = canvas.getContext("2d");
const tip = document.getElementById("tip");
const details = document.getElementById("details");
const element = (id) => document.getElementById(id);
const GIB = 2 ** 30;

const LEFT = 92, RIGHT = 16, AXIS = 24, GAP = 5, HEADING = 24;
const { ink: INK, quiet: QUIET, line: LINE, idle: IDLE, hot: HOT, critical: CRITICAL, memory: MEMORY, fill: FILL } = data.colours;
const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const ranks = data.ranks.length, shared = ranks < data.stages.length;
const end = Math.max(...data.runs.map((run) => run.seconds)) || 1;

// [run][rank]: bars sorted by start, for binary search.
const bars = data.runs.map((run, r) => {
  const rows = data.ranks.map(() => []);
  const critical = new Set(run.critical.map(([stage, op]) => `${stage} ${op}`));
  for (const [stage, kind, chunk, start, stop, peak] of run.records) {
    const op = data.kinds[kind].letter + chunk, name = shared ? `${data.kinds[kind].letter}${stage}.${chunk}` : op;
    const rank = data.rank_of[stage];
    rows[rank].push({ run: r, rank, stage, kind, chunk, op, name, start, stop, peak, critical: critical.has(`${stage} ${op}`) });
  }
  return rows;
});
const idles = data.runs.map((run, r) => {
  const rows = data.ranks.map(() => []);
  for (const [rank, start, stop, reason] of run.bubbles) rows[rank].push({ run: r, rank, start, stop, reason });
  return rows;
});
const transfers = data.runs.map((run) => {
  const rows = data.ranks.map(() => []);
  for (const [stage, name, colour, start, stop] of run.transfers) rows[data.rank_of[stage]].push({ name, colour, start, stop });
  return rows;
});
const byOp = bars.map((rows) => new Map(rows.flat().map((bar) => [`${bar.stage} ${bar.op}`, bar])));

let view = { start: 0, stop: end };
let width = 0, rows = [], height = 0;
let hovered = null, pinned = null, found = -1;

// --- numbers ------------------------------------------------------------------------------------

function digits(value, count) { return Number(value.toPrecision(count)).toString(); }
function time(value) {
  if (data.unit !== "s") return `${digits(value, 4)} ${data.unit}`;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size >= 1) return `${value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3)} s`;
  return size >= 1e-3 ? `${digits(value * 1e3, 4)} ms` : `${digits(value * 1e6, 4)} us`;
}
function bytes(value) {
  return Math.abs(value) >= GIB / 100 ? `${(value / GIB).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(2)} MiB`;
}
function share(value) { return `${(100 * value).toFixed(1)}%`; }
function ticks(start, stop, most) {
  const raw = (stop - start) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
  const places = [];
  for (let n = Math.ceil(start / step - 1e-9); n * step <= stop * (1 + 1e-12); n += 1) places.push(n * step);
  return { places, step };
}
function tickText(place, step) {
  let factor = 1, unit = data.unit;
  if (data.unit === "s" && end < 1) { factor = end >= 1e-3 ? 1e3 : 1e6; unit = end >= 1e-3 ? "ms" : "us"; }
  const after = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  return `${(place * factor).toFixed(Math.min(after, 12))} ${unit}`;
}

// --- geometry -----------------------------------------------------------------------------------

const x = (seconds) => LEFT + ((seconds - view.start) / (view.stop - view.start)) * (width - LEFT - RIGHT);
const seconds = (px) => view.start + ((px - LEFT) / (width - LEFT - RIGHT)) * (view.stop - view.start);

function layout() {
  width = canvas.parentElement.clientWidth;
  const memory = element("memory").checked;
  const bar = Math.max(16, Math.min(34, 300 / ranks)), curve = Math.max(24, Math.min(46, 300 / ranks));
  let y = AXIS;
  rows = [];
  data.runs.forEach((run, r) => {
    if (data.runs.length > 1) { rows.push({ what: "heading", run: r, y, height: HEADING }); y += HEADING; }
    for (let rank = 0; rank < ranks; rank += 1) {
      rows.push({ what: "bars", run: r, rank, y, height: bar });
      y += bar + 4;
      if (memory && run.curves.length) { rows.push({ what: "curve", run: r, rank, y, height: curve }); y += curve + 3; }
      y += GAP;
    }
    y += 6;
  });
  height = y;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  details.style.maxHeight = `${Math.max(260, height)}px`;
  paint();
}

// --- painting -----------------------------------------------------------------------------------

let waiting = false;
function paint() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; paintNow(); });
}

function text(string, px, py, size, colour, align = "left", weight = "") {
  context.font = `${weight} ${size}px ${FONT}`;
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(string, px, py);
}

function paintNow() {
  context.clearRect(0, 0, width, height);
  const { places, step } = ticks(view.start, view.stop, Math.max(2, (width - LEFT) / 120));
  context.fillStyle = LINE;
  for (const place of places) context.fillRect(x(place), AXIS - 4, 1, height);
  for (const place of places) text(tickText(place, step), x(place) + 4, 14, 11.5, QUIET);
  for (const row of rows) {
    if (row.what === "heading") text(data.runs[row.run].title, 10, row.y + 16, 14, INK, "left", "600");
    if (row.what === "bars") paintBars(row);
    if (row.what === "curve") paintCurve(row);
  }
  if (element("arrows").checked) paintArrows();
}

function clip(row, draw) {
  context.save();
  context.beginPath();
  context.rect(LEFT, row.y - 2, width - LEFT - RIGHT, row.height + 5);
  context.clip();
  draw();
  context.restore();
}

function firstVisible(list) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].stop < view.start) low = middle + 1; else high = middle;
  }
  return low;
}

function paintBars(row) {
  const run = data.runs[row.run], list = bars[row.run][row.rank];
  text(data.ranks[row.rank], LEFT - 10, row.y + row.height / 2 + 1, 12.5, INK, "right");
  if (row.height > 24) text(`${share(run.idle[row.rank])} idle`, LEFT - 10, row.y + row.height / 2 + 14, 10.5, QUIET, "right");
  clip(row, () => {
    context.fillStyle = IDLE;
    context.fillRect(x(0), row.y, x(run.seconds) - x(0), row.height);
    if (hovered && hovered.reason !== undefined && hovered.run === row.run && hovered.rank === row.rank) {
      context.fillStyle = "#fbe3df";
      context.fillRect(x(hovered.start), row.y, x(hovered.stop) - x(hovered.start), row.height);
    }
    for (const { colour, start, stop } of transfers[row.run][row.rank]) {
      if (stop < view.start || start > view.stop) continue;
      context.fillStyle = colour;
      context.fillRect(x(start), row.y + row.height * 0.35, Math.max(0.5, x(stop) - x(start)), row.height * 0.3);
    }
    const marked = [];
    for (let i = firstVisible(list); i < list.length && list[i].start <= view.stop; i += 1) {
      const bar = list[i], left = x(bar.start), wide = x(bar.stop) - left, chunk = data.chunks[bar.chunk];
      const inner = Math.max(0.4, wide > 3 ? wide - 0.7 : wide);
      context.fillStyle = chunk.fill[bar.kind];
      context.fillRect(left, row.y, inner, row.height);
      if (chunk.accent) { context.fillStyle = chunk.accent; context.fillRect(left, row.y, inner, 3); }
      const again = recomputed(bar);
      if (again) {
        const tall = Math.max(2.5, 0.4 * row.height * again);
        context.fillStyle = HOT;
        context.fillRect(left, row.y + row.height - tall, inner, tall);
      }
      if (wide > 13) {
        const size = Math.min(12, row.height * 0.55), visible = Math.max(left, LEFT);
        const label = wide > 8 * (bar.name.length + 1) ? bar.name : bar.name.slice(1);
        const middle = (visible + Math.min(left + wide, width - RIGHT)) / 2;
        if (wide > label.length * size * 0.62 + 3) text(label, middle, row.y + row.height / 2 + size * 0.36, size, chunk.ink, "center");
      }
      if (bar.critical && element("critical").checked) {
        context.fillStyle = CRITICAL;
        context.fillRect(left, row.y + row.height + 0.5, Math.max(wide, 1), 2.5);
      }
      if (bar.chunk === found || (hovered && hovered.chunk === bar.chunk)) marked.push([bar, "#e53935", 2]);
      if (pinned === bar) marked.push([bar, "#e53935", 3]);
    }
    for (const [bar, colour, thick] of marked) {
      context.strokeStyle = colour;
      context.lineWidth = thick;
      const left = x(bar.start);
      context.strokeRect(left + thick / 2, row.y + thick / 2, Math.max(0.5, x(bar.stop) - left - thick), row.height - thick);
    }
  });
}

function paintCurve(row) {
  const run = data.runs[row.run], curve = run.curves[row.rank], budget = run.budget[row.rank];
  const most = Math.max(...run.peaks, ...run.budget, 1) * 1.05, bottom = row.y + row.height;
  const y = (value) => bottom - (row.height * value) / most;
  text(bytes(run.peaks[row.rank]), LEFT - 10, bottom - row.height / 2 + 1, 10.5, budget && run.peaks[row.rank] > budget ? HOT : QUIET, "right");
  if (budget && row.height > 26) text(`of ${bytes(budget)}`, LEFT - 10, bottom - row.height / 2 + 13, 10.5, QUIET, "right");
  clip(row, () => {
    context.beginPath();
    context.moveTo(x(curve[0][0]), bottom);
    let level = 0;
    for (const [at, value] of curve) {
      context.lineTo(x(at), y(level));
      context.lineTo(x(at), y(value));
      level = value;
    }
    context.lineTo(x(run.seconds), y(level));
    context.lineTo(x(run.seconds), bottom);
    context.closePath();
    context.fillStyle = FILL;
    context.fill();
    context.strokeStyle = MEMORY;
    context.lineWidth = 1;
    context.stroke();
    if (budget) {
      context.strokeStyle = HOT;
      context.setLineDash([5, 3]);
      context.beginPath();
      context.moveTo(x(0), y(budget));
      context.lineTo(x(run.seconds), y(budget));
      context.stroke();
      context.setLineDash([]);
    }
  });
}

function paintArrows() {
  const bar = pinned || hovered;
  if (!bar || bar.op === undefined) return;
  const middle = (rank) => { const row = rows.find((r) => r.what === "bars" && r.run === bar.run && r.rank === rank); return row.y + row.height / 2; };
  context.strokeStyle = context.fillStyle = CRITICAL;
  context.lineWidth = 1.3;
  context.save();
  context.beginPath();
  context.rect(LEFT, AXIS, width - LEFT - RIGHT, height);
  context.clip();
  for (const { source } of needs(bar)) {
    const from = [x(source.stop), middle(source.rank)], to = [x(bar.start), middle(bar.rank)];
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(...to);
    context.stroke();
    context.beginPath();
    context.arc(...from, 3, 0, 2 * Math.PI);
    context.fill();
  }
  context.restore();
}

// --- what things are -----------------------------------------------------------------------------

function recomputed(bar) { return data.kinds[bar.kind].recomputes ? data.recomputed[bar.stage][bar.chunk] : 0; }

function needs(bar) {
  const chunk = data.chunks[bar.chunk], found = [];
  const last = data.stages.length - 1, stage = bar.stage;
  const there = { ANY: true, FIRST: stage === 0, LAST: stage === last, BEFORE_LAST: stage < last };
  for (const [letters, step, relation, why, at] of data.kinds[bar.kind].needs) {
    if (!there[at]) continue;
    const where = step === "last" ? last : stage + step;
    const others = relation === "SAME" ? [bar.chunk] : relation === "EARLIER" ? chunk.earlier : chunk.later;
    for (const other of others) for (const letter of letters) {
      const source = byOp[bar.run].get(`${where} ${letter}${other}`);
      if (source) found.push({ source, why });
    }
  }
  return found;
}

function shortText(thing) {
  if (thing.op === undefined) return thing.reason === undefined
    ? `${data.ranks[thing.rank]} at ${time(thing.at)}: ${bytes(thing.bytes)}`
    : `${data.ranks[thing.rank]} idle ${time(thing.stop - thing.start)}\n${thing.reason}`
      + transfers[thing.run][thing.rank].filter((t) => t.start < thing.stop && t.stop > thing.start)
        .map((t) => `\n${t.name}: ${time(t.stop - t.start)}`).join("");
  const chunk = data.chunks[thing.chunk], again = recomputed(thing), aside = data.offloaded[thing.stage][thing.chunk];
  return `${thing.op} on stage ${thing.stage}: ${data.kinds[thing.kind].name}, ${time(thing.stop - thing.start)}\n`
    + `${chunk.tokens} tokens: ${chunk.name}` + (again ? `\nrecomputes in ${share(again)} of the layers` : "")
    + (aside ? `\nactivations of ${share(aside)} of the layers offloaded` : "")
    + (thing.peak ? `\npeak ${bytes(thing.peak)}` : "");
}

function node(tag, content, attributes = {}) {
  const made = document.createElement(tag);
  if (content !== undefined) made.textContent = content;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function describe(thing) {
  details.replaceChildren();
  const list = node("dl");
  const add = (name, value) => list.append(node("dt", name), node("dd", value));
  if (thing.op === undefined) {
    if (thing.reason === undefined) return;
    details.append(node("h2", `${data.ranks[thing.rank]} idle`));
    add("from", time(thing.start));
    add("to", time(thing.stop));
    add("for", `${time(thing.stop - thing.start)}, ${share((thing.stop - thing.start) / data.runs[thing.run].seconds)} of the iteration`);
    add("why", thing.reason);
    details.append(list);
    return;
  }
  const chunk = data.chunks[thing.chunk];
  details.append(node("h2", `${thing.op} on stage ${thing.stage}`), node("div", data.kinds[thing.kind].name, { class: "quiet" }));
  if (data.runs.length > 1) add("run", data.runs[thing.run].title);
  add("from", time(thing.start));
  add("to", time(thing.stop));
  add("takes", time(thing.stop - thing.start));
  for (const [r, other] of byOp.map((ops) => ops.get(`${thing.stage} ${thing.op}`)).entries()) {
    if (other && r !== thing.run) add(data.runs[r].title, `${time(other.stop - other.start)} (${share((other.stop - other.start) / (thing.stop - thing.start))})`);
  }
  if (thing.peak) add("peak", bytes(thing.peak));
  add("critical", thing.critical ? "yes" : "no");
  add("recompute", `${data.recompute[thing.stage][thing.chunk]} (layers: k keep, f full, o offloaded, others named modules)`);
  add("chunk", `${chunk.tokens} tokens, ${chunk.pairs} query-key pairs: ${chunk.name}`);
  add("holds", chunk.spans);
  for (const { source, why } of needs(thing)) add("needs", `${source.op} of stage ${source.stage}, done at ${time(source.stop)} (${why})`);
  details.append(list);
}

// --- pointer and keys ------------------------------------------------------------------------------

function thingAt(px, py) {
  const row = rows.find((r) => py >= r.y && py < r.y + r.height);
  if (!row || row.what === "heading" || px < LEFT || px > width - RIGHT) return null;
  const at = seconds(px);
  if (row.what === "curve") {
    const curve = data.runs[row.run].curves[row.rank];
    let value = curve[0][1];
    for (const [when, held] of curve) { if (when > at) break; value = held; }
    return { run: row.run, rank: row.rank, at, bytes: value };
  }
  const slack = (view.stop - view.start) / (width - LEFT - RIGHT);
  const list = bars[row.run][row.rank];
  for (let i = firstVisible(list); i < list.length && list[i].start <= at + slack; i += 1) {
    if (at <= list[i].stop && at >= list[i].start) return list[i];
  }
  return idles[row.run][row.rank].find((idle) => at >= idle.start && at <= idle.stop) || null;
}

function zoom(factor, at = (view.start + view.stop) / 2) {
  const span = Math.max(end * 1e-5, Math.min(end, (view.stop - view.start) * factor));
  const part = (at - view.start) / (view.stop - view.start);
  moveTo(at - part * span, span);
}
function moveTo(start, span = view.stop - view.start) {
  const from = Math.max(0, Math.min(end - span, start));
  view = { start: from, stop: from + span };
  paint();
}
function show(start, stop, around = 6) {
  const span = Math.min(end, Math.max((stop - start) * around, end / 60));
  moveTo((start + stop) / 2 - span / 2, span);
  canvas.scrollIntoView({ block: "nearest" });
}

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  drag = { px: event.clientX, start: view.start, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  const box = canvas.getBoundingClientRect();
  if (drag) {
    const shift = event.clientX - drag.px;
    if (Math.abs(shift) > 3) { drag.moved = true; canvas.classList.add("dragging"); tip.hidden = true; }
    if (drag.moved) moveTo(drag.start - (shift * (view.stop - view.start)) / (width - LEFT - RIGHT));
    return;
  }
  hovered = thingAt(event.clientX - box.left, event.clientY - box.top);
  tip.hidden = !hovered;
  if (hovered) {
    tip.textContent = shortText(hovered);
    const wide = tip.offsetWidth, tall = tip.offsetHeight;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - wide - 8)}px`;
    tip.style.top = `${event.clientY + 18 + tall > window.innerHeight ? event.clientY - tall - 10 : event.clientY + 18}px`;
    if (!pinned) describe(hovered);
  }
  paint();
});
canvas.addEventListener("pointerup", (event) => {
  canvas.classList.remove("dragging");
  if (drag && !drag.moved) {
    const box = canvas.getBoundingClientRect();
    const thing = thingAt(event.clientX - box.left, event.clientY - box.top);
    pinned = thing && (thing.op !== undefined || thing.reason !== undefined) && thing !== pinned ? thing : null;
    if (thing) describe(thing);
  }
  drag = null;
  paint();
});
canvas.addEventListener("pointerleave", () => { hovered = null; tip.hidden = true; paint(); });
canvas.addEventListener("wheel", (event) => {
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    moveTo(view.start + (event.deltaX * (view.stop - view.start)) / (width - LEFT - RIGHT));
    return;
  }
  event.preventDefault();
  zoom(1.0015 ** event.deltaY, seconds(event.clientX - canvas.getBoundingClientRect().left));
}, { passive: false });
canvas.addEventListener("dblclick", () => { pinned = null; moveTo(0, end); });
canvas.addEventListener("keydown", (event) => {
  const step = (view.stop - view.start) / 5;
  const action = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), "0": () => moveTo(0, end),
    ArrowLeft: () => moveTo(view.start - step), ArrowRight: () => moveTo(view.start + step) }[event.key];
  if (action) { event.preventDefault(); action(); }
});
element("fit").onclick = () => moveTo(0, end);
element("in").onclick = () => zoom(0.6);
element("out").onclick = () => zoom(1.6);
element("memory").onchange = layout;
element("critical").onchange = paint;
element("arrows").onchange = paint;
element("find").oninput = (event) => {
  found = event.target.value.trim() === "" ? -1 : Number(event.target.value);
  const hits = bars[0].flat().filter((bar) => bar.chunk === found);
  if (hits.length) show(Math.min(...hits.map((b) => b.start)), Math.max(...hits.map((b) => b.stop)), 1.2);
  paint();
};
new ResizeObserver(layout).observe(canvas.parentElement);

// --- head and tables -------------------------------------------------------------------------------

document.querySelector("h1").textContent = data.title;
for (const run of data.runs) {
  const span = node("span");
  span.innerHTML = `${data.runs.length > 1 ? "<i></i> " : ""}<b></b> &middot; bubbles <b></b>`;
  if (data.runs.length > 1) span.querySelector("i").textContent = run.title;
  const [total, idle] = span.querySelectorAll("b");
  total.textContent = time(run.seconds);
  idle.textContent = share(run.bubble_ratio);
  element("figures").append(span);
}
element("figures").append(node("span", data.summary));
for (const [marks, name] of data.legend) {
  const entry = node("span");
  if (marks === "dashed") entry.append(node("i", undefined, { class: "dashed" }));
  for (const colour of marks === "dashed" ? [] : marks) {
    const mark = node("i");
    mark.style.background = colour;
    if (marks.length > 1) mark.style.width = "7px";
    if (colour !== marks[marks.length - 1]) mark.style.marginRight = "0";
    entry.append(mark);
  }
  entry.append(name);
  element("legend").append(entry);
}

function table(headers, body, numeric) {
  const box = node("div", undefined, { class: "scroll" });
  const made = node("table"), head = node("tr");
  let ascending = true, sorted = -1;
  headers.forEach((header, column) => {
    const cell = node("th", header, numeric[column] ? { class: "number" } : {});
    cell.onclick = () => {
      ascending = sorted === column ? !ascending : !numeric[column];
      sorted = column;
      body.sort((a, b) => (ascending ? 1 : -1) * (a.keys[column] < b.keys[column] ? -1 : a.keys[column] > b.keys[column] ? 1 : 0));
      fill();
    };
    head.append(cell);
  });
  const rows = node("tbody");
  function fill() {
    rows.replaceChildren(...body.slice(0, 500).map((line) => {
      const row = node("tr", undefined, line.go ? { "data-go": "" } : {});
      line.cells.forEach((cell, column) => row.append(node("td", cell, { class: (numeric[column] ? "number" : "") + (line.over === column ? " over" : "") })));
      if (line.go) row.onclick = line.go;
      return row;
    }));
    if (body.length > 500) {
      const row = node("tr");
      row.append(node("td", `${body.length - 500} more; sort by another column to see them`, { class: "quiet", colspan: headers.length }));
      rows.append(row);
    }
  }
  fill();
  const top = node("thead");
  top.append(head);
  made.append(top, rows);
  box.append(made);
  return box;
}

const many = data.runs.length > 1;
const tabs = {
  "Bubbles": () => table(["run", shared ? "rank" : "stage", "from", "for", "why"].slice(many ? 0 : 1), idles.flat(2).sort((a, b) => (b.stop - b.start) - (a.stop - a.start)).map((idle) => ({
    keys: [data.runs[idle.run].title, idle.rank, idle.start, idle.stop - idle.start, idle.reason].slice(many ? 0 : 1),
    cells: [data.runs[idle.run].title, data.ranks[idle.rank].split(" ")[1], time(idle.start), time(idle.stop - idle.start), idle.reason].slice(many ? 0 : 1),
    go: () => { pinned = idle; describe(idle); show(idle.start, idle.stop); },
  })), [false, true, true, true, false].slice(many ? 0 : 1)),
  "Critical path": () => table(["run", "op", "stage", "from", "takes", "kind", "chunk holds"].slice(many ? 0 : 1), data.runs.flatMap((run, r) => run.critical.map(([stage, op]) => byOp[r].get(`${stage} ${op}`))).map((bar) => ({
    keys: [data.runs[bar.run].title, bar.op, bar.stage, bar.start, bar.stop - bar.start, bar.kind, bar.chunk].slice(many ? 0 : 1),
    cells: [data.runs[bar.run].title, bar.op, bar.stage, time(bar.start), time(bar.stop - bar.start), data.kinds[bar.kind].name, data.chunks[bar.chunk].name].slice(many ? 0 : 1),
    go: () => { pinned = bar; describe(bar); show(bar.start, bar.stop); },
  })), [false, false, true, true, true, false, false].slice(many ? 0 : 1)),
  "Chunks": () => table(["chunk", "tokens", "query-key pairs", "holds", "spans: document[start:stop], @ its rank where one computes it alone"], data.chunks.map((chunk, c) => ({
    keys: [c, chunk.tokens, chunk.pairs, chunk.name, chunk.spans],
    cells: [c, chunk.tokens, chunk.pairs, chunk.name, chunk.spans.length > 120 ? `${chunk.spans.slice(0, 117)}...` : chunk.spans],
    go: () => { element("find").value = c; element("find").dispatchEvent(new Event("input")); },
  })), [true, true, true, false, false]),
  [shared ? "Ranks" : "Stages"]: () => table(["run", shared ? "rank" : "stage", "layers", "busy", "idle", "peak", "budget", "recomputed layers"].slice(many ? 0 : 1), data.runs.flatMap((run) => data.ranks.map((name, s) => {
    const mine = data.stages.map((_, stage) => stage).filter((stage) => data.rank_of[stage] === s);
    const layers = mine.map((stage) => data.stages[stage].layers).join(" "), again = mine.flatMap((stage) => data.recomputed[stage]);
    const average = again.reduce((a, b) => a + b, 0) / again.length, budget = run.budget[s], number = name.split(" ")[1];
    const peak = run.peaks.length ? bytes(run.peaks[s]) : "";
    return {
      keys: [run.title, Number(number), mine.reduce((sum, stage) => sum + data.stages[stage].layers, 0), -run.idle[s], run.idle[s], run.peaks[s] || 0, budget || 0, average].slice(many ? 0 : 1),
      cells: [run.title, number, layers, share(1 - run.idle[s]), share(run.idle[s]), peak, budget ? bytes(budget) : "none", share(average)].slice(many ? 0 : 1),
      over: budget && run.peaks[s] > budget ? (many ? 5 : 4) : -1,
    };
  })), [false, true, true, true, true, true, true, true].slice(many ? 0 : 1)),
};
for (const [name, make] of Object.entries(tabs)) {
  const button = node("button", name, { role: "tab", "aria-selected": "false" });
  button.onclick = () => {
    for (const other of element("tabs").children) other.setAttribute("aria-selected", String(other === button));
    element("tables").replaceChildren(make());
  };
  element("tabs").append(button);
}
element("tabs").firstChild.click();
layout();
