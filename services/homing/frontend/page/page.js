// The live page: polls /fleet while it is visible, and chats with the model.
//
// Rates are differences between two samples of counters that only rise. When one falls, the
// coordinator was restarted, and the curve has a gap.

const POLL_MS = 1000;
const SPAN_S = 300; // what the plots show
const RATE_S = 4; // over how long a rate is measured
const HIT_S = 15; // over how long a hit rate is: prompts come more rarely than tokens
const GAP_S = 5; // samples further apart are not joined
const FRESH_S = 60; // for how long the latest value is news

const $ = (selector, root = document) => root.querySelector(selector);

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// Numbers

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const showRate = (value) => (value < 10 ? value.toFixed(1) : whole.format(value));
const showPercent = (value) => `${Math.round(value * 100)} %`;
const showSeconds = (value) =>
  value < 1 ? `${Math.round(value * 1000)} ms` : `${Number(value.toPrecision(3))} s`;
const plural = (count, word) => `${whole.format(count)} ${word}${count === 1 ? "" : "s"}`;

// History: samples of /fleet, oldest first

const samples = [];

function remember(fleet) {
  samples.push({ ...fleet, time_s: performance.now() / 1000 });
  while (samples[0].time_s < samples.at(-1).time_s - SPAN_S - HIT_S) samples.shift();
}

/** The oldest sample of the last `span` seconds before sample `index`, or undefined after a gap. */
function before(index, span) {
  let earliest;
  for (let at = index - 1; at >= 0; at--) {
    if (samples[at + 1].time_s - samples[at].time_s > GAP_S) break;
    if (samples[index].time_s - samples[at].time_s > span) break;
    earliest = samples[at];
  }
  return earliest;
}

/** How `count`, a function of a sample, grew per second; null where that cannot be said. */
function rateAt(index, count) {
  const earlier = before(index, RATE_S);
  if (!earlier) return null;
  const grown = count(samples[index]) - count(earlier);
  return grown >= 0 ? grown / (samples[index].time_s - earlier.time_s) : null;
}

/** How much of `all` the growth of `part` was; null where neither grew. */
function ratioAt(index, part, all) {
  const earlier = before(index, HIT_S);
  if (!earlier) return null;
  const grown = all(samples[index]) - all(earlier);
  return grown > 0 ? Math.max(0, (part(samples[index]) - part(earlier)) / grown) : null;
}

const curve = (at) => samples.map((sample, index) => [sample.time_s, at(index)]);

const ofRank = (rank, key) => (sample) =>
  sample.ranks.find((row) => row.rank === rank)?.[key] ?? 0;

// Plots: SVG, drawn anew with each sample

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** The least of 1, 2, 5 times a power of ten that is not below `value`. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/** Points parted where neighbours are too far from each other to be joined. */
function runs(points) {
  const found = [];
  points.forEach((point, index) => {
    if (index === 0 || point[0] - points[index - 1][0] > GAP_S) found.push([]);
    found.at(-1).push(point);
  });
  return found;
}

/**
 * Draws points [time, value or null] into `holder`. `show` writes a value; `ceiling` fixes the top
 * of the axis; `marks` are single points; `label` describes the plot to those who cannot see it.
 */
function plot(holder, points, { show, ceiling, marks = [], label, bare = false }) {
  const { clientWidth: width, clientHeight: height } = holder;
  const [top, bottom] = bare ? [2, height - 2] : [14, height - 18];
  const end = samples.at(-1).time_s;
  const isShown = ([time, value]) => value !== null && time > end - SPAN_S;
  const values = [...points, ...marks].filter(isShown).map((point) => point[1]);
  const most = ceiling ?? niceCeiling(Math.max(1e-3, ...values));
  const x = (time) => width * (1 - (end - time) / SPAN_S);
  const y = (value) => bottom - (bottom - top) * Math.min(1, value / most);
  const svg = shape("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}` });
  if (!bare) {
    for (const value of [0, most / 2, most]) {
      svg.append(shape("line", { class: "grid", x1: 0, x2: width, y1: y(value), y2: y(value) }));
    }
    svg.append(shape("text", { x: 0, y: top - 4 }, show(most)));
    svg.append(shape("text", { x: 0, y: height - 4 }, "5 min ago"));
    svg.append(shape("text", { x: width, y: height - 4, "text-anchor": "end" }, "now"));
  }
  for (const run of runs(points.filter(isShown))) {
    const path = run.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    const [from, to] = [x(run[0][0]).toFixed(1), x(run.at(-1)[0]).toFixed(1)];
    const line = path.join("L");
    const area = `M${from},${bottom}L${line}L${to},${bottom}Z`;
    svg.append(shape("path", { class: "area", d: area }));
    svg.append(shape("path", { class: "curve", d: `M${line}` }));
  }
  for (const [time, value] of marks.filter(isShown)) {
    svg.append(shape("circle", { class: "mark", cx: x(time), cy: y(value), r: 3.5 }));
  }
  holder.replaceChildren(svg);
}

/** A plot below the latest of its values, as long as that is not too old to be news. */
function figure(id, points, options) {
  const box = document.getElementById(id);
  const [, value] = [...points, ...(options.marks ?? [])].reduce(
    (latest, point) => (point[1] !== null && point[0] >= latest[0] ? point : latest),
    [samples.at(-1).time_s - FRESH_S, null],
  );
  const shown = value === null ? "–" : options.show(value);
  const [number, unit = options.unit ?? ""] = shown.split(" ");
  $("output", box).value = number;
  $(".unit", box).textContent = unit;
  const label = `${$("figcaption", box).textContent}: ${shown} ${options.unit ?? ""}`;
  plot($(".plot", box), points, { ...options, label });
}

// The fleet

const ownTtfts = []; // [time, seconds] of this page's own chats

function showFleet() {
  const fleet = samples.at(-1);
  showHeader(fleet);
  showFigures();
  showRanks(fleet);
  showRoutes(fleet.recent);
}

function showHeader(fleet) {
  $("#model").textContent = fleet.model?.name ?? "";
  const lost = fleet.ranks.length - fleet.live_ranks;
  const state = fleet.live_ranks === 0 ? "no rank serves" : fleet.state;
  showStatus(
    fleet.live_ranks === 0 ? "bad" : lost || fleet.state !== "running" ? "wait" : "good",
    `${state} · ${fleet.live_ranks} of ${plural(fleet.ranks.length, "rank")}`,
  );
  $("#summary").textContent = [
    `${plural(fleet.requests, "request")} in flight`,
    `routed by ${fleet.policy.replaceAll("_", " ")}`,
    fleet.epoch ? `weight epoch ${fleet.epoch}` : "",
    fleet.totals.resubmissions ? `${plural(fleet.totals.resubmissions, "resubmission")}` : "",
    fleet.totals.refused ? `${plural(fleet.totals.refused, "request")} refused` : "",
  ]
    .filter(Boolean)
    .join(" · ");
}

function showStatus(kind, text) {
  const status = $("#status");
  status.className = kind;
  const words = $(".text", status);
  if (words.textContent !== text) words.textContent = text; // said aloud when it changes
}

function showFigures() {
  const total = (key) => (sample) => sample.totals[key];
  const ttft = (key) => (sample) => sample.ttft?.[key] ?? 0;
  figure("speed", curve((index) => rateAt(index, total("generated_tokens"))), {
    show: showRate,
    unit: "tok/s",
  });
  figure("ttft", curve((index) => ratioAt(index, ttft("sum_s"), ttft("count"))), {
    show: showSeconds,
    marks: ownTtfts,
  });
  figure("hits", curve((index) => hitRateAt(index, total)), { show: showPercent, ceiling: 1 });
}

const hitRateAt = (index, count) => {
  const rate = ratioAt(index, count("cached_tokens"), count("prompt_tokens"));
  return rate === null ? null : Math.min(1, rate); // a prompt is counted before its hits are
};

function showRanks(fleet) {
  const list = $("#ranks");
  while (list.children.length > fleet.ranks.length) list.lastChild.remove();
  while (list.children.length < fleet.ranks.length) list.append(rankCard());
  const most = Math.max(8, ...fleet.ranks.map((row) => row.running + row.waiting));
  fleet.ranks.forEach((row, at) => showRank(list.children[at], row, most));
}

function rankCard() {
  const part = (className) => element("i", { className });
  const row = (term, name, ...parts) => [
    element("dt", { textContent: term }),
    element("dd", { className: `bar ${name}`, ariaHidden: "true" }, ...parts.map(part)),
    element("dd", { className: `value ${name}` }),
  ];
  const rows = [
    ...row("load", "load", "running", "waiting"),
    ...row("KV cache", "kv", "used"),
    ...row("hit rate", "hit", "hits"),
  ];
  return element(
    "li",
    {},
    element("h3", {}, part("dot"), element("span"), element("small")),
    element("dl", {}, ...rows),
    element("div", { className: "plot" }),
  );
}

/** `most`: how many requests fill the load's bar. Its number may be in tokens. */
function showRank(card, row, most) {
  const last = samples.length - 1;
  const counter = (key) => ofRank(row.rank, key);
  const speed = rateAt(last, counter("generated_tokens"));
  const hits = row.prompt_tokens ? Math.min(1, row.cached_tokens / row.prompt_tokens) : null;
  const kv = row.kv_total_blocks ? row.kv_used_blocks / row.kv_total_blocks : 0;
  const state = row.live ? row.state : "gone";
  card.classList.toggle("gone", !row.live);
  $("h3", card).className = row.live ? (state === "running" ? "good" : "wait") : "bad";
  $("h3 span", card).textContent = `Rank ${row.rank}`;
  $("h3 small", card).textContent =
    state === "running" ? `${showRate(speed ?? 0)} tok/s` : state;
  share($(".running", card), row.running / most);
  share($(".waiting", card), row.waiting / most);
  share($(".used", card), kv);
  share($(".hits", card), hits ?? 0);
  const value = (name, textContent, title) =>
    Object.assign($(`.value.${name}`, card), { textContent, title });
  const n = whole.format;
  const queue = `${row.running} running, ${row.waiting} waiting`;
  value("load", n(row.load), `${queue}, ${plural(row.owed_tokens, "token")} to prefill`);
  const blocks = plural(row.kv_total_blocks, "block");
  value("kv", showPercent(kv), `${n(row.kv_used_blocks)} of ${blocks}`);
  const prompts = plural(row.prompt_tokens, "prompt token");
  value("hit", hits === null ? "–" : showPercent(hits), `${n(row.cached_tokens)} of ${prompts}`);
  plot($(".plot", card), curve((index) => rateAt(index, counter("generated_tokens"))), {
    show: showRate,
    bare: true,
    label: `Tokens per second of rank ${row.rank} over the last five minutes`,
  });
}

function share(bar, value) {
  bar.style.setProperty("--share", `${(100 * value).toFixed(1)}%`);
}

function showRoutes(recent) {
  $("#routes").hidden = recent.length === 0;
  $("#routes tbody").replaceChildren(...recent.map(routeRow));
}

function routeRow(request) {
  const chips = request.scores.map((score) => scoreChip(score, request));
  return element(
    "tr",
    {},
    element("td", { textContent: showSeconds(request.age_s) }),
    element("td", { textContent: whole.format(request.num_blocks) }),
    element("td", { textContent: `rank ${request.rank}` }),
    element("td", {}, element("div", { className: "scores" }, ...chips)),
  );
}

function scoreChip(score, request) {
  const why = `${whole.format(score.matched_blocks)} held, load ${whole.format(score.load)}`;
  return element(
    "span",
    { className: score.rank === request.rank ? "chosen" : "" },
    `${score.rank}: ${score.score.toFixed(2).replace("-", "−")} `,
    element("small", { textContent: why }),
  );
}

// Talking to the server

const KEY = "homing-api-key";

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401 && !$("#key").open) $("#key").showModal();
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answers ${response.status}`);
}

$("#key form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, $("#key-value").value.trim());
});

async function poll() {
  try {
    const response = await ask("fleet", { signal: AbortSignal.timeout(5 * POLL_MS) });
    remember(await response.json());
    showFleet();
  } catch (error) {
    const silent = error instanceof TypeError || error.name === "TimeoutError";
    showStatus("bad", silent ? "the server does not answer" : error.message);
  }
}

async function pollWhileVisible() {
  for (;;) {
    if (document.hidden) {
      await new Promise((resume) =>
        document.addEventListener("visibilitychange", resume, { once: true }),
      );
      continue;
    }
    await poll();
    await new Promise((resume) => setTimeout(resume, POLL_MS));
  }
}

// Chat

// On a phone the chat is far down: a button leads there, until it is in sight.
new IntersectionObserver(([entry]) => {
  document.body.classList.toggle("chat-in-view", entry.isIntersecting);
}).observe($("aside"));

const history = []; // what the model is told, oldest first
let running = null; // the AbortController of the answer that is being written

$("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("#prompt");
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  chat(text);
});

$("#prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("#composer").requestSubmit();
});

$("#stop").addEventListener("click", () => running?.abort());

$("#clear").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  $("#messages").replaceChildren();
  $("#clear").hidden = true;
  $("#prompt").focus();
});

async function chat(text) {
  const question = { role: "user", content: text };
  const view = showTurn(text);
  running = new AbortController();
  busy(true);
  const answer = { content: "", thoughts: "", started: performance.now(), usage: null };
  let problem = "";
  try {
    await receive([...history, question], answer, view, running.signal);
  } catch (error) {
    if (!running.signal.aborted) problem = error.message;
  }
  const stopped = running.signal.aborted;
  running = null;
  busy(false);
  view.box.classList.remove("streaming");
  view.box.ariaBusy = "false";
  if (problem) view.box.append(element("span", { className: "error", textContent: problem }));
  if (answer.content && view.box.isConnected) {
    history.push(question, { role: "assistant", content: answer.content });
  }
  const cut = answer.finish === "length" ? "cut off at the length limit" : "";
  showFacts(answer, view, stopped ? "stopped" : cut);
}

function busy(isBusy) {
  $("#send").hidden = isBusy;
  $("#stop").hidden = !isBusy;
  $("#clear").hidden = false;
}

function showTurn(text) {
  const parts = { thoughts: "div", words: "span", facts: "small" };
  const view = {};
  for (const [className, tag] of Object.entries(parts)) {
    view[className] = element(tag, { className });
  }
  view.box = element("div", { className: "message streaming" }, ...Object.values(view));
  view.box.ariaBusy = "true";
  $("#messages .hint")?.remove();
  $("#messages").append(element("div", { className: "message user", textContent: text }), view.box);
  view.box.scrollIntoView({ block: "end" });
  return view;
}

async function receive(messages, answer, view, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      messages,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    }),
  });
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    answer.usage = chunk.usage ?? answer.usage;
    take(chunk.choices[0], answer);
    show(answer, view);
  }
}

function take(choice, answer) {
  if (!choice) return; // the last chunk: usage alone
  const { content, reasoning_content: thoughts } = choice.delta;
  answer.finish = choice.finish_reason ?? answer.finish;
  if (!content && !thoughts) return;
  answer.content += content ?? "";
  answer.thoughts += thoughts ?? "";
  answer.last = performance.now();
  if (!answer.first) {
    answer.first = answer.last;
    ownTtfts.push([answer.first / 1000, (answer.first - answer.started) / 1000]);
  }
}

/** The JSON of each server-sent event. */
async function* events(body) {
  let text = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const complete = (text + value).split("\n\n");
    text = complete.pop();
    for (const event of complete) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) yield JSON.parse(event.slice("data: ".length));
    }
  }
}

function show(answer, view) {
  const log = $("#messages");
  const following = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  view.thoughts.textContent = answer.thoughts;
  view.words.textContent = answer.content;
  showFacts(answer, view, "");
  if (following) log.scrollTop = log.scrollHeight;
}

function showFacts(answer, view, ending) {
  const facts = [];
  const { usage, first, last, started } = answer;
  if (usage && last > first) {
    facts.push(`${showRate(((usage.completion_tokens - 1) * 1000) / (last - first))} tok/s`);
  }
  if (first) facts.push(`first after ${showSeconds((first - started) / 1000)}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    facts.push(`${whole.format(cached)} of ${plural(usage.prompt_tokens, "prompt token")} cached`);
  }
  view.facts.textContent = [...facts, ending].filter(Boolean).join(" · ");
}

pollWhileVisible();
