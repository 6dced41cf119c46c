// Chats, kept in the browser. A chat is a tree of messages: to edit a message or to ask for another answer adds a branch, and nothing
// that was said is lost. `leaf` is the message that the shown branch ends with.
//
//   nodes   [{parent, role, content, sum, used}]; parent: a node's number, -1 for none; of an answer: what it came to, and the
//           tokens of chat and answer

import { forget, keep, kept, names } from "./store.js";

const PREFIX = "chat.";
const LONGEST_TITLE = 60; // characters

const freshId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export class Chat {
  constructor({ id = freshId(), at = 0, nodes = [], leaf = -1 } = {}) {
    Object.assign(this, { id, at, nodes, leaf });
  }

  get title() {
    const text = this.nodes[0]?.content.trim().replaceAll(/\s+/g, " ") ?? "";
    return text.length > LONGEST_TITLE ? `${text.slice(0, LONGEST_TITLE - 1)}…` : text;
  }

  // The numbers of the messages from the first to a leaf.
  path(leaf = this.leaf) {
    const found = [];
    for (let number = leaf; number >= 0; number = this.nodes[number].parent) found.push(number);
    return found.reverse();
  }

  messages(leaf = this.leaf) {
    return this.path(leaf).map((number) => ({ role: this.nodes[number].role, content: this.nodes[number].content }));
  }

  add(parent, role, content, more = {}) {
    this.nodes.push({ parent, role, content, ...more });
    return (this.leaf = this.nodes.length - 1);
  }

  // The messages that stand in the place of this one, itself among them.
  beside(number) {
    const { parent } = this.nodes[number];
    return [...this.nodes.keys()].filter((other) => this.nodes[other].parent === parent);
  }

  // Show the branch of a message, to its newest end.
  show(number) {
    for (let next = number; next >= 0; next = this.nodes.findLastIndex((node) => node.parent === number)) number = next;
    this.leaf = number;
  }

  // Whether the browser had room for it. A chat that another tab has gone on with is kept beside that tab's.
  save() {
    if (kept(PREFIX + this.id)?.at > this.at) this.id = freshId();
    this.at = Date.now();
    const { id, at, nodes, leaf } = this;
    return keep(PREFIX + id, { id, at, nodes, leaf });
  }
}

// All that are kept, the newest first. What is not of this page's form is left alone.
export function chats() {
  const isChat = (one) => one && Array.isArray(one.nodes) && one.nodes.length > 0 && Number.isInteger(one.leaf);
  const found = names().filter((name) => name.startsWith(PREFIX)).map(kept).filter(isChat);
  return found.map((one) => new Chat(one)).sort((one, other) => other.at - one.at);
}

export const remove = ({ id }) => forget(PREFIX + id);
