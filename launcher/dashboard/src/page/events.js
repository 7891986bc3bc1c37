// The events of a run.
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
