// What every part of the page uses of the browser. Text is inserted as text only: nothing on this page makes HTML of a string.

export const $ = (id) => document.getElementById(id);
export const pause = (ms) => new Promise((done) => setTimeout(done, ms));
// A hidden tab has no frames.
export const frame = () => Promise.race([new Promise((done) => requestAnimationFrame(done)), pause(250)]);
export const decimals = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
export const tokens = (count) => `${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}`;
export const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(text, className, onClick) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// A button that copies what `text()` gives, and says so.
export function copyButton(text, label = "Copy") {
  const made = button(label, "small", async () => {
    made.textContent = (await copied(text())) ? "Copied" : "Cannot copy";
    await pause(1500);
    made.textContent = label;
  });
  return made;
}

// Browsers give the clipboard to https and localhost alone; elsewhere the older command does it.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = document.activeElement;
    const box = element("textarea", "hidden");
    box.value = text;
    (before?.closest("dialog") ?? document.body).append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    before?.focus();
    return done;
  }
}

export function median(values) {
  const ordered = [...values].sort((one, other) => one - other);
  return (ordered[(ordered.length - 1) >> 1] + ordered[ordered.length >> 1]) / 2;
}
