// Limits of the page, and functions that create elements.
const MAX_RUNS = 4;
const MAX_EVENTS = 1000;
const MAX_LOG_LINES = 3000;
const RUN_LIST_INTERVAL_MS = 5000;
const LOG_INTERVAL_MS = 1000;
const STATES = { s: "starting", r: "running", f: "failed", e: "ended", d: "done" };

const token = new URLSearchParams(location.search).get("token") || "";
const dataElement = document.getElementById("data");

/** Creates an element. A child that is no element becomes a text node. */
function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Sets the text of an element if it differs, so that unchanged elements are not drawn again. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
