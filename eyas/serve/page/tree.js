// The round that is looked at: its tree, in which the accepted path comes first, and the same in words.

import { $, decimals, tokens } from "./dom.js";

const LONGEST_LABEL = 9; // characters of a token in the tree
const SVG = "http://www.w3.org/2000/svg";
const CHARACTER = 7.3, LEAST = 46, HEIGHT = 34, GAP = 8, ACROSS = 16, DOWN = 12; // px
const SMALLEST = 0.8; // a picture of its size, from left to right

function drawn(tag, attributes, parent, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

function label(text) {
  const visible = text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "∅";
  const characters = [...visible];
  return characters.length > LONGEST_LABEL ? characters.slice(0, LONGEST_LABEL - 1).join("") + "…" : visible;
}

// Nodes, parents first, with their depth: the accepted child comes first, then the others by probability, text's last.
function nodesOf(rootText, round) {
  const root = { text: rootText, kind: "root", children: [] };
  const nodes = (round.tree ?? []).map((node) => ({ ...node, children: [] }));
  for (const node of nodes) {
    node.kind = (node.accepted ? "accepted" : "rejected") + (node.source === "text" ? " text" : "");
    (nodes[node.parent] ?? root).children.push(node);
  }
  const path = nodes.filter((node) => node.accepted);
  const own = round.tokens.slice(path.length).at(-1);
  if (own) (path.at(-1) ?? root).children.push({ text: own.text, kind: "bonus", accepted: true, children: [] });
  const all = [];
  const visit = (node, depth) => {
    node.depth = depth;
    node.label = label(node.text);
    node.width = Math.max(LEAST, [...node.label].length * CHARACTER + 12);
    all.push(node);
    node.children.sort((one, other) => Boolean(other.accepted) - Boolean(one.accepted) || (other.probability ?? -1) - (one.probability ?? -1));
    for (const child of node.children) visit(child, depth + 1);
  };
  visit(root, 0);
  return all;
}

// Give nodes their places: from left to right, or where that is too wide from top to bottom. A node stands in line with its parent,
// or as far aside as others of its depth are there. Returns the picture's width and height.
function place(nodes, room) {
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + ACROSS, 0));
  const isDown = SMALLEST * (lefts.at(-1) + widths.at(-1)) > room;
  const taken = [];
  const put = (node, aside) => {
    const at = Math.max(aside, taken[node.depth] ?? 0);
    taken[node.depth] = at + (isDown ? node.width : HEIGHT) + GAP;
    if (isDown) Object.assign(node, { left: at, top: node.depth * (HEIGHT + DOWN) });
    else Object.assign(node, { left: lefts[node.depth], top: at, width: widths[node.depth] });
    const out = isDown ? [at + LEAST / 2, node.top + HEIGHT] : [node.left + node.width, at + HEIGHT / 2];
    for (const child of node.children) {
      put(child, at);
      child.edge = isDown
        ? `M${out}c0 ${DOWN / 2} ${child.left - at} ${DOWN / 2} ${child.left - at} ${DOWN}`
        : `M${out}c${ACROSS / 2} 0 ${ACROSS / 2} ${child.top - at} ${ACROSS} ${child.top - at}`;
    }
  };
  put(nodes[0], 0);
  return [Math.max(...nodes.map((node) => node.left + node.width)) + 4, Math.max(...nodes.map((node) => node.top)) + HEIGHT + 4];
}

function drawTree(rootText, round, room) {
  const nodes = nodesOf(rootText, round);
  const [width, height] = place(nodes, room);
  const picture = drawn("svg", { width, height, viewBox: `-2 -2 ${width} ${height}`, role: "img", "aria-label": inWords(round) });
  for (const { edge, kind, probability } of nodes.slice(1)) {
    drawn("path", { d: edge, class: `edge ${kind}`, "stroke-width": 1 + 3 * Math.max(probability ?? 0, 0.2) }, picture);
  }
  for (const node of nodes) drawNode(node, picture);
  return picture;
}

function drawNode({ text, kind, source, probability, label, left, width, top }, picture) {
  const group = drawn("g", { class: `node ${kind}` }, picture);
  const middle = left + width / 2;
  const share = Number.isFinite(probability) ? `${decimals(100 * probability, 0)} %` : "";
  const below = { text: "text", head: share, both: `${share} +t` }[source] ?? (kind === "bonus" ? "target" : "root");
  const who = { text: "found in text", head: `${share} of the head`, both: `${share} of the head, and found in text` }[source];
  drawn("title", {}, group, who ? `“${text}”, ${who}` : `“${text}”`);
  drawn("rect", { x: left, y: top, width, height: HEIGHT, rx: 6 }, group);
  drawn("text", { x: middle, y: top + 15 }, group, label);
  drawn("text", { x: middle, y: top + 29, class: "probability" }, group, below);
}

function inWords({ tokens: said, tree }) {
  // What ends an answer has no text; as a node it has a name.
  const names = (tree ?? []).filter((node) => node.accepted).map((node) => node.text);
  const quoted = said.map((token, place) => `“${token.text || (names[place] ?? "∅")}”`);
  if (tree === null) return `A round without drafts: the target said ${quoted.join("")}.`;
  if (!tree.length) return `No draft was worth judging: the target said ${quoted.join("")}.`;
  const ofText = tree.filter((node) => node.source === "text").length;
  const byHead = tree.length > ofText ? `The head drafted ${tokens(tree.length - ofText)}` : "";
  const byText = ofText ? `${byHead ? ", text" : "Text drafted"} ${tokens(ofText)}` : "";
  const accepted = said.filter((token) => token.origin === "drafted" || token.origin === "text").length;
  const own = quoted.slice(accepted).join("");
  const kept = accepted ? `kept ${accepted}: ${quoted.slice(0, accepted).join("")}` : "kept none";
  return `${byHead}${byText}; the target ${kept}${own ? `, and added ${own}` : ""}.`;
}

// Shows one answer's rounds: the last that drafted, or else the last, until somebody picks another.
class Tree {
  follow(rounds, words) {
    this.words?.mark(-1);
    Object.assign(this, { rounds, words, follows: true, number: -1 });
  }

  newest() {
    const shown = this.rounds.slice(0, this.words.numRounds);
    const drafted = shown.findLastIndex((round) => round.tree?.length);
    const last = drafted < 0 ? shown.length - 1 : drafted;
    if (this.follows && last >= 0) this.show(last);
    else this.enable();
  }

  pick(number) {
    if (!this.words?.numRounds) return;
    this.follows = false;
    this.show(Math.min(Math.max(number, 0), this.words.numRounds - 1));
  }

  show(number) {
    if (number === this.number) return this.enable();
    this.number = number;
    $("told").textContent = inWords(this.rounds[number]);
    this.draw();
    this.words.mark(number);
    this.enable();
  }

  draw() {
    const round = this.words && this.rounds[this.number];
    if (!round) return;
    const rootText = this.rounds[this.number - 1]?.tokens.at(-1).text ?? "prompt";
    $("drawing").replaceChildren(drawTree(rootText, round, $("drawing").clientWidth));
  }

  clear() {
    if (this.words) this.follow([], this.words);
    $("drawing").replaceChildren();
    $("told").textContent = $("told").dataset.empty;
    $("tree-title").textContent = "Round";
    for (const id of ["which", "back", "on"]) $(id).disabled = true;
    this.words = null;
  }

  enable() {
    const shown = this.words.numRounds;
    $("tree-title").textContent = `Round ${this.number + 1} of ${shown}`;
    $("which").max = Math.max(shown, 1);
    $("which").value = this.number + 1;
    $("which").disabled = shown < 2;
    $("back").disabled = this.number < 1;
    $("on").disabled = this.number >= shown - 1;
  }
}

export const tree = new Tree();

$("told").dataset.empty = $("told").textContent;
$("which").addEventListener("input", () => tree.pick($("which").valueAsNumber - 1));
$("back").addEventListener("click", () => tree.pick(tree.number - 1));
$("on").addEventListener("click", () => tree.pick(tree.number + 1));
addEventListener("resize", () => tree.draw());
