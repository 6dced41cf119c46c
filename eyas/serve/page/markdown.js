// Markdown as models write it, as elements of the page: headings, lists, quotes, tables, code with a copy button, emphasis, links.
//
// A text is parsed to nodes that name places of it, so that whoever shows it can say of every character which token it is of:
//
//   blocks(lines, depth)  lines of a text [{from, to}] -> nodes {tag, start, children, ...}
//   inline(lines)         the same lines -> nodes inside a paragraph; a leaf is {from, to}, a place in the text
//   Markdown              draws them, and while a text grows draws its last blocks anew
//
// What is no Markdown is text, HTML too. Links go to http, https and mailto; a picture is a link to it, for nothing is loaded.

import { copyButton, element } from "./dom.js";

const DEEPEST = 8; // quotes, lists and emphasis in each other; deeper marks are text
const LONGEST_LINK = 1000; // characters of its text
const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^\s{0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}> ?/;
const ITEM = /^(\s{0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const DASHES = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const THOUGHT = /^\s*<think>\s*$/;

// Blocks

class Parser {
  constructor(text) {
    this.text = text;
  }

  of({ from, to }) {
    return this.text.slice(from, to);
  }

  isBlank(line) {
    return !this.of(line).trim();
  }

  lines(from) {
    const found = [];
    for (let at = from; at < this.text.length; ) {
      const end = this.text.indexOf("\n", at);
      const to = end < 0 ? this.text.length : end;
      found.push({ from: at, to });
      at = to + 1;
    }
    return found;
  }

  blocks(lines, depth = 0) {
    const made = [];
    for (let k = 0; k < lines.length; ) {
      if (this.isBlank(lines[k])) {
        k += 1;
        continue;
      }
      const start = lines[k].from;
      const [node, next] =
        this.code(lines, k) ?? this.heading(lines, k) ?? this.rule(lines, k) ?? this.thought(lines, k, depth) ??
        this.quote(lines, k, depth) ?? this.list(lines, k, depth) ?? this.table(lines, k) ?? this.paragraph(lines, k);
      made.push({ ...node, start });
      k = next;
    }
    return made;
  }

  code(lines, k) {
    const opening = FENCE.exec(this.of(lines[k]));
    if (!opening) return null;
    const [, fence, language] = opening;
    const indent = this.of(lines[k]).search(/\S/);
    const closing = new RegExp(`^\\s{0,3}${fence[0]}{${fence.length},}\\s*$`);
    let end = k + 1;
    while (end < lines.length && !closing.test(this.of(lines[end]))) end += 1;
    const inside = lines.slice(k + 1, end).map((line) => this.stripped(line, indent));
    return [{ tag: "pre", language, lines: inside }, Math.min(end + 1, lines.length)];
  }

  heading(lines, k) {
    const found = HEADING.exec(this.of(lines[k]));
    if (!found) return null;
    const children = this.inline([{ from: lines[k].from + found[0].length, to: lines[k].to }]);
    return [{ tag: "h4", className: `level-${found[1].length}`, children }, k + 1];
  }

  rule(lines, k) {
    return RULE.test(this.of(lines[k])) ? [{ tag: "hr", children: [] }, k + 1] : null;
  }

  // What a model thinks before it answers.
  thought(lines, k, depth) {
    if (!THOUGHT.test(this.of(lines[k]))) return null;
    let end = k + 1;
    while (end < lines.length && !/<\/think>/.test(this.of(lines[end]))) end += 1;
    const summary = { tag: "summary", children: [{ text: "Thoughts" }] };
    return [{ tag: "details", children: [summary, ...this.blocks(lines.slice(k + 1, end), depth + 1)] }, Math.min(end + 1, lines.length)];
  }

  quote(lines, k, depth) {
    if (depth >= DEEPEST || !QUOTE.test(this.of(lines[k]))) return null;
    const inside = [];
    for (; k < lines.length && QUOTE.test(this.of(lines[k])); k += 1) {
      inside.push({ from: lines[k].from + QUOTE.exec(this.of(lines[k]))[0].length, to: lines[k].to });
    }
    return [{ tag: "blockquote", children: this.blocks(inside, depth + 1) }, k];
  }

  list(lines, k, depth) {
    const first = depth < DEEPEST && ITEM.exec(this.of(lines[k]));
    if (!first) return null;
    const kind = first[2].at(-1);
    const isOrdered = kind === "." || kind === ")";
    const children = [];
    while (k < lines.length) {
      const found = ITEM.exec(this.of(lines[k]));
      if (!found || found[2].at(-1) !== kind || RULE.test(this.of(lines[k]))) break;
      const width = found[0].length - Math.max(0, found[3].length - 4);
      const item = [{ from: lines[k].from + width, to: lines[k].to }];
      for (k += 1; k < lines.length && this.belongs(lines, k, found[1].length); k += 1) item.push(this.stripped(lines[k], width));
      children.push({ tag: "li", children: this.blocks(item, depth + 1) });
    }
    return [{ tag: isOrdered ? "ol" : "ul", number: isOrdered ? parseInt(first[2], 10) : null, children }, k];
  }

  // Whether a line goes on with the item above it, of a list that is so far indented: it is indented more, or blank before such
  // a line or a next item, or goes on with a paragraph.
  belongs(lines, k, indent) {
    if (this.isBlank(lines[k])) {
      const next = lines.findIndex((line, place) => place > k && !this.isBlank(line));
      return next >= 0 && (this.indent(lines[next]) >= indent + 2 || ITEM.test(this.of(lines[next])));
    }
    if (this.indent(lines[k]) >= indent + 2) return true;
    return !this.isBlank(lines[k - 1]) && !this.begins(lines, k) && !ITEM.test(this.of(lines[k]));
  }

  indent(line) {
    return this.of(line).replaceAll("\t", "    ").search(/\S|$/);
  }

  // A line without up to so many columns of space.
  stripped(line, width) {
    let { from } = line;
    for (let columns = 0; columns < width && from < line.to && /[ \t]/.test(this.text[from]); from += 1) {
      columns += this.text[from] === "\t" ? 4 : 1;
    }
    return { from, to: line.to };
  }

  table(lines, k) {
    if (!this.isTable(lines, k)) return null;
    const aligned = this.cells(lines[k + 1]).map((cell) => {
      const dashes = this.of(cell);
      return dashes.endsWith(":") ? (dashes.startsWith(":") ? "center" : "right") : "";
    });
    const row = (line, tag) => {
      const children = this.cells(line).slice(0, aligned.length);
      return { tag: "tr", children: children.map((cell, place) => ({ tag, className: aligned[place], children: this.inline([cell]) })) };
    };
    const head = { tag: "thead", children: [row(lines[k], "th")] };
    const body = { tag: "tbody", children: [] };
    for (k += 2; k < lines.length && this.of(lines[k]).includes("|"); k += 1) body.children.push(row(lines[k], "td"));
    return [{ tag: "table", children: [head, body] }, k];
  }

  isTable(lines, k) {
    if (k + 1 >= lines.length || !this.of(lines[k]).includes("|") || !DASHES.test(this.of(lines[k + 1]))) return false;
    return this.cells(lines[k]).length === this.cells(lines[k + 1]).length;
  }

  cells({ from, to }) {
    const found = [];
    const text = this.text.slice(from, to);
    for (const { 0: cell, index } of text.matchAll(/(?:\\.|[^|\\])+|(?<=\|)(?=\|)/g)) {
      const inside = cell.trim();
      const at = from + index + cell.indexOf(inside);
      if (inside || (index > 0 && index + cell.length < text.trimEnd().length)) found.push({ from: at, to: at + inside.length });
    }
    return found;
  }

  paragraph(lines, k) {
    const first = k;
    for (k += 1; k < lines.length && !this.isBlank(lines[k]) && !this.begins(lines, k); ) k += 1;
    return [{ tag: "p", children: this.inline(lines.slice(first, k)) }, k];
  }

  // Whether a block begins here in the middle of a paragraph.
  begins(lines, k) {
    const text = this.of(lines[k]);
    const item = ITEM.exec(text);
    const isItem = item && item[3] && (item[2].length === 1 || parseInt(item[2], 10) === 1);
    return isItem || [FENCE, HEADING, RULE, QUOTE, THOUGHT].some((one) => one.test(text)) || this.isTable(lines, k);
  }

  inline(lines) {
    return new Inline(this.text, lines).nodes();
  }
}

// What is inside a paragraph

const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const TARGET = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()]|\([^\s()]*\))*))(?:\s+"[^"\n]*")?\s*\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]*_])>?/y;

class Inline {
  constructor(text, lines) {
    this.lines = lines;
    this.said = lines.map(({ from, to }) => text.slice(from, to)).join("\n");
    this.starts = [0]; // of each line in `said`
    for (const { from, to } of lines) this.starts.push(this.starts.at(-1) + to - from + 1);
    this.depth = 0;
    this.unclosed = new Map(); // by mark and end: where one was sought in vain, so that no later one is
  }

  nodes(from = 0, to = this.said.length) {
    const made = [];
    let plain = from;
    this.depth += 1;
    for (let i = from; i < to; ) {
      const [end, node] = this.special(i, to) ?? [i + 1, null];
      if (node) {
        made.push(...this.leaves(plain, i), node);
        plain = end;
      } else if (end > i + 1) {
        made.push(...this.leaves(plain, i)); // an escape: its backslash is not shown
        plain = i + 1;
      }
      i = end;
    }
    this.depth -= 1;
    return [...made, ...this.leaves(plain, to)];
  }

  // [end, node] of what begins at i; a node of null is an escaped character.
  special(i, to) {
    const said = this.said;
    if (this.depth > DEEPEST) return null;
    switch (said[i]) {
      case "\\":
        return /[!-/:-@[-`{-~]/.test(said[i + 1] ?? "") ? [i + 2, null] : null;
      case "`":
        return this.codeSpan(i, to);
      case "!":
        return said[i + 1] === "[" ? this.link(i + 1, to) : null;
      case "[":
        return this.link(i, to);
      case "*":
      case "_":
      case "~":
        return this.emphasis(i, to);
      case "<":
      case "h":
        return this.address(i, to);
      default:
        return null;
    }
  }

  codeSpan(i, to) {
    const ticks = run(this.said, i, to);
    const end = this.seek("`".repeat(ticks), i + ticks, to, (k, length) => (length === ticks ? k : -1));
    if (end < 0) return null;
    const inside = this.said.slice(i + ticks, end);
    const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    return [end + ticks, { tag: "code", children: this.leaves(i + ticks + isPadded, end - isPadded) }];
  }

  emphasis(i, to) {
    const said = this.said;
    const length = run(said, i, to);
    const mark = said[i] === "~" ? "~~" : said[i].repeat(length >= 2 ? 2 : 1);
    const inside = i + mark.length;
    const isWord = (k) => said[i] === "_" && /\w/.test(said[k] ?? "");
    if (length < mark.length || /\s/.test(said[inside] ?? " ") || isWord(i - 1)) return null;
    const end = this.seek(mark, inside, to, (k, found) => {
      const at = k + found - mark.length;
      const fits = mark.length === 2 ? found >= 2 : found % 2 === 1;
      return fits && at > inside && !/\s/.test(said[k - 1]) && !isWord(at + mark.length) ? at : -1;
    });
    return end < 0 ? null : [end + mark.length, { tag: MARKS[mark], children: this.nodes(inside, end) }];
  }

  // Where a mark is closed: `closes` says of a run of its character where, or -1. Escapes, and in emphasis code, are no marks.
  seek(mark, from, to, closes) {
    const key = `${mark} ${to}`;
    if (from >= (this.unclosed.get(key) ?? Infinity)) return -1;
    for (let k = from; k < to; ) {
      const length = run(this.said, k, to);
      if (this.said[k] === mark[0]) {
        const end = closes(k, length);
        if (end >= 0) return end;
        k += length;
      } else if (this.said[k] === "\\" && mark[0] !== "`") k += 2;
      else if (this.said[k] === "`") k = this.codeSpan(k, to)?.[0] ?? k + length;
      else k += 1;
    }
    this.unclosed.set(key, Math.min(from, this.unclosed.get(key) ?? Infinity));
    return -1;
  }

  address(i, to) {
    const at = this.said[i] === "<" ? i + 1 : i;
    if (!this.said.startsWith("http", at) || /\w/.test(this.said[i - 1] ?? "")) return null;
    ADDRESS.lastIndex = i;
    const found = ADDRESS.exec(this.said.slice(0, to));
    return found && linked(found[1], this.leaves(at, at + found[1].length), i + found[0].length);
  }

  link(i, to) {
    const said = this.said;
    const most = Math.min(to, i + LONGEST_LINK);
    let depth = 0, end = i;
    for (; end < most; end += 1) {
      if (said[end] === "\\") end += 1;
      else if (said[end] === "[") depth += 1;
      else if (said[end] === "]" && --depth === 0) break;
    }
    if (end >= most) return null;
    TARGET.lastIndex = end + 1;
    const found = TARGET.exec(said);
    if (!found || TARGET.lastIndex > to) return null;
    return linked(found[1] ?? found[2], this.nodes(i + 1, end), TARGET.lastIndex);
  }

  // Leaves of [from, to) of what is said, a new line as a break.
  leaves(from, to) {
    const made = [];
    let [k, beyond] = [0, this.lines.length]; // the line that `from` is in
    while (beyond - k > 1) {
      const middle = (k + beyond) >> 1;
      if (this.starts[middle] <= from) k = middle;
      else beyond = middle;
    }
    for (; k < this.lines.length && this.starts[k] < to; k += 1) {
      const [start, end] = [this.starts[k], this.starts[k + 1] - 1];
      const [one, other] = [Math.max(from, start), Math.min(to, end)];
      const at = this.lines[k].from - start;
      if (one < other) made.push({ from: at + one, to: at + other });
      if (from <= end && end < to) made.push({ tag: "br", children: [] });
    }
    return made;
  }
}

// How often the character at i stands there in a row.
function run(said, i, to) {
  let end = i + 1;
  while (end < to && said[end] === said[i]) end += 1;
  return end - i;
}

// A link where the address is one that a page may lead to; else null: it stays text.
function linked(address, children, end) {
  if (!/^(https?:\/\/|mailto:)/i.test(address) || !URL.canParse(address)) return null;
  return [end, { tag: "a", address, children }];
}

// Drawn

export class Markdown {
  // leaf(from, to): what is shown for that place of the text, an array of nodes
  constructor(place, leaf) {
    Object.assign(this, { place, leaf, starts: [] });
  }

  clear() {
    this.starts = [];
    this.place.replaceChildren();
  }

  // Show a text that begins with the one shown before. What is added changes its last block, or adds to the one before that
  // (a list, by an item behind a blank line).
  update(text) {
    const kept = Math.max(0, this.starts.length - 2);
    const parser = new Parser(text);
    const nodes = parser.blocks(parser.lines(this.starts[kept] ?? 0));
    while (this.place.childNodes.length > kept) this.place.lastChild.remove();
    this.starts.length = kept;
    for (const node of nodes) {
      this.starts.push(node.start);
      this.place.append(this.drawn(node, text));
    }
  }

  drawn(node, text) {
    if (node.text) return document.createTextNode(node.text);
    if (node.tag === "pre") return this.code(node, text);
    const made = element(node.tag, node.className);
    if (node.address) Object.assign(made, { href: node.address, target: "_blank", rel: "noopener noreferrer" });
    if (node.number !== null && node.tag === "ol") made.start = node.number;
    for (const child of node.children) made.append(...(child.tag || child.text ? [this.drawn(child, text)] : this.leaf(child.from, child.to)));
    if (node.tag !== "table") return made;
    const scrolled = element("div", "scroll");
    scrolled.tabIndex = 0;
    scrolled.setAttribute("role", "group");
    scrolled.setAttribute("aria-label", "Table");
    scrolled.append(made);
    return scrolled;
  }

  code({ language, lines }, text) {
    const [block, head, pre, code] = [element("div", "code"), element("div", "code-head"), element("pre"), element("code")];
    const whole = lines.map(({ from, to }) => text.slice(from, to)).join("\n");
    for (const { from, to } of lines) code.append(...this.leaf(from, Math.min(to + 1, text.length)));
    head.append(element("span", "", language || "text"), copyButton(() => whole));
    pre.tabIndex = 0;
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", `Code, ${language || "text"}`);
    pre.append(code);
    block.append(head, pre);
    return block;
  }
}
