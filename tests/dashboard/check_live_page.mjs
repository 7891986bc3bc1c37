// Opens the page of a training in Chromium, and checks that the curve of the loss grows while the
// training runs. Then prints a line, so that the test stops the training, and checks that the page
// shows the end. The page is never loaded again.
import assert from "node:assert/strict";
import { openBrowser } from "./browser.mjs";

// Counts the points of the longest line that is drawn on each canvas, and stores the number of the
// newest drawing in the attribute `data-points`. Each drawing begins with the background.
const COUNT_POINTS = `{
  const prototype = CanvasRenderingContext2D.prototype;
  const counts = new WeakMap();
  const wrap = (name, count) => {
    const original = prototype[name];
    prototype[name] = function (...args) {
      const of = counts.get(this) || { path: 0, longest: 0 };
      counts.set(this, of);
      count(of);
      this.canvas.dataset.points = of.longest;
      return original.apply(this, args);
    };
  };
  wrap("fillRect", (of) => { of.longest = 0; });
  wrap("beginPath", (of) => { of.path = 0; });
  wrap("lineTo", (of) => { of.longest = Math.max(of.longest, ++of.path); });
}`;
const LOSS = "document.querySelector('canvas[aria-label^=\"Loss\"]')";
const STATE = "document.querySelector('#main .title .state').textContent";

/** Returns the value of a fact in the summary of the run. */
const readFact = (name) => `[...document.querySelectorAll("#main dt")].find((dt) => dt.textContent === "${name}").nextSibling.textContent`;

const browser = await openBrowser();
try {
  await browser.call("Page.addScriptToEvaluateOnNewDocument", { source: COUNT_POINTS });
  await browser.open(process.argv[2]);
  await browser.waitFor(`${STATE} === "running" && ${LOSS}.dataset.points >= 3`, 60000);
  await browser.evaluate("window.isFirstDocument = true");
  const points = [await browser.evaluate(`Number(${LOSS}.dataset.points)`)];
  for (let look = 0; look < 3; look++) {
    await browser.waitFor(`${LOSS}.dataset.points > ${points.at(-1)}`, 60000);
    points.push(await browser.evaluate(`Number(${LOSS}.dataset.points)`));
  }
  assert.equal(await browser.evaluate(readFact("exit code")), "–");
  console.log(`points of the loss: ${points.join(", ")}`);

  await browser.waitFor(`${STATE} === "stopped" && ${readFact("exit code")} === "143"`, 120000);
  const last = await browser.evaluate(`Number(${LOSS}.dataset.points)`);
  assert.ok(last >= points.at(-1), `${last} points at the end`);
  assert.ok(await browser.evaluate("document.querySelectorAll('.cell.e').length === 2"), "both ranks have ended");
  assert.equal(await browser.evaluate("window.isFirstDocument"), true);
  const { origin } = new URL(process.argv[2]);
  assert.deepEqual(browser.requests.filter((url) => !url.startsWith(origin)), []);
  assert.deepEqual(browser.errors, []);
} finally {
  await browser.close();
}
