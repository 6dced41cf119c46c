// Numbers of an answer's rounds, and where they are shown. A round of tau is one that the head drafted in; `all` are the target's
// forwards after the prefill, whose token is plain.

import { $, decimals, tokens } from "./dom.js";
import { server } from "./server.js";

const ARRIVALS = 4, SPAN_MS = 20; // an answer that came in fewer pieces, or in less time, has no pace
const ORIGINS = ["drafted", "text", "bonus", "plain"];

export class Tally {
  constructor(started) {
    Object.assign(this, { started, drafted: 0, text: 0, bonus: 0, plain: 0, ofHead: 0, ofText: 0, trees: 0 });
    Object.assign(this, { rounds: 0, emitted: 0, all: 0, ofAll: 0, atFirst: 0, arrivals: 0 });
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
    if (round.tree?.length) this.trees += 1;
    for (const { source } of round.tree ?? []) this[source === "text" ? "ofText" : "ofHead"] += 1;
    if (!round.head) return;
    this.rounds += 1;
    this.emitted += round.tokens.length;
  }

  get tokens() {
    return this.drafted + this.text + this.bonus + this.plain;
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

export const pace = (speed) => decimals(speed, speed < 10 ? 1 : 0);

export function showNumbers(tally) {
  $("per-round").textContent = decimals(tally.perRound, 2);
  const without = tally.tokens > 1 && server.hasHead ? "the head drafted in no round so far" : "over all rounds, plain ones too";
  const some = `over all ${tally.all} rounds; tau ${decimals(tally.tau, 2)} over the ${tally.rounds} that the head drafted in`;
  const each = `over ${tally.all} rounds, and the head drafted in all: this is tau`;
  $("per-round-note").textContent = tally.rounds ? (tally.rounds === tally.all ? each : some) : without;
  $("speed").textContent = pace(tally.speed);
  $("speed-note").textContent = tally.tokens ? `first token after ${decimals(tally.firstMs, 0)} ms` : "from the first token on";
  $("accepted").textContent = tally.ofHead ? `${decimals((100 * tally.drafted) / tally.ofHead, 0)} %` : "–";
  $("accepted-note").textContent = tally.ofHead ? `of ${tokens(tally.ofHead)} that the head drafted` : "of what the head drafted";
  $("of-text").textContent = tally.ofText ? ` of ${tally.ofText}` : "";
  for (const origin of ORIGINS) {
    $(`num-${origin}`).textContent = tally[origin];
    const share = tally.tokens ? (100 * tally[origin]) / tally.tokens : 0;
    document.querySelector(`#shares .${origin}`).style.width = `${share}%`;
  }
}
