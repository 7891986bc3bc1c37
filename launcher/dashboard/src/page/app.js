"use strict";
// The page of the dashboard. All texts from runs are written as text nodes, never as markup.
(() => {
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

  // --- numbers ---

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const formatPlain = (v) => (isNumber(v) ? Number(v.toPrecision(5)).toString() : "–");
  function formatCount(v) {
    if (!isNumber(v)) return "–";
    const units = ["", "k", "M", "G", "T", "P"];
    let at = 0;
    for (; Math.abs(v) >= 1000 && at + 1 < units.length; at++) v /= 1000;
    return `${Number(v.toPrecision(4))}${units[at]}`;
  }
  function formatBytes(v) {
    if (!isNumber(v)) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    for (; Math.abs(v) >= 1024 && at + 1 < units.length; at++) v /= 1024;
    return `${Number(v.toPrecision(4))} ${units[at]}`;
  }
  function formatSeconds(v) {
    if (!isNumber(v)) return "–";
    if (v < 0.0005) return `${Number((v * 1e6).toPrecision(3))} µs`;
    if (v < 0.5) return `${Number((v * 1e3).toPrecision(3))} ms`;
    if (v < 120) return `${Number(v.toPrecision(3))} s`;
    const minutes = Math.floor(v / 60);
    if (minutes < 120) return `${minutes} min`;
    return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
  }
  function formatClock(seconds) {
    const s = Math.max(0, Math.floor(seconds));
    const two = (n) => String(n).padStart(2, "0");
    return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  }

  /** The curves: names of the series, title, format of the values. */
  const CHARTS = [
    { names: ["loss", "eval_loss"], title: "Loss (dashed: evaluation)", format: formatPlain },
    { names: ["tokens_per_s"], title: "Tokens per second", format: formatCount },
    { names: ["step_s"], title: "Step time", format: formatSeconds },
    { names: ["peak_rss"], title: "Memory (largest resident set of a rank)", format: formatBytes },
    { names: ["grad_norm"], title: "Gradient norm", format: formatPlain },
    { names: ["exposed_comm_s"], title: "Waiting for collectives", format: formatSeconds },
    { names: ["lr"], title: "Learning rate", format: formatPlain },
  ];

  // --- state ---

  /** The runs whose data the page has, by ID. */
  const models = new Map();
  let listedRuns = [];
  let selected = [];
  let stream = null;
  let cursorStep = null;
  let isLogScale = false;
  let isDrawPending = false;
  /** The parts of the page that show the selected runs. */
  let view = null;

  function createModel() {
    return { info: null, numbers: {}, ranks: null, status: null, series: {}, events: [], marks: [], job: null, share: 0, logs: null };
  }

  /** Adds an update of the server to a model. */
  function applyUpdate(model, update) {
    if (update.reset) Object.assign(model, createModel(), { logs: model.logs });
    model.info = update.info;
    model.numbers = update.numbers;
    model.ranks = update.ranks;
    model.status = update.status ?? null;
    model.share = update.share;
    for (const [name, part] of Object.entries(update.series)) {
      const buckets = (model.series[name] ||= []);
      buckets.length = Math.min(buckets.length, part.from);
      for (const bucket of part.buckets) buckets.push(bucket);
    }
    for (const event of update.events) model.events.push(event.event);
    if (model.events.length > MAX_EVENTS) model.events.splice(0, model.events.length - MAX_EVENTS);
    if (update.marks) model.marks = update.marks;
    if (update.job !== undefined) model.job = update.job;
  }

  // --- curves ---

  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    return {
      runs: [0, 1, 2, 3].map((n) => color(`run${n}`)),
      line: color("line"), muted: color("muted"), text: color("text"), back: color("back"),
      restart: color("restart"), failure: color("restart"), checkpoint: color("checkpoint"),
      resume: color("resume"), reload: color("muted"),
    };
  }

  /** Returns round values between `low` and `high`. */
  function listTicks(low, high, count, isBinary) {
    const raw = (high - low) / count;
    if (!(raw > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = isBinary ? 2 ** Math.ceil(Math.log2(raw)) : [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
    const ticks = [];
    for (let n = Math.ceil(low / step); n * step <= high && ticks.length < 50; n++) ticks.push(n * step);
    return ticks;
  }

  /** Returns the curves of a chart: for each run and series its buckets. */
  function listCurves(chart) {
    const curves = [];
    selected.forEach((run, number) => {
      const model = models.get(run);
      chart.names.forEach((name, at) => {
        const buckets = model && model.series[name];
        if (buckets && buckets.length) curves.push({ model, number, buckets, isDashed: at > 0, name });
      });
    });
    return curves;
  }

  /** Returns the smallest and largest steps and values of curves. */
  function findBounds(curves, isLog) {
    const bounds = { x0: Infinity, x1: -Infinity, y0: Infinity, y1: -Infinity };
    for (const { buckets } of curves) {
      for (const bucket of buckets) {
        for (let at = 0; at < bucket.length; at += 2) {
          const [x, y] = [bucket[at], bucket[at + 1]];
          if (isLog && !(y > 0)) continue;
          bounds.x0 = Math.min(bounds.x0, x);
          bounds.x1 = Math.max(bounds.x1, x);
          bounds.y0 = Math.min(bounds.y0, y);
          bounds.y1 = Math.max(bounds.y1, y);
        }
      }
    }
    return bounds;
  }

  function drawChart(part, colors) {
    const { canvas, chart } = part;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const ratio = window.devicePixelRatio || 1;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = colors.back;
    context.fillRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    const curves = listCurves(chart);
    const bounds = findBounds(curves, isLogScale);
    part.scale = null;
    if (!Number.isFinite(bounds.x0)) {
      context.fillStyle = colors.muted;
      context.fillText("no values yet", 12, 20);
      return;
    }
    const convert = isLogScale ? Math.log10 : (y) => y;
    let [low, high] = [convert(bounds.y0), convert(bounds.y1)];
    if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
    const span = Math.max(bounds.x1 - bounds.x0, 1);
    const plot = { left: 66, right: width - 8, top: 8, bottom: height - 20 };
    const toX = (step) => plot.left + ((step - bounds.x0) / span) * (plot.right - plot.left);
    const toY = (value) => plot.bottom - ((convert(value) - low) / (high - low)) * (plot.bottom - plot.top);
    part.scale = { plot, span, x0: bounds.x0 };
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of listTicks(low, high, 4, chart.format === formatBytes && !isLogScale)) {
      const y = plot.bottom - ((tick - low) / (high - low)) * (plot.bottom - plot.top);
      context.strokeStyle = colors.line;
      context.beginPath();
      context.moveTo(plot.left, y);
      context.lineTo(plot.right, y);
      context.stroke();
      context.fillStyle = colors.muted;
      context.fillText(chart.format(isLogScale ? 10 ** tick : tick), plot.left - 6, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of listTicks(bounds.x0, bounds.x0 + span, 5)) {
      context.fillText(formatCount(tick), toX(tick), plot.bottom + 5);
    }
    drawMarks(context, colors, bounds, plot, toX);
    for (const { buckets, number, isDashed } of curves) {
      context.strokeStyle = colors.runs[number];
      context.lineWidth = 1.5;
      context.setLineDash(isDashed ? [5, 4] : []);
      context.beginPath();
      for (const bucket of buckets) {
        for (let at = 0; at < bucket.length; at += 2) {
          if (!isLogScale || bucket[at + 1] > 0) context.lineTo(toX(bucket[at]), toY(bucket[at + 1]));
        }
      }
      context.stroke();
      context.setLineDash([]);
      if (buckets.length === 1) {
        context.fillStyle = colors.runs[number];
        context.fillRect(toX(buckets[0][0]) - 2, toY(buckets[0][1]) - 2, 4, 4);
      }
    }
    if (cursorStep !== null && cursorStep >= bounds.x0 && cursorStep <= bounds.x1) {
      context.strokeStyle = colors.text;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(toX(cursorStep), plot.top);
      context.lineTo(toX(cursorStep), plot.bottom);
      context.stroke();
    }
  }

  /** Draws restarts and resumes as lines, and checkpoints as triangles at the axis. */
  function drawMarks(context, colors, bounds, plot, toX) {
    for (const run of selected) {
      const model = models.get(run);
      for (const mark of model ? model.marks : []) {
        if (mark.step < bounds.x0 - 1 || mark.step > bounds.x1 + 1) continue;
        const x = Math.min(Math.max(toX(mark.step), plot.left), plot.right);
        context.strokeStyle = context.fillStyle = colors[mark.kind] || colors.muted;
        context.beginPath();
        if (mark.kind === "checkpoint") {
          context.moveTo(x - 4, plot.bottom);
          context.lineTo(x + 4, plot.bottom);
          context.lineTo(x, plot.bottom - 7);
          context.fill();
        } else {
          context.setLineDash([2, 3]);
          context.moveTo(x, plot.top);
          context.lineTo(x, plot.bottom);
          context.stroke();
          context.setLineDash([]);
        }
      }
    }
  }

  /** Returns the point of buckets that is nearest to a step. */
  function findNearest(buckets, step) {
    let [low, high] = [0, buckets.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (buckets[middle][buckets[middle].length - 2] < step) low = middle + 1;
      else high = middle;
    }
    let best = null;
    for (const bucket of buckets.slice(Math.max(0, low - 1), low + 1)) {
      for (let at = 0; at < bucket.length; at += 2) {
        if (!best || Math.abs(bucket[at] - step) < Math.abs(best.step - step)) {
          best = { step: bucket[at], value: bucket[at + 1] };
        }
      }
    }
    return best;
  }

  /** Shows the values of all charts at the cursor. */
  function showCursor() {
    for (const part of view.charts) {
      const texts = listCurves(part.chart).map(({ model, buckets, name }) => {
        const point = cursorStep === null ? null : findNearest(buckets, cursorStep);
        const label = selected.length > 1 ? `${model.info.run} ` : "";
        return point ? `${label}${name} ${part.chart.format(point.value)} at step ${point.step}` : "";
      });
      setText(part.output, texts.filter(Boolean).join(" · "));
    }
    scheduleDraw();
  }

  function moveCursor(event, part) {
    if (!part.scale) return;
    const { plot, span, x0 } = part.scale;
    const x = event.clientX - part.canvas.getBoundingClientRect().left;
    cursorStep = Math.round(x0 + ((x - plot.left) / (plot.right - plot.left)) * span);
    showCursor();
  }

  function moveCursorByKey(event, part) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (event.key === "Escape") cursorStep = null;
    else if (move === undefined || !part.scale) return;
    else {
      const { span, x0 } = part.scale;
      const from = cursorStep === null ? x0 + span : cursorStep;
      const by = Number.isFinite(move) ? move * Math.max(1, Math.round(span / 200)) : move;
      cursorStep = Math.min(Math.max(from + by, x0), x0 + span);
    }
    event.preventDefault();
    showCursor();
  }

  function buildCharts() {
    const parts = CHARTS.map((chart) => {
      const canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": `${chart.title} over steps. Arrow keys show values.` });
      const output = make("output", { "aria-live": "polite" });
      const part = { chart, canvas, output, scale: null };
      canvas.addEventListener("pointermove", (event) => moveCursor(event, part));
      canvas.addEventListener("keydown", (event) => moveCursorByKey(event, part));
      return part;
    });
    const scale = make("input", { type: "checkbox", onchange: (event) => { isLogScale = event.target.checked; scheduleDraw(); } });
    scale.checked = isLogScale;
    const legend = ["restart", "resume", "checkpoint"].map((kind) => make("span", { class: kind }, kind));
    const panel = make("section", { class: "panel", "aria-label": "Curves" },
      make("h2", {}, "Curves"),
      make("div", { class: "legend" }, ...legend, make("label", {}, scale, " logarithmic")),
      make("div", { class: "charts" }, ...parts.map((part) => make("div", { class: "chart" }, make("h3", {}, part.chart.title), part.canvas, part.output))));
    return { parts, panel };
  }

  // --- summaries and failures ---

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

  // --- ranks ---

  /** Shows what the hosts use, and which ranks are slow. */
  function updateUsage(element, status) {
    const key = status ? JSON.stringify([status.hosts, status.stragglers]) : "";
    if (element.dataset.key === key) return;
    element.dataset.key = key;
    if (!status) return element.replaceChildren();
    const rate = (bytes, ms) => (isNumber(bytes) && ms > 0 ? `${formatBytes((bytes * 1000) / ms)}/s` : "–");
    const percent = (share) => (isNumber(share) ? `${Math.round(share * 100)} %` : "–");
    const rows = status.hosts.slice(0, 64).map(({ host, usage }) => [
      host,
      `${percent(usage.cpu_share)} of ${usage.cpus}`,
      `${formatBytes(usage.memory_used)} of ${formatBytes(usage.memory_total)}`,
      usage.gpus.map((gpu) => percent(gpu.busy_share)).join(" ") || "–",
      `${rate(usage.disk_read, usage.interval_ms)} / ${rate(usage.disk_written, usage.interval_ms)}`,
      `${rate(usage.network_received, usage.interval_ms)} / ${rate(usage.network_sent, usage.interval_ms)}`,
    ]);
    const heads = ["host", "CPU", "memory", "GPU", "disk read / written", "network received / sent"];
    const cellsOf = (tag, texts) => make("tr", {}, ...texts.map((text) => make(tag, {}, text)));
    const slow = status.stragglers.map((report) => make("p", { class: "warning" }, report.message));
    const rest = status.hosts.length - rows.length;
    element.replaceChildren(...slow, ...(rows.length
      ? [make("table", {}, make("thead", {}, cellsOf("th", heads)), make("tbody", {}, ...rows.map((row) => cellsOf("td", row))))]
      : []), ...(rest > 0 ? [make("p", { class: "muted" }, `${rest} further hosts`)] : []));
  }

  function buildGrid(run) {
    const container = make("div", { class: "grid", role: "grid", "aria-label": `Ranks of run ${run}` });
    const detail = make("output", { "aria-live": "polite" });
    const legend = make("div", { class: "legend" });
    const labels = Object.entries(STATES).map(([letter, name]) => [letter, name, make("span", { class: letter }, name)]);
    legend.append(...labels.map(([, , element]) => element));
    const usage = make("div", { class: "usage" });
    const panel = make("section", { class: "panel" }, make("h2", {}, `Ranks of ${run}`), legend, container, detail, usage);
    let [cells, layout, chosen, states, latest] = [[], "", 0, "", null];

    const describe = (rank) => {
      const { ranks } = latest;
      const row = ranks.hosts.find((host) => rank >= host.first_rank && rank < host.first_rank + host.workers);
      const parts = [`rank ${rank}${row ? ` on ${row.host}` : ""}: ${STATES[ranks.states[rank]] || "unknown"}`];
      if (ranks.failures[rank]) parts.push(`${ranks.failures[rank]} failures`);
      if (ranks.notices[rank]) parts.push(`${ranks.notices[rank]} messages`);
      const age = ranks.output_age_s[rank];
      if (isNumber(age)) parts.push(`last output ${formatSeconds(age)} ago`);
      const { status } = latest;
      if (status && isNumber(status.work_ms[rank])) {
        parts.push(`step time ${formatSeconds(status.step_s)}: work ${formatSeconds(status.work_ms[rank] / 1000)}, waiting ${formatSeconds(status.waiting_ms[rank] / 1000)}, collectives ${formatSeconds(status.collective_ms[rank] / 1000)}`);
      } else if (isNumber(latest.numbers.step_s)) parts.push(`step time ${formatSeconds(latest.numbers.step_s)} (all ranks)`);
      return parts.join(", ");
    };
    const choose = (rank, isFocused) => {
      const cell = cells[rank];
      if (!cell) return;
      cells[chosen]?.classList.remove("chosen");
      cells[chosen]?.setAttribute("tabindex", "-1");
      chosen = rank;
      cell.classList.add("chosen");
      cell.setAttribute("tabindex", "0");
      if (isFocused) cell.focus();
      setText(detail, describe(rank));
    };
    container.addEventListener("click", (event) => {
      const rank = cells.indexOf(event.target);
      if (rank >= 0) {
        choose(rank, true);
        view.logs.get(run)?.select(rank);
      }
    });
    container.addEventListener("keydown", (event) => {
      const rows = latest ? latest.ranks.hosts : [];
      const row = rows.findIndex((host) => chosen >= host.first_rank && chosen < host.first_rank + host.workers);
      const vertical = (by) => {
        const next = rows[row + by];
        return next ? next.first_rank + Math.min(chosen - rows[row].first_rank, next.workers - 1) : chosen;
      };
      const targets = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, ArrowUp: vertical(-1), ArrowDown: vertical(1), Home: 0, End: cells.length - 1 };
      if (!(event.key in targets)) return;
      event.preventDefault();
      choose(Math.min(Math.max(targets[event.key], 0), cells.length - 1), true);
    });
    const rebuild = (ranks) => {
      cells = Array.from({ length: ranks.states.length }, () => make("button", { type: "button", role: "gridcell", tabindex: "-1", class: "cell" }));
      const rows = ranks.hosts.map((host) => make("div", { class: "host", role: "row" },
        make("span", { role: "rowheader", title: host.host }, host.host),
        make("div", { class: "cells", role: "presentation" }, ...cells.slice(host.first_rank, host.first_rank + host.workers))));
      const rest = ranks.world - ranks.states.length;
      container.replaceChildren(...rows, ...(rest > 0 ? [make("p", { class: "muted" }, `${rest} further ranks are not drawn`)] : []));
      states = "";
      cells[0]?.setAttribute("tabindex", "0");
      chosen = 0;
    };
    const update = (model) => {
      latest = model;
      const { ranks } = model;
      panel.hidden = !ranks.states.length;
      const key = JSON.stringify([ranks.hosts, ranks.world]);
      if (key !== layout) {
        layout = key;
        rebuild(ranks);
      }
      if (states !== ranks.states) {
        for (let rank = 0; rank < cells.length; rank++) {
          if (states[rank] === ranks.states[rank]) continue;
          cells[rank].className = `cell ${ranks.states[rank]}${rank === chosen ? " chosen" : ""}`;
          cells[rank].setAttribute("aria-label", `rank ${rank}: ${STATES[ranks.states[rank]]}`);
          cells[rank].title = `rank ${rank}: ${STATES[ranks.states[rank]]}`;
        }
        states = ranks.states;
        for (const [letter, name, element] of labels) {
          const count = states.split(letter).length - 1;
          setText(element, `${name}: ${count}`);
          element.hidden = !count;
        }
      }
      const slow = new Set((model.status?.stragglers ?? []).map((report) => report.rank));
      cells.forEach((cell, rank) => cell.classList.toggle("slow", slow.has(rank)));
      // The height of the bar in a cell is the work time of the rank, compared with the longest one.
      const work = model.status?.work_ms ?? [];
      const longest = work.reduce((a, b) => Math.max(a, b), 0);
      cells.forEach((cell, rank) => {
        const level = longest > 0 && isNumber(work[rank]) ? Math.round((work[rank] / longest) * 8) : -1;
        if (cell.dataset.work !== String(level)) cell.dataset.work = String(level);
      });
      updateUsage(usage, model.status);
      if (cells.length) setText(detail, describe(chosen));
    };
    return { panel, update };
  }

  // --- events ---

  /** Returns an event as a line of text. */
  function describeEvent(event) {
    if (typeof event.message === "string") {
      return (isNumber(event.rank) ? `rank ${event.rank}: ` : "") + event.message;
    }
    const hidden = ["event", "schema", "time", "report", "epoch", "left", "cause", "run_dir"];
    const fields = Object.entries(event).filter(([name, value]) => !hidden.includes(name) && value !== null);
    return fields.map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  }

  function buildEvents(run) {
    const body = make("tbody", {});
    const filter = make("input", { type: "search", placeholder: "filter", "aria-label": `filter events of run ${run}` });
    const panel = make("section", { class: "panel" }, make("div", { class: "tools" }, make("h2", {}, `Events of ${run}`), filter),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "events" },
        make("table", {}, make("thead", {}, make("tr", {}, ...["time", "event", "content"].map((name) => make("th", { scope: "col" }, name)))), body)));
    let key = "";
    const update = (model) => {
      const text = filter.value.toLowerCase();
      const newKey = `${model.events.length} ${model.events.at(-1)?.time} ${text}`;
      if (newKey === key) return;
      key = newKey;
      const rows = [];
      for (let at = model.events.length - 1; at >= 0 && rows.length < 300; at--) {
        const event = model.events[at];
        const content = describeEvent(event);
        if (text && !`${event.event} ${content}`.toLowerCase().includes(text)) continue;
        const since = formatClock(event.time - model.info.began_ms / 1000);
        rows.push(make("tr", {}, make("td", {}, since), make("td", {}, event.event), make("td", {}, content.length > 500 ? `${content.slice(0, 500)}…` : content)));
      }
      body.replaceChildren(...rows);
    };
    filter.addEventListener("input", scheduleDraw);
    return { panel, update };
  }

  // --- logs ---

  async function request(path, parameters) {
    const query = new URLSearchParams(parameters);
    const answer = await fetch(`${path}?${query}`, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
    return answer.json();
  }

  function buildLogs(run) {
    const select = make("select", { "aria-label": `rank whose log is shown, run ${run}` });
    const follow = make("input", { type: "checkbox", checked: true });
    const search = make("input", { type: "search", placeholder: "search in the logs of all ranks", "aria-label": `search in the logs of run ${run}`, size: "32" });
    const note = make("span", { class: "muted", role: "status" });
    const text = make("pre", {});
    const box = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `log, run ${run}` }, text);
    const panel = make("section", { class: "panel" }, make("div", { class: "tools" }, make("h2", {}, `Logs of ${run}`), select,
      make("label", {}, follow, " follow"), search, note), box);
    let [lines, position, ranks, searched, isBusy] = [[], null, [], "", false];

    const show = () => {
      if (searched) return;
      setText(text, lines.join("\n"));
      if (follow.checked) box.scrollTop = box.scrollHeight;
    };
    const setRanks = (list) => {
      if (JSON.stringify(list) === JSON.stringify(ranks)) return;
      const value = select.value;
      ranks = list;
      select.replaceChildren(...list.map((rank) => make("option", { value: rank }, `rank ${rank}`)));
      if (list.map(String).includes(value)) select.value = value;
    };
    const loadStatic = () => {
      const part = models.get(run)?.logs?.[select.value];
      lines = part ? part.lines : ["the report does not contain this log"];
      show();
    };
    const poll = async () => {
      if (isBusy || document.hidden) return;
      isBusy = true;
      try {
        setRanks(await request("api/logs", { run }));
        if (select.value !== "" && (follow.checked || !position)) {
          const rank = select.value;
          const part = await request("api/log", { run, rank, ...(position || {}) });
          if (rank === select.value) {
            if (!position || position.file !== part.file) lines = [];
            position = { file: part.file, end: part.end };
            lines.push(...part.lines);
            if (lines.length > MAX_LOG_LINES) lines.splice(0, lines.length - MAX_LOG_LINES);
            if (part.lines.length || !text.textContent) show();
          }
        }
      } catch (error) {
        setText(note, String(error.message));
      } finally {
        isBusy = false;
      }
    };
    const restart = () => {
      [lines, position] = [[], null];
      if (dataElement) loadStatic();
      else poll();
    };
    const runSearch = async () => {
      searched = search.value;
      setText(note, "");
      if (!searched) return show();
      if (dataElement) {
        const found = Object.entries(models.get(run)?.logs || {}).flatMap(([rank, part]) => part.lines
          .filter((line) => line.toLowerCase().includes(searched.toLowerCase())).map((line) => `[rank ${rank}] ${line}`));
        return setText(text, found.join("\n") || "no matches");
      }
      const wanted = searched;
      try {
        const found = await request("api/search", { run, text: wanted });
        if (wanted !== searched) return;
        setText(text, found.matches.map((match) => `[rank ${match.rank}] ${match.line}`).join("\n") || "no matches");
        setText(note, found.is_cut ? "not all matches are shown" : "");
      } catch (error) {
        setText(note, String(error.message));
      }
    };
    let delay = 0;
    search.addEventListener("input", () => {
      clearTimeout(delay);
      delay = setTimeout(runSearch, 250);
    });
    select.addEventListener("change", restart);
    follow.addEventListener("change", show);
    const selectRank = (rank) => {
      if (!ranks.includes(rank)) return setText(note, `the log of rank ${rank} is not on this machine`);
      setText(note, "");
      select.value = String(rank);
      search.value = searched = "";
      restart();
    };
    const begin = () => {
      if (!dataElement) return poll();
      setRanks(Object.keys(models.get(run)?.logs || {}).map(Number));
      loadStatic();
      return undefined;
    };
    return { panel, poll, begin, select: selectRank };
  }

  // --- plan ---

  function buildPlan(run) {
    const hosts = make("pre", {});
    const job = make("pre", {});
    const panel = make("section", { class: "panel" }, make("h2", {}, `Plan of ${run}`),
      make("details", {}, make("summary", {}, "hosts and ranks"), make("div", { class: "scroll" }, hosts)),
      make("details", {}, make("summary", {}, "job with all defaults"), make("div", { class: "scroll" }, job)));
    let shown = null;
    const update = (model) => {
      const rows = model.ranks.hosts.map((host) => `${host.host}: ${host.workers === 1 ? `rank ${host.first_rank}` : `ranks ${host.first_rank}–${host.first_rank + host.workers - 1}`}`);
      setText(hosts, rows.join("\n"));
      if (model.job !== shown) {
        shown = model.job;
        const command = model.job && Array.isArray(model.job.command) ? `${model.job.command.join(" ")}\n\n` : "";
        setText(job, model.job ? command + JSON.stringify(model.job.job, null, 2) : "the run has no job.json");
      }
    };
    return { panel, update };
  }

  // --- the page ---

  function draw() {
    isDrawPending = false;
    if (!view) return;
    for (const { run, parts } of view.runs) {
      const model = models.get(run);
      if (model && model.info) parts.forEach((part) => part.update(model));
    }
    const colors = readColors();
    view.charts.forEach((part) => drawChart(part, colors));
    window.launchDraws = (window.launchDraws || 0) + 1;
  }

  function scheduleDraw() {
    if (isDrawPending) return;
    isDrawPending = true;
    requestAnimationFrame(draw);
  }

  function buildMain() {
    const main = document.getElementById("main");
    const { parts, panel } = buildCharts();
    const built = selected.map((run, number) => ({
      run,
      summary: buildSummary(run, number), failure: buildFailure(run), grid: buildGrid(run),
      events: buildEvents(run), logs: buildLogs(run), plan: buildPlan(run),
    }));
    const columns = (name) => make("div", { class: "columns" }, ...built.map((run) => run[name].panel));
    main.replaceChildren(columns("summary"), columns("failure"), panel, columns("grid"), columns("logs"), columns("events"), columns("plan"));
    if (!built.length) main.replaceChildren(make("p", {}, "There are no runs yet. A run appears here when it begins."));
    view = {
      charts: built.length ? parts : [],
      runs: built.map((run) => ({ run: run.run, parts: [run.summary, run.failure, run.grid, run.events, run.plan] })),
      logs: new Map(built.map((run) => [run.run, run.logs])),
    };
    scheduleDraw();
    for (const logs of view.logs.values()) logs.begin();
  }

  function setStatus(text) {
    setText(document.getElementById("status"), text);
  }

  function openStream() {
    if (stream) stream.close();
    if (!selected.length) return;
    const query = new URLSearchParams([["token", token], ...selected.map((run) => ["run", run])]);
    stream = new EventSource(`api/stream?${query}`);
    stream.addEventListener("open", () => {
      setStatus("live");
      // The server sends everything again.
      for (const run of selected) models.set(run, createModel());
    });
    stream.addEventListener("error", () => setStatus("no connection to launch serve"));
    stream.addEventListener("run", (event) => {
      const update = JSON.parse(event.data);
      const run = update.info.run;
      if (!selected.includes(run)) return;
      if (!models.has(run)) models.set(run, createModel());
      applyUpdate(models.get(run), update);
      scheduleDraw();
    });
    stream.addEventListener("missing", (event) => setStatus(`there is no run ${JSON.parse(event.data)}`));
  }

  /** Selects the runs that the page shows, and records them in the address. */
  function selectRuns(runs) {
    selected = runs.slice(-MAX_RUNS);
    for (const run of models.keys()) if (!selected.includes(run)) models.delete(run);
    const hash = new URLSearchParams(selected.map((run) => ["run", run])).toString();
    history.replaceState(null, "", `${location.pathname}${location.search}#${hash}`);
    cursorStep = null;
    buildMain();
    openStream();
    showRunList();
  }

  function showRunList() {
    const items = listedRuns.map((info) => {
      const box = make("input", { type: "checkbox", "aria-label": `compare ${info.run}` });
      box.checked = selected.includes(info.run);
      box.addEventListener("change", () => selectRuns(box.checked ? [...selected, info.run] : selected.filter((run) => run !== info.run)));
      const at = selected.indexOf(info.run);
      const began = new Date(info.began_ms).toLocaleString();
      return make("li", {}, make("label", {}, box, make("span", {},
        make("span", { class: `swatch ${at >= 0 ? `run${at}` : ""}` }), ` ${info.name} `, make("span", { class: `state ${info.state}` }, info.state),
        make("br", {}), make("small", {}, `${info.run} · ${began} · ${info.world} workers${isNumber(info.step) ? ` · step ${info.step}` : ""}`))));
    });
    const nav = document.getElementById("runs");
    const key = JSON.stringify([listedRuns, selected]);
    if (nav.dataset.key === key) return;
    nav.dataset.key = key;
    const focused = [...nav.querySelectorAll("input")].indexOf(document.activeElement);
    nav.replaceChildren(make("h2", {}, `Runs (compare up to ${MAX_RUNS})`), make("ul", {}, ...items));
    if (focused >= 0) nav.querySelectorAll("input")[focused]?.focus();
  }

  async function loadRunList() {
    try {
      listedRuns = await request("api/runs", {});
      if (!selected.length && listedRuns.length) {
        const first = listedRuns.find((info) => info.is_active) || listedRuns[0];
        selectRuns([first.run]);
      }
      showRunList();
    } catch {
      setStatus("no connection to launch serve");
    }
  }

  function beginLive() {
    const runs = new URLSearchParams(location.hash.slice(1)).getAll("run");
    if (runs.length) selectRuns(runs);
    else buildMain();
    loadRunList();
    setInterval(() => { if (!document.hidden) loadRunList(); }, RUN_LIST_INTERVAL_MS);
    setInterval(() => { if (view) for (const logs of view.logs.values()) logs.poll(); }, LOG_INTERVAL_MS);
  }

  function beginStatic() {
    const { runs } = JSON.parse(dataElement.textContent);
    for (const { update, logs } of runs) {
      const model = createModel();
      applyUpdate(model, update);
      model.logs = logs;
      models.set(update.info.run, model);
    }
    selected = runs.map(({ update }) => update.info.run);
    document.getElementById("layout").className = "static";
    document.getElementById("runs").hidden = true;
    setStatus("report");
    buildMain();
  }

  window.addEventListener("resize", scheduleDraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", scheduleDraw);
  if (dataElement) beginStatic();
  else beginLive();
})();
