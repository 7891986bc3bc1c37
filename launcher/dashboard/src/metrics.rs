//! Formats the progress of runs and their newest measurements as Prometheus or OpenMetrics text.
use crate::{
    dashboard::{Dashboard, SharedTrackedRun, lock_ignoring_poison},
    live_metrics::LIVE_METRICS,
    rank_grid::RankState,
    status_reader::is_recent,
    tracked_run::TrackedRun,
};
use std::{fmt::Write, time::Duration};

/// The largest number of runs whose metrics are exported.
const MAX_EXPORTED_RUNS: usize = 32;
/// How long a request for metrics waits until the journal (file of events) of a run is read.
const LOAD_TIMEOUT: Duration = Duration::from_secs(2);

/// A text format in which metrics are exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricsFormat {
    /// OpenMetrics 1.0, which Prometheus requests.
    OpenMetrics,
    /// The text format of Prometheus, version 0.0.4, which node exporters read from files.
    Prometheus,
}

/// The type of a metric in Prometheus: a gauge or a counter.
#[derive(Clone, Copy, PartialEq)]
enum MetricType {
    Gauge,
    Counter,
}

/// A Prometheus metric with one value per run, such as its step, and the function that reads this
/// value.
struct PrometheusRunMetric {
    /// The name without the suffix `_total` of counters.
    name: &'static str,
    kind: MetricType,
    help: &'static str,
    /// Returns the value of the metric for a run, if the run has one.
    value: fn(&TrackedRun) -> Option<f64>,
}

/// All Prometheus metrics that have one value per run.
const PROMETHEUS_RUN_METRICS: [PrometheusRunMetric; 19] = [
    PrometheusRunMetric {
        name: "launch_run_active",
        kind: MetricType::Gauge,
        help: "Whether the run is active.",
        value: |run| Some(f64::from(u8::from(run.info.is_active))),
    },
    PrometheusRunMetric {
        name: "launch_run_start_time_seconds",
        kind: MetricType::Gauge,
        help: "Start of the run since 1970.",
        value: |run| Some(run.info.began_ms as f64 / 1000.0),
    },
    PrometheusRunMetric {
        name: "launch_run_exit_code",
        kind: MetricType::Gauge,
        help: "Exit code of a run that has ended.",
        value: |run| run.view.numbers.exit_code.map(f64::from),
    },
    PrometheusRunMetric {
        name: "launch_last_event_time_seconds",
        kind: MetricType::Gauge,
        help: "Time of the newest event since 1970.",
        value: |run| run.view.numbers.time,
    },
    PrometheusRunMetric {
        name: "launch_workers",
        kind: MetricType::Gauge,
        help: "Number of workers of the current attempt.",
        value: |run| Some(f64::from(run.view.grid.world())),
    },
    PrometheusRunMetric {
        name: "launch_hosts",
        kind: MetricType::Gauge,
        help: "Number of hosts of the current attempt.",
        value: |run| Some(run.view.grid.host_count() as f64),
    },
    PrometheusRunMetric {
        name: "launch_workers_running",
        kind: MetricType::Gauge,
        help: "Number of workers that train.",
        value: |run| Some(run.view.grid.count_in_state(RankState::Running) as f64),
    },
    PrometheusRunMetric {
        name: "launch_step",
        kind: MetricType::Gauge,
        help: "Optimizer steps that are done.",
        value: |run| run.view.numbers.step.map(|v| v as f64),
    },
    PrometheusRunMetric {
        name: "launch_steps_planned",
        kind: MetricType::Gauge,
        help: "Optimizer steps of the whole training.",
        value: |run| run.view.numbers.total_steps.map(|v| v as f64),
    },
    PrometheusRunMetric {
        name: "launch_step_seconds",
        kind: MetricType::Gauge,
        help: "Duration of the newest step.",
        value: |run| run.view.numbers.step_s,
    },
    PrometheusRunMetric {
        name: "launch_loss",
        kind: MetricType::Gauge,
        help: "Loss of the newest step.",
        value: |run| run.view.numbers.loss,
    },
    PrometheusRunMetric {
        name: "launch_eval_loss",
        kind: MetricType::Gauge,
        help: "Loss of the newest evaluation.",
        value: |run| run.view.numbers.eval_loss,
    },
    PrometheusRunMetric {
        name: "launch_grad_norm",
        kind: MetricType::Gauge,
        help: "Norm of the gradients of the newest step.",
        value: |run| run.view.numbers.grad_norm,
    },
    PrometheusRunMetric {
        name: "launch_learning_rate",
        kind: MetricType::Gauge,
        help: "Learning rate of the newest step.",
        value: |run| run.view.numbers.lr,
    },
    PrometheusRunMetric {
        name: "launch_tokens_per_second",
        kind: MetricType::Gauge,
        help: "Tokens per second of all ranks.",
        value: |run| run.view.numbers.tokens_per_s,
    },
    PrometheusRunMetric {
        name: "launch_peak_rss_bytes",
        kind: MetricType::Gauge,
        help: "Largest resident set of a rank.",
        value: |run| run.view.numbers.peak_rss.map(|v| v as f64),
    },
    PrometheusRunMetric {
        name: "launch_exposed_communication_seconds",
        kind: MetricType::Gauge,
        help: "Time for which computation waited for collectives in the newest step.",
        value: |run| run.view.numbers.exposed_comm_s,
    },
    PrometheusRunMetric {
        name: "launch_restarts",
        kind: MetricType::Counter,
        help: "Restarts of the workers.",
        value: |run| Some(run.view.numbers.restarts as f64),
    },
    PrometheusRunMetric {
        name: "launch_checkpoints",
        kind: MetricType::Counter,
        help: "Checkpoints that were saved.",
        value: |run| Some(run.view.numbers.checkpoints as f64),
    },
];

impl MetricsFormat {
    /// Returns the value of the HTTP header `Content-Type` for metrics in this format.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            MetricsFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            MetricsFormat::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Formats the metrics of runs as the content of a file for the textfile collector of Prometheus's
/// node exporter.
pub fn format_metrics_textfile(dashboard: &Dashboard) -> String {
    format_metrics(dashboard, MetricsFormat::Prometheus)
}

/// Formats the metrics of the newest run, of all active runs, and of the runs that the command line
/// names, as Prometheus or OpenMetrics text.
pub(crate) fn format_metrics(dashboard: &Dashboard, format: MetricsFormat) -> String {
    let listed = dashboard.list_runs();
    let shown = listed.iter().enumerate().filter(|(at, info)| *at == 0 || info.is_active || info.is_named);
    let names = shown.take(MAX_EXPORTED_RUNS).map(|(_, info)| &info.run);
    let runs: Vec<_> = names.filter_map(|run| dashboard.load_run(run, LOAD_TIMEOUT)).collect();
    let mut text = String::new();
    for metric in &PROMETHEUS_RUN_METRICS {
        let suffix = if metric.kind == MetricType::Counter { "_total" } else { "" };
        let (name, help) = (metric.name, metric.help);
        let kind = if metric.kind == MetricType::Counter { "counter" } else { "gauge" };
        // A family has the suffix of its samples in the format of Prometheus only.
        let family_suffix = if format == MetricsFormat::Prometheus { suffix } else { "" };
        let mut samples = String::new();
        for run in &runs {
            let run = lock_ignoring_poison(run);
            if let Some(value) = (metric.value)(&run).filter(|value| value.is_finite()) {
                let labels = format!(
                    r#"run="{}",job_name="{}""#,
                    escape_label_value(&run.info.run),
                    escape_label_value(&run.info.name)
                );
                // Writing to a string cannot fail.
                _ = writeln!(samples, "{name}{suffix}{{{labels}}} {value:?}");
            }
        }
        if !samples.is_empty() {
            _ = write!(
                text,
                "# HELP {name}{family_suffix} {help}\n# TYPE {name}{family_suffix} {kind}\n{samples}"
            );
        }
    }
    append_live_metrics(&mut text, &runs);
    if format == MetricsFormat::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

/// Appends the metrics of each rank, host and GPU of the active runs to `text`. All of them are
/// gauges.
fn append_live_metrics(text: &mut String, runs: &[SharedTrackedRun]) {
    for metric in &LIVE_METRICS {
        let (name, help) = (metric.name, metric.help);
        // Writing to a string cannot fail.
        let mut header = Some(format!("# HELP {name} {help}\n# TYPE {name} gauge\n"));
        for run in runs {
            let run = lock_ignoring_poison(run);
            let status = run.status.as_ref().filter(|status| run.info.is_active && is_recent(status));
            let samples = status.map(|status| metric.list_samples(status));
            for (labels, value) in samples.unwrap_or_default().into_iter().filter(|(_, v)| v.is_finite()) {
                text.push_str(&header.take().unwrap_or_default());
                _ = write!(
                    text,
                    r#"{name}{{run="{}",job_name="{}""#,
                    escape_label_value(&run.info.run),
                    escape_label_value(&run.info.name)
                );
                labels
                    .iter()
                    .for_each(|(label, v)| _ = write!(text, r#",{label}="{}""#, escape_label_value(v)));
                _ = writeln!(text, "}} {value:?}");
            }
        }
    }
}

/// Escapes the special characters in the value of a Prometheus label.
fn escape_label_value(value: &str) -> String {
    let value: String =
        value.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect();
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
#[path = "grafana_tests.rs"]
mod grafana_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::build_dashboard;

    #[test]
    fn both_formats_have_the_numbers_of_a_run() {
        let (_directory, dashboard) = build_dashboard("a \"quoted\"\\name\n");
        let text = format_metrics(&dashboard, MetricsFormat::Prometheus);
        let labels = r#"{run="r1",job_name="a \"quoted\"\\name\n"}"#;
        for line in [
            "# TYPE launch_restarts_total counter".to_owned(),
            format!("launch_restarts_total{labels} 1.0"),
            format!("launch_loss{labels} 3.0"),
            format!("launch_hosts{labels} 2.0"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(!text.contains("EOF"));
        let text = format_metrics(&dashboard, MetricsFormat::OpenMetrics);
        assert!(text.contains("# TYPE launch_restarts counter\nlaunch_restarts_total{"), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }
}
