// Asking the server: the key, errors as sentences, server-sent events. Paths are relative, so that the page also works
// behind a proxy that serves it under a prefix.

const STORED = "flashsplit-api-key";
let key = sessionStorage.getItem(STORED) ?? "";

export const keys = new EventTarget(); // "needed" when the server refuses the key, or its absence

export function hasKey() {
  return key !== "";
}

export function setKey(text) {
  key = text;
  if (text) sessionStorage.setItem(STORED, text);
  else sessionStorage.removeItem(STORED);
}

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The reply, if it is a good one. Throws Refusal with the server's own sentence, TypeError when nobody answers.
export async function ask(path, { body, signal, requestId } = {}) {
  const headers = {};
  const sent = key;
  if (key) headers.authorization = `Bearer ${key}`;
  if (requestId) headers["x-request-id"] = requestId;
  if (body) headers["content-type"] = "application/json";
  const reply = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (reply.ok) return reply;
  // A key that was typed in since then is not refused by this.
  if (reply.status === 401 && sent === key) keys.dispatchEvent(new Event("needed"));
  throw new Refusal(reply.status, await sentence(reply));
}

async function sentence(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered ${reply.status} ${reply.statusText}`;
  }
}

// Events of a reply as { name, data }, data as text.
export async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "message";
  let data = [];
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.replace(/\r$/, "");
        if (line === "") {
          if (data.length) yield { name, data: data.join("\n") };
          name = "message";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line.startsWith("event:")) name = line.slice(6).trim();
      }
    }
  } finally {
    // Who stops reading is no longer waited for.
    reader.cancel().catch(() => {});
  }
}

export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
