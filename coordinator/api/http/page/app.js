// Puts the page together: views, the key, the state that is asked for every second, and the blocks as they come.

import { ask, eventsOf, hasKey, keys, setKey } from "./api.js";
import { Blocks } from "./blocks.js";
import { Chain } from "./chain.js";
import { showBlock, startChat } from "./chat.js";
import { setText } from "./format.js";

const ASK_MS = 1000;
const RETRY_MS = 2000;

const byId = (id) => document.getElementById(id);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const chain = new Chain();
const blocks = new Blocks(byId("blocks"));
const dialog = byId("key-dialog");

// Resolves when the page can be seen and the server has not just refused a key.
async function allowed() {
  while (document.hidden || dialog.open) await pause(200);
}

async function watchStatus() {
  while (true) {
    await allowed();
    try {
      show(await (await ask("v1/status")).json());
      lost("");
    } catch (error) {
      if (error.status !== 401) lost(error.status ? error.message : "The server doesn't answer; trying again.");
    }
    await pause(ASK_MS);
  }
}

async function watchBlocks() {
  while (true) {
    await allowed();
    try {
      for await (const { data } of eventsOf(await ask("v1/events"))) {
        const { blocks: came } = JSON.parse(data);
        if (!came.length) continue;
        blocks.add(came);
        came.forEach(showBlock);
      }
    } catch {
      // What is wrong stands above the chain already.
    }
    await pause(RETRY_MS);
  }
}

function show(status) {
  setText(byId("model"), status.model);
  byId("model").hidden = false;
  document.title = `${status.model} · flashsplit`;
  const dead = status.workers.filter((worker) => worker.error).length;
  const state = status.draining ? "shutting down" : dead || !status.ready ? "not ready" : "ready";
  pill(state, state === "ready" ? "good" : "bad");
  blocks.rows = status.acceptance.block_rows;
  byId("forget-key").hidden = !hasKey();
  chain.show(status);
}

function lost(text) {
  byId("lost").hidden = !text;
  setText(byId("lost"), text);
  byId("panel").classList.toggle("stale", Boolean(text));
  if (text) pill("no connection", "bad");
}

function pill(text, kind) {
  setText(byId("state"), text);
  byId("state").dataset.kind = kind;
}

function askForKey(why) {
  // Several requests may have been refused at once.
  if (dialog.open) return;
  setText(byId("key-why"), `${why} It stays in this tab.`);
  setKey("");
  pill("key needed", "bad");
  dialog.showModal();
}

function startKeys() {
  // The page knows before it asks for anything.
  const needed = document.querySelector('meta[name="api-key"]').content === "needed";
  if (needed && !hasKey()) askForKey("This server wants a key.");

  keys.addEventListener("needed", () => askForKey("This server doesn't know that key."));
  // Without one there is nothing behind it.
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    byId("key").value = "";
    dialog.close();
    byId("question").focus();
  });
  byId("forget-key").addEventListener("click", () => {
    setKey("");
    location.reload();
  });
}

function startViews() {
  const buttons = document.querySelectorAll(".views button");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.view;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
    });
  }
}

startKeys();
startViews();
startChat();
watchStatus();
watchBlocks();
