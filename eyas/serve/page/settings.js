// Settings of requests, kept in the browser. A control of the settings with `data-field` is the field of the API with that name; an
// empty one leaves it to the server. One more setting is one more control in index.html.

import { $ } from "./dom.js";
import { server } from "./server.js";
import { kept, keep } from "./store.js";

const NAME = "settings";
const fields = () => [...$("settings").querySelectorAll("[data-field]")];
const boxes = () => [...document.querySelectorAll("[data-kept]")];
const nameOf = (control) => control.labels[0].firstChild.textContent.trim();

// The body of a request for an answer to these messages.
export function wanted(messages, extra = {}) {
  const system = $("system").value.trim();
  const body = {
    model: server.model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_rounds: true, include_usage: true, continuous_usage_stats: true },
  };
  for (const control of fields()) if (control.value !== "") body[control.dataset.field] = control.valueAsNumber;
  if (server.speculates) body.speculation = $("speculation").checked;
  return Object.assign(body, extra);
}

export const isGreedy = () => $("temperature").valueAsNumber === 0;

// What is wrong with the settings, or null.
export function wrong() {
  const control = fields().find((one) => !one.checkValidity());
  return control ? `“${nameOf(control)}” in Settings: ${control.validationMessage}` : null;
}

// An error of the server in the words of this page: by the names of its controls.
export function inWords({ message, code }) {
  if (code === "context_length_exceeded") {
    const longest = $("longest").valueAsNumber;
    const advice = longest ? `lower “${nameOf($("longest"))}” in Settings (now ${longest}), or shorten the message` : "shorten the message";
    return `This server holds ${server.maxLength} tokens of chat and answer together, and this asks for more: ${advice}, edit an earlier one, or begin a new chat.`;
  }
  for (const control of fields()) message = message.replaceAll(new RegExp(`\\b${control.dataset.field}\\b`, "g"), `“${nameOf(control)}” in Settings`);
  return message;
}

function save() {
  const values = fields().map((control) => [control.id, control.value]);
  const checks = boxes().map((control) => [control.id, control.checked]);
  keep(NAME, Object.fromEntries([...values, ...checks, ["system", $("system").value]]));
}

function fill(values) {
  for (const control of [...fields(), $("system")]) control.value = values[control.id] ?? control.defaultValue;
  for (const control of boxes()) control.checked = values[control.id] ?? control.defaultChecked;
}

fill(kept(NAME) ?? {});
for (const control of [...fields(), ...boxes(), $("system")]) control.addEventListener("change", save);
$("reset").addEventListener("click", () => {
  const { value } = $("system");
  fill({});
  $("system").value = value; // it is a text of the user's
  save();
  for (const control of boxes()) control.dispatchEvent(new Event("input"));
});
