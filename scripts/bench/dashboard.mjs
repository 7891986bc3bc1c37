#!/usr/bin/env node
// Measures the page of `launch serve` for a generated run with many ranks and steps.
//
//     scripts/bench/dashboard.mjs [--launch LAUNCH] [--ranks 1000] [--steps 1000000] [--json]
//
// LAUNCH is the executable, target/release/launch by default. The script writes the directory of an
// active run, opens the page in Chromium, and waits until the whole journal is read. Then it extends
// the journal and the measurements of the run for some seconds, as a controller does. It prints a
// Markdown table, or the figures as JSON. Needs Chromium and Node.js.
import { spawn } from "node:child_process";
import { appendFileSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, renameSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { openBrowser } from "../../tests/dashboard/browser.mjs";

const RUN = "20260101-000000-0000";
const RANKS_PER_HOST = 8;
const LIVE_SECONDS = 10;
const MB = 1e6;

const { values: options } = parseArgs({ options: {
  launch: { type: "string", default: join(import.meta.dirname, "../../target/release/launch") },
  ranks: { type: "string", default: "1000" },
  steps: { type: "string", default: "1000000" },
  json: { type: "boolean", default: false },
} });
const [launch, ranks, steps] = [resolve(options.launch), Number(options.ranks), Number(options.steps)];
const hosts = Array.from({ length: Math.ceil(ranks / RANKS_PER_HOST) }, (_, at) => ({
  host: `node-${at}`,
  ranks: Array.from({ length: Math.min(RANKS_PER_HOST, ranks - at * RANKS_PER_HOST) }, (_, rank) => at * RANKS_PER_HOST + rank),
}));
const began = Date.now() / 1000 - steps;
const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

const formatEvents = (events) => events.map((event) => `${JSON.stringify({ schema: 2, ...event })}\n`).join("");

/** Returns the event of a step, whose loss falls with noise. */
function createStep(step) {
  const loss = 2 + 8 / Math.sqrt(step) + 0.1 * Math.sin(step * 12.9898);
  return { event: "step", step, loss, grad_norm: 1 + 0.1 * Math.cos(step), lr: 3e-4, tokens: step * 4194304, tokens_per_s: 4194304, peak_rss: 30e9, exposed_comm_s: 0.02, time: began + step };
}

/** Writes the newest measurements of all ranks and hosts, as the controller of the run does. */
function writeStatus(directory, step) {
  const vary = (number) => Math.round(1e6 * (1 + 0.1 * Math.sin(number * 78.233 + step)));
  const time = Date.now() / 1000;
  const usageOf = (host, at) => ({
    interval_ms: 2000, cpus: 96, cpu_share: 0.2, memory_total: 1e12, memory_used: 2e11 + vary(at), disk_read: vary(at), disk_written: vary(at),
    network_received: 100 * vary(at), network_sent: 100 * vary(at),
    gpus: host.ranks.map((_, gpu) => ({ gpu, busy_share: 0.9, memory_used: 6e10, memory_total: 8e10 })),
    workers: host.ranks.map((rank) => ({ rank, rss: 2e10 + vary(rank), cpu_us: 2 * vary(rank) })),
  });
  const times = Array.from({ length: ranks }, (_, rank) => ({ step_us: 10 * 1e6, waiting_us: vary(rank), collective_us: 2 * vary(rank), micro_batches: 80, links: null }));
  const status = {
    version: 1, time, attempt: 0, step_times: { step, steps: 10, ranks: times },
    hosts: hosts.map((host, at) => ({ host: host.host, time, usage: usageOf(host, at) })), stragglers: [],
  };
  writeFileSync(join(directory, ".status.json.tmp"), JSON.stringify(status));
  renameSync(join(directory, ".status.json.tmp"), join(directory, "status.json"));
}

/** Writes the directory of a run whose controller is on another machine. Returns its path. */
function writeRun(root) {
  const directory = join(root, "runs/large", RUN);
  mkdirSync(join(directory, "logs"), { recursive: true });
  const write = (name, value) => writeFileSync(join(directory, name), JSON.stringify(value));
  write("run.json", {
    version: 1, run: RUN, name: "large", run_dir: directory, world: ranks, began_ms: Math.round(began * 1000), command: ["launch", "job.yaml"],
    by: { host: "controller-of-the-benchmark", boot: "none", pid: 1, started: 1 },
  });
  write("job.json", { version: 1, run: RUN, world: ranks, job: { name: "large", train: { steps: 2 * steps } } });
  for (let rank = 0; rank < ranks; rank++) writeFileSync(join(directory, `logs/rank-${rank}.log`), `rank ${rank} of ${ranks}\n`);
  const journal = join(directory, "events.jsonl");
  writeFileSync(journal, formatEvents([
    { event: "start", run: RUN, run_dir: directory, world: ranks, time: began },
    { event: "placement", attempt: 0, world: ranks, hosts: hosts.map((host) => host.host), workers: hosts.map((host) => host.ranks.length), time: began },
    { event: "ready", step: 0, total_steps: 2 * steps, parameters: 7e9, tokens_per_step: 4194304, time: began },
  ]));
  for (let first = 1; first <= steps; first += 10000) {
    const count = Math.min(10000, steps - first + 1);
    appendFileSync(journal, formatEvents(Array.from({ length: count }, (_, at) => createStep(first + at))));
  }
  writeStatus(directory, steps);
  return directory;
}

/**
 * Returns the memory of a process and its descendants, in bytes. Memory that processes share is
 * counted once. Files, such as the executable, are not counted, because other programs share them.
 */
function measureProcesses(root) {
  const parents = new Map();
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      parents.set(Number(pid), Number(readFileSync(`/proc/${pid}/stat`, "utf8").split(")").at(-1).split(" ")[2]));
    } catch {
      // the process has ended
    }
  }
  const isBelow = (pid) => pid === root || (parents.has(pid) && isBelow(parents.get(pid)));
  let sum = 0;
  for (const pid of [...parents.keys()].filter(isBelow)) {
    try {
      const text = readFileSync(`/proc/${pid}/smaps_rollup`, "utf8");
      for (const [, kilobytes] of text.matchAll(/^Pss_(?:Anon|Shmem):\s+(\d+)/gm)) sum += 1024 * Number(kilobytes);
    } catch {
      // the process has ended
    }
  }
  return sum;
}

/** Returns a size in `/proc/PID/status`, in bytes. */
function readProcessSize(pid, name) {
  return 1024 * Number(new RegExp(`^${name}:\\s+(\\d+)`, "m").exec(readFileSync(`/proc/${pid}/status`, "utf8"))[1]);
}

/** Opens the page, and returns the figures. */
async function measure(browser, server, address, directory) {
  // The time is that of the first frame after the frame in which all cells have their state.
  await browser.call("Page.addScriptToEvaluateOnNewDocument", { source: `{
    const look = () => {
      if (document.querySelectorAll(".cell.r[aria-label]").length !== ${ranks}) return requestAnimationFrame(look);
      requestAnimationFrame(() => { window.gridDrawnMs = performance.now(); });
    };
    requestAnimationFrame(look);
  }` });
  await pause(2);
  const emptyBytes = measureProcesses(browser.pid);
  await browser.open(address);
  await browser.waitFor("window.gridDrawnMs > 0", 60000);
  const gridMs = await browser.evaluate("window.gridDrawnMs");
  const text = "document.querySelector('#main').textContent";
  await browser.waitFor(`${text}.includes("step ${steps} of") && !${text}.includes("reading the journal")`, 600000);
  const loadedMs = await browser.evaluate("performance.now()");
  for (let second = 1; second <= LIVE_SECONDS; second++) {
    appendFileSync(join(directory, "events.jsonl"), formatEvents([createStep(steps + second)]));
    writeStatus(directory, steps + second);
    await pause(1);
  }
  await browser.waitFor(`${text}.includes("step ${steps + LIVE_SECONDS} of")`, 60000);
  const pageBytes = measureProcesses(browser.pid) - emptyBytes;
  await browser.call("HeapProfiler.collectGarbage");
  const { metrics } = await browser.call("Performance.getMetrics");
  return {
    ranks, steps, journal_bytes: statSync(join(directory, "events.jsonl")).size, grid_ms: gridMs, loaded_ms: loadedMs,
    js_heap_bytes: metrics.find((metric) => metric.name === "JSHeapUsedSize").value, page_bytes: pageBytes,
    server_bytes: readProcessSize(server.pid, "VmRSS"), server_peak_bytes: readProcessSize(server.pid, "VmHWM"),
  };
}

function printFigures(figures) {
  if (options.json) return console.log(JSON.stringify(figures));
  const [megabytes, seconds] = [(bytes) => `${(bytes / MB).toFixed(1)} MB`, (ms) => `${(ms / 1000).toFixed(2)} s`];
  console.log(`${ranks} ranks on ${hosts.length} hosts, ${steps} steps, a journal of ${megabytes(figures.journal_bytes)}\n`);
  console.log("| measured | value |\n|---|---|");
  for (const [name, value] of [
    ["from the navigation to the drawn grid", seconds(figures.grid_ms)],
    ["from the navigation until the whole journal is read", seconds(figures.loaded_ms)],
    ["JavaScript heap", megabytes(figures.js_heap_bytes)],
    ["Chromium, more than for an empty page", megabytes(figures.page_bytes)],
    ["server (resident set)", megabytes(figures.server_bytes)],
    ["server (largest resident set)", megabytes(figures.server_peak_bytes)],
  ]) console.log(`| ${name} | ${value} |`);
}

const root = mkdtempSync(join(tmpdir(), "dashboard-"));
const directory = writeRun(root);
const env = { PATH: process.env.PATH, HOME: root, LC_ALL: "C.UTF-8" };
const server = spawn(launch, ["serve"], { cwd: root, env, stdio: ["ignore", "pipe", "inherit"] });
let browser = null;
try {
  const address = await new Promise((done, fail) => {
    server.once("error", fail);
    server.once("exit", () => fail(new Error("launch serve has ended")));
    server.stdout.once("data", (data) => done(String(data).split("\n")[0]));
  });
  browser = await openBrowser();
  printFigures(await measure(browser, server, address, directory));
} finally {
  await browser?.close();
  server.kill("SIGKILL");
  rmSync(root, { recursive: true, force: true, maxRetries: 5 });
}
