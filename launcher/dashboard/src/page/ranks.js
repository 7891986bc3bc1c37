// The ranks of a run by host, and the usage of the hosts.
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
