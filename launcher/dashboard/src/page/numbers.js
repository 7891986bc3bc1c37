// Numbers as texts, and the curves that the page shows.
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
