//! [`Batch`]: the metrics and tags that one request sends to MLflow, within MLflow's limits.
use protocol::{
    event::{Event, TimedEvent},
    exit,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The number of metrics in a request to MLflow from which on the next event of the run is put into
/// a new request. MLflow accepts 1,000 metrics, params and tags in one request, and a single event
/// has fewer than 20 of them.
const METRICS_PER_FULL_BATCH: usize = 900;
/// The largest number of parameters that one request to MLflow contains.
const MAX_PARAMS: usize = 100;
/// The longest value of a parameter that is sent to MLflow, in bytes. Servers before MLflow 2.8
/// reject longer values.
const MAX_PARAM_BYTES: usize = 500;
/// The longest value of a tag that is sent to MLflow, in bytes.
const MAX_TAG_BYTES: usize = 5000;
/// The longest key of a metric, parameter or tag that is sent to MLflow, in bytes.
const MAX_KEY_BYTES: usize = 250;
/// The text at the end of a value that was shortened for MLflow.
const ELLIPSIS: &str = "…";

/// One value of a metric at one step, as MLflow stores it.
#[derive(Clone, Debug, PartialEq)]
struct Metric {
    key: String,
    value: f64,
    /// The time in milliseconds since 1970.
    timestamp: u64,
    step: u64,
}

/// Metrics and tags of a run that wait to be sent to MLflow with one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Batch {
    metrics: Vec<Metric>,
    tags: BTreeMap<String, String>,
    /// The state of the run and the time in milliseconds since 1970, if the run has ended.
    pub(super) end: Option<(&'static str, u64)>,
}

impl Batch {
    /// Returns whether the batch has metrics or tags to send to MLflow. Otherwise there is nothing
    /// to send but the end of the run.
    pub(super) fn has_content(&self) -> bool {
        !self.metrics.is_empty() || !self.tags.is_empty()
    }

    /// Returns whether the batch for MLflow has so many metrics that further events must go into
    /// the next batch.
    pub(super) fn is_full(&self) -> bool {
        self.metrics.len() >= METRICS_PER_FULL_BATCH
    }

    /// Adds metrics without an optimizer step, such as resource usage, to the batch for MLflow,
    /// with the seconds since the start of the run as the step. This time is `seconds`.
    pub(super) fn add_metrics_at_seconds(&mut self, values: Vec<(String, f64)>, time: f64, seconds: f64) {
        for (key, value) in values.into_iter().take(METRICS_PER_FULL_BATCH) {
            self.add_metric(&key, value, time, seconds as u64);
        }
    }

    /// Adds one value of a metric to the batch, with its step and its time in seconds since 1970.
    fn add_metric(&mut self, key: &str, value: f64, time: f64, step: u64) {
        let metric = Metric { key: key.to_owned(), value, timestamp: to_milliseconds(time), step };
        self.metrics.push(metric);
    }

    /// Adds a tag of the run to the batch for MLflow, with the prefix `launch.` before the tag's
    /// name `key`.
    fn add_tag(&mut self, key: &str, value: impl Into<String>) {
        self.tags.insert(format!("launch.{key}"), value.into());
    }

    /// Adds the metrics and tags of one event of the run, such as the loss of a step, to the batch
    /// for MLflow. Ignores events without such data.
    pub(super) fn add_event(&mut self, timed: &TimedEvent) {
        let time = timed.time;
        match &timed.event {
            Event::Step { step, loss, grad_norm, lr, tokens, tokens_per_s, peak_rss, exposed_comm_s } => {
                for (key, value) in [
                    ("train/loss", *loss),
                    ("train/grad_norm", *grad_norm),
                    ("train/lr", *lr),
                    ("train/tokens", *tokens as f64),
                    ("train/tokens_per_s", *tokens_per_s),
                    ("train/exposed_comm_s", *exposed_comm_s),
                    ("train/peak_rss_bytes", *peak_rss as f64),
                ] {
                    self.add_metric(key, value, time, *step);
                }
            }
            Event::Eval { step, loss, perplexity, .. } => {
                self.add_metric("eval/loss", *loss, time, *step);
                self.add_metric("eval/perplexity", *perplexity, time, *step);
            }
            Event::Checkpoint { step, path, bytes, seconds } => {
                self.add_metric("checkpoint/bytes", *bytes as f64, time, *step);
                self.add_metric("checkpoint/seconds", *seconds, time, *step);
                self.add_tag("checkpoint", path.display().to_string());
            }
            Event::Gather { path, .. } => self.add_tag("weights", path.display().to_string()),
            Event::Resume { path, .. } => self.add_tag("resumed_from", path.display().to_string()),
            Event::Ready { parameters, .. } => self.add_tag("parameters", parameters.to_string()),
            Event::Placement { world, hosts, .. } => {
                self.add_tag("world", world.to_string());
                self.add_tag("hosts", hosts.join(", "));
            }
            Event::Restart { attempt, failure, .. } => {
                self.add_tag("restarts", attempt.to_string());
                self.add_tag("restart_reason", failure.message.clone());
            }
            Event::Failure(failure) => self.add_tag("failure", failure.message.clone()),
            Event::Done { exit_code, .. } => {
                self.add_tag("exit_code", exit_code.to_string());
                self.end = Some((choose_mlflow_run_state(*exit_code), to_milliseconds(time)));
            }
            _ => {}
        }
    }

    /// Formats the batch as the body of a request to MLflow's `runs/log-batch`.
    pub(super) fn to_request(&self, run_id: &str) -> Value {
        let metric = |metric: &Metric| {
            let Metric { key, timestamp, step, .. } = metric;
            json!({"key": key, "value": format_number(metric.value), "timestamp": timestamp, "step": step})
        };
        let metrics: Vec<Value> = self.metrics.iter().map(metric).collect();
        json!({"run_id": run_id, "metrics": metrics, "tags": format_tags(&self.tags)})
    }
}

/// Formats tags as the JSON list of keys and values that a request to MLflow contains. Shortens
/// long values.
pub(super) fn format_tags(tags: &BTreeMap<String, String>) -> Vec<Value> {
    tags.iter()
        .map(|(key, value)| json!({"key": key, "value": shorten_to_bytes(value, MAX_TAG_BYTES)}))
        .collect()
}

/// Formats the parameters of a run as request bodies for MLflow's `runs/log-batch`, each with at
/// most [`MAX_PARAMS`] parameters. Shortens long values, and leaves out keys that MLflow does not
/// accept.
pub(super) fn format_params(run_id: &str, params: &BTreeMap<String, String>) -> Vec<Value> {
    let accepted: Vec<Value> = params
        .iter()
        .filter(|(key, _)| is_valid_param_key(key))
        .map(|(key, value)| json!({"key": key, "value": shorten_to_bytes(value, MAX_PARAM_BYTES)}))
        .collect();
    accepted.chunks(MAX_PARAMS).map(|chunk| json!({"run_id": run_id, "params": chunk})).collect()
}

/// Returns whether MLflow accepts the key of a parameter.
fn is_valid_param_key(key: &str) -> bool {
    let is_accepted = |c: char| c.is_ascii_alphanumeric() || "_-. /".contains(c);
    !key.is_empty() && key.len() <= MAX_KEY_BYTES && key.chars().all(is_accepted)
}

/// Shortens a text that is longer than `limit` bytes to this length, and ends the shortened text
/// with [`ELLIPSIS`].
fn shorten_to_bytes(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(limit - ELLIPSIS.len());
    format!("{}{ELLIPSIS}", &text[..end])
}

/// Formats a number as JSON for MLflow, including infinity and NaN. As in Protocol Buffers, texts
/// stand for numbers that are not finite.
fn format_number(value: f64) -> Value {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => value.into(),
    }
}

/// Returns the run state that MLflow shows (such as `FAILED`) for a run of launch that ended with
/// this exit code.
fn choose_mlflow_run_state(exit_code: u8) -> &'static str {
    match exit_code {
        exit::DONE => "FINISHED",
        exit::INTERRUPTED | exit::TERMINATED => "KILLED",
        _ => "FAILED",
    }
}

/// Converts a time in seconds to milliseconds.
pub(super) fn to_milliseconds(seconds: f64) -> u64 {
    (seconds * 1000.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::event::FailureReport;

    fn step(step: u64, loss: f64) -> TimedEvent {
        let (grad_norm, lr, tokens_per_s, exposed_comm_s) = (1.0, 0.5, 9.0, 0.0);
        let event =
            Event::Step { step, loss, grad_norm, lr, tokens: 4, tokens_per_s, peak_rss: 5, exposed_comm_s };
        TimedEvent { time: 2.5, event }
    }

    #[test]
    fn a_request_has_the_metrics_of_each_step_and_the_newest_tags() {
        let mut batch = Batch::default();
        batch.add_event(&step(3, f64::NAN));
        for attempt in 1..=2 {
            let failure = Box::new(FailureReport { message: "m".repeat(9999), ..FailureReport::default() });
            let event = Event::Restart { attempt, restarts_left: 1, pause_s: 0.0, failure };
            batch.add_event(&TimedEvent { time: 3.0, event });
        }
        batch.add_event(&TimedEvent { time: 1.0, event: Event::new_notice(None, "x") });
        let request = batch.to_request("r");
        let expected = json!({"key": "train/loss", "value": "NaN", "timestamp": 2500, "step": 3});
        assert_eq!((&request["run_id"], &request["metrics"][0]), (&json!("r"), &expected));
        assert_eq!(request["metrics"].as_array().map(Vec::len), Some(7));
        let tags = request["tags"].as_array().expect("tags");
        assert_eq!(tags[1], json!({"key": "launch.restarts", "value": "2"}));
        assert!(tags.iter().all(|tag| tag["value"].as_str().is_some_and(|v| v.len() <= MAX_TAG_BYTES)));
        assert_eq!(batch.end, None);
    }

    #[test]
    fn a_batch_never_exceeds_the_limits_of_the_server() {
        let mut batch = Batch::default();
        let mut number = 0;
        while !batch.is_full() {
            number += 1;
            batch.add_event(&step(number, 1.0));
        }
        let metrics = batch.to_request("r")["metrics"].as_array().map(Vec::len).expect("metrics");
        assert!((900..=1000).contains(&metrics), "{metrics}");
        assert!(batch.to_request("r").to_string().len() < 1_000_000);
        let params: BTreeMap<String, String> =
            (0..250).map(|i| (format!("train.k{i}"), "é".repeat(1000))).collect();
        let requests = format_params("r", &params);
        let sizes: Vec<_> = requests.iter().map(|r| r["params"].as_array().map(Vec::len)).collect();
        assert_eq!(sizes, [Some(100), Some(100), Some(50)]);
        let value = requests[0]["params"][0]["value"].as_str().expect("text");
        assert!(value.len() <= MAX_PARAM_BYTES && value.ends_with(ELLIPSIS));
        let odd = BTreeMap::from([("a\u{1}".to_owned(), "v".to_owned()), ("k".repeat(251), "v".to_owned())]);
        assert!(format_params("r", &odd).is_empty());
    }

    #[test]
    fn the_exit_code_determines_the_state() {
        for (exit_code, state) in [(0, "FINISHED"), (1, "FAILED"), (3, "FAILED"), (130, "KILLED")] {
            let mut batch = Batch::default();
            let event = Event::Done { exit_code, step: None, seconds: 1.0 };
            batch.add_event(&TimedEvent { time: 9.0, event });
            assert_eq!(batch.end, Some((state, 9000)));
        }
    }
}
