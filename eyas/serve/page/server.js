// This server's API: what it serves, and an answer as it arrives. No request goes to another server; the key stays in memory.

export const server = { key: "", model: "", hasHead: false, speculates: false, maxLength: 0 };

export class Refused extends Error {
  constructor(status, message, code = null) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const BROKEN = "the connection broke before the answer ended";

export async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(server.key ? { authorization: `Bearer ${server.key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server cannot be reached");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const again = response.headers.get("retry-after");
  const message = body?.error?.message ?? `the server answered ${response.status}`;
  throw new Refused(response.status, again ? `${message}; try again in ${again} s` : message, body?.error?.code);
}

// Learn what is served; the model's card.
export async function meet() {
  const { data } = await (await ask("v1/models")).json();
  const [card] = data;
  const { has_head, text_drafts } = card.eyas;
  Object.assign(server, {
    model: card.id,
    hasHead: has_head,
    speculates: has_head || Boolean(text_drafts),
    maxLength: card.max_model_len,
  });
  return card;
}

// Rounds as they arrive: {tokens, tree, head, at}, at in ms, the same for rounds that came together. `end` gets the finish reason
// and, with every round, the usage so far.
export async function* stream(body, signal, end) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const { data, at } of eventsOf(response.body.getReader())) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(0, chunk.error.message);
    end.reason = chunk.choices[0]?.finish_reason ?? end.reason;
    end.usage = chunk.usage ?? end.usage;
    if (chunk.eyas) yield { ...chunk.eyas.round, at };
  }
  throw new Refused(0, BROKEN);
}

async function* eventsOf(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0, BROKEN);
    }
    if (part.done) return;
    const at = performance.now();
    const events = (rest + decoder.decode(part.value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield { data: event.slice(6), at };
  }
}
