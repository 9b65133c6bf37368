// A chat with the model, whose answers are streamed.

import { $, element } from "./dom.js";
import { plural, showRate, showSeconds, whole } from "./format.js";
import { ownTtfts } from "./samples.js";
import { ask } from "./server.js";

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
