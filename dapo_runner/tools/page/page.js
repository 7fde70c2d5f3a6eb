"use strict";
// Whatever a model or a data set wrote reaches the page through textContent alone, and Plotly through `plain`.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"];
const LINES = [["solid", "solid"], ["dash", "dashed"], ["dot", "dotted"]]; // the names of Plotly and of CSS
const ON_DARK = { "#0072B2": "#2E8FDB", "#555555": "#BBBBBB", "#888888": "#AAAAAA" }; // what is too dark there
const HEADLINES = ["eval/avg@*", "eval/loss", "batch/reward"]; // the first of them that a run has
const AS_LOGGED = /^(eval\/|time\/|train\/lr$)/; // never smoothed: few values, mostly 0, or without noise
const NEAREST = 40; // steps that are searched for a prompt
const POLL_MS = 2000;
const FULL = { entropy: 2, ratio: 1.35, advantage: 2 }; // what has all of its colour
const SCALES = {
  "": "",
  entropy: `full colour from ${FULL.entropy} nats`,
  probability: "the fuller the colour, the less probable",
  ratio: `blue above 1, full from ${FULL.ratio}; orange below`,
  advantage: `blue above 0, full from ${FULL.advantage}; orange below`,
  clip: "orange: low, blue: high, grey: dual",
};
const CLIP_COLOURS = { low: "#E69F00", high: "#56B4E9", dual: "#888888" };
// What would act on the text around it: control characters, changes of direction, halves of a surrogate pair.
const UNPRINTABLE = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|\p{Surrogate}/gu;

let data = JSON.parse(document.getElementById("data").textContent);
const live = data.live;
const shown = new Set(data.runs.keys());
const places = data.runs.map(() => ({ step: null, group: null })); // where in its rollouts each run is read
const files = new Map(); // run/step → Promise of its groups
const charts = new Map(); // title → its element, which keeps its zoom
const dark = matchMedia("(prefers-color-scheme: dark)");

function setting(id) {
  const input = document.getElementById(id);
  return input.type === "checkbox" ? input.checked : input.value;
}

/** A colour of the style sheet. */
function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
}

function visible(color) {
  return (dark.matches && ON_DARK[color]) || color;
}

/** The line of a run. Those of more runs than there are colours are dashed, then dotted. */
function lineOf(run) {
  const [dash, style] = LINES[Math.floor(run / COLOURS.length) % LINES.length];
  return { color: visible(COLOURS[run % COLOURS.length]), dash, style };
}

function underline(element, run) {
  const { color, style } = lineOf(run);
  element.style.borderBottom = `3px ${style} ${color}`;
}

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = printable(text);
  return element;
}

/** Note which control of an element has the focus. The function returned gives it to that control of another one. */
function keepFocus(old) {
  const controls = (element) => [...(element?.querySelectorAll("button, input, select") ?? [])];
  const place = controls(old).indexOf(document.activeElement);
  return (element) => {
    const isLost = document.activeElement === document.body; // nobody has gone elsewhere since
    if (isLost) controls(element)[place]?.focus({ preventScroll: true });
  };
}

function printable(text) {
  return String(text).replace(UNPRINTABLE, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

/** Text for Plotly, which reads some tags. */
function plain(text) {
  return printable(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// Curves

/** The curve logged under a key, whose trailing star stands for any rest. */
function find(curves, key) {
  if (!key.endsWith("*")) return curves[key] && { suffix: "", points: curves[key] };
  const stem = key.slice(0, -1);
  const name = Object.keys(curves).find((name) => name.startsWith(stem));
  return name && { suffix: stem.at(-1) + name.slice(stem.length), points: curves[name] };
}

/** An average that follows the curve: each value keeps `share` of the average before it. */
function smooth(values, share) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

function isZero(run, curve) {
  return (find(data.runs[run].curves, curve.key)?.points[1] ?? []).every((value) => value === 0);
}

/** Of one run a chart for each panel, of several runs a chart for each curve. What is 0 in all of them is only named. */
function chosenCharts() {
  const found = [];
  const zero = [];
  for (const panel of data.panels) {
    const logged = panel.curves.filter((curve) => [...shown].some((run) => find(data.runs[run].curves, curve.key)));
    const isFlat = (curve) => !panel.share && [...shown].every((run) => isZero(run, curve));
    zero.push(...logged.filter(isFlat).map((curve) => titleOf(panel, [curve])));
    const curves = logged.filter((curve) => !isFlat(curve));
    const parts = shown.size > 1 ? curves.map((curve) => [curve]) : [curves];
    found.push(...parts.filter((part) => part.length).map((part) => ({ panel, curves: part })));
  }
  return { found, zero };
}

function titleOf(panel, curves) {
  const isPart = curves.length === 1 && panel.curves.length > 1;
  return isPart ? `${panel.title}: ${curves[0].label}` : panel.title;
}

function traces({ panel, curves }) {
  const found = [];
  const alone = shown.size === 1;
  for (const place of shown) {
    const run = data.runs[place];
    for (const curve of curves) {
      const match = find(run.curves, curve.key);
      if (!match) continue;
      const [x, y] = match.points;
      const { color, dash } = alone ? { color: visible(curve.color) } : lineOf(place);
      const label = printable(alone ? curve.label + match.suffix : run.name);
      const name = plain(label);
      const hovertemplate = `${name} %{customdata:.4g}<extra></extra>`;
      const common = { x, y, name, customdata: y, hovertemplate, meta: label };
      if (panel.stacked && alone) found.push({ ...common, type: "bar", marker: { color } });
      else found.push(...lines(common, { color, dash }, AS_LOGGED.test(curve.key) ? 0 : Number(setting("smoothing"))));
    }
  }
  return found;
}

/** A curve as it was logged, faint where a smooth one lies over it. Its values are shown as they were logged. */
function lines(common, look, share) {
  const mode = common.x.length <= 40 ? "lines+markers" : "lines";
  const marker = { size: 4, color: look.color };
  const line = { ...common, type: "scatter", mode, line: { ...look, width: 1.5 }, marker };
  if (!share) return [line];
  const raw = { ...line, mode: "lines", opacity: 0.25, hoverinfo: "skip", hovertemplate: null };
  return [raw, { ...line, y: smooth(common.y, share), line: { ...look, width: 2 } }];
}

function drawChart(chart) {
  const title = titleOf(chart.panel, chart.curves);
  if (!charts.has(title)) {
    const element = make("section", "panel");
    element.append(make("h3"), make("div", "key"), make("div", "chart"));
    charts.set(title, element);
  }
  const [heading, key] = charts.get(title).children;
  heading.textContent = title;
  heading.title = chart.curves.map(meaning).join("\n");
  const labels = shown.size === 1 && chart.curves.length > 1 ? chart.curves : [];
  key.replaceChildren(
    ...labels.map((curve) => {
      const label = make("span", "swatch", curve.label);
      label.style.borderColor = visible(curve.color);
      label.title = meaning(curve);
      return label;
    }),
  );
  return charts.get(title);
}

function meaning({ key }) {
  const pattern = key.replace(/\/.*?(_std)?$/, "/*$1"); // of a reward's parts
  return `${key}: ${data.meanings[key] ?? data.meanings[pattern] ?? "seconds of the phases of a step"}`;
}

function drawCurves() {
  const { found, zero } = chosenCharts();
  const elements = found.map(drawChart);
  document.getElementById("curves").replaceChildren(...elements);
  document.getElementById("zero").textContent = zero.length ? `0 at every step: ${zero.join(", ")}` : "";
  const axis = { gridcolor: theme("line"), zerolinecolor: theme("line"), linecolor: theme("line"), automargin: true };
  const title = (text) => ({ text: plain(text), font: { size: 11 } });
  found.forEach((chart, place) => {
    const { panel } = chart;
    const layout = {
      margin: { l: 55, r: 10, t: 8, b: 38 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { color: theme("ink") },
      hoverlabel: { bgcolor: theme("wash"), font: { color: theme("ink") } },
      xaxis: { ...axis, exponentformat: "none", title: title(data.step) },
      yaxis: { ...axis, exponentformat: panel.unit === "tokens" ? "none" : "e", title: title(panel.unit) },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
      barmode: "stack",
      bargap: 0,
      hovermode: "x unified",
      showlegend: false,
      uirevision: "zoom", // new points leave the zoom as it is
    };
    if (panel.share) layout.yaxis.range = [-0.02, 1.02];
    if (panel.from_zero) layout.yaxis.rangemode = "tozero";
    const drawn = traces(chart);
    if (!panel.share && !panel.stacked) Object.assign(layout.yaxis, rangeOfConstant(drawn));
    const options = { responsive: true, displayModeBar: false };
    const [heading, , element] = elements[place].children;
    Plotly.react(element, drawn, layout, options);
    Object.assign(element, { role: "img", ariaLabel: `${heading.textContent}, last values: ${lastValues(drawn)}` });
  });
}

/** What a screen reader says of the curves. */
function lastValues(drawn) {
  const values = new Map(drawn.map(({ meta, customdata }) => [meta, customdata.findLast((value) => value !== null)]));
  const short = (value) => (value === undefined ? "none" : Number(value.toPrecision(4)));
  return [...values].map(([label, value]) => `${label} ${short(value)}`).join(", ");
}

/** A range around curves with a single value; Plotly itself would draw 2e-4 between -1 and 1, as if it were 0. */
function rangeOfConstant(drawn) {
  const values = drawn.flatMap(({ y }) => y.filter((value) => value !== null));
  const isConstant = values.every((value) => Math.abs(value - values[0]) <= 1e-9 * Math.abs(values[0]));
  return values[0] && isConstant ? { range: [0.9 * values[0], 1.1 * values[0]].sort((a, b) => a - b) } : {};
}

// Rollouts

/** The groups of a step, out of the page itself or from the server. */
function load(run, step) {
  const name = `${run}/${step}`;
  if (!files.has(name)) {
    const reading = read(run, step);
    files.set(name, reading);
    reading.catch(() => files.delete(name));
  }
  return files.get(name);
}

async function read(run, step) {
  let packed;
  if (live) {
    const response = await fetch(`rollouts/${run}/${step}`);
    if (!response.ok) throw new Error(`step ${step}: its rollouts are gone`);
    packed = response.body;
  } else {
    const bytes = Uint8Array.from(atob(data.runs[run].rollouts[step]), (c) => c.charCodeAt(0));
    packed = new Blob([bytes]).stream();
  }
  const text = await new Response(packed.pipeThrough(new DecompressionStream("gzip"))).text();
  const [header, ...groups] = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  return { header, groups };
}

const SAMPLE_FILTERS = {
  correct: (sample) => sample.correct,
  incorrect: (sample) => !sample.correct,
  truncated: (sample) => sample.finish_reason === "length",
};
const GROUP_FILTERS = {
  "all-incorrect": (correct, n) => correct === 0,
  "all-correct": (correct, n) => correct === n,
  mixed: (correct, n) => 0 < correct && correct < n,
};

function count(samples, keep) {
  return samples.filter(keep).length;
}

function wanted(group) {
  const keepSample = SAMPLE_FILTERS[setting("responses")];
  const keepGroup = GROUP_FILTERS[setting("groups")];
  const samples = keepSample ? group.samples.filter(keepSample) : group.samples;
  const correct = count(group.samples, SAMPLE_FILTERS.correct);
  return samples.length && (!keepGroup || keepGroup(correct, group.samples.length)) ? samples : null;
}

function chooser(what, values, label, chosen, onChoice) {
  const select = make("select");
  select.ariaLabel = what;
  for (const value of values) {
    const option = select.appendChild(make("option", "", label(value)));
    option.value = value;
    option.selected = value === chosen;
  }
  select.addEventListener("change", () => onChoice(Number(select.value)));
  const move = (by) => {
    const next = values[values.indexOf(chosen) + by];
    if (next !== undefined) onChoice(next);
  };
  const buttons = [["‹", "previous", -1], ["›", "next", 1]].map(([text, which, by]) => {
    const button = make("button", "", text);
    button.ariaLabel = `${which} ${what}`;
    button.addEventListener("click", () => move(by));
    return button;
  });
  const whole = make("span");
  whole.append(buttons[0], select, buttons[1]);
  return whole;
}

function drawRollouts() {
  // Until a response with values per token is drawn.
  for (const id of ["legend", "token"]) document.getElementById(id).hidden = true;
  document.getElementById("scale").textContent = SCALES[setting("colour")];
  document.getElementById("together").hidden = shown.size < 2;
  let leader = null; // a promise of the group that the first run shows
  const columns = [...shown].map((run) => {
    const column = make("div", "run");
    column.dataset.run = run;
    const giveFocus = keepFocus(document.querySelector(`.run[data-run="${run}"]`));
    const filling = fill(column, run, setting("same") ? leader : null).catch((error) => {
      column.append(make("p", "note", error.message));
    });
    filling.then(() => giveFocus(column));
    leader ??= filling;
    return column;
  });
  document.getElementById("rollouts").replaceChildren(...columns);
}

/** Where a run has the prompt of a group, nearest to a step. */
async function findPrompt(run, { prompt, step }) {
  const distance = (other) => Math.abs(other - step);
  const near = [...data.runs[run].steps].sort((a, b) => distance(a) - distance(b)).slice(0, NEAREST);
  for (const other of near) {
    const { groups } = await load(run, other);
    const group = groups.find((group) => group.prompt.id === prompt.id);
    if (group) return { step: other, group: group.group };
  }
  return null;
}

/** Show a group of a run: the one that was chosen in it, or one with the prompt that `leader` shows. */
async function fill(column, run, leader) {
  const { name, steps, saved } = data.runs[run];
  const heading = column.appendChild(make("h3", "", name));
  if (data.runs.length > 1) underline(heading, run);
  if (saved > steps.length) {
    column.append(make("p", "note", `${steps.length} of the ${saved} saved steps are in this file (--max-mb)`));
  }
  if (!steps.length) return void column.append(make("p", "note", "no rollouts"));
  const lead = await leader;
  const same = lead && (await findPrompt(run, lead));
  if (lead && !same) column.append(make("p", "note", "no group of this prompt is saved near this step; another one:"));
  const place = same ?? places[run];
  const go = (where) => {
    Object.assign(places[run], where);
    if (leader) document.getElementById("same").checked = false;
    drawRollouts();
  };
  const step = steps.includes(place.step) ? place.step : steps.at(-1);
  const where = column.appendChild(make("div", "where"));
  where.append(chooser("step", steps, (n) => `step ${n}`, step, (chosen) => go({ step: chosen })));
  const { header, groups } = await load(run, step);
  const found = groups.filter(wanted);
  where.append(make("span", "note", `${groups.length} of ${header.groups} groups saved, ${found.length} pass the filters`));
  if (!found.length) return null;
  const group = found.find((group) => group.group === place.group) ?? found[0];
  if (same && group.group !== same.group) {
    column.append(make("p", "note", "the filters leave out the group of this prompt; another one:"));
  }
  const title = (number) => {
    const { samples } = groups[number - 1];
    return `group ${number}: ${count(samples, SAMPLE_FILTERS.correct)} of ${samples.length} correct`;
  };
  const numbers = found.map((group) => group.group);
  where.append(chooser("group", numbers, title, group.group, (chosen) => go({ step, group: chosen })));
  column.append(...drawGroup(group));
  return { prompt: group.prompt, step };
}

function drawGroup(group) {
  const { prompt } = group;
  const head = make("div", "", `${prompt.source} ${prompt.id}${prompt.answer && ` · expected ${prompt.answer}`}`);
  return [head, make("div", "prompt", prompt.text), ...wanted(group).map((sample, place) => drawSample(sample, place < 4))];
}

function signed(value) {
  return value === null ? "not finite" : (value < 0 ? "" : "+") + Number(value.toPrecision(3));
}

/** The values at the ends of a segment and its length; in brackets where it does not train. */
function ends(segment) {
  const text = `${signed(segment.before)} → ${signed(segment.after)} over ${segment.length}`;
  return segment.trains ? text : `(${text})`;
}

/** Who, how many tokens, why it ended and what it earned. */
function turnFacts(turn) {
  const reward = turn.reward === null ? "" : signed(turn.reward);
  return [turn.role, turn.end - turn.start, turn.finish_reason, reward].filter(Boolean).join(" ");
}

function drawSample(sample, open) {
  const details = make("details");
  const parts = Object.entries(sample.parts ?? {}).map(([name, value]) => `${name} ${signed(value)}`);
  const answer = `answer ${signed(sample.base_reward)}${parts.length ? ` (unweighted: ${parts.join(", ")})` : ""}`;
  const facts = [
    `sample ${sample.sample} ${sample.correct ? "correct" : "incorrect"}`,
    `reward ${signed(sample.reward)} = ${answer} + length ${signed(sample.length_penalty)}`,
    sample.segments ? `segments ${sample.segments.map(ends).join(", ")}` : `advantage ${signed(sample.advantage)}`,
    `${sample.tokens} tokens${sample.finish_reason === "length" ? ", truncated" : ""}`,
    ...(sample.extracted === null ? [] : [`extracted ${sample.extracted}`]),
    ...(sample.rule ? [`rule ${sample.rule}`] : []),
    ...(sample.turns ? [`turns ${sample.turns.map(turnFacts).join(", ")}`] : []),
    ...(sample.trains ? [] : ["does not train"]),
  ];
  details.append(make("summary", sample.correct ? "correct" : "incorrect", facts.join(" · ")));
  const response = details.appendChild(make("div", "response"));
  // Tens of thousands of tokens are laid out when somebody looks.
  details.addEventListener("toggle", () => details.open && !response.hasChildNodes() && response.append(...tokens(sample)));
  details.open = open;
  return details;
}

/** The colour behind a token; one scale for all responses, so that two can be compared. */
function tint(token, colour) {
  const blend = (rgb, share) => `rgba(${rgb}, ${(0.6 * Math.min(1, share)).toFixed(3)})`;
  const twoSided = (share) => blend(share < 0 ? "213, 94, 0" : "0, 114, 178", Math.abs(share));
  const logprob = token.logprob ?? token.engine_logprob;
  const value = colour === "probability" ? logprob : token[colour];
  if (value == null) return "";
  if (colour === "entropy") return blend("204, 121, 167", value / FULL.entropy);
  if (colour === "probability") return blend("213, 94, 0", 1 - Math.exp(value));
  if (colour === "ratio") return twoSided(Math.log(value) / Math.log(FULL.ratio));
  if (colour === "advantage") return twoSided(value / FULL.advantage);
  return CLIP_COLOURS[value];
}

function tokens(sample) {
  const columns = sample.per_token;
  const turns = sample.turns ?? [{ role: "assistant", text: sample.response, start: 0, end: Infinity }];
  if (!columns) return turns.map((turn) => make("span", turn.role, turn.text));
  for (const id of ["legend", "token"]) document.getElementById(id).hidden = false;
  const colour = setting("colour");
  return columns.text.map((text, place) => {
    const token = Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name][place]]));
    const span = make("span", "token", text.replaceAll("\n", "↵\n"));
    span.classList.toggle("high", token.high_entropy === true);
    span.classList.toggle("selected", token.selected === true);
    span.classList.toggle("clipped", Boolean(token.clip));
    span.classList.toggle("masked", !token.trains);
    span.classList.add(turns.find((turn) => place < turn.end).role);
    span.style.backgroundColor = tint(token, colour);
    if (colour === "clip" && token.clip) span.style.color = "#000"; // its colours are opaque, in either theme
    span.addEventListener("click", () => choose(span, token, place));
    return span;
  });
}

function choose(span, token, place) {
  document.querySelector(".chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  const facts = Object.entries(token).map(([name, value]) => `${name.replaceAll("_", " ")} ${JSON.stringify(value)}`);
  document.getElementById("token").textContent = printable(`token ${place + 1}   ${facts.join("   ")}`);
}

// The page

function percent(value) {
  return `${(100 * value).toFixed(1)} %`;
}

/** The first and the last value of what a run is judged by. */
function headline(curves) {
  const key = HEADLINES.find((key) => find(curves, key)?.points[1].some((value) => value !== null));
  if (!key) return "nothing logged yet";
  const { suffix, points } = find(curves, key);
  const known = points[0].map((step, place) => [step, points[1][place]]).filter(([, value]) => value !== null);
  const form = key.startsWith("eval/avg") ? percent : (value) => value.toPrecision(3);
  const [[, first], [step, last]] = [known[0], known.at(-1)];
  return `${key.replace("*", "")}${suffix.slice(1)} ${form(first)} → ${form(last)} after step ${step}`;
}

function about(settings, differences) {
  const model = settings["model.path"] ?? `made for this run, ${settings["model.tiny.layers"]} layers`;
  const data = settings["data.path"] ?? settings["data.format"];
  const algorithm = settings.algorithm ?? settings["loss.objective"] ?? "supervised";
  const facts = [["model", model], ["data", data], ["algorithm", algorithm], ...Object.entries(differences)];
  return facts.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(" · ");
}

function drawHeader() {
  const labels = data.runs.map((run, place) => {
    const label = make("label", "card");
    const box = label.appendChild(make("input"));
    Object.assign(box, { type: "checkbox", checked: shown.has(place) });
    const name = label.appendChild(make("span", "name", run.name));
    if (data.runs.length > 1) underline(name, place);
    label.append(make("strong", "", headline(run.curves)));
    if (Object.keys(run.about).length) label.append(make("span", "note", about(run.about, run.differences)));
    box.addEventListener("change", () => {
      if (box.checked) shown.add(place);
      else shown.delete(place);
      draw();
    });
    return label;
  });
  const header = document.getElementById("runs");
  const giveFocus = keepFocus(header);
  header.replaceChildren(...labels);
  giveFocus(header);
}

function draw() {
  drawHeader();
  drawCurves();
  drawRollouts();
}

for (const id of ["colour", "responses", "groups", "same"]) {
  document.getElementById(id).addEventListener("change", drawRollouts);
}
document.getElementById("smoothing").addEventListener("input", drawCurves);
dark.addEventListener("change", draw);
draw();

async function poll() {
  const status = document.getElementById("status");
  try {
    const response = await fetch("data", { headers: { "If-None-Match": data.version } });
    if (response.status === 200) {
      data = await response.json();
      files.clear(); // a run that resumed may have written a step again
      drawHeader();
      drawCurves();
      // Who reads an earlier step goes on reading; the newest one gives way to the next.
      const leading = setting("same") ? [...shown].slice(0, 1) : [...shown];
      if (leading.some((run) => places[run].step === null)) drawRollouts();
    }
    status.textContent = "connected";
  } catch {
    status.textContent = "dapo watch has ended";
  }
  setTimeout(poll, POLL_MS);
}
if (live) poll();
