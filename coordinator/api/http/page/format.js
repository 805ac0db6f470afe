// Numbers for people, and making elements.

const UNITS = ["KiB", "MiB", "GiB", "TiB"];

export function size(bytes) {
  if (bytes < 1024) return `${Math.round(bytes)} B`;
  let value = bytes;
  let unit = "";
  for (unit of UNITS) {
    value /= 1024;
    if (value < 1000) break;
  }
  return `${value.toFixed(value < 10 ? 1 : 0)} ${unit}`;
}

export function percent(share) {
  const value = share * 100;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

export function count(number) {
  return Math.round(number).toLocaleString("en").replaceAll(",", "\u202f");
}

export function milliseconds(ms) {
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

// An element with properties, "class" and "data-…" among them, and children: nodes and texts.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

// Only touches the page when something changes: readers of live regions hear of changes alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
