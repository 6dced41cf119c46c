// The race: a prompt without speculation and with it, the verdict on both, and both again side by side.

import { $, button, decimals, element, frame, median } from "./dom.js";
import { answer, isStopped, lookBack, opener, spoken } from "./answers.js";
import { server } from "./server.js";
import { wanted } from "./settings.js";
import { Tally, pace, showNumbers } from "./tally.js";
import { tree } from "./tree.js";

const REPLAY_S = 4; // a replay takes at least
const LEAST_TURNS = 8; // races that a ratio takes: as many as a benchmark's turns (eyas/tau.py)

let races = []; // of this chat, those that have a pace: {ratio, all, ofAll}

export function forgetRaces() {
  races = [];
}

function lane(parent, title) {
  const place = element("div", "lane");
  const figure = element("div", "figure", "–");
  const progress = element("progress");
  const said = element("div", "said");
  const note = opener("waits", () => lookBack(made.came, made.words));
  progress.max = longest();
  progress.value = 0;
  progress.setAttribute("aria-label", `${title}: tokens so far`);
  said.tabIndex = 0; // it scrolls
  said.setAttribute("role", "group");
  said.setAttribute("aria-label", `Answer ${title}`);
  place.append(element("h3", "", title), figure, progress, said, note);
  parent.append(place);
  const made = { place, words: null, came: null, most: 0 };
  made.words = spoken(said, () => lookBack(made.came, made.words));
  made.show = (tally) => {
    progress.max = made.most || progress.max;
    progress.value = tally.tokens;
    figure.textContent = `${pace(tally.speed)} tokens/s`;
    note.textContent =
      (tally.isTimed
        ? `${tally.tokens} tokens in ${decimals((tally.lastAt - tally.firstAt) / 1000, 2)} s from the first on`
        : `${tally.tokens} tokens, too soon over to time`) +
      (tally.trees ? `, ${decimals(tally.perRound, 2)} tokens a round` : "");
    said.scrollTop = said.scrollHeight;
  };
  return made;
}

// Race in `place`: the verdict, and what both said unless it was stopped. Raises Refused. `again(work)` is how the buttons work.
export async function race(place, messages, again) {
  const verdict = element("p", "verdict", "One after the other, so that they do not disturb each other.");
  const buttons = element("div", "row"), beside = element("div", "lanes");
  place.append(verdict, buttons, beside);
  const lanes = [lane(beside, "without drafts"), lane(beside, "with drafts")];
  const stopped = () => (verdict.textContent = "Stopped: there is nothing to compare.");
  place.scrollIntoView({ block: "start" });
  if (!(await run(messages, lanes))) return { verdict: stopped() };
  const work = async () => {
    let left = LEAST_TURNS - races.length;
    while (left-- > 0 && (await run(messages, lanes)));
    if (isStopped()) return stopped();
    return judge(lanes, verdict, more);
  };
  const more = button("", "more", () => again(work));
  const side = button("Replay side by side", "", () => again(() => replay(lanes, side)));
  buttons.append(more, side);
  judge(lanes, verdict, more);
  place.scrollIntoView({ block: "start" });
  return { verdict: verdict.textContent, came: lanes[1].came, said: lanes[1].words.text };
}

// Tokens of an answer: a small model repeats itself when it goes on.
const longest = () => $("longest").valueAsNumber || Math.min(256, server.maxLength);

const fresh = (count) => crypto.getRandomValues(new Uint32Array(count));

// Both lanes once, another one first each time; whether both came to their end. Each has a salt of its own: else the server would
// draft the second answer from the first, which is the same.
async function run(messages, lanes) {
  // With the same seed both must draw the same tokens, at any temperature.
  const seed = $("seed").value === "" ? fresh(1)[0] : $("seed").valueAsNumber;
  const order = races.length % 2 ? [1, 0] : [0, 1];
  for (const one of lanes) {
    one.words.clear();
    one.came = null;
  }
  for (const place of order) {
    if (isStopped()) break;
    const one = lanes[place];
    const body = wanted(messages, { seed, speculation: place === 1, cache_salt: fresh(4).join("-"), max_tokens: longest() });
    one.came = await answer(body, one.words, (came) => one.show(came.tally));
    if (one.came.error) throw one.came.error;
    for (const each of lanes) each.most = one.came.tally.tokens; // both say the same: so long is the way
    one.show(one.came.tally);
  }
  const [plain, drafted] = lanes.map((one) => one.came);
  if (!plain || !drafted || plain.stopped || drafted.stopped) return false;
  if (plain.tally.isTimed && drafted.tally.isTimed && parting(plain, drafted) === undefined) {
    races.push({ ratio: drafted.tally.speed / plain.tally.speed, all: drafted.tally.all, ofAll: drafted.tally.ofAll });
  }
  tree.follow(drafted.rounds, lanes[1].words);
  tree.newest();
  showNumbers(drafted.tally);
  return true;
}

// The first token in which two answers differ; undefined where they are the same to the end.
function parting(plain, drafted) {
  const [one, other] = [plain, drafted].map((came) => came.rounds.flatMap((round) => round.tokens.map((token) => token.text)));
  const most = Math.max(one.length, other.length);
  const found = [...Array(most).keys()].find((place) => one[place] !== other[place]);
  return found ?? (plain.reason === drafted.reason ? undefined : most);
}

function judge(lanes, verdict, more) {
  const [plain, drafted] = lanes.map((one) => one.came);
  const parts = parting(plain, drafted);
  const same = parts === undefined;
  const identity = element("b", same ? "" : "warn", same ? "Identical outputs" : "The outputs differ");
  const which = same ? `: all ${drafted.tally.tokens} tokens are the same. ` : ` from token ${parts + 1} on. `;
  verdict.replaceChildren(identity, which, compared(plain.tally, drafted.tally));
  const left = LEAST_TURNS - races.length;
  more.textContent = `Race ${left} more ${left === 1 ? "time" : "times"}`;
  more.hidden = left <= 0;
  return verdict.textContent;
}

const NOT_DRAFTED =
  "Nothing was drafted in the second answer either, so there is nothing to compare: the server drafts as it sees fit (auto), and " +
  "judged that it would not pay for this request just now.";

// A ratio of speeds is claimed as a benchmark's is: of enough races, where its interval does not hold 1, and never above the
// tokens of a round, since a round takes at least as long as a plain one.
function compared(plain, drafted) {
  if (!drafted.trees) return NOT_DRAFTED;
  const rounds = `With drafts ${decimals(drafted.perRound, 2)} tokens a round, over all ${drafted.all} rounds. `;
  if (!plain.isTimed || !drafted.isTimed) return `${rounds}Too soon over to time: ask for a longer answer.`;
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

// Both lanes at once, each at the pace that it had.
async function replay(lanes, side) {
  const spans = lanes.map(({ came }) => came.tally.lastAt - came.tally.firstAt);
  const slower = Math.max(1, (1000 * REPLAY_S) / Math.max(...spans, 1));
  side.textContent = `Replay side by side (${decimals(slower, 1)} times slower)`;
  const runs = lanes.map((one) => {
    one.words.clear();
    return { ...one, tally: new Tally(one.came.tally.started), next: 0 };
  });
  const show = (one, until) => {
    for (; one.next < one.came.rounds.length && one.came.rounds[one.next].at <= until; one.next += 1) {
      one.words.add(one.came.rounds[one.next]);
      one.tally.add(one.came.rounds[one.next]);
    }
    if (!one.next) return;
    one.words.draw(until === Infinity);
    one.show(one.tally);
  };
  tree.follow(lanes[1].came.rounds, lanes[1].words);
  const began = performance.now();
  while (!isStopped() && runs.some((one) => one.next < one.came.rounds.length)) {
    for (const one of runs) show(one, one.came.tally.firstAt + (performance.now() - began) / slower);
    tree.newest();
    await frame();
  }
  for (const one of runs) show(one, Infinity);
  tree.newest();
}
