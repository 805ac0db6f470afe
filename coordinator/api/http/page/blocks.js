// Decode steps as columns: as many cells as rows were sent, filled those that were kept.

import { make } from "./format.js";

const SHOWN = 55; // columns of the large picture
const IN_STRIP = 120; // columns below an answer

export function strip() {
  return make("div", { class: "strip", "aria-hidden": "true" });
}

export function addBlock(element, { rows, kept }, most = IN_STRIP) {
  const column = make("i", { title: `${kept} of ${rows} rows kept` });
  column.style.setProperty("--rows", rows);
  column.style.setProperty("--kept", kept);
  element.append(column);
  while (element.childElementCount > most) element.firstElementChild.remove();
}

// The large picture of all requests' blocks.
export class Blocks {
  constructor(element) {
    this.element = element;
    this.latest = [];
  }

  add(blocks) {
    // Of a burst only what can be seen is drawn.
    for (const block of blocks.slice(-SHOWN)) addBlock(this.element, block, SHOWN);
    this.latest = [...this.latest, ...blocks].slice(-SHOWN);
    const verifies = this.latest.filter((block) => block.rows > 1);
    const kept = verifies.reduce((sum, block) => sum + block.kept, 0) / verifies.length;
    const label = verifies.length
      ? `The last ${verifies.length} blocks: ${kept.toFixed(1)} rows kept on average, at most ${Math.max(...verifies.map((block) => block.rows))} sent`
      : `The last ${this.latest.length} steps were plain: one row each`;
    this.element.setAttribute("aria-label", label);
  }

  // Columns are as high as the model's blocks.
  set rows(rows) {
    this.element.style.setProperty("--block", rows);
  }
}
