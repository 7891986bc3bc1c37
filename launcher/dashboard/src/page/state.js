// The state of the page: the runs and what is selected.
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
