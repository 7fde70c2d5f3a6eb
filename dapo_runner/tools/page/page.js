"use strict";
// Whatever a model or a data set wrote reaches the page through textContent alone, and Plotly through `plain`.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
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

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = printable(text);
  return element;
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

function traces(panel) {
  const found = [];
  const alone = shown.size === 1;
  const [first] = shown;
  for (const place of shown) {
    const run = data.runs[place];
    panel.curves.forEach((curve, number) => {
      const match = find(run.curves, curve.key);
      if (!match) return;
      const [x, y] = match.points;
      const label = curve.label + match.suffix;
      const color = alone ? curve.color : COLOURS[place % COLOURS.length];
      // Several runs share a legend, which tells their curves apart; the runs' colours stand at the top of the page.
      const legend = { name: plain(label), legendgroup: curve.key, showlegend: place === first };
      const owner = alone ? "" : `${plain(run.name)}: `;
      const common = { x, y, ...legend, hovertemplate: `${owner}${plain(label)} %{y:.4g}<extra></extra>` };
      if (panel.stacked && alone) found.push({ ...common, type: "bar", marker: { color } });
      else {
        const line = { color, width: 1.5, dash: alone ? "solid" : DASHES[number % DASHES.length] };
        const mode = x.length <= 40 ? "lines+markers" : "lines";
        found.push({ ...common, type: "scatter", mode, line, marker: { size: 4, color } });
      }
    });
  }
  return found;
}

function drawCurves() {
  const grid = document.getElementById("curves");
  data.panels.forEach((panel, place) => {
    const chart = grid.children[place] ?? grid.appendChild(make("div", "chart"));
    const found = traces(panel);
    const layout = {
      title: { text: plain(panel.title), font: { size: 14 }, x: 0.02, y: 0.97 },
      margin: { l: 55, r: 10, t: 50, b: 38 },
      xaxis: { title: { text: "rollout step", font: { size: 11 } } },
      yaxis: { title: { text: plain(panel.unit), font: { size: 11 } } },
      barmode: "stack",
      bargap: 0,
      hovermode: "x unified",
      showlegend: found.length > shown.size,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { size: 10 } },
      uirevision: "zoom", // new points leave the zoom as it is
    };
    if (panel.share) layout.yaxis.range = [-0.02, 1.02];
    if (panel.from_zero) layout.yaxis.rangemode = "tozero";
    if (!found.length) {
      layout.annotations = [
        { text: "nothing logged", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: "#888" } },
      ];
      layout.xaxis.visible = layout.yaxis.visible = false;
    }
    Plotly.react(chart, found, layout, { responsive: true, displaylogo: false });
  });
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
  const keepSample = SAMPLE_FILTERS[document.getElementById("responses").value];
  const keepGroup = GROUP_FILTERS[document.getElementById("groups").value];
  const samples = keepSample ? group.samples.filter(keepSample) : group.samples;
  const correct = count(group.samples, SAMPLE_FILTERS.correct);
  return samples.length && (!keepGroup || keepGroup(correct, group.samples.length)) ? samples : null;
}

function chooser(values, label, chosen, onChoice) {
  const select = make("select");
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
  const buttons = [["‹", -1], ["›", 1]].map(([text, by]) => {
    const button = make("button", "", text);
    button.addEventListener("click", () => move(by));
    return button;
  });
  const whole = make("span");
  whole.append(buttons[0], select, buttons[1]);
  return whole;
}

function drawRollouts() {
  document.getElementById("scale").textContent = SCALES[document.getElementById("colour").value];
  const columns = [...shown].map((run) => {
    const column = make("div", "run");
    fill(column, run).catch((error) => column.append(make("p", "note", error.message)));
    return column;
  });
  document.getElementById("rollouts").replaceChildren(...columns);
}

async function fill(column, run) {
  const { name, steps, kept } = data.runs[run];
  const place = places[run];
  const go = (where) => {
    Object.assign(place, where);
    drawRollouts();
  };
  column.append(make("h3", "", name));
  if (kept > steps.length) {
    column.append(make("p", "note", `${steps.length} of the ${kept} steps kept are in this file (--max-mb)`));
  }
  if (!steps.length) return void column.append(make("p", "note", "no rollouts"));
  const step = steps.includes(place.step) ? place.step : steps.at(-1);
  const where = column.appendChild(make("div", "where"));
  where.append(chooser(steps, (n) => `step ${n}`, step, (chosen) => go({ step: chosen })));
  const { header, groups } = await load(run, step);
  const found = groups.filter(wanted);
  where.append(make("span", "note", `${groups.length} of ${header.groups} groups kept, ${found.length} pass the filters`));
  if (!found.length) return;
  const group = found.find((group) => group.group === place.group) ?? found[0];
  const title = (number) => {
    const { samples } = groups[number - 1];
    return `group ${number}: ${count(samples, SAMPLE_FILTERS.correct)} of ${samples.length} correct`;
  };
  const numbers = found.map((group) => group.group);
  where.append(chooser(numbers, title, group.group, (chosen) => go({ step, group: chosen })));
  column.append(...drawGroup(group));
}

function drawGroup(group) {
  const { prompt } = group;
  const head = make("div", "", `${prompt.source} ${prompt.id} · expected ${prompt.answer}`);
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

function drawSample(sample, open) {
  const details = make("details");
  const parts = Object.entries(sample.parts ?? {}).map(([name, value]) => `${name} ${signed(value)}`);
  const answer = `answer ${signed(sample.base_reward)}${parts.length ? ` (${parts.join(", ")})` : ""}`;
  const facts = [
    `sample ${sample.sample} ${sample.correct ? "correct" : "incorrect"}`,
    `reward ${signed(sample.reward)} = ${answer} + length ${signed(sample.length_penalty)}`,
    sample.segments ? `segments ${sample.segments.map(ends).join(", ")}` : `advantage ${signed(sample.advantage)}`,
    `${sample.tokens} tokens${sample.finish_reason === "length" ? ", truncated" : ""}`,
    `extracted ${sample.extracted ?? "None"}`,
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
  const blend = (rgb, share) => `rgba(${rgb}, ${(0.85 * Math.min(1, share)).toFixed(3)})`;
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
  if (!columns) return [document.createTextNode(printable(sample.response))];
  const colour = document.getElementById("colour").value;
  return columns.text.map((text, place) => {
    const token = Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name][place]]));
    const span = make("span", "token", text.replaceAll("\n", "↵\n"));
    span.classList.toggle("high", token.high_entropy === true);
    span.classList.toggle("selected", token.selected === true);
    span.classList.toggle("clipped", Boolean(token.clip));
    span.classList.toggle("masked", !token.trains);
    span.style.backgroundColor = tint(token, colour);
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

function draw() {
  drawCurves();
  drawRollouts();
}

data.runs.forEach((run, place) => {
  const label = make("label");
  const box = label.appendChild(make("input"));
  Object.assign(box, { type: "checkbox", checked: true });
  const name = label.appendChild(make("span", "", run.name));
  if (data.runs.length > 1) name.style.color = COLOURS[place % COLOURS.length];
  box.addEventListener("change", () => {
    if (box.checked) shown.add(place);
    else shown.delete(place);
    draw();
  });
  document.getElementById("runs").append(label);
});
for (const id of ["colour", "responses", "groups"]) {
  document.getElementById(id).addEventListener("change", drawRollouts);
}
draw();

async function poll() {
  const status = document.getElementById("status");
  try {
    const response = await fetch("data", { headers: { "If-None-Match": data.version } });
    if (response.status === 200) {
      data = await response.json();
      drawCurves();
      // Who reads an earlier step goes on reading; the newest one gives way to the next.
      if (places.some((place) => place.step === null)) drawRollouts();
    }
    status.textContent = "live";
  } catch {
    status.textContent = "dapo watch has ended";
  }
  setTimeout(poll, POLL_MS);
}
if (live) poll();
