// The plan of a run.
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
