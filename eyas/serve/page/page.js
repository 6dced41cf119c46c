// The playground: sends chats to this server and shows where each token comes from. This file shows a chat and does what the buttons
// say; the others, from below:
//
//   dom, store            what the browser gives; what is kept in it
//   server                an answer as it arrives: rounds, each with the moment it came
//   markdown, words       an answer's text as elements, a span a token
//   tally, tree           what the numbers say of the rounds that are drawn; the round that is looked at
//   settings, chats       the fields of a request; chats with their branches
//   answers, race         one answer drawn as the screen keeps up, or slowly; two of them compared

import { $, button, copyButton, element } from "./dom.js";
import {
  allWords, answer, busy, gauge, isRunning, lookBack, opener, say, spoken, stop, sum, view,
} from "./answers.js";
import { Chat, chats, remove } from "./chats.js";
import { forgetRaces, race } from "./race.js";
import { Refused, meet, server } from "./server.js";
import { isGreedy, wanted, wrong } from "./settings.js";
import { isKept } from "./store.js";
import { Tally, showNumbers } from "./tally.js";
import { tree } from "./tree.js";

const welcome = $("welcome");
const cameOf = new WeakMap(); // rounds of answers, by node; they are kept in memory alone
let chat = new Chat();

// Keep a scrolled element at its end if it is there.
let staysAtEnd = true;

function atItsEnd() {
  if (staysAtEnd) $("log").scrollTop = $("log").scrollHeight;
}

// What is said

function turn(who, kind) {
  welcome.remove();
  const place = element("div", `turn ${kind}`);
  place.append(element("h3", "", who));
  $("log").append(place);
  return place;
}

// Show a chat, to a leaf of it.
function show(leaf = chat.leaf) {
  tree.clear();
  allWords.clear();
  $("log").replaceChildren(...(leaf < 0 ? [welcome] : []));
  for (const number of chat.path(leaf)) {
    const node = chat.nodes[number];
    if (node.role === "user") question(node.content, number);
    else kept(number, node);
  }
  gauge(chat.nodes[leaf]?.used);
  if (!tree.words) showNumbers(new Tally(0));
}

function question(text, number) {
  const place = turn("You", "user");
  place.append(element("div", "asked", text));
  if (number !== undefined) place.append(actions(number));
  return place;
}

function kept(number, node) {
  const place = turn(server.model || "Answer", "answer");
  const came = cameOf.get(node);
  const words = answerIn(place, () => came);
  if (came) for (const round of came.rounds) words.add(round);
  else words.text = node.content;
  words.draw();
  finish(place, number, words);
  if (!came) return;
  tree.follow(came.rounds, words);
  tree.newest();
  showNumbers(came.tally);
}

function answerIn(place, cameNow) {
  const said = element("div", "said");
  const words = spoken(said, () => lookBack(cameNow(), words));
  place.append(said);
  return words;
}

function finish(place, number, words) {
  const node = chat.nodes[number];
  const came = cameOf.get(node);
  place.append(came ? opener(node.sum, () => lookBack(came, words)) : element("p", "note", node.sum), actions(number));
}

// The row of buttons below a message.
function actions(number) {
  const node = chat.nodes[number];
  const row = element("div", "row actions");
  const beside = chat.beside(number);
  const at = beside.indexOf(number);
  if (beside.length > 1) {
    const steps = [["‹", "Version before", at - 1], ["›", "Next version", at + 1]].map(([text, label, next]) => {
      const step = button(text, "small", () => whenFree(() => branch(beside[next])));
      step.setAttribute("aria-label", label);
      step.disabled = beside[next] === undefined;
      return step;
    });
    row.append(steps[0], element("span", "note", `${at + 1} of ${beside.length}`), steps[1]);
  }
  row.append(copyButton(() => node.content));
  if (node.role === "user") row.append(button("Edit", "small", (event) => whenFree(() => edit(number, event.target.closest(".turn")))));
  else row.append(button("Regenerate", "small", () => asks(() => regenerate(number))));
  return row;
}

function whenFree(work) {
  if (!isRunning()) work();
}

function branch(number) {
  chat.show(number);
  chat.save();
  show();
  $("log").children[chat.path().indexOf(number)].querySelector(".actions button:not(:disabled)").focus();
}

function edit(number, place) {
  const { parent, content } = chat.nodes[number];
  const form = element("form", "edit");
  const box = element("textarea");
  box.value = content;
  box.rows = Math.min(10, content.split("\n").length + 1);
  box.setAttribute("aria-label", "Your message");
  const send = element("button", "small", "Send as new version");
  const cancel = button("Cancel", "small", () => show());
  const row = element("div", "row");
  row.append(send, cancel);
  form.append(box, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (box.value.trim()) asks(() => converse(box.value, parent));
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show();
    else sendsOnEnter(event, form);
  });
  place.querySelector(".asked").replaceWith(form);
  place.querySelector(".actions").remove();
  box.focus();
}

// What is asked

// Ask behind a message, and answer. What was not answered is not of the chat: it stands in its box again.
async function converse(prompt, parent = chat.leaf) {
  if (parent !== chat.leaf) show(parent);
  const asked = question(prompt);
  const messages = [...chat.messages(parent), { role: "user", content: prompt }];
  const node = await said(messages, (content, more) => {
    const user = chat.add(parent, "user", prompt);
    asked.append(actions(user));
    return chat.add(user, "assistant", content, more);
  }, prompt);
  return node?.sum;
}

async function regenerate(number) {
  const { parent } = chat.nodes[number];
  show(parent);
  $("prompt").focus();
  const node = await said(chat.messages(parent), (content, more) => chat.add(parent, "assistant", content, more));
  const same = node && chat.beside(chat.leaf).some((other) => other !== chat.leaf && chat.nodes[other].content === node.content);
  return same && isGreedy() ? `${node.sum}. The same again: at temperature 0 it always is; raise it in Settings for another.` : node?.sum;
}

// An answer to these messages, which `add(content, more)` makes a node of the chat; the node, or nothing.
async function said(messages, add, prompt = "") {
  const place = turn(server.model, "answer streaming");
  let came = null;
  const words = answerIn(place, () => came);
  came = await answer(wanted(messages), words, atItsEnd);
  place.classList.remove("streaming");
  if (!words.text) {
    show();
    giveBack(prompt);
    if (came.error || came.stopped) throw came.error ?? new Refused(0, "stopped before the answer began");
    throw new Refused(0, "the model ended its answer before it said anything");
  }
  const number = add(words.text, { sum: sum(came), used: came.usage?.total_tokens });
  const node = chat.nodes[number];
  cameOf.set(node, came);
  finish(place, number, words);
  atItsEnd();
  save();
  if (came.error) throw came.error;
  return node;
}

function giveBack(prompt) {
  if (!$("prompt").value) $("prompt").value = prompt;
}

async function compare(prompt) {
  const parent = chat.leaf;
  const asked = question(prompt);
  const place = turn("Race", "race");
  let result;
  try {
    result = await race(place, [...chat.messages(), { role: "user", content: prompt }], start);
  } catch (error) {
    show();
    giveBack(prompt);
    throw error;
  }
  if (!result.came) {
    giveBack(prompt);
    return result.verdict;
  }
  const user = chat.add(parent, "user", prompt);
  asked.append(actions(user));
  chat.add(user, "assistant", result.said, { sum: `Race. ${result.verdict}`, used: result.came.usage?.total_tokens });
  cameOf.set(chat.nodes[chat.leaf], result.came);
  save();
  place.scrollIntoView({ block: "start" });
  return result.verdict;
}

function save() {
  if (chat.save()) history.replaceState(null, "", `#${chat.id}`);
  else throw new Refused(0, "the browser has no room for more chats, so this one is not kept: delete others under Chats");
}

// Chats that are kept

function list() {
  const all = chats();
  $("chat-list").replaceChildren(...all.map((one) => {
    const row = element("li", "row");
    const open = button(one.title, "opener", () => {
      $("chats").close();
      begin(one);
    });
    if (one.id === chat.id) open.setAttribute("aria-current", "true");
    const when = new Date(one.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const gone = button("Delete", "small", () => {
      if (!confirm(`Delete “${one.title}”?`)) return;
      remove(one);
      if (one.id === chat.id) begin(new Chat());
      list();
      $("close-chats").focus();
    });
    gone.setAttribute("aria-label", `Delete “${one.title}”`);
    const named = element("div", "named");
    named.append(open, element("span", "note", when));
    row.append(named, gone);
    return row;
  }));
  $("delete-all").disabled = !all.length;
  $("chats-note").textContent = !isKept
    ? "This browser keeps nothing for this page: chats are here until the tab is closed."
    : all.length ? "Kept in this browser alone, without their rounds." : "None yet. They will be kept in this browser alone.";
}

function begin(one) {
  chat = one;
  forgetRaces();
  show();
  say("", "");
  view("chat");
  history.replaceState(null, "", chat.nodes.length ? `#${chat.id}` : location.pathname);
  $("prompt").focus();
}

// The form

const start = (work) => {
  staysAtEnd = true;
  return busy(work, enableButtons);
};

function enableButtons() {
  const isReady = Boolean(server.model) && !isRunning();
  for (const id of ["send", "clear", "open-chats"]) $(id).disabled = !isReady;
  $("race").disabled = !isReady || !server.speculates;
  for (const one of welcome.querySelectorAll(".example")) one.disabled = !isReady;
  $("stop").disabled = !isRunning();
}

function submit(work) {
  const prompt = $("prompt").value;
  if (isRunning() || !$("composer").reportValidity() || !prompt.trim()) return;
  asks(() => {
    $("prompt").value = "";
    return work(prompt);
  });
}

// Do what asks the server, unless a setting is wrong.
function asks(work) {
  const fault = wrong();
  if (fault) return say("", fault);
  view("chat");
  start(work);
}

function sendsOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

async function welcomed() {
  const card = await meet();
  const head = server.hasHead
    ? "with a head"
    : server.speculates ? "drafts from text alone" : "without a head: start the server with --head to see it speculate";
  $("served").textContent = `${card.id} · ${card.eyas.dtype} · ${card.max_model_len} tokens · ${head}`;
  $("speculation").disabled = !server.speculates;
  $("speculation").checked = server.speculates;
  $("key-form").hidden = true;
  const id = location.hash.slice(1);
  const earlier = id && chats().find((one) => one.id === id);
  if (earlier) chat = earlier;
  show();
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(converse);
});
$("race").addEventListener("click", () => submit(compare));
for (const one of welcome.querySelectorAll(".example")) {
  one.addEventListener("click", () => asks(() => converse(one.textContent)));
}
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => begin(new Chat()));
$("prompt").addEventListener("keydown", (event) => sendsOnEnter(event, $("composer")));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
$("log").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = $("log");
  staysAtEnd = scrollHeight - scrollTop - clientHeight < 120;
});
for (const name of ["chat", "rounds"]) $(`view-${name}`).addEventListener("click", () => view(name));
$("colours").addEventListener("input", () => document.body.classList.toggle("plainly", !$("colours").checked));
$("markdown").addEventListener("input", () => {
  for (const words of allWords) words.show($("markdown").checked);
});
for (const name of ["chats", "settings"]) {
  $(`open-${name}`).addEventListener("click", () => {
    if (name === "chats") list();
    $(name).showModal();
  });
  $(`close-${name}`).addEventListener("click", () => $(name).close());
  $(name).addEventListener("click", (event) => {
    if (event.target === $(name)) $(name).close(); // beside the dialog
  });
}
$("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all chats that this browser keeps?")) return;
  chats().forEach(remove);
  begin(new Chat());
  list();
  $("close-chats").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  server.key = $("key").value;
  $("key").value = "";
  start(welcomed);
});

$("colours").dispatchEvent(new Event("input"));
enableButtons();
start(welcomed);
