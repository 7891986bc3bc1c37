// The logs of the ranks, and the search in them.
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
