// The curves of the selected runs, drawn on canvases.
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
