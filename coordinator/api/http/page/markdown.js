// Markdown as elements, never as HTML: what a model writes cannot become code. Covers what models write: headings,
// paragraphs, lists, quotes, tables, fenced code, emphasis, links.

import { make } from "./format.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])(\s+|$)/;
const DELIMITER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /(`+)(?<code>[\s\S]*?[^`])\1(?!`)|\*\*(?<bold>(?=\S)[\s\S]*?\S)\*\*|(?<![\w*])[*_](?<em>(?=[^\s*_])[^\n]*?[^\s*_])[*_](?![\w*])|~~(?<del>(?=\S)[^\n]*?\S)~~|\[(?<label>[^\]\n]*)\]\((?<url>https?:\/\/[^\s)]+)\)|(?<auto>https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"])|\\(?<escaped>[!-\/:-@[-`{-~])/g;

// Draws the text into an element; of what is there already only blocks that have changed are drawn anew.
export function draw(element, text) {
  const blocks = split(text);
  const known = element.markdownBlocks ?? [];
  let same = 0;
  while (same < blocks.length && blocks[same].source === known[same]) same += 1;
  while (element.children.length > same) element.lastElementChild.remove();
  for (const block of blocks.slice(same)) element.append(elementOf(block));
  element.markdownBlocks = blocks.map((block) => block.source);
}

function split(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kind = kindOf(lines, at);
    const end = endOf(kind, lines, at);
    blocks.push({ kind, lines: lines.slice(at, end), source: `${kind}\n${lines.slice(at, end).join("\n")}` });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && DELIMITER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return "table";
  return "paragraph";
}

function endOf(kind, lines, at) {
  let end = at + 1;
  if (kind === "heading" || kind === "rule") return end;
  if (kind === "code") {
    const fence = lines[at].match(FENCE)[1];
    while (end < lines.length && !(lines[end].trim().startsWith(fence) && !lines[end].trim().slice(fence.length).trim()))
      end += 1;
    return Math.min(end + 1, lines.length);
  }
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (kind === "list") {
      // A list goes on behind an empty line when another item or its text follows.
      const next = line.trim() ? line : (lines[end + 1] ?? "");
      if (!ITEM.test(next) && !/^\s+\S/.test(next) && (!line.trim() || kindOf(lines, end) !== "paragraph")) break;
    } else if (!line.trim()) break;
    else if (kind === "quote" ? !QUOTE.test(line) : kind === "table" ? !line.includes("|") : false) break;
    else if (kind === "paragraph" && kindOf(lines, end) !== "paragraph") break;
  }
  return end;
}

function elementOf({ kind, lines }) {
  if (kind === "code") return codeBlock(lines);
  if (kind === "heading") {
    const [, marks, title] = lines[0].match(HEADING);
    // The page's own headings come first.
    return make(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(title));
  }
  if (kind === "rule") return make("hr");
  if (kind === "quote") {
    const quote = make("blockquote");
    draw(quote, lines.map((line) => line.replace(QUOTE, "")).join("\n"));
    return quote;
  }
  if (kind === "list") return list(lines);
  if (kind === "table") return table(lines);
  return make("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n")));
}

function codeBlock(lines) {
  const [, fence, language] = lines[0].match(FENCE);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = make("button", { type: "button", class: "quiet copy" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(code);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"));
  // Where the page isn't on a secure origin there is no clipboard.
  if (navigator.clipboard) head.append(copy);
  const text = make("pre", { tabIndex: 0 }, make("code", {}, code));
  return make("div", { class: "code" }, head, text);
}

function list(lines) {
  const [, indent, number] = lines[0].match(ITEM);
  const element = make(number === undefined ? "ul" : "ol");
  if (number !== undefined && number !== "1") element.start = Number(number);
  const items = [];
  for (const line of lines) {
    const match = line.match(ITEM);
    if (match && match[1].length <= indent.length + 1) items.push([line.slice(match[0].length)]);
    else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${indent.length + 4}}`), ""));
  }
  for (const own of items) {
    const item = make("li");
    const [first, ...rest] = own;
    if (rest.some((line) => line.trim())) draw(item, own.join("\n"));
    else item.append(...inline(first));
    element.append(item);
  }
  return element;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const row = (tag, line) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell))));
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row("td", line)));
  const whole = make("table", {}, make("thead", {}, row("th", lines[0])), body);
  return make("div", { class: "table", tabIndex: 0 }, whole);
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    const { code, bold, em, del, label, url, auto, escaped } = match.groups;
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (bold !== undefined) nodes.push(make("strong", {}, ...inline(bold)));
    else if (em !== undefined) nodes.push(make("em", {}, ...inline(em)));
    else if (del !== undefined) nodes.push(make("del", {}, ...inline(del)));
    else if (escaped !== undefined) nodes.push(escaped);
    else nodes.push(link(url ?? auto, url === undefined ? [auto] : inline(label)));
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function link(url, label) {
  return make("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, ...label);
}
