// The placement as a chain: a card for every worker, a line for every edge, drawn once and then kept up to date.

import { count, make, milliseconds, percent, setText, size } from "./format.js";

const byId = (id) => document.getElementById(id);

export class Chain {
  constructor() {
    this.shape = "";
    this.cards = new Map();
    this.edges = new Map();
  }

  show(status) {
    const shape = JSON.stringify([
      status.num_layers,
      status.workers.map((worker) => [worker.name, worker.address, worker.layers, worker.draft]),
    ]);
    if (shape !== this.shape) this.build(status);
    this.shape = shape;
    for (const worker of status.workers) this.cards.get(worker.name).show(worker, status);
    for (const edge of status.edges) this.edges.get(edge.to).show(edge);
    tiles(status);
    cache(status.cache);
  }

  build(status) {
    const list = byId("stages");
    list.replaceChildren(make("li", { class: "start" }, "Coordinator"));
    this.cards.clear();
    this.edges.clear();
    for (const worker of status.workers) {
      const edge = status.edges.find(({ to }) => to === worker.name);
      if (edge) {
        const line = new EdgeLine(edge);
        this.edges.set(edge.to, line);
        list.append(line.element);
      }
      const card = new Card(worker, status);
      this.cards.set(worker.name, card);
      list.append(card.element);
    }
  }
}

const PARTS = { busy: "compute", drafting: "draft", wire: "wire", wait: "wait" };
const MEMORY = { weight_bytes: "weights", session_bytes: "caches", snapshot_bytes: "prefixes" };
const REMEMBERED = 60; // loads in the line beside the name

class Card {
  constructor(worker, status) {
    this.loads = new Array(REMEMBERED).fill(0);
    this.line = sparkline();
    this.load = make("span", { class: "load" });
    this.where = make("span", { class: "where" });
    this.error = make("p", { class: "error", hidden: true });
    const parts = Object.entries(PARTS);
    this.parts = parts.map(([part]) => make("i", { class: part }));
    this.shares = make("div", { class: "shares", role: "img" }, ...this.parts);
    this.times = parts.map(([part]) => make("li", { class: part }));
    this.memory = make("p", { class: "memory" });
    const head = make("div", { class: "head" }, make("h3", {}, worker.name), this.where, this.line, this.load);
    const times = make("ul", { class: "legend", "aria-hidden": "true" }, ...this.times);
    this.element = make("li", { class: "card", "data-name": worker.name }, head, this.error);
    this.element.append(...layers(worker, status), this.shares, times, this.memory);
  }

  show(worker, status) {
    const dead = worker.error !== null;
    this.element.classList.toggle("dead", dead);
    this.element.classList.toggle("active", !dead && worker.load > 0.005);
    this.loads = [...this.loads, dead ? 0 : worker.load].slice(-REMEMBERED);
    drawLine(this.line, this.loads);
    setText(this.load, dead ? "no answer" : `${percent(worker.load)} load`);
    setText(this.where, `${worker.device} · ${worker.host}`);
    this.error.hidden = !dead;
    setText(this.error, worker.error ?? "");
    this.showShares(worker.shares);
    const held = Object.entries(MEMORY).map(([field, name]) => `${size(worker.memory[field])} ${name}`);
    const { pool_bytes: pool, pool_used_bytes: used, host_weight_bytes: beside } = worker.memory;
    if (beside) held.push(`${size(beside)} of experts in the host`);
    if (pool) held.push(`pages ${percent(used / pool)} of ${size(pool)}`);
    if (worker.batches) held.push(`${worker.batches.rows.toFixed(1)} rows a step`);
    setText(this.memory, held.join(" · "));
    this.element.title = `flashsplit ${worker.versions.flashsplit}, torch ${worker.versions.torch}, Python ${worker.versions.python}, process ${worker.process_id}, ${worker.address}`;
    this.element.classList.toggle("other-version", worker.versions.flashsplit !== status.version);
  }

  showShares(shares) {
    const { busy = 0, drafting = 0, wire = 0, wait = 0 } = shares ?? {};
    const names = Object.values(PARTS);
    const texts = [busy - drafting, drafting, wire, wait].map((share, index) => {
      this.parts[index].style.width = `${share * 100}%`;
      return `${names[index]} ${Math.round(share * 100)} %`;
    });
    // What has no part in it is left out; without a step one line says so.
    texts.forEach((text, index) => {
      setText(this.times[index], shares ? text : "no step in the last minute");
      this.times[index].hidden = index !== 3 && (!shares || text.endsWith(" 0 %"));
    });
    this.shares.setAttribute("aria-label", shares ? `Of a step's time: ${texts.join(", ")}` : "No step lately");
  }
}

const SVG = "http://www.w3.org/2000/svg";

function sparkline() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${REMEMBERED - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(SVG, "polygon"), document.createElementNS(SVG, "polyline"));
  return svg;
}

function drawLine(svg, loads) {
  const first = REMEMBERED - loads.length;
  const points = loads.map((load, index) => `${first + index},${(19 - load * 18).toFixed(1)}`);
  svg.lastChild.setAttribute("points", points.join(" "));
  svg.firstChild.setAttribute("points", [`${first},20`, ...points, `${REMEMBERED - 1},20`].join(" "));
}

// Which layers of all a stage holds, as a row of cells, and in words.
function layers(worker, status) {
  // Of a CPU the system tells no more than its kind.
  const product = worker.devices.map((device) => device.product).find((name) => name?.includes(" "));
  const made = make("span", { class: "product" }, product ?? "");
  const draft = worker.draft ? `draft, blocks of ${status.acceptance.block_rows}` : "";
  if (!worker.layers) return [make("p", { class: "layers-text" }, draft || "reads long prompts first", made)];
  const { first, last } = worker.layers;
  const cells = Array.from({ length: status.num_layers }, (_, layer) =>
    make("i", layer >= first && layer < last ? { class: "held" } : {}),
  );
  const text = `layers ${first} to ${last - 1} of ${status.num_layers}`;
  return [
    make("div", { class: "layers", "aria-hidden": "true" }, ...cells),
    make("p", { class: "layers-text" }, text, ...(draft ? [make("span", { class: "chip" }, `+ ${draft}`)] : []), made),
  ];
}

class EdgeLine {
  constructor({ source, to }) {
    this.text = make("span", {});
    const line = make("i", { class: "line", "aria-hidden": "true" });
    this.element = make("li", { class: "edge", "data-to": to, "aria-label": `from ${source} to ${to}` });
    this.element.append(line, make("p", {}, this.text));
  }

  show(edge) {
    const parts = [`${size(edge.bytes_per_s)}/s`];
    if (edge.step_ms !== null) parts.push(`${milliseconds(edge.step_ms)} a step`);
    if (edge.total_bytes) parts.push(`${size(edge.total_bytes)} so far`);
    setText(this.text, parts.join(" · "));
    this.element.classList.toggle("active", edge.bytes_per_s > 0);
  }
}

function tiles({ tokens, requests, acceptance }) {
  setText(byId("tile-rate"), count(tokens.completion_per_s));
  const queue = requests.waiting ? ` + ${requests.waiting}` : "";
  setText(byId("tile-requests"), `${requests.running}${queue}`);
  byId("tile-requests").title = `${requests.running} run, ${requests.waiting} wait, at most ${requests.max_running} at once`;
  byId("acceptance").classList.toggle("plain", acceptance.block_rows === 1);
  const length = acceptance.recent_tokens_per_verify ?? acceptance.tokens_per_verify;
  setText(byId("tile-kept"), length === null ? "–" : `${length.toFixed(1)} of ${acceptance.block_rows}`);
  if (acceptance.block_rows === 1) {
    setText(byId("acceptance-note"), "No draft is loaded: every step is one row.");
  } else if (acceptance.verifies) {
    const share = percent(acceptance.accepted_tokens / Math.max(1, acceptance.draft_tokens));
    const verifies = `${count(acceptance.verifies)} verified ${acceptance.verifies === 1 ? "block" : "blocks"}`;
    setText(byId("acceptance-note"), `${verifies}; ${share} of the draft's tokens were accepted.`);
  }
}

function cache({ enabled, prompt_tokens: all, hits }) {
  const parts = Object.entries(hits).map(([source, { tokens, requests }]) => {
    const times = `${count(requests)} ${requests === 1 ? "request" : "requests"}`;
    return { source, tokens, text: `from ${source}: ${count(tokens)} in ${times}` };
  });
  const computed = all - parts.reduce((sum, part) => sum + part.tokens, 0);
  parts.push({ source: "computed", tokens: computed, text: `computed: ${count(computed)}` });
  const bar = byId("cache-bar");
  const legend = byId("cache-legend");
  if (bar.childElementCount !== parts.length) {
    bar.replaceChildren(...parts.map(({ source }) => make("i", { class: source })));
    legend.replaceChildren(...parts.map(({ source }) => make("li", { class: source })));
  }
  parts.forEach((part, index) => {
    bar.children[index].style.width = all ? `${(part.tokens / all) * 100}%` : "0";
    setText(legend.children[index], part.text);
  });
  bar.setAttribute("aria-label", all ? parts.map((part) => part.text).join(", ") : "No prompt yet");
  byId("cache").hidden = !enabled && !all;
}
