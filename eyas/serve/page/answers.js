// One answer, from the request to the last token on the screen; one thing at a time, which Stop ends.

import { $, button, decimals, frame, pause, sentence, tokens } from "./dom.js";
import { Refused, server, stream } from "./server.js";
import { inWords } from "./settings.js";
import { Tally, pace, showNumbers } from "./tally.js";
import { tree } from "./tree.js";
import { Words } from "./words.js";

const TOKENS_A_FRAME = 200; // between two frames no more are drawn
const SLOW_MS = 400; // a round of slow motion
const TIGHT = 0.85; // of the context

export const allWords = new Set(); // of the chat that is shown
let running = null; // AbortController of what is under way

export const isRunning = () => running !== null;
export const isStopped = () => running.signal.aborted;
export const stop = () => running?.abort();

// Do one thing; what it gives is told to a screen reader, what it raises to everybody. `enable` is called before and after.
export async function busy(work, enable) {
  if (running) return;
  running = new AbortController();
  say("", "");
  enable();
  try {
    const told = await work();
    if (told) say(told, "");
  } catch (error) {
    complain(error);
  } finally {
    running = null;
    enable();
  }
}

export function say(status, problem) {
  $("status").textContent = status;
  $("problem").textContent = problem;
}

function complain(error) {
  const isKey = error.status === 401;
  $("key-form").hidden = !isKey && $("key-form").hidden;
  if (isKey) $("key").focus();
  const ours = error instanceof Refused;
  say("", ours ? sentence(inWords(error)) : `This page has failed: ${error.message}`);
  if (!ours) console.error(error);
}

// Ask, and draw into `words`; what came, whether it was stopped, and the error that ended it.
export async function answer(body, words, onDrawn = () => {}) {
  const came = { rounds: [], tally: new Tally(performance.now()), reason: null, usage: null, stopped: false, isOver: false, error: null };
  const { signal } = running;
  tree.follow(came.rounds, words);
  showNumbers(came.tally);
  const drawing = draw(came, words, signal, onDrawn);
  try {
    for await (const round of stream(body, signal, came)) came.rounds.push(round);
  } catch (error) {
    if (error.name !== "AbortError") came.error = error;
  }
  came.isOver = true;
  await drawing;
  came.stopped = signal.aborted;
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
      words.draw(false);
      onDrawn(came);
      showNumbers(came.tally);
      gauge(came.usage);
      tree.newest();
    }
    await ($("slow").checked ? Promise.race([pause(SLOW_MS), aborted(signal)]) : frame());
  }
  words.draw();
  onDrawn(came);
  came.rounds.length = next;
}

const aborted = (signal) => new Promise((done) => signal.addEventListener("abort", done, { once: true }));

// How much of the context chat and answer take: a usage, or the tokens.
export function gauge(usage) {
  const used = usage?.total_tokens ?? usage ?? 0;
  const most = server.maxLength;
  $("gauge").max = Math.max(most, 1);
  $("gauge").value = used;
  $("gauge").high = TIGHT * most;
  const share = most ? `${decimals((100 * used) / most, 0)} % of ${tokens(most)}` : "";
  const isTight = most && used > TIGHT * most;
  $("context").textContent = `${share}${isTight ? ": nearly full; begin a new chat, or edit an earlier message" : ""}`;
}

// An element for words; `shown` makes an answer that somebody clicks on the one whose rounds are drawn.
export function spoken(place, shown) {
  const words = new Words(place, $("markdown").checked);
  allWords.add(words);
  place.addEventListener("click", (event) => {
    const number = event.target.dataset?.round;
    if (number === undefined || String(getSelection()) || (isRunning() && tree.words !== words)) return;
    if (tree.words !== words) shown(words);
    tree.pick(Number(number));
    view("rounds");
  });
  return words;
}

// On a narrow screen: the chat or the rounds.
export function view(name) {
  document.body.dataset.view = name;
  for (const one of ["chat", "rounds"]) $(`view-${one}`).setAttribute("aria-pressed", one === name);
  tree.draw(); // it had no width
}

export function lookBack(came, words) {
  if (running || !came) return;
  view("rounds");
  tree.follow(came.rounds, words);
  tree.newest();
  showNumbers(came.tally);
}

// What an answer came to; for the keyboard what a click on its tokens is for the mouse.
export function opener(text, open) {
  const made = button(text, "opener", open);
  made.title = "Show the rounds of this answer";
  return made;
}

export const sum = ({ tally, stopped, reason, error }) =>
  tokens(tally.tokens) +
  (tally.trees ? `, ${decimals(tally.perRound, 2)} tokens a round` : "") +
  (tally.isTimed ? `, ${pace(tally.speed)} tokens/s` : "") +
  (stopped ? "; stopped" : error ? "; broken off" : reason === "length" ? "; cut at its longest" : "");
