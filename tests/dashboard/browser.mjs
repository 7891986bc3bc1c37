// Drives a headless Chromium through its debugging pipe, without libraries.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** Starts a browser with one page. `options.requests` gets the address of every request. */
export async function openBrowser(executable = process.env.CHROMIUM || "chromium", { width = 1400, height = 1000, dark = false } = {}) {
  const profile = mkdtempSync(join(tmpdir(), "chromium-"));
  const process_ = spawn(executable, [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--enable-precise-memory-info",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
    `--user-data-dir=${profile}`, "about:blank",
  ], { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
  const [input, output] = [process_.stdio[3], process_.stdio[4]];
  const [pending, listeners] = [new Map(), []];
  let [number, rest] = [0, ""];
  output.on("data", (data) => {
    rest += data;
    for (let end; (end = rest.indexOf("\0")) >= 0; rest = rest.slice(end + 1)) {
      const message = JSON.parse(rest.slice(0, end));
      if (message.id) {
        const { resolve, reject } = pending.get(message.id);
        pending.delete(message.id);
        if (message.error) reject(new Error(JSON.stringify(message.error)));
        else resolve(message.result);
      } else listeners.forEach((listener) => listener(message));
    }
  });
  const send = (method, params = {}, sessionId = undefined) => new Promise((resolve, reject) => {
    pending.set(++number, { resolve, reject });
    input.write(`${JSON.stringify({ id: number, method, params, sessionId })}\0`);
  });
  const { targetInfos } = await send("Target.getTargets");
  const page = targetInfos.find((info) => info.type === "page");
  const { sessionId } = await send("Target.attachToTarget", { targetId: page.targetId, flatten: true });
  const call = (method, params) => send(method, params, sessionId);
  const [requests, errors] = [[], []];
  listeners.push(({ method, params }) => {
    if (method === "Network.requestWillBeSent") requests.push(params.request.url);
    if (method === "Runtime.exceptionThrown") errors.push(params.exceptionDetails.exception?.description || params.exceptionDetails.text);
    if (method === "Log.entryAdded" && params.entry.level === "error") errors.push(params.entry.text);
    if (method === "Page.javascriptDialogOpening") errors.push(`dialog: ${params.message}`);
  });
  for (const domain of ["Page", "Network", "Runtime", "Log", "Performance"]) await call(`${domain}.enable`);
  await call("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile: false });
  await call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }] });
  const evaluate = async (expression) => {
    const { result, exceptionDetails } = await call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description || exceptionDetails.text);
    return result.value;
  };
  return {
    requests, errors, call, evaluate, pid: process_.pid,
    open: (url) => call("Page.navigate", { url }),
    /** Waits until a JavaScript expression is true. Fails after `limit` milliseconds. */
    async waitFor(expression, limit = 20000) {
      const end = Date.now() + limit;
      for (;;) {
        if (await evaluate(expression).catch(() => false)) return;
        if (Date.now() > end) throw new Error(`not true after ${limit} ms: ${expression}`);
        await new Promise((resolve) => setTimeout(resolve, 50));
      }
    },
    /** Changes the size of the page and its colour scheme. */
    async setAppearance({ width, height, dark }) {
      await call("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile: false });
      await call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }] });
    },
    /** Returns a picture of the page in the format WebP. */
    async screenshot() {
      const { data } = await call("Page.captureScreenshot", { format: "webp", quality: 80 });
      return Buffer.from(data, "base64");
    },
    async close() {
      await send("Browser.close").catch(() => {});
      await new Promise((resolve) => (process_.exitCode === null ? process_.once("exit", resolve) : resolve()));
      rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
    },
  };
}
