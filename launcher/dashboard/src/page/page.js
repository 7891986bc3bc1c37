// The parts of the page, the list of runs, and the data from the server.
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
