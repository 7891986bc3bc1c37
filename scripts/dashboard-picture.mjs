#!/usr/bin/env node
// Draws the page of `launch serve` as docs/images/dashboard*.webp.
//
//     scripts/dashboard-picture.mjs [LAUNCH]     LAUNCH: the executable, target/release/launch by default
//
// Trains a small model with three workers on a text of this repository, and takes these pictures:
// - dashboard.webp: a run that was restarted after the death of a worker;
// - dashboard-failure-dark.webp and -light.webp: a run that failed because a worker was stopped, with
//   the evidence;
// - dashboard-compare.webp: two runs side by side.
// Needs Chromium and Node.js.
import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { openBrowser } from "../tests/dashboard/browser.mjs";

const MAX_BYTES = 150_000;
const LIMIT_MS = 300_000;
const repository = resolve(import.meta.dirname, "..");
const launch = resolve(process.argv[2] || join(repository, "target/release/launch"));
const directory = mkdtempSync(join(tmpdir(), "picture-"));
const job = `name: tiny
cluster: {workers_per_host: 3}
run: {restarts: 3}
train:
  model: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
  data: {files: ["${repository}/docs/*.md"], seq_len: 64, held_out: 0.1}
  steps: 100000
  batch: {global: 12, micro: 4}
  eval: {every: 50, samples: 16}
checkpoint: {every: 100}
`;
writeFileSync(join(directory, "job.yaml"), job);
const env = { PATH: process.env.PATH, HOME: directory, LC_ALL: "C.UTF-8" };
const start = (args) => spawn(launch, args, { cwd: directory, env, stdio: ["ignore", "pipe", "ignore"] });
const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
const runs = [];

/** Starts a run of the job with these keys, and returns its process. */
function startRun(name, keys = []) {
  const run = start(["job.yaml", "--json", ...[`name=${name}`, ...keys].flatMap((key) => ["--set", key])]);
  run.stdout.resume();
  runs.push(run);
  return run;
}

/** Ends a run that saves before it stops. */
async function stopRun(run) {
  const ended = new Promise((done) => run.once("exit", done));
  run.kill("SIGINT");
  await ended;
}

/** Returns the pid of a worker of the active run. */
function findWorker() {
  const isWorker = (pid) => {
    try {
      return readFileSync(`/proc/${pid}/cmdline`, "utf8").includes("\0worker") && readFileSync(`/proc/${pid}/environ`, "utf8").includes(`HOME=${directory}`);
    } catch {
      return false;
    }
  };
  return Number(readdirSync("/proc").filter((name) => /^\d+$/.test(name)).find(isWorker));
}

const server = start(["serve"]);
const browser = await openBrowser("chromium");

/** Takes a picture of the page after a pause in which the page is drawn. */
async function takePicture(name, appearance) {
  await browser.setAppearance(appearance);
  await pause(3);
  const picture = await browser.screenshot();
  if (picture.length > MAX_BYTES) throw new Error(`${name} has ${picture.length} bytes, more than ${MAX_BYTES}`);
  writeFileSync(join(repository, "docs/images", name), picture);
}

/** Waits until the page lists the run `name`, and selects it instead of the others, or also. */
async function selectRun(name, isOnlyRun = true) {
  const items = `[...document.querySelectorAll("#runs li")]`;
  const isNamed = `(item) => item.textContent.includes(" ${name} ")`;
  await browser.waitFor(`${items}.some(${isNamed})`, LIMIT_MS);
  await browser.evaluate(`{
    const isNamed = ${isNamed};
    const find = (test) => ${items}.find(test)?.querySelector("input");
    const isSelected = (item) => item.querySelector("input").checked;
    find((item) => isNamed(item) && !isSelected(item))?.click();
    // A click draws the list again.
    for (let other; ${isOnlyRun} && (other = find((item) => !isNamed(item) && isSelected(item)));) other.click();
  }`);
}

const main = `document.querySelector("#main").textContent`;
const hasCheckpoints = (count) => `/checkpoints\\s*${count}/.test(${main})`;
try {
  const address = await new Promise((done) => server.stdout.once("data", (data) => done(String(data).split("\n")[0])));
  await browser.open(address);

  const first = startRun("tiny");
  await selectRun("tiny");
  await browser.waitFor(hasCheckpoints(3), LIMIT_MS);
  process.kill(findWorker(), "SIGKILL");
  await browser.waitFor(hasCheckpoints(5), LIMIT_MS);
  await takePicture("dashboard.webp", { width: 1300, height: 1150, dark: true });
  await stopRun(first);

  const second = startRun("fast", ["train.optimizer.lr=1e-2"]);
  await selectRun("fast");
  await browser.waitFor(hasCheckpoints(4), LIMIT_MS);
  await stopRun(second);
  await selectRun("tiny", false);
  await takePicture("dashboard-compare.webp", { width: 1300, height: 1000, dark: false });

  startRun("stuck", ["run.restarts=0", "run.hang_timeout=5s"]);
  await selectRun("stuck");
  await browser.waitFor(hasCheckpoints(2), LIMIT_MS);
  process.kill(findWorker(), "SIGSTOP");
  await browser.waitFor(`document.querySelector(".failure") && !document.querySelector(".failure").hidden`, LIMIT_MS);
  await browser.evaluate(`document.querySelector(".failure details").open = true`);
  for (const dark of [true, false]) {
    await takePicture(`dashboard-failure-${dark ? "dark" : "light"}.webp`, { width: 1300, height: 1000, dark });
  }
} finally {
  await browser.close();
  server.kill("SIGINT");
  for (const run of runs) run.kill("SIGKILL");
  await pause(1);
  rmSync(directory, { recursive: true, force: true, maxRetries: 5 });
}
