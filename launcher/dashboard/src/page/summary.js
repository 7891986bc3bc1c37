// The summary and the failure of a run.
const FACTS = [
  ["loss", (n) => formatPlain(n.loss)],
  ["eval loss", (n) => formatPlain(n.eval_loss)],
  ["tokens per second", (n) => formatCount(n.tokens_per_s)],
  ["step time", (n) => formatSeconds(n.step_s)],
  ["memory", (n) => formatBytes(n.peak_rss)],
  ["tokens", (n) => formatCount(n.tokens)],
  ["parameters", (n) => formatCount(n.parameters)],
  ["time left", (n) => (isNumber(n.exit_code) || !isNumber(n.step_s) || !(n.total_steps > n.step) ? "–" : formatSeconds((n.total_steps - n.step) * n.step_s))],
  ["restarts", (n) => formatPlain(n.restarts)],
  ["checkpoints", (n) => (n.checkpoint ? `${n.checkpoints}, last at step ${n.checkpoint.step}` : "–")],
  ["exit code", (n) => formatPlain(n.exit_code)],
];

function buildSummary(run, number) {
  const title = make("div", { class: "title" });
  const state = make("span", { class: "state" });
  const place = make("div", { class: "muted" });
  const progress = make("progress", { max: "1", "aria-label": "steps done" });
  const steps = make("div", {});
  const values = FACTS.map(([name]) => ({ name, element: make("dd", {}) }));
  const list = make("dl", {}, ...values.map(({ name, element }) => make("div", {}, make("dt", {}, name), element)));
  const name = make("h2", {}, run);
  title.append(make("span", { class: `swatch run${number}` }), name, state);
  const panel = make("section", { class: "panel", "aria-label": `Run ${run}` }, title, place, steps, progress, list);
  const update = (model) => {
    const { info, numbers, ranks } = model;
    setText(name, `${info.name} · ${info.run}`);
    setText(state, info.state);
    state.className = `state ${info.state}`;
    const hosts = ranks.hosts.length === 1 ? `1 host (${ranks.hosts[0].host})` : `${ranks.hosts.length} hosts`;
    const damaged = numbers.damaged_lines ? ` · ${numbers.damaged_lines} damaged lines in the journal` : "";
    setText(place, `${ranks.world} workers on ${hosts} · attempt ${numbers.attempt} · ${info.run_dir}${damaged}`);
    const total = numbers.total_steps;
    const loading = model.share < 1 ? ` · reading the journal: ${Math.floor(model.share * 100)} %` : "";
    setText(steps, `step ${numbers.step ?? "–"}${isNumber(total) ? ` of ${total}` : ""}${loading}`);
    progress.hidden = !isNumber(total);
    progress.value = total ? Math.min(1, (numbers.step || 0) / total) : 0;
    values.forEach(({ element }, at) => setText(element, FACTS[at][1](numbers)));
  };
  return { panel, update };
}

function buildFailure(run) {
  const heading = make("h2", {});
  const facts = make("pre", {});
  const tail = make("pre", {});
  const more = make("details", {}, make("summary", {}, "reason and diagnostics"), make("div", { class: "scroll" }, facts));
  const message = make("p", {});
  const help = make("ul", {});
  const panel = make("section", { class: "panel failure", "aria-label": `Failure of run ${run}` }, heading, message, help,
    make("h3", {}, "last lines of its output"), make("div", { class: "scroll" }, tail), more);
  let shown = null;
  const update = (model) => {
    const failure = model.numbers.failure;
    panel.hidden = !failure;
    const key = failure ? JSON.stringify(failure) : null;
    if (!failure || key === shown) return;
    shown = key;
    const isEnd = failure.event === "failure";
    const rank = isNumber(failure.rank) ? `rank ${failure.rank} on ` : "";
    setText(heading, `${isEnd ? "Failure" : `Restart ${failure.attempt}`}: ${rank}${failure.host || "an unknown host"} [${failure.code || "unknown"}]`);
    setText(message, `${failure.message ?? ""}${failure.pid ? ` (pid ${failure.pid})` : ""}`);
    help.replaceChildren(...(Array.isArray(failure.help) ? failure.help : []).map((text) => make("li", {}, text)));
    const lines = Array.isArray(failure.tail) ? failure.tail : [];
    setText(tail, lines.length ? lines.join("\n") : "no output");
    setText(facts, JSON.stringify({ reason: failure.reason, log: failure.log, diagnostics: failure.diagnostics }, null, 2));
  };
  return { panel, update };
}
