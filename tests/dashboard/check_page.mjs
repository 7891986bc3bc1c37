// Opens the page of a failed run in Chromium, and checks that the page shows the failure and the
// log, that no script from the log runs, and that no request goes to another address.
import assert from "node:assert/strict";
import { openBrowser } from "./browser.mjs";

const address = process.argv[2];
const browser = await openBrowser();
try {
  await browser.open(address);
  await browser.waitFor("document.querySelector('.failure:not([hidden])') && document.querySelectorAll('.cell').length === 2", 60000);
  const failure = await browser.evaluate("document.querySelector('.failure').textContent");
  assert.match(failure, /rank [01] on .*\[worker-exited\].*exited with code 7/s);
  await browser.waitFor("document.querySelector('#main').textContent.split('</script><script>window.attacked').length >= 3", 60000);
  assert.equal(await browser.evaluate("typeof window.attacked"), "undefined");
  assert.equal(await browser.evaluate("document.querySelectorAll('#main img, #main script').length"), 0);
  // The arrow keys move between ranks.
  await browser.evaluate("document.querySelector('.cell').focus()");
  for (const type of ["keyDown", "keyUp"]) await browser.call("Input.dispatchKeyEvent", { type, key: "ArrowRight", code: "ArrowRight", windowsVirtualKeyCode: 39 });
  assert.match(await browser.evaluate("document.activeElement.getAttribute('aria-label')"), /^rank 1: /);
  const origin = address.startsWith("file:") ? "file:" : new URL(address).origin;
  assert.deepEqual(browser.requests.filter((url) => !url.startsWith(origin)), []);
  assert.deepEqual(browser.errors, []);
} finally {
  await browser.close();
}
