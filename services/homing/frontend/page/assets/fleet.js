// The fleet as its latest sample has it: figures, ranks, and where the last requests went.

import { $, element } from "./dom.js";
import { plural, showPercent, showRate, showSeconds, whole } from "./format.js";
import { figure, plot } from "./plots.js";
import { curve, ofRank, ownTtfts, rateAt, ratioAt, samples } from "./samples.js";

export function showFleet() {
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

export function showStatus(kind, text) {
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
