// The words of an answer: every character belongs to a token, and a token to its round. Shown as Markdown, or as the tokens are,
// a line of its own for each line; both in spans that have the token's origin as class and its round as data.

import { element } from "./dom.js";
import { Markdown } from "./markdown.js";

const PATIENCE = 4; // times as long as the last drawing of growing Markdown took, until the next

export class Words {
  constructor(place, asMarkdown = true) {
    this.place = place;
    this.asMarkdown = asMarkdown;
    this.markdown = new Markdown(place, (from, to) => this.leaf(from, to));
    this.clear();
  }

  clear() {
    Object.assign(this, { text: "", tokens: [], owners: [], numRounds: 0, number: -1, line: null, drawn: 0, tookMs: 0, drawnAt: 0 });
    this.markdown.clear();
  }

  add(round) {
    for (const { text, origin } of round.tokens) {
      for (let count = text.length; count > 0; count -= 1) this.owners.push(this.tokens.length);
      this.tokens.push({ origin, number: this.numRounds });
      this.text += text;
    }
    this.numRounds += 1;
  }

  // Draw what was added. Markdown may wait for a next time, unless this is the last.
  draw(isLast = true) {
    if (!this.asMarkdown) return this.drawLines();
    const now = performance.now();
    if (!isLast && now - this.drawnAt < PATIENCE * this.tookMs) return;
    this.markdown.update(this.text);
    this.drawnAt = performance.now();
    this.tookMs = this.drawnAt - now;
  }

  drawLines() {
    while (this.drawn < this.text.length) {
      if (this.line === null) this.place.append((this.line = element("div")));
      const newline = this.text.indexOf("\n", this.drawn);
      const end = newline < 0 ? this.text.length : newline + 1;
      this.line.append(...this.leaf(this.drawn, end));
      if (newline >= 0) this.line = null;
      this.drawn = end;
    }
  }

  show(asMarkdown) {
    if (asMarkdown === this.asMarkdown) return;
    this.asMarkdown = asMarkdown;
    this.markdown.clear();
    Object.assign(this, { line: null, drawn: 0 });
    this.draw();
  }

  // [from, to) of the text, a span a token. An answer that was kept without its rounds is text alone.
  leaf(from, to) {
    if (!this.tokens.length) return [this.text.slice(from, to)];
    const made = [];
    for (let start = from, end; start < to; start = end) {
      end = start + 1;
      while (end < to && this.owners[end] === this.owners[start]) end += 1;
      const { origin, number } = this.tokens[this.owners[start]];
      const span = element("span", `token ${origin}${number === this.number ? " now" : ""}`, this.text.slice(start, end));
      span.dataset.round = number;
      made.push(span);
    }
    return made;
  }

  mark(number) {
    for (const span of this.place.querySelectorAll(".now")) span.classList.remove("now");
    this.number = number;
    for (const span of this.place.querySelectorAll(`[data-round="${number}"]`)) span.classList.add("now");
  }
}
