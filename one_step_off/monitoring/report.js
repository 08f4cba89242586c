"use strict";

// Draws the report of a run out of the JSON object that report.py collected.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SUMMARY = DATA.summary[0] || {};
const VERSIONS = DATA.versions[0] || {};
const PAGE = document.getElementById("page");
const SVG_NAMESPACE = "http://www.w3.org/2000/svg";
const UNKNOWN = "–";

// ---- elements ----

// Texts become text nodes and nothing else: what a model wrote is shown and never read as HTML.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) {
      node.addEventListener(name.slice(2), value);
    } else {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.filter(child => child !== null));
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

function addSection(title, ...children) {
  const id = title.toLowerCase().replace(/\W+/g, "_");
  PAGE.append(el("section", { id }, el("h2", {}, title), ...children));
}

function softText(text) {
  return el("p", { class: "soft" }, text);
}

function colorBox(color) {
  return el("i", { style: `background:${color}` });
}

// A table whose first column holds names. Spaces in front of a name indent it.
function table(heads, rows) {
  const children = [];
  if (heads) {
    const cells = heads.map((head, i) => el("th", i ? { style: "text-align:right" } : {}, head));
    children.push(el("thead", {}, el("tr", {}, ...cells)));
  }
  children.push(el("tbody", {}, ...rows.map(row => tableRow(row, heads !== null))));
  return el("table", {}, ...children);
}

function tableRow([name, ...values], hasHeads) {
  const indent = name.length - name.trimStart().length;
  const style = indent ? { style: `padding-left:${indent * 8}px` } : {};
  const cells = values.map(value => {
    const isNumber = hasHeads || typeof value === "number";
    return el("td", isNumber ? { class: "number" } : {}, String(value));
  });
  return el("tr", {}, el("th", style, name), ...cells);
}

// ---- numbers ----

function isKnown(x) {
  return typeof x === "number" && Number.isFinite(x);
}

// A metric's values, one per step; null where a step has none.
function column(name) {
  return (DATA.columns[name] || []).map(x => (isKnown(x) ? x : null));
}

function hasValues(name) {
  return column(name).some(isKnown);
}

function isSupervised() {
  return hasValues("sft/loss");
}

function sum(name) {
  return column(name).reduce((total, x) => total + (x || 0), 0);
}

function minimum(values) {
  return values.reduce((a, b) => Math.min(a, b), Infinity);
}

function maximum(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}

function median(values) {
  const sorted = values.filter(isKnown).sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// The median of all steps but the first, in which caches and buffers warm up.
function typical(name) {
  const values = column(name);
  return median(values.length > 1 ? values.slice(1) : values);
}

function figure(x, digits = 3) {
  if (!isKnown(x)) return UNKNOWN;
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e15 || size < 1e-4) return x.toExponential(1);
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(digits)));
}

function seconds(x) {
  if (!isKnown(x)) return UNKNOWN;
  if (x >= 100) return figure(x) + " s";
  if (x >= 0.995) return x.toFixed(2) + " s";
  if (x >= 0.0995) return Math.round(x * 1000) + " ms";
  if (x > 0 && x < 1e-5) return "< 0.01 ms";
  return Number((x * 1000).toPrecision(2)) + " ms";
}

function share(x) {
  return isKnown(x) ? Math.round(x * 100) + "%" : UNKNOWN;
}

function change(first, last) {
  return isKnown(first) ? `${first.toFixed(3)} → ${last.toFixed(3)}` : UNKNOWN;
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count) {
  const smallest = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(smallest));
  const size = [1, 2, 5, 10].map(x => x * power).find(x => x >= smallest);
  const found = [];
  for (let t = Math.ceil(low / size) * size; t <= high + size * 1e-9; t += size) {
    found.push(Number(t.toPrecision(12)));
  }
  return found;
}

// The numbers of an axis as texts, with as many digits as tell them apart.
function axisTexts(values, write) {
  for (let digits = 0; digits < 12; digits++) {
    const texts = values.map(value => write(value, digits));
    if (new Set(texts).size === texts.length) return texts;
  }
  return values.map(String);
}

// ---- the run and its results ----

const STEPS = column("step");

// A key of the resolved config, as text.
function setting(section, key) {
  const pattern = `^${section}:\\n(?:[ ]+.*\\n)*?  ${key}: (.*)$`;
  const match = new RegExp(pattern, "m").exec(DATA.config);
  return match ? match[1] : "";
}

function startTime() {
  const microseconds = DATA.events.map(event => event.ts).find(isKnown);
  if (!isKnown(microseconds)) return "";
  return new Date(microseconds / 1000).toLocaleString("sv").slice(0, 16);
}

function endText() {
  if (DATA.ended.startsWith("KeyboardInterrupt")) {
    return "The run was stopped, by Ctrl-C or SIGTERM.";
  }
  if (DATA.ended) return "The run ended with an error: " + DATA.ended;
  return "The run has not ended, or it was killed: there is no summary.json. " +
    "If it failed, error.log says why.";
}

function stalenessText() {
  const staleness = setting("pipeline", "staleness");
  if (staleness === "0") return "synchronous";
  if (staleness === "1") return "one step off";
  return `up to ${staleness} versions off`;
}

function drawHead() {
  document.title = "one_step_off: " + DATA.name;
  const facts = [
    setting("model", "path"),
    isSupervised() ? "supervised" : setting("algorithm", "adv_estimator"),
    setting("actor", "backend"),
    isSupervised() ? "" : stalenessText(),
    SUMMARY.device || VERSIONS.device,
    startTime(),
  ];
  PAGE.append(el("h1", {}, DATA.name), softText(facts.filter(Boolean).join("  ·  ")));
  const hasEndedWell = !DATA.ended && "seconds" in SUMMARY;
  if (!hasEndedWell) PAGE.append(el("p", { class: "bad", id: "ended" }, endText()));
}

function drawCards() {
  const before = SUMMARY.steps_before;
  const rlCards = [
    ["training reward (sampled), first → last steps", change(SUMMARY["reward/first"], SUMMARY["reward/last"])],
    ["held-out reward", change(SUMMARY["val/first"], SUMMARY["val/last"])],
    ["rollout idle", share(SUMMARY["idle_share/rollout"])],
    ["trainer idle", share(SUMMARY["idle_share/trainer"])],
    ["samples per second", figure(SUMMARY.samples_per_s)],
    ["tokens/s while generating", figure(SUMMARY["tokens_per_s/rollout"])],
  ];
  const supervisedCards = [
    ["loss, first → last step", change(SUMMARY["sft/first"], SUMMARY["sft/last"])],
    ["held-out loss", change(SUMMARY["val/loss/first"], SUMMARY["val/loss/last"])],
    ["rows per second", figure(SUMMARY.rows_per_s)],
  ];
  const cards = [
    ["steps" + (before ? `, ${before} of them before a resume` : ""), figure(STEPS.length)],
    ["median step", seconds(SUMMARY["median/time/step_s"])],
    ...(isSupervised() ? supervisedCards : rlCards),
    ["tokens/s while training", figure(SUMMARY["tokens_per_s/trainer"])],
    ["duration of this run", seconds(SUMMARY.seconds)],
  ];
  const elements = cards.map(([name, text]) =>
    el("div", { class: "card" }, el("b", {}, text), el("span", {}, name)));
  PAGE.append(el("div", { class: "cards" }, ...elements));
  if (!STEPS.length) {
    PAGE.append(el("p", { id: "nothing" }, "No step has been finished: there are no curves."));
  }
}

// ---- the pipeline: what happened when ----

// Kind of activity -> its color and its name.
const KINDS = {
  generate: ["#3b78c3", "generate"],
  evaluate: ["#8d6cc0", "evaluate"],
  weights: ["#2f9e6e", "weight sync"],
  update: ["#d9822b", "update"],
  scoring: ["#c9a62b", "log-probs, values, scores"],
  stall: ["#b3261e", "checkpoint: training waits"],
  write: ["#7b8794", "checkpoint: writing"],
  phase: ["#63b995", "a phase of the sync"],
  wait: ["#c5ccd3", "a phase of the sync: waits"],
};
const SYNC_WAITS = ["wait", "header", "pause"];
const TRAINER_LANES = [
  "actor", "critic", "ref", "reward_model", "evaluation", "checkpoint", "checkpoint write",
];
const MOST_LANES = 14; // with more of them the phases of the sync are hidden at first
const SHOWN_STEPS = 5;

function isSyncDetail(lane) {
  return lane.startsWith("sync ");
}

function kindOf(lane, activity) {
  if (isSyncDetail(lane)) return SYNC_WAITS.includes(activity) ? "wait" : "phase";
  if (lane === "sync") return "weights";
  return KINDS[activity] ? activity : "scoring";
}

// Sorts lanes: rollouts above the sync, trainers below it.
function sortKey(lane) {
  if (lane === "rollout") return "0";
  if (lane.startsWith("rollout")) return "1" + lane;
  if (lane.startsWith("sync r")) return "2" + lane;
  if (lane === "sync") return "3";
  if (lane.startsWith("sync t")) return "4" + lane;
  return "5" + TRAINER_LANES.indexOf(lane);
}

// The spans of the timeline, times in seconds after the first one.
function readSpans() {
  const isSpan = e => e.ph === "X" && isKnown(e.ts) && isKnown(e.dur) && e.cat && e.name;
  const spans = DATA.events.filter(isSpan).map(event => {
    const words = String(event.name).split(" ");
    return {
      lane: String(event.cat),
      name: String(event.name),
      activity: words[0],
      step: Number(words.pop()),
      begin: event.ts / 1e6,
      end: (event.ts + event.dur) / 1e6,
    };
  });
  const first = minimum(spans.map(span => span.begin));
  for (const span of spans) {
    span.begin -= first;
    span.end -= first;
  }
  return spans.sort((a, b) => a.begin - b.begin);
}

const SPANS = readSpans();
const LAST_END = Math.max(0, maximum(SPANS.map(span => span.end)));

function readLanes() {
  let lanes = [...new Set(SPANS.map(span => span.lane))];
  lanes.sort((a, b) => sortKey(a).localeCompare(sortKey(b), "en", { numeric: true }));
  // Where each replica has a lane, the lanes of the group would show the same again.
  if (lanes.some(lane => /^rollout \d+$/.test(lane))) {
    lanes = lanes.filter(lane => lane !== "rollout");
  }
  if (lanes.some(lane => /^rollout \d+ evaluation$/.test(lane))) {
    lanes = lanes.filter(lane => lane !== "evaluation");
  }
  return lanes;
}

const LANES = readLanes();
const HAS_SYNC_DETAILS = LANES.some(isSyncDetail);

// When each step began and ended: it begins with the sync before its update, or with the update.
function readStepMarks() {
  const updates = SPANS.filter(span => span.lane === "actor" && span.activity === "update");
  return updates.map(update => {
    const isItsSync = span => span.lane === "sync" && span.step === update.step &&
      span.begin <= update.begin + 1 && span.begin > update.begin - 60;
    const sync = SPANS.filter(isItsSync).pop();
    const begin = sync ? Math.min(update.begin, sync.begin) : update.begin;
    return { step: update.step, begin, end: update.end };
  });
}

const MARKS = readStepMarks();

// From the begin of mark i to that of the mark `count` later, or to the end of the last one.
function rangeOfMarks(i, count) {
  const next = MARKS[i + count];
  return [MARKS[i].begin, next ? next.begin : MARKS[i + count - 1].end];
}

// Of each mark the index of its attempt: a restart repeats steps, a resume comes after a pause.
function attemptsOfMarks() {
  const gaps = MARKS.slice(1).map((mark, i) => mark.begin - MARKS[i].begin);
  const stepSeconds = typical("time/step_s") || median(gaps) || 0;
  const attempts = [];
  let attempt = 0;
  MARKS.forEach((mark, i) => {
    const before = MARKS[i - 1];
    if (before) {
      const isNext = mark.step === before.step + 1;
      const isPause = mark.begin - before.begin > 3 * stepSeconds;
      if (!isNext || isPause) attempt += 1;
    }
    attempts.push(attempt);
  });
  return attempts;
}

// What is shown at first: a few steps of one attempt, near the middle of the run, where no pause
// stretches them.
function initialView() {
  if (!MARKS.length) return [0, LAST_END || 1];
  const attempts = attemptsOfMarks();
  const sizes = new Array(attempts[attempts.length - 1] + 1).fill(0);
  for (const attempt of attempts) sizes[attempt] += 1;
  const count = Math.min(SHOWN_STEPS, maximum(sizes));
  const inOneAttempt = i =>
    i + count <= MARKS.length && attempts[i] === attempts[i + count - 1];
  const starts = MARKS.map((_, i) => i).filter(inOneAttempt);
  const width = i => MARKS[i + count - 1].end - MARKS[i].begin;
  const typicalWidth = median(starts.map(width));
  const middle = (MARKS.length - count) / 2;
  const calm = starts.filter(i => width(i) <= 1.5 * typicalWidth);
  const [chosen] = calm.sort((a, b) => Math.abs(a - middle) - Math.abs(b - middle));
  const hasNext = chosen + count < MARKS.length && attempts[chosen + count] === attempts[chosen];
  const lastEnd = MARKS[chosen + count - 1].end;
  const [low, high] = hasNext ? rangeOfMarks(chosen, count) : [MARKS[chosen].begin, lastEnd];
  const margin = (high - low) * 0.02;
  return [low - margin, high + margin];
}

// The share of the time from low to high in which a lane works; its spans may be nested.
function busyShare(spans, [low, high]) {
  let total = 0;
  let until = low;
  for (const span of spans) {
    const begin = Math.max(span.begin, until);
    const end = Math.min(span.end, high);
    if (end > begin) {
      total += end - begin;
      until = end;
    }
  }
  return total / (high - low);
}

// ---- the pipeline: its picture ----

const PICTURE = { left: 170, right: 52, width: 1072, top: 22, bottomMargin: 22, laneGap: 5 };
const LETTER_WIDTH = 6.5; // of the steps' names
let view = initialView();
let showsDetails = LANES.length <= MOST_LANES;
const drawing = el("div", { id: "gantt" });
const viewText = el("span", { class: "soft" });

function laneHeight(lane) {
  return isSyncDetail(lane) ? 15 : 24;
}

// Where a time is drawn, in pixels.
function timeX(time) {
  const [low, high] = view;
  const width = PICTURE.width - PICTURE.left - PICTURE.right;
  return PICTURE.left + (time - low) / (high - low) * width;
}

function drawPipeline() {
  const lanes = showsDetails ? LANES : LANES.filter(lane => !isSyncDetail(lane));
  let y = PICTURE.top;
  const rows = lanes.map(lane => {
    const row = { lane, y };
    y += laneHeight(lane) + PICTURE.laneGap;
    return row;
  });
  const bottom = y + 2;
  const root = svg("svg", {
    viewBox: `0 0 ${PICTURE.width} ${bottom + PICTURE.bottomMargin}`,
    role: "img",
    "aria-label": "The pipeline over time",
  });
  drawStepMarks(root, bottom);
  for (const row of rows) root.append(drawLane(row));
  drawTimeAxis(root, bottom);
  drawing.replaceChildren(root);
  viewText.textContent = describeView();
}

function drawStepMarks(root, bottom) {
  const [low, high] = view;
  let freeX = 0; // where the next name may begin, so that none lies on another
  for (const mark of MARKS) {
    if (mark.begin < low || mark.begin > high) continue;
    const x = timeX(mark.begin);
    root.append(svg("line", {
      x1: x, x2: x, y1: 14, y2: bottom, stroke: "#c9d0d8", "stroke-dasharray": "3 3",
    }));
    const label = "step " + mark.step;
    const labelX = x + 3;
    if (labelX >= freeX) {
      root.append(svg("text", { x: labelX, y: 12, class: "step" }, label));
      freeX = labelX + LETTER_WIDTH * label.length + 8;
    }
  }
}

function drawLane({ lane, y }) {
  const [low, high] = view;
  const height = laneHeight(lane);
  const textY = y + height / 2 + 4;
  const rightEdge = PICTURE.width - PICTURE.right;
  const spans = SPANS.filter(span => span.lane === lane && span.end > low && span.begin < high);
  const group = svg("g", { "data-lane": lane });
  group.append(svg("rect", {
    x: PICTURE.left, y, width: rightEdge - PICTURE.left, height, fill: "#f3f5f7", class: "ground",
  }));
  const nameClass = isSyncDetail(lane) ? "" : "name";
  const nameX = PICTURE.left - 8;
  group.append(svg("text", { x: nameX, y: textY, "text-anchor": "end", class: nameClass }, lane));
  for (const span of spans) drawSpan(group, span, y, height);
  const busy = lane.startsWith("checkpoint") ? "" : share(busyShare(spans, view));
  group.append(svg("text", { x: rightEdge + 6, y: textY }, busy));
  return group;
}

function drawSpan(group, span, y, height) {
  const x1 = Math.max(timeX(span.begin), PICTURE.left);
  const x2 = Math.min(timeX(span.end), PICTURE.width - PICTURE.right);
  const width = x2 - x1;
  const [color] = KINDS[kindOf(span.lane, span.activity)];
  const times = `from ${span.begin.toFixed(3)} s to ${span.end.toFixed(3)} s`;
  const title = `${span.lane}: ${span.name}\n${seconds(span.end - span.begin)}, ${times}`;
  group.append(svg("rect", {
    x: x1.toFixed(2),
    y,
    width: Math.max(width, 0.8).toFixed(2),
    height,
    fill: color,
    rx: width > 4 ? 2 : 0,
    class: "work",
  }, svg("title", {}, title)));
  const hasRoomForName = height > 20 && width > span.name.length * 6 + 6;
  if (hasRoomForName) {
    const center = { x: (x1 + x2) / 2, y: y + height / 2 + 4 };
    group.append(svg("text", { ...center, "text-anchor": "middle", class: "inside" }, span.name));
  }
}

function drawTimeAxis(root, bottom) {
  for (const time of ticks(view[0], view[1], 8)) {
    const x = timeX(time);
    root.append(svg("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4, stroke: "#9aa3ad" }));
    const text = Number(time.toFixed(4)) + " s";
    root.append(svg("text", { x, y: bottom + 16, "text-anchor": "middle" }, text));
  }
}

function describeView() {
  const [low, high] = view;
  const edge = (high - low) * 0.025;
  const isShown = mark => mark.end > low + edge && mark.begin < high - edge;
  const steps = MARKS.filter(isShown).map(mark => mark.step);
  const range = steps.length ? `steps ${minimum(steps)} to ${maximum(steps)}, ` : "";
  return range + seconds(high - low);
}

// ---- the pipeline: its buttons ----

function showRange(range) {
  view = range;
  drawPipeline();
}

function zoom(factor) {
  const middle = (view[0] + view[1]) / 2;
  const half = (view[1] - view[0]) / 2 * factor;
  showRange([middle - half, middle + half]);
}

function move(share) {
  const distance = share * (view[1] - view[0]);
  showRange(view.map(time => time + distance));
}

function goToStep(event) {
  const i = MARKS.findIndex(mark => mark.step === Number(event.target.value));
  if (i >= 0) showRange(rangeOfMarks(i, Math.min(3, MARKS.length - i)));
}

function toggleDetails() {
  showsDetails = !showsDetails;
  drawPipeline();
}

function button(text, action) {
  return el("button", { type: "button", onclick: action }, text);
}

function drawPipelineSection() {
  if (!SPANS.length) return;
  const controls = el("div", { class: "controls" },
    button("◀", () => move(-0.5)),
    button("▶", () => move(0.5)),
    button("zoom in", () => zoom(0.5)),
    button("zoom out", () => zoom(2)),
    button("whole run", () => showRange([0, LAST_END])),
    el("input", { type: "number", "aria-label": "step", placeholder: "step", onchange: goToStep }),
    HAS_SYNC_DETAILS ? button("sync by process", toggleDetails) : null,
    viewText);
  let text = "Who works when. The numbers are steps; those of a sync and an evaluation are weight " +
    "versions. At the right: the share of the shown time in which the lane works.";
  if (DATA.cut) {
    text += ` This long run is shown by ${SPANS.length} spans from its middle; timeline.json has ` +
      "all of them, for Perfetto.";
  }
  const usedKinds = new Set(SPANS.map(span => kindOf(span.lane, span.activity)));
  const legend = Object.entries(KINDS)
    .filter(([kind]) => usedKinds.has(kind))
    .map(([, [color, name]]) => el("span", {}, colorBox(color), name));
  addSection("The pipeline", softText(text), controls, drawing,
    el("div", { class: "legend" }, ...legend));
  drawPipeline();
}

// ---- curves ----

const COLORS = ["#3b78c3", "#d9822b", "#2f9e6e", "#8d6cc0", "#b3261e", "#7b8794"];
const CURVE = { width: 330, height: 150, left: 46, right: 8, top: 8, bottom: 20 };
const FEW_POINTS = 40; // up to so many are drawn as circles too

function colorOf(i) {
  return COLORS[i % COLORS.length];
}

// The lowest and highest values of an axis, apart from each other and with a margin.
function axisRange(values, startsAtZero) {
  let low = startsAtZero ? Math.min(0, minimum(values)) : minimum(values);
  let high = maximum(values);
  const size = Math.max(Math.abs(low), Math.abs(high), 1e-9);
  if (high - low < 1e-9 * size) {
    const distance = Math.abs(low) * 0.1 || 1;
    low -= distance;
    high += distance;
  }
  const margin = (high - low) * 0.06;
  const staysAtZero = startsAtZero && low === 0;
  return [staysAtZero ? 0 : low - margin, high + margin];
}

// The position of a value on an axis from `range` to pixels from `begin` to `end`.
function scale([low, high], begin, end) {
  return value => begin + (value - low) / (high - low) * (end - begin);
}

// A figure with one curve per line, [name, [[x, y], ...]]; null without any point.
function curve(title, lines, { zero = false, log = false } = {}) {
  const isUsable = ([x, y]) => isKnown(x) && isKnown(y) && !(log && y <= 0);
  const usable = lines.map(([name, points]) => [name, points.filter(isUsable)]);
  const points = usable.flatMap(([, own]) => own);
  if (!points.length) return null;
  const toAxis = y => (log ? Math.log10(y) : y);
  const xs = points.map(([x]) => x);
  let xRange = [minimum(xs), maximum(xs)];
  if (xRange[0] === xRange[1]) xRange = [xRange[0] - 0.5, xRange[1] + 0.5];
  const yRange = axisRange(points.map(([, y]) => toAxis(y)), zero);
  const scaleX = scale(xRange, CURVE.left, CURVE.width - CURVE.right);
  const scaleY = scale(yRange, CURVE.height - CURVE.bottom, CURVE.top);
  const root = svg("svg", {
    viewBox: `0 0 ${CURVE.width} ${CURVE.height}`, role: "img", "aria-label": title,
  });
  drawAxes(root, xRange, yRange, scaleX, scaleY, log);
  usable.forEach(([name, own], i) => {
    const pixels = own.map(([x, y]) => [scaleX(x), scaleY(toAxis(y))]);
    drawLine(root, name, colorOf(i), own, pixels);
  });
  return el("figure", {}, el("figcaption", {}, title, ...curveKeys(lines)), root);
}

function curveKeys(lines) {
  if (lines.length === 1) return [];
  return lines.map(([name], i) => el("span", { class: "key" }, colorBox(colorOf(i)), name));
}

function drawAxes(root, xRange, yRange, scaleX, scaleY, log, size = CURVE) {
  const yTicks = ticks(yRange[0], yRange[1], 4);
  const write = (value, digits) =>
    (log ? (10 ** value).toExponential(digits) : figure(value, 3 + digits));
  const texts = axisTexts(yTicks, write);
  yTicks.forEach((value, i) => {
    const y = scaleY(value);
    const x2 = size.width - size.right;
    root.append(svg("line", { x1: size.left, x2, y1: y, y2: y, stroke: "#e6e9ed" }));
    const position = { x: size.left - 5, y: y + 4 };
    root.append(svg("text", { ...position, "text-anchor": "end", class: "tick" }, texts[i]));
  });
  for (const value of ticks(xRange[0], xRange[1], 6)) {
    if (!Number.isInteger(value)) continue;
    const position = { x: scaleX(value), y: size.height - 5 };
    root.append(svg("text", { ...position, "text-anchor": "middle" }, String(value)));
  }
}

function drawLine(root, name, color, points, pixels) {
  if (!points.length) return;
  const path = pixels.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`);
  root.append(svg("path", {
    d: path.join(""),
    fill: "none",
    stroke: color,
    "stroke-width": 1.6,
    "stroke-linejoin": "round",
    "stroke-dasharray": points.length < 3 ? "2 4" : "none",
    "data-curve": name,
  }));
  if (points.length >= FEW_POINTS) return;
  const r = points.length < 12 ? 2.6 : 1.6;
  points.forEach(([x, y], i) => {
    const [cx, cy] = pixels[i];
    const title = svg("title", {}, `${name}: ${figure(y, 6)} at ${x}`);
    root.append(svg("circle", { cx, cy, r, fill: color }, title));
  });
}

function overSteps(name) {
  return column(name).map((value, i) => [STEPS[i], value]);
}

function overVersions(name) {
  return DATA.evaluations.map(evaluation => [evaluation["val/version"], evaluation[name]]);
}

// The names that match a pattern with one group: what the group holds.
function matches(names, pattern) {
  return names.map(name => pattern.exec(name)).filter(Boolean).map(match => match[1]);
}

function drawCurves() {
  const trainingParts = matches(Object.keys(DATA.columns), /^reward\/(.+)\/mean$/);
  const sources = matches(Object.keys(DATA.columns), /^source\/([^/]+)\/epoch$/);
  const ages = matches(Object.keys(DATA.columns), /^staleness\/age_(\d+)$/);
  const agesWithRatio = matches(Object.keys(DATA.columns), /^staleness\/ratio_age_(\d+)$/);
  const evaluationKeys = [...new Set(DATA.evaluations.flatMap(row => Object.keys(row)))];
  const heldOutParts = matches(evaluationKeys, /^val\/reward\/(.+)$/);
  const klNames = ["actor/kl", "kl/response", "actor/approx_kl"];
  const kl = klNames.find(hasValues) || klNames[0];
  const klPolicy = kl === "actor/approx_kl" ? "sampling policy" : "reference";
  const line = (name, metric) => [name, overSteps(metric)];
  const figures = [
    curve("Loss of the answers, nats per token", [
      line("training", "sft/loss"),
      ["held out (at its version)", overVersions("val/loss")],
    ]),
    curve("Reward", [
      line("training", "reward/mean"),
      ["held out (at its version)", overVersions("val/reward")],
    ]),
    curve("Parts of the reward, training",
      trainingParts.map(name => line(name, `reward/${name}/mean`))),
    curve("Reward by source",
      sources.map(name => line(name, `source/${name}/reward/mean`))),
    curve("Share of samples that solve their prompt, by source",
      sources.map(name => line(name, `source/${name}/solve_rate`))),
    curve("Prompts that the difficulty filter dropped", [
      line("always solved", "difficulty/dropped_always"),
      line("never solved", "difficulty/dropped_never"),
    ], { zero: true }),
    curve("Parts of the reward, held out",
      heldOutParts.map(name => [name, overVersions(`val/reward/${name}`)])),
    curve("Response length, tokens", [
      line("mean", "response_length/mean"),
      line("longest", "response_length/max"),
    ], { zero: true }),
    curve("Tokens that a sequence gets per step of its engine (rollout.speculation)", [
      line("tokens", "rollout/acceptance_length"),
    ], { zero: true }),
    curve("Turns and contexts of an episode", [
      line("turns", "episode/turns"),
      line("segments", "episode/segments"),
    ], { zero: true }),
    curve("Seconds of a step", [
      line("step", "time/step_s"),
      line("generate", "time/generate_s"),
      line("train", "time/train_s"),
    ], { zero: true }),
    curve(`KL to the ${klPolicy}, nats`, [line("KL", kl)]),
    curve("Reverse KL to the teacher, nats", [line("mean", "distill/kl")]),
    curve("Entropy of the policy, nats", [line("entropy", "actor/entropy")]),
    curve("Ratio of trained to sampling policy", [line("mean", "ratio/mean")]),
    curve("Share of the trained tokens by age, in versions",
      // One step off nearly all tokens have the same age.
      ages.length > 2 ? ages.map(age => line(age, `staleness/age_${age}`)) : [],
      { zero: true }),
    curve("Ratio of trained to sampling policy, by age of the tokens",
      agesWithRatio.map(age => line(age, `staleness/ratio_age_${age}`))),
    curve("Canary: engine vs trainer, nats", [
      line("largest", "canary/logprob_diff_max"),
      line("mean", "canary/logprob_diff_mean"),
    ], { log: true }),
    curve("Gradient norm", [line("norm", "actor/grad_norm")], { zero: true }),
    curve("Weight sync, seconds", [line("sync", "time/sync_s")], { zero: true }),
  ].filter(Boolean);
  if (!figures.length) return;
  const text = "Over the steps, counted from 0 as in metrics.jsonl; held-out rewards over the " +
    "weight versions.";
  addSection("Curves", softText(text), el("div", { class: "curves" }, ...figures));
}

// ---- where the time goes ----

const STEP_PARTS = [
  ["whole step", "time/step_s"],
  ["generate (during training, if one step off)", "time/generate_s"],
  ["train", "time/train_s"],
  ["  of which log-probs, values, scores", "time/log_prob_s"],
  ["  of which the update", "time/update_s"],
  ["    its forward passes", "actor/forward_s"],
  ["    its backward passes", "actor/backward_s"],
  ["    its optimizer", "actor/optimizer_s"],
  ["optimizer waits for the sync", "actor/sync_wait_s"],
  ["trainer waits for samples", "time/wait_rollout_s"],
  ["replicas wait for the trainer", "time/wait_trainer_s"],
  ["weight sync", "time/sync_s"],
  ["checkpoint: training waits", "checkpoint/stall_s"],
  ["checkpoint: written in", "checkpoint/write_s"],
];
const SYNC_PHASES = [
  ["transfer as a whole", "sync/transfer_s"],
  ["sender: gather", "sync/gather_s"],
  ["sender: checksums", "sync/checksum_s"],
  ["sender: find changes", "sync/encode_s"],
  ["sender: copy kept for restarted replicas", "sync/keep_s"],
  ["on the wire", "sync/wire_s"],
  ["replica: pause the engine", "sync/pause_s"],
  ["replica: prepare", "sync/prepare_s"],
  ["replica: wait for data", "sync/wait_s"],
  ["replica: apply changes", "sync/apply_s"],
  ["replica: verify", "sync/verify_s"],
  ["replica: load", "sync/load_s"],
  ["replica: finish", "sync/finish_s"],
  ["canary", "time/canary_s"],
];

function timeTable(title, parts) {
  const rows = parts.map(([text, name]) => {
    const longest = maximum(column(name).filter(isKnown));
    return [text, seconds(typical(name)), seconds(longest)];
  });
  return table([title, "median", "longest"], rows);
}

// Bars of the shares in which rollout and trainer work; null where they are not known.
function idleBars() {
  const groups = [
    ["rollout", SUMMARY["idle_share/rollout"]],
    ["trainer", SUMMARY["idle_share/trainer"]],
  ].filter(([, idle]) => isKnown(idle));
  if (!groups.length) return null;
  const bars = svg("svg", {
    viewBox: "0 0 520 58", role: "img", "aria-label": "Idle shares", style: "max-width:520px",
  });
  const width = 400;
  groups.forEach(([name, idle], i) => {
    const bar = { x: 66, y: 4 + 28 * i, height: 20 };
    const textY = 19 + 28 * i;
    bars.append(
      svg("text", { x: 58, y: textY, "text-anchor": "end", class: "name" }, name),
      svg("rect", { ...bar, width, fill: "#e3e7eb" }),
      svg("rect", { ...bar, width: width * Math.max(0, 1 - idle), fill: COLORS[i] }),
      svg("text", { x: 472, y: textY }, share(idle) + " idle"));
  });
  return bars;
}

function drawTimes() {
  if (!STEPS.length) return;
  const parts = STEP_PARTS.filter(([, name]) => hasValues(name));
  const phases = SYNC_PHASES.filter(([, name]) => column(name).some(x => x > 0));
  const text = "Medians over the steps after the first, and the longest. Parts may overlap, so " +
    "they do not add up.";
  const tables = el("div", { class: "two" },
    timeTable("of a step", parts),
    phases.length ? timeTable("of a weight sync", phases) : null);
  addSection("Where the time goes", softText(text), idleBars(), tables);
}

// ---- the time of samples ----

const TIME_PARTS = [
  ["queue", "samples/queue_s"],
  ["prefill", "samples/prefill_s"],
  ["decode", "samples/decode_s"],
  ["tools, environment", "samples/tool_s"],
  ["reward", "samples/reward_s"],
];
const STACK = { width: 680, height: 190, left: 46, right: 8, top: 8, bottom: 20 };

// A bar per step, of the parts' heights above one another.
function stackedBars(title, parts) {
  const columns = parts.map(([, name]) => column(name).map(x => (isKnown(x) ? x : 0)));
  const totals = STEPS.map((_, i) => columns.reduce((total, values) => total + values[i], 0));
  const xRange = [minimum(STEPS) - 0.5, maximum(STEPS) + 0.5];
  const yRange = axisRange(totals, true);
  const scaleX = scale(xRange, STACK.left, STACK.width - STACK.right);
  const scaleY = scale(yRange, STACK.height - STACK.bottom, STACK.top);
  const root = svg("svg", {
    viewBox: `0 0 ${STACK.width} ${STACK.height}`, role: "img", "aria-label": title,
  });
  drawAxes(root, xRange, yRange, scaleX, scaleY, false, STACK);
  const width = Math.max(0.5, 0.8 * (scaleX(1) - scaleX(0)));
  STEPS.forEach((step, i) => {
    let low = 0;
    parts.forEach(([text], part) => {
      const value = columns[part][i];
      if (!value) return;
      const y = scaleY(low + value);
      const place = { x: scaleX(step) - width / 2, y, width, height: scaleY(low) - y };
      const tip = svg("title", {}, `step ${step}, ${text}: ${seconds(value)}`);
      root.append(svg("rect", { ...place, fill: colorOf(part), "data-part": text }, tip));
      low += value;
    });
  });
  const keys = parts.map(([text], part) => el("span", {}, colorBox(colorOf(part)), text));
  return el("figure", {}, root, el("div", { class: "legend" }, ...keys));
}

function drawSampleTimes() {
  const parts = TIME_PARTS.filter(([, name]) => column(name).some(x => x > 0));
  if (!parts.length) return;
  const text = "Seconds of a trajectory, the mean of each step: waiting for the engine and in it, " +
    "reading its contexts, writing its turns, at its tools, and being scored.";
  addSection("Where the time of a sample goes", softText(text), stackedBars("seconds", parts));
}

// ---- samples ----

const FINISH_REASONS = {
  stop: "ended with EOS",
  length: "cut at the limit",
  turns: "ended by agent.max_turns",
  time: "ended by agent.timeout_s",
  room: "no more would fit",
  turn_length: "cut at agent.max_turn_tokens",
};

function rewardText(sample) {
  const parts = Object.entries(sample.reward_parts || {});
  const texts = parts.map(([name, value]) => `${name} ${figure(value)}`);
  const details = texts.length ? ` (${texts.join(", ")})` : "";
  return `reward ${figure(sample.reward)}${details}`;
}

function sampleElement(sample, isOpen) {
  const facts = [
    `step ${sample.step}`,
    `${sample.length} tokens`,
    rewardText(sample),
    FINISH_REASONS[sample.finish_reason] || sample.finish_reason,
    sample.ground_truth == null ? "" : `ground truth ${sample.ground_truth}`,
    sample.error ? `error: ${sample.error}` : "",
  ];
  return el("details", isOpen ? { open: "" } : {},
    el("summary", {}, facts.filter(Boolean).join("  ·  ")),
    ...(sample.images || []).map((url) => el("img", { src: url, alt: "image of the prompt" })),
    el("pre", {}, String(sample.prompt ?? "")),
    el("pre", {}, String(sample.response ?? "")));
}

function drawSamples() {
  if (!DATA.samples.length) return;
  const text = "The longest samples of the last steps. The other samples of their step wait for " +
    "them.";
  const elements = DATA.samples.map((sample, i) => sampleElement(sample, i === 0));
  addSection("The longest samples", softText(text), ...elements);
}

// ---- episodes: a tree of segments, each a row of parts ----

// Kind of a part -> its color and its name.
const PART_KINDS = {
  context: ["#c5ccd3", "context: prompts, tools, the agent"],
  trained: ["#2f9e6e", "generated by the policy and trained"],
  untrained: ["#d9b44a", "generated by the policy, left out of the loss"],
};
const HOVER_CHARACTERS = 400;
const INDENT = 14; // pixels per level of the tree
const DEEPEST_INDENT = 5; // levels; deeper ones are drawn like this one

function partColor(part) {
  return (PART_KINDS[part.kind] || PART_KINDS.context)[0];
}

// A long context must not hide short turns, so widths grow with the root of the tokens.
function partWidth(part) {
  return Math.sqrt(isKnown(part.tokens) && part.tokens > 0 ? part.tokens : 1);
}

function partFacts(part) {
  const versions = part.versions.map(version => `v${version}`).join("+");
  return [part.kind, `${figure(part.tokens)} tokens`, versions].filter(Boolean).join(", ");
}

function partBar(segment, widest) {
  const width = segment.parts.reduce((total, part) => total + partWidth(part), 0);
  const boxes = segment.parts.map(part => {
    const text = part.text.length > HOVER_CHARACTERS
      ? part.text.slice(0, HOVER_CHARACTERS) + " …" : part.text;
    return el("i", {
      class: part.kind,
      style: `flex-grow:${partWidth(part).toFixed(3)};background:${partColor(part)}`,
      title: `${partFacts(part)}\n${text}`,
    });
  });
  const style = `width:${(100 * width / widest).toFixed(2)}%`;
  return el("span", { class: "track" }, el("span", { class: "bar", style }, ...boxes));
}

function moreText(count, what) {
  return count > 0 ? softText(`and ${count} more ${what}`) : null;
}

function segmentElement(segment, depth, widest, isTree) {
  const trained = segment.parts.filter(part => part.kind === "trained");
  const calls = segment.calls.length + segment.omitted_calls;
  const hasEnded = segment.finish_reason === "stop";
  const facts = [
    countText(trained.length, "turn"),
    `${figure(tokensOf(trained))} tokens trained`,
    calls ? `${countText(calls, "call")} of ${segment.call_names.join(", ")}` : "",
    hasEnded ? "" : FINISH_REASONS[segment.finish_reason] || segment.finish_reason || "",
  ];
  const name = isTree ? `${depth ? "└ " : ""}segment ${segment.index}` : "one context";
  const indent = INDENT * Math.min(depth, DEEPEST_INDENT);
  const texts = segment.parts.map(part => el("div", { class: "part" },
    el("p", { class: "soft" }, partFacts(part)),
    el("pre", { style: `border-left:4px solid ${partColor(part)}` }, part.text)));
  const callTexts = segment.calls.map(call => el("code", { class: "call" }, call));
  return el("details", { class: "segment" },
    el("summary", {},
      el("b", { style: `padding-left:${indent}px` }, name), partBar(segment, widest),
      el("span", { class: "soft" }, facts.filter(Boolean).join("  ·  "))),
    ...texts, moreText(segment.omitted_parts, "parts"),
    ...callTexts, moreText(segment.omitted_calls, "tool calls"));
}

function countText(count, what) {
  return `${figure(count)} ${what}${count === 1 ? "" : "s"}`;
}

function tokensOf(parts) {
  return parts.reduce((total, part) => total + (part.tokens || 0), 0);
}

// The segments as [segment, depth], each below the one whose turns its context has.
function treeOf(segments) {
  const rows = [];
  const done = new Set();
  const add = (segment, depth) => {
    if (done.has(segment)) return; // a broken file could name a circle
    done.add(segment);
    rows.push([segment, depth]);
    for (const child of segments) {
      if (child.parent === segment.index && child !== segment) add(child, depth + 1);
    }
  };
  for (const segment of segments) {
    if (!segments.some(other => other.index === segment.parent && other !== segment)) {
      add(segment, 0);
    }
  }
  for (const segment of segments) add(segment, 0);
  return rows;
}

function episodeElement(episode) {
  const count = episode.segments.length + episode.omitted;
  const parts = episode.segments.flatMap(segment => segment.parts);
  const facts = [
    `step ${episode.step}`,
    `prompt ${(episode.prompt_id || []).join(":")}, sample ${episode.index}`,
    countText(count, "segment"),
    `${figure(tokensOf(parts.filter(part => part.kind === "trained")))} tokens trained`,
    episode.ground_truth == null ? "" : `ground truth ${episode.ground_truth}`,
    episode.error ? `error: ${episode.error}` : "",
  ];
  const widths = episode.segments.map(segment =>
    segment.parts.reduce((total, part) => total + partWidth(part), 0));
  const rows = treeOf(episode.segments).map(([segment, depth]) =>
    segmentElement(segment, depth, maximum(widths), count > 1));
  const title = episode.why[0].toUpperCase() + episode.why.slice(1);
  return el("div", { class: "episode" },
    el("b", {}, `${title}: ${rewardText(episode)}`),
    softText(facts.filter(Boolean).join("  ·  ")),
    ...rows, moreText(episode.omitted, "segments"));
}

function drawEpisodes() {
  if (!DATA.episodes.length) return;
  const text = "What an agent asked of the policy, from left to right: a row is one context as it " +
    "grew, and where the agent edited it another segment begins, below the one whose turns it " +
    "keeps. All segments have the reward of the episode. Widths grow with the square root of the " +
    "number of tokens. Point at a part for its text; click on a row for all its parts.";
  const legend = Object.values(PART_KINDS).map(([color, name]) =>
    el("span", {}, colorBox(color), name));
  addSection("An episode", softText(text), el("div", { class: "legend" }, ...legend),
    ...DATA.episodes.map(episodeElement));
}

// ---- faults, versions, config ----

// How much a counter grew over the run; it begins at 0 again after a resume.
function growth(name) {
  let total = 0;
  let before = 0;
  for (const value of column(name)) {
    const count = value || 0;
    total += count >= before ? count - before : count;
    before = count;
  }
  return total;
}

function drawFaults() {
  if (!STEPS.length) return;
  const restarts = "times the trainer was restarted from a checkpoint, or the run was resumed";
  addSection("Faults survived", table(null, [
    ["replicas restarted", growth("restarts/replicas")],
    [restarts, growth("restarts/trainer")],
    ["optimizer steps skipped, actor", sum("actor/skipped_updates")],
    ["optimizer steps skipped, critic", sum("critic/skipped_updates")],
    ["samples whose reward raised an error", sum("reward/errors")],
    ["samples whose reward took too long", sum("reward/timeouts")],
    ["trajectories whose agent loop failed", sum("agent/errors")],
    ["groups dropped for them", sum("samples/dropped_groups")],
  ]));
}

function drawVersions() {
  const rows = Object.entries(VERSIONS);
  addSection("Versions", rows.length ? table(null, rows) : softText("versions.json is missing."));
}

function drawConfig() {
  if (!DATA.config) {
    addSection("Config", softText("config.yaml is missing."));
    return;
  }
  const summary = el("summary", {}, "config.yaml, as it was resolved");
  addSection("Config", el("details", {}, summary, el("pre", { id: "yaml" }, DATA.config)));
}

drawHead();
drawCards();
drawPipelineSection();
drawCurves();
drawTimes();
drawSampleTimes();
drawEpisodes();
drawSamples();
drawFaults();
drawVersions();
drawConfig();
