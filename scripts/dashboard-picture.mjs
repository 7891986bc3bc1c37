#!/usr/bin/env node
// Draws the page of `launch serve` during a run as docs/images/dashboard.png.
//
//     scripts/dashboard-picture.mjs [LAUNCH]     LAUNCH: the executable, target/release/launch by default
//
// Trains a small model with three workers on a text of this repository, kills a worker, and takes a
// picture after the restart. Needs Chromium and Node.js.
import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { openBrowser } from "../tests/dashboard/browser.mjs";

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

/** Returns the pid of a worker of the run. */
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

const run = start(["job.yaml", "--json"]);
run.stdout.resume();
const server = start(["serve"]);
const browser = await openBrowser("chromium", { width: 1300, height: 1150, dark: true });
try {
  const address = await new Promise((done) => server.stdout.once("data", (data) => done(String(data).split("\n")[0])));
  await browser.open(address);
  const hasCheckpoints = (count) => `/checkpoints\\s*${count}/.test(document.querySelector("#main").textContent)`;
  await browser.waitFor(hasCheckpoints(3), 120000);
  process.kill(findWorker(), "SIGKILL");
  await browser.waitFor(hasCheckpoints(5), 120000);
  await pause(3);
  writeFileSync(join(repository, "docs/images/dashboard.png"), await browser.screenshot());
} finally {
  await browser.close();
  server.kill("SIGINT");
  run.kill("SIGKILL");
  await pause(1);
  rmSync(directory, { recursive: true, force: true, maxRetries: 5 });
}
