// The conversation: sends it, draws answers as they come, stops them.

import { ask, eventsOf, randomId, Refusal } from "./api.js";
import { addBlock, strip } from "./blocks.js";
import { count, make, milliseconds, setText } from "./format.js";
import { draw } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const question = byId("question");

const messages = []; // what the model is sent, without the system message
const answers = new Map(); // request id -> Answer, for the blocks that belong to it
let running = null; // AbortController of the answer that is coming

// One answer on the page.
class Answer {
  constructor(requestId) {
    this.requestId = requestId;
    this.text = "";
    this.reasoning = "";
    this.thoughts = make("div", { class: "text" });
    this.thinking = make("details", { class: "thinking", hidden: true }, make("summary", {}, "Reasoning"), this.thoughts);
    this.body = make("div", { class: "text" });
    this.blocks = strip();
    this.figures = make("p", { class: "figures" });
    const footer = make("footer", {}, this.blocks, this.figures);
    this.element = make("article", { class: "answer", "aria-busy": "true", "aria-label": "Answer" });
    this.element.append(this.thinking, this.body, footer);
    this.drawing = 0;
  }

  add(delta) {
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    // At most once a frame, however fast tokens come.
    this.drawing ||= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const follow = atEnd();
    draw(this.body, this.text);
    this.thinking.hidden = !this.reasoning;
    if (this.reasoning) draw(this.thoughts, this.reasoning);
    if (follow) toEnd();
  }

  end(text, failed = false) {
    this.show();
    const follow = atEnd();
    setText(this.figures, text);
    this.element.classList.toggle("failed", failed);
    this.element.setAttribute("aria-busy", "false");
    if (follow) toEnd();
  }
}

function atEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function toEnd() {
  log.scrollTop = log.scrollHeight;
}

export function startChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(question.value);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(question.value);
  });
  question.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", clear);
  byId("settings-toggle").addEventListener("click", toggleSettings);
  byId("welcome").addEventListener("click", (event) => {
    if (event.target instanceof HTMLButtonElement) send(event.target.textContent);
  });
}

// A decode step of some request: drawn below the answer if it is one of ours.
export function showBlock(block) {
  const answer = answers.get(block.request_id);
  if (answer) addBlock(answer.blocks, block);
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, 200)}px`;
}

function toggleSettings() {
  const toggle = byId("settings-toggle");
  const open = toggle.getAttribute("aria-expanded") !== "true";
  toggle.setAttribute("aria-expanded", String(open));
  byId("settings").hidden = !open;
}

function clear() {
  stop();
  messages.length = 0;
  answers.clear();
  for (const article of log.querySelectorAll("article")) article.remove();
  byId("welcome").hidden = false;
  byId("new-chat").disabled = true;
  question.focus();
}

function stop() {
  running?.abort();
}

function waiting(yes) {
  byId("stop").hidden = !yes;
  byId("send").hidden = yes;
  byId("new-chat").disabled = false;
}

async function send(typed) {
  const text = typed.trim();
  if (!text || running) return;
  question.value = "";
  grow();
  byId("welcome").hidden = true;
  log.append(make("article", { class: "question", "aria-label": "You" }, text));
  const answer = new Answer(`page-${randomId()}`);
  log.append(answer.element);
  toEnd();
  answers.set(answer.requestId, answer);
  messages.push({ role: "user", content: text });
  running = new AbortController();
  waiting(true);
  announce("Answering");
  try {
    const timings = await read(answer, running.signal);
    answer.end(summary(timings));
    announce(`Answer: ${answer.text}`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.end(stopped ? "stopped" : sentenceOf(error), !stopped);
    announce(stopped ? "Stopped" : sentenceOf(error));
  } finally {
    running = null;
    waiting(false);
    // What came is what the model goes on from; a question without an answer is asked again, not left open.
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.pop();
  }
}

// Draws the answer as it comes; its figures, where the server told them.
async function read(answer, signal) {
  const reply = await ask("v1/chat/completions", { body: wishes(), signal, requestId: answer.requestId });
  let timings = null;
  let ended = false;
  for await (const { data } of eventsOf(reply)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(500, chunk.error.message);
    const choice = chunk.choices[0];
    if (choice) answer.add(choice.delta);
    timings = chunk.timings ?? timings;
    if (choice?.finish_reason === "length") answer.cut = true;
  }
  if (!ended) throw new TypeError("the answer broke off");
  return { ...timings, cut: answer.cut };
}

function wishes() {
  const system = byId("system").value.trim();
  const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    speculate: byId("speculate").checked,
  };
}

function summary(timings) {
  if (timings.predicted_n === undefined) return "";
  const parts = [`${count(timings.predicted_n)} tokens`];
  if (timings.predicted_per_second) parts.push(`${count(timings.predicted_per_second)} tokens/s`);
  if (timings.acceptance_length) parts.push(`${timings.acceptance_length.toFixed(1)} tokens a verify`);
  if (timings.cache_n) {
    const prompt = timings.prompt_n + timings.cache_n;
    parts.push(`${count(timings.cache_n)} of ${count(prompt)} prompt tokens from ${timings.cache_source}`);
  }
  parts.push(`first token after ${milliseconds(timings.prompt_ms + timings.restore_ms)}`);
  if (timings.cut) parts.push("cut at the most tokens");
  return [...parts, ...timings.notes].join(" · ");
}

function sentenceOf(error) {
  if (error instanceof Refusal) return error.message;
  return "The connection to the server was lost: see whether it runs, then ask again.";
}

function announce(text) {
  setText(byId("announcer"), text);
}
