// The playground: sends chats to this server and shows where each token comes from. It sends requests to no other server, keeps
// nothing, and inserts text as text only. With `stream_options.include_rounds` each chunk has its round under `eyas`.
//
//   stream      one answer as it arrives: rounds, each with the moment it came
//   show        draws rounds as the screen keeps up, or slowly: never more than so many tokens between two frames
//   Tally       what the numbers say of the rounds that are drawn
//   Words       an answer, a span a token
//   Tree        the round of an answer that is looked at
//   chat, race  what the two buttons do

const TOKENS_A_FRAME = 200;
const SLOW_MS = 400; // a round of slow motion
const REPLAY_S = 4; // a replay takes at least
const LONGEST_LABEL = 9; // characters of a token in the tree
const ARRIVALS = 4, SPAN_MS = 20; // an answer that came in fewer pieces, or in less time, has no pace
const LEAST_TURNS = 8; // races that a ratio takes: as many as a benchmark's turns (eyas/tau.py)

const $ = (id) => document.getElementById(id);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
// A hidden tab has no frames.
const frame = () => Promise.race([new Promise((done) => requestAnimationFrame(done)), pause(250)]);
const decimals = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// The server

const server = { key: "", model: "", hasHead: false };

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
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
  throw new Refused(response.status, again ? `${message}; try again in ${again} s` : message);
}

// Rounds as they arrive: {tokens, tree, at}, at in ms, the same for rounds that came together. `end` gets the finish reason and usage.
async function* stream(body, signal, end) {
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
  throw new Refused(0, "the connection broke before the answer ended");
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
      throw new Refused(0, "the connection broke before the answer ended");
    }
    if (part.done) return;
    const at = performance.now();
    const events = (rest + decoder.decode(part.value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield { data: event.slice(6), at };
  }
}

// Numbers of rounds. A round of tau is one that the head drafted in; `all` are the target's forwards after the prefill, whose token is plain.

class Tally {
  constructor(started) {
    Object.assign(this, { started, drafted: 0, bonus: 0, plain: 0, judged: 0, rounds: 0, emitted: 0, all: 0, ofAll: 0, atFirst: 0, arrivals: 0 });
    this.firstAt = this.lastAt = null;
  }

  add(round) {
    this.firstAt ??= round.at;
    if (round.at === this.firstAt) this.atFirst += round.tokens.length;
    if (round.at !== this.lastAt) this.arrivals += 1;
    this.lastAt = round.at;
    const isPrefill = !this.tokens && round.tree === null;
    for (const token of round.tokens) this[token.origin] += 1;
    if (!isPrefill) {
      this.all += 1;
      this.ofAll += round.tokens.length;
    }
    this.judged += round.tree?.length ?? 0;
    if (!round.head) return;
    this.rounds += 1;
    this.emitted += round.tokens.length;
  }

  get tokens() {
    return this.drafted + this.bonus + this.plain;
  }

  get tau() {
    return this.emitted / this.rounds;
  }

  get perRound() {
    return this.ofAll / this.all;
  }

  get isTimed() {
    return this.arrivals >= ARRIVALS && this.lastAt - this.firstAt >= SPAN_MS;
  }

  get speed() {
    return this.isTimed ? (1000 * (this.tokens - this.atFirst)) / (this.lastAt - this.firstAt) : NaN;
  }

  get firstMs() {
    return this.firstAt - this.started;
  }
}

function showNumbers(tally) {
  $("per-round").textContent = decimals(tally.perRound, 2);
  const without = tally.tokens > 1 && server.hasHead ? "the head drafted in no round so far" : "over all rounds, plain ones too";
  const some = `over all ${tally.all} rounds; tau ${decimals(tally.tau, 2)} over the ${tally.rounds} that drafted`;
  const each = `over ${tally.all} rounds, which all drafted: this is tau`;
  $("per-round-note").textContent = tally.rounds ? (tally.rounds === tally.all ? each : some) : without;
  $("speed").textContent = decimals(tally.speed, tally.speed < 10 ? 1 : 0);
  $("speed-note").textContent = tally.tokens ? `first token after ${decimals(tally.firstMs, 0)} ms` : "from the first token on";
  $("accepted").textContent = tally.judged ? `${decimals((100 * tally.drafted) / tally.judged, 0)} %` : "–";
  $("accepted-note").textContent = tally.judged ? `of ${tally.judged} drafted tokens` : "of what the head drafted";
  for (const origin of ["drafted", "bonus", "plain"]) {
    $(`num-${origin}`).textContent = tally[origin];
    const share = tally.tokens ? (100 * tally[origin]) / tally.tokens : 0;
    document.querySelector(`#shares .${origin}`).style.width = `${share}%`;
  }
}

// The words of an answer, a span a token. A line of its own for each line, so that a long answer is not laid out anew.

class Words {
  constructor(place) {
    this.place = place;
    this.clear();
  }

  clear() {
    this.place.replaceChildren();
    this.spans = []; // by round
    this.text = "";
    this.line = null;
    this.marked = [];
  }

  add(round) {
    const number = this.spans.length;
    this.spans.push(round.tokens.map((token) => this.token(token, number)));
  }

  token({ text, origin }, number) {
    if (this.line === null) this.place.append((this.line = element("div")));
    const span = element("span", `token ${origin}`, text);
    span.dataset.round = number;
    this.line.append(span);
    this.text += text;
    if (text.includes("\n")) this.line = null;
    return span;
  }

  mark(number) {
    for (const span of this.marked) span.classList.remove("now");
    this.marked = this.spans[number] ?? [];
    for (const span of this.marked) span.classList.add("now");
  }
}

// The tree of one round

const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.3, HEIGHT = 34, GAP = 22, PITCH = 42; // px

function drawn(tag, attributes, parent, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function label(text) {
  const visible = text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
  const characters = [...visible];
  return characters.length > LONGEST_LABEL ? characters.slice(0, LONGEST_LABEL - 1).join("") + "…" : visible;
}

// Nodes with depth and row: a node stands where its first child does, children by probability.
function placed(rootText, round) {
  const root = { text: rootText, kind: "root", children: [] };
  const nodes = (round.tree ?? []).map((node) => ({ ...node, kind: node.accepted ? "accepted" : "", children: [] }));
  for (const [number, node] of nodes.entries()) (round.tree[number].parent < 0 ? root : nodes[node.parent]).children.push(node);
  const path = nodes.filter((node) => node.accepted);
  const own = round.tokens.filter((token) => token.origin !== "drafted").at(-1);
  if (own) (path.at(-1) ?? root).children.push({ text: own.text, kind: "bonus", probability: -1, children: [] });
  const all = [];
  let row = 0;
  const place = (node, depth) => {
    node.depth = depth;
    all.push(node);
    node.children.sort((one, other) => other.probability - one.probability);
    if (!node.children.length) node.row = row++;
    for (const child of node.children) place(child, depth + 1);
    if (node.children.length) node.row = node.children[0].row;
  };
  place(root, 0);
  return all;
}

function drawTree(rootText, round) {
  const nodes = placed(rootText, round);
  const widths = [];
  for (const node of nodes) {
    node.label = label(node.text);
    widths[node.depth] = Math.max(widths[node.depth] ?? 46, [...node.label].length * CHARACTER + 12);
  }
  const lefts = widths.map((_, depth) => 2 + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  const width = lefts.at(-1) + widths.at(-1) + 2;
  const height = (Math.max(...nodes.map((node) => node.row)) + 1) * PITCH;
  const picture = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }))
    picture.setAttribute(name, value);
  picture.setAttribute("aria-label", inWords(round));
  const middle = (node) => node.row * PITCH + HEIGHT / 2 + 2;
  for (const node of nodes) {
    const right = lefts[node.depth] + widths[node.depth];
    for (const child of node.children) {
      const [x, y, bend] = [lefts[child.depth], middle(child), GAP / 2];
      const path = `M${right} ${middle(node)}C${right + bend} ${middle(node)} ${x - bend} ${y} ${x} ${y}`;
      drawn("path", { d: path, class: `edge ${child.kind}`, "stroke-width": 1 + 3 * Math.max(child.probability, 0.2) }, picture);
    }
  }
  for (const node of nodes) drawNode(node, lefts[node.depth], middle(node), widths[node.depth], picture);
  return picture;
}

function drawNode(node, left, middle, width, picture) {
  const group = drawn("g", { class: `node ${node.kind}` }, picture);
  drawn("title", {}, group, node.probability >= 0 ? `${node.text} (${node.probability})` : node.text);
  drawn("rect", { x: left, y: middle - HEIGHT / 2, width, height: HEIGHT, rx: 6 }, group);
  const isDraft = node.kind === "accepted" || node.kind === "";
  const below = isDraft ? `${decimals(100 * node.probability, 0)} %` : node.kind === "bonus" ? "target" : "root";
  drawn("text", { x: left + width / 2, y: middle - 2 }, group, node.label);
  drawn("text", { x: left + width / 2, y: middle + 12, class: "probability" }, group, below);
}

function inWords({ tokens, tree, head }) {
  // What ends an answer has no text; as a node it has a name.
  const names = (tree ?? []).filter((node) => node.accepted).map((node) => node.text);
  const said = tokens.map((token, place) => `“${token.text || (names[place] ?? "∅")}”`);
  if (tree === null) return `A round without drafts: the target said ${said.join("")}.`;
  const accepted = tokens.filter((token) => token.origin === "drafted").length;
  const own = said.slice(accepted).join("");
  const kept = accepted ? `kept ${accepted}: ${said.slice(0, accepted).join("")}` : "kept none";
  return `${head ? "The head" : "Text"} drafted ${tree.length} ${tree.length === 1 ? "token" : "tokens"}; the target ${kept}${own ? `, and added ${own}` : ""}.`;
}

// Shows one answer's rounds: the last that drafted, or else the last, until somebody picks another.
class Tree {
  follow(rounds, words) {
    this.words?.mark(-1);
    Object.assign(this, { rounds, words, follows: true, number: -1 });
  }

  newest() {
    const shown = this.rounds.slice(0, this.words.spans.length);
    const drafted = shown.findLastIndex((round) => round.tree !== null);
    const last = drafted < 0 ? shown.length - 1 : drafted;
    if (this.follows && last >= 0) this.show(last);
    else this.enable();
  }

  pick(number) {
    if (!this.words?.spans.length) return;
    this.follows = false;
    this.show(Math.min(Math.max(number, 0), this.words.spans.length - 1));
  }

  show(number) {
    if (number === this.number) return this.enable();
    this.number = number;
    const round = this.rounds[number];
    $("drawing").replaceChildren(drawTree(this.rounds[number - 1]?.tokens.at(-1).text ?? "prompt", round));
    $("told").textContent = inWords(round);
    this.words.mark(number);
    this.enable();
  }

  enable() {
    const shown = this.words.spans.length;
    $("tree-title").textContent = `Round ${this.number + 1} of ${shown}`;
    $("which").max = Math.max(shown, 1);
    $("which").value = this.number + 1;
    $("which").disabled = shown < 2;
    $("back").disabled = this.number < 1;
    $("on").disabled = this.number >= shown - 1;
  }
}

const tree = new Tree();

// One answer, from the request to the last token on the screen

let running = null; // AbortController of what is under way

function wanted(messages, extra = {}) {
  const body = {
    model: server.model,
    messages,
    temperature: $("temperature").valueAsNumber,
    max_tokens: $("longest").valueAsNumber,
    stream: true,
    stream_options: { include_rounds: true, include_usage: true },
    ...extra,
  };
  if (server.hasHead) body.speculation ??= $("speculation").checked;
  return body;
}

// Ask, and draw into `words`; what came, and whether it was stopped. Raises Refused, once what came before is drawn.
async function answer(body, words, onDrawn = () => {}) {
  const started = performance.now();
  const came = { rounds: [], tally: new Tally(started), reason: null, usage: null, stopped: false, isOver: false };
  const { signal } = running;
  tree.follow(came.rounds, words);
  showNumbers(came.tally);
  const drawing = draw(came, words, signal, onDrawn);
  try {
    for await (const round of stream(body, signal, came)) came.rounds.push(round);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    came.isOver = true;
    await drawing;
    came.stopped = signal.aborted;
  }
  return came;
}

async function draw(came, words, signal, onDrawn) {
  let next = 0;
  const one = () => {
    words.add(came.rounds[next]);
    came.tally.add(came.rounds[next]);
    next += 1;
  };
  while (!signal.aborted && !(came.isOver && next === came.rounds.length)) {
    if (next < came.rounds.length) {
      const before = came.tally.tokens;
      if ($("slow").checked) one();
      else while (next < came.rounds.length && came.tally.tokens - before < TOKENS_A_FRAME) one();
      onDrawn(came);
      atItsEnd($("log"));
      showNumbers(came.tally);
      tree.newest();
    }
    await ($("slow").checked ? Promise.race([pause(SLOW_MS), aborted(signal)]) : frame());
  }
  came.rounds.length = next;
}

const aborted = (signal) => new Promise((done) => signal.addEventListener("abort", done, { once: true }));

// Keep a scrolled element at its end if it is there.
const isAtEnd = (scrolled) => scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < 120;
let staysAtEnd = true;

function atItsEnd(scrolled) {
  if (staysAtEnd) scrolled.scrollTop = scrolled.scrollHeight;
}

// Chat and race

let history = [];

const welcome = $("welcome");

function turn(who) {
  welcome.remove();
  const place = element("div", "turn");
  place.append(element("h3", "", who));
  $("log").append(place);
  return place;
}

function question(text) {
  const place = turn("You");
  place.append(element("div", "asked", text));
  return place;
}

// `shown` makes an answer that somebody clicks on the one whose rounds are drawn.
function spoken(place, shown) {
  const words = new Words(element("div", "said"));
  place.append(words.place);
  words.place.addEventListener("click", (event) => {
    const number = event.target.dataset?.round;
    if (number === undefined) return;
    if (tree.words !== words) shown(words);
    tree.pick(Number(number));
  });
  return words;
}

function lookBack(came, words) {
  if (running || !came) return;
  tree.follow(came.rounds, words);
  tree.newest();
  showNumbers(came.tally);
}

// What an answer came to; for the keyboard what a click on its tokens is for the mouse.
function opener(text, open) {
  const button = element("button", "opener", text);
  button.type = "button";
  button.title = "Show the rounds of this answer";
  button.addEventListener("click", open);
  return button;
}

const sum = (came) =>
  `${came.tally.tokens} tokens` +
  (came.tally.rounds ? `, ${decimals(came.tally.perRound, 2)} tokens a round` : "") +
  (came.tally.isTimed ? `, ${decimals(came.tally.speed, 0)} tokens/s` : "") +
  (came.stopped ? "; stopped" : came.reason === "length" ? "; cut at the longest answer" : "");

async function chat(prompt) {
  const asked = question(prompt);
  const place = turn(server.model);
  place.classList.add("streaming");
  const messages = [...history, { role: "user", content: prompt }];
  let came = null;
  const words = spoken(place, (of) => lookBack(came, of));
  try {
    came = await answer(wanted(messages), words);
    if (words.text) history = [...messages, { role: "assistant", content: words.text }];
    place.append(opener(sum(came), () => lookBack(came, words)));
    atItsEnd($("log"));
    return sum(came);
  } finally {
    place.classList.remove("streaming");
    if (!words.text) giveBack(prompt, asked, place);
  }
}

// A prompt that was not answered stands in its box again.
function giveBack(prompt, ...places) {
  for (const place of places) place?.remove();
  if (!$("prompt").value) $("prompt").value = prompt;
}

function lane(parent, title) {
  const place = element("div", "lane");
  const figure = element("div", "figure", "–");
  const progress = element("progress");
  const note = opener("waits", () => lookBack(made.came, made.words));
  progress.max = $("longest").valueAsNumber;
  progress.value = 0;
  progress.setAttribute("aria-label", `${title}: tokens so far`);
  place.append(element("h3", "", title), figure, progress);
  parent.append(place);
  const made = { place, words: null, came: null, most: 0 };
  made.words = spoken(place, (of) => lookBack(made.came, of));
  place.append(note);
  made.show = (tally) => {
    progress.max = made.most || progress.max;
    progress.value = tally.tokens;
    figure.textContent = `${decimals(tally.speed, tally.speed < 10 ? 1 : 0)} tokens/s`;
    note.textContent =
      (tally.isTimed
        ? `${tally.tokens} tokens in ${decimals((tally.lastAt - tally.firstAt) / 1000, 2)} s from the first on`
        : `${tally.tokens} tokens, too soon over to time`) +
      (tally.rounds ? `, ${decimals(tally.perRound, 2)} tokens a round` : "");
    made.words.place.scrollTop = made.words.place.scrollHeight;
  };
  return made;
}

let races = []; // of this chat, those that have a pace: {ratio, all, ofAll}

async function race(prompt) {
  const asked = question(prompt);
  const place = turn("Race: one after the other, so that they do not disturb each other");
  const beside = element("div", "lanes");
  place.append(beside);
  const lanes = [lane(beside, "without the head"), lane(beside, "with the head")];
  const messages = [...history, { role: "user", content: prompt }];
  const verdict = element("p", "verdict");
  try {
    if (!(await run(messages, lanes))) {
      place.append(verdict);
      return (verdict.textContent = "Stopped: there is nothing to compare.");
    }
  } catch (error) {
    if (lanes.every((one) => !one.words.text)) giveBack(prompt, asked, place);
    throw error;
  }
  history = [...messages, { role: "assistant", content: lanes[1].words.text }];
  const more = raceButton(() => untilEnough(messages, lanes, verdict, more));
  const again = raceButton(() => replay(lanes, again));
  again.textContent = "Replay side by side";
  place.append(verdict, more, again);
  judge(lanes, verdict, more);
  atItsEnd($("log"));
  return verdict.textContent;
}

function raceButton(work) {
  const button = element("button");
  button.type = "button";
  button.addEventListener("click", () => busy(work));
  return button;
}

// Both lanes once, another one first each time; whether both came to their end.
async function run(messages, lanes) {
  // With the same seed both must draw the same tokens, at any temperature.
  const seed = crypto.getRandomValues(new Uint32Array(1))[0];
  const order = races.length % 2 ? [1, 0] : [0, 1];
  for (const one of lanes) {
    one.words.clear();
    one.came = null;
  }
  for (const place of order) {
    if (running.signal.aborted) break;
    const one = lanes[place];
    one.came = await answer(wanted(messages, { seed, speculation: place === 1 }), one.words, (came) => one.show(came.tally));
    for (const each of lanes) each.most = one.came.tally.tokens; // both say the same: so long is the way
    one.show(one.came.tally);
  }
  const [plain, head] = lanes.map((one) => one.came);
  if (!plain || !head || plain.stopped || head.stopped) return false;
  if (plain.tally.isTimed && head.tally.isTimed && parting(plain, head) === undefined) {
    races.push({ ratio: head.tally.speed / plain.tally.speed, all: head.tally.all, ofAll: head.tally.ofAll });
  }
  tree.follow(head.rounds, lanes[1].words);
  tree.newest();
  showNumbers(head.tally);
  return true;
}

async function untilEnough(messages, lanes, verdict, more) {
  let left = LEAST_TURNS - races.length;
  while (left-- > 0 && (await run(messages, lanes)));
  if (running.signal.aborted) return (verdict.textContent = "Stopped: there is nothing to compare.");
  judge(lanes, verdict, more);
  return verdict.textContent;
}

// The first token in which two answers differ; undefined where they are the same to the end.
function parting(plain, head) {
  const [one, other] = [plain, head].map((came) => came.rounds.flatMap((round) => round.tokens.map((token) => token.text)));
  const most = Math.max(one.length, other.length);
  const found = [...Array(most).keys()].find((place) => one[place] !== other[place]);
  return found ?? (plain.reason === head.reason ? undefined : most);
}

function judge(lanes, verdict, more) {
  const [plain, head] = lanes.map((one) => one.came);
  const parts = parting(plain, head);
  const same = parts === undefined;
  const identity = element("b", same ? "" : "warn", same ? "Identical outputs" : "The outputs differ");
  const which = same ? `: all ${head.tally.tokens} tokens are the same. ` : ` from token ${parts + 1} on. `;
  verdict.replaceChildren(identity, which, compared(plain.tally, head.tally));
  const left = LEAST_TURNS - races.length;
  more.textContent = `Race ${left} more ${left === 1 ? "time" : "times"}`;
  more.hidden = left <= 0;
}

// A ratio of speeds is claimed as a benchmark's is: of enough races, where its interval does not hold 1, and never above the
// tokens of a round, since a round takes at least as long as a plain one.
function compared(plain, head) {
  if (!head.rounds) return NOT_DRAFTED;
  const rounds = `With the head ${decimals(head.perRound, 2)} tokens a round, over all ${head.all} rounds. `;
  if (!plain.isTimed || !head.isTimed) return `${rounds}Too soon over to time: ask for a longer answer.`;
  if (races.length < LEAST_TURNS) {
    return `${rounds}No speed is claimed yet: ${races.length} of ${LEAST_TURNS} races, and fewer may agree by chance.`;
  }
  const [low, high] = medianInterval(races.map((one) => one.ratio));
  const ratio = median(races.map((one) => one.ratio));
  const within = `over ${races.length} races (${decimals(low, 2)} to ${decimals(high, 2)})`;
  if (decimals(low, 2) <= 1 && decimals(high, 2) >= 1) return `${rounds}No certain difference in tokens a second ${within}.`;
  const most = races.reduce((sum, one) => sum + one.ofAll, 0) / races.reduce((sum, one) => sum + one.all, 0);
  if (ratio > most) {
    return `${rounds}No speed is claimed: ${decimals(ratio, 2)} ${within} is more than ${decimals(most, 2)} tokens a round can give.`;
  }
  return `${rounds}${decimals(ratio, 2)} times as many tokens a second ${within}, without the time to the first token.`;
}

function median(values) {
  const ordered = [...values].sort((one, other) => one - other);
  return (ordered[(ordered.length - 1) >> 1] + ordered[ordered.length >> 1]) / 2;
}

// What holds the median with 95 %, as eyas/bench/metrics.py:median_interval: the k lowest and the k highest are left out.
function medianInterval(values) {
  const ordered = [...values].sort((one, other) => one - other);
  let ways = 1, miss = 2 / 2 ** ordered.length, k = 0;
  for (;;) {
    ways *= (ordered.length - k) / (k + 1);
    miss += (2 * ways) / 2 ** ordered.length;
    if (miss > 0.05) return [ordered[k], ordered[ordered.length - 1 - k]];
    k += 1;
  }
}

const NOT_DRAFTED =
  "Nothing was drafted with the head either, so there is nothing to compare: the server drafts as it sees fit (auto), and judged " +
  "that it would not pay for this request just now.";

// Both lanes at once, each at the pace that it had.
async function replay(lanes, button) {
  const spans = lanes.map(({ came }) => came.tally.lastAt - came.tally.firstAt);
  const slower = Math.max(1, (1000 * REPLAY_S) / Math.max(...spans, 1));
  button.textContent = `Replay side by side (${decimals(slower, 1)} times slower)`;
  const runs = lanes.map((one) => {
    one.words.clear();
    return { ...one, tally: new Tally(one.came.tally.started), next: 0 };
  });
  tree.follow(lanes[1].came.rounds, lanes[1].words);
  const began = performance.now();
  while (!running.signal.aborted && runs.some((one) => one.next < one.came.rounds.length)) {
    for (const one of runs) {
      const now = one.came.tally.firstAt + (performance.now() - began) / slower;
      while (one.next < one.came.rounds.length && one.came.rounds[one.next].at <= now) {
        const round = one.came.rounds[one.next++];
        one.words.add(round);
        one.tally.add(round);
      }
      if (one.next) one.show(one.tally);
    }
    tree.newest();
    await frame();
  }
  for (const one of runs) {
    for (const round of one.came.rounds.slice(one.next)) one.words.add(round), one.tally.add(round);
    one.show(one.tally);
  }
  tree.newest();
}

// The form

async function busy(work) {
  if (running) return;
  running = new AbortController();
  staysAtEnd = true;
  $("problem").textContent = $("status").textContent = "";
  enableButtons();
  try {
    const told = await work();
    if (told) $("status").textContent = told;
  } catch (error) {
    complain(error);
  } finally {
    running = null;
    enableButtons();
  }
}

function complain(error) {
  const isKey = error.status === 401;
  $("key-form").hidden = !isKey && $("key-form").hidden;
  if (isKey) $("key").focus();
  const ours = error instanceof Refused;
  $("problem").textContent = ours ? sentence(error.message) : `This page has failed: ${error.message}`;
  if (!ours) console.error(error);
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

function enableButtons() {
  const isReady = Boolean(server.model) && !running;
  $("send").disabled = $("clear").disabled = !isReady;
  $("race").disabled = !isReady || !server.hasHead;
  for (const one of welcome.querySelectorAll(".example")) one.disabled = !isReady;
  $("stop").disabled = !running;
}

function submit(work) {
  const prompt = $("prompt").value;
  if (running || !$("composer").reportValidity() || !prompt.trim()) return;
  $("prompt").value = "";
  busy(() => work(prompt));
}

async function meet() {
  const { data } = await (await ask("v1/models")).json();
  const [card] = data;
  server.model = card.id;
  server.hasHead = card.eyas.has_head;
  const head = server.hasHead ? "with a head" : "without a head: start the server with --head to see it speculate";
  $("served").textContent = `${card.id} · ${card.eyas.dtype} · ${card.max_model_len} tokens · ${head}`;
  $("speculation").disabled = !server.hasHead;
  $("speculation").checked = server.hasHead;
  $("key-form").hidden = true;
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(chat);
});
$("race").addEventListener("click", () => submit(race));
for (const one of welcome.querySelectorAll(".example")) {
  one.addEventListener("click", () => busy(() => chat(one.textContent)));
}
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  history = [];
  races = [];
  $("log").replaceChildren(welcome);
  $("problem").textContent = $("status").textContent = "";
  $("prompt").focus();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(chat);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("log").addEventListener("scroll", () => (staysAtEnd = isAtEnd($("log"))));
$("which").addEventListener("input", () => tree.pick($("which").valueAsNumber - 1));
$("back").addEventListener("click", () => tree.pick(tree.number - 1));
$("on").addEventListener("click", () => tree.pick(tree.number + 1));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  server.key = $("key").value;
  $("key").value = "";
  busy(meet);
});

enableButtons();
busy(meet);
