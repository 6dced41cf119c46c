// What this page keeps in the browser: chats and settings, each under a name of its own, so that two tabs write over nothing of
// each other's. A browser that keeps nothing for pages has it in memory, until the tab is closed.

const PREFIX = "eyas.";
const memory = new Map();
const storage = (() => {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
})();

export const isKept = storage !== null;

// The value of a name; null where there is none, or none of this page's.
export function kept(name) {
  try {
    return JSON.parse((storage ? storage.getItem(PREFIX + name) : memory.get(name)) ?? "null");
  } catch {
    return null;
  }
}

// Whether there was room for it.
export function keep(name, value) {
  const text = JSON.stringify(value);
  try {
    if (storage) storage.setItem(PREFIX + name, text);
    else memory.set(name, text);
    return true;
  } catch {
    return false;
  }
}

export function forget(name) {
  if (storage) storage.removeItem(PREFIX + name);
  else memory.delete(name);
}

export function names() {
  const all = storage ? Object.keys(storage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length)) : [...memory.keys()];
  return all.sort();
}
