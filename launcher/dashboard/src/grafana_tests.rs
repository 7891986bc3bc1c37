//! Tests that the dashboard for Grafana in the documentation queries only metrics and labels that
//! are exported.
use super::{LIVE_METRICS, MetricType, PROMETHEUS_RUN_METRICS};
use protocol::{
    control::{GpuUsage, HostUsage, WorkerUsage},
    run_measurements::{HostUsageSample, RunMeasurements},
    step_times::{RankTimes, StepTimes},
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The labels that every metric has.
const RUN_LABELS: [&str; 2] = ["run", "job_name"];
/// The words in an expression of Prometheus that are neither metrics nor labels.
const OPERATORS: [&str; 2] = ["time", "and"];

/// The names of metrics, each with the names of its labels.
type MetricLabels = BTreeMap<String, BTreeSet<String>>;

/// A name in an expression that is not exported.
#[derive(Debug, PartialEq)]
enum UnknownName {
    /// No metric has this name.
    Metric(String),
    /// The metric `metric` has no label `label`.
    Label { metric: String, label: String },
}

/// Returns measurements of one rank, one host and one GPU, in which every value is known.
fn measure_everything() -> RunMeasurements {
    let usage = HostUsage {
        cgroup_memory_limit: Some(1),
        cgroup_memory_used: Some(1),
        gpus: vec![GpuUsage { busy_share: Some(0.5), memory_used: Some(1), ..GpuUsage::default() }],
        workers: vec![WorkerUsage::default()],
        ..HostUsage::default()
    };
    RunMeasurements {
        step_times: StepTimes { step: 1, steps: 1, ranks: vec![RankTimes::default()] },
        hosts: vec![HostUsageSample { host: "a".into(), time: 1.0, usage }],
        ..RunMeasurements::default()
    }
}

/// Lists all exported metrics with their labels.
fn list_exported_metrics() -> MetricLabels {
    let run_labels = || RUN_LABELS.into_iter().map(str::to_owned).collect::<BTreeSet<String>>();
    let run_metrics = PROMETHEUS_RUN_METRICS.iter().map(|metric| {
        let suffix = if metric.kind == MetricType::Counter { "_total" } else { "" };
        (format!("{}{suffix}", metric.name), run_labels())
    });
    let measured = measure_everything();
    let live_metrics = LIVE_METRICS.iter().map(|metric| {
        let samples = metric.list_samples(&measured);
        assert_eq!(samples.len(), 1, "{}", metric.name);
        let labels = samples.into_iter().flat_map(|(labels, _)| labels).map(|(label, _)| label.to_owned());
        (metric.name.to_owned(), run_labels().into_iter().chain(labels).collect())
    });
    run_metrics.chain(live_metrics).collect()
}

/// Splits an expression of Prometheus into words, and drops its strings. Also returns for each word
/// whether it is between braces, where labels are.
fn split_expression(expression: &str) -> Vec<(String, bool)> {
    let (mut words, mut is_label, mut is_string) = (Vec::new(), false, false);
    let mut word = String::new();
    for c in expression.chars().chain([' ']) {
        if !is_string && (c.is_ascii_alphanumeric() || matches!(c, '_' | ':')) {
            word.push(c);
            continue;
        }
        if !word.is_empty() {
            words.push((std::mem::take(&mut word), is_label));
        }
        match c {
            '"' => is_string = !is_string,
            '{' if !is_string => is_label = true,
            '}' if !is_string => is_label = false,
            _ => {}
        }
    }
    words.retain(|(word, _)| !word.starts_with(|c: char| c.is_ascii_digit()));
    words
}

/// Returns the number of metrics in an expression. Fails if one of them is not exported, or if it
/// lacks a label that the expression or `shown` contains.
fn count_metrics(exported: &MetricLabels, expression: &str, shown: &[&str]) -> Result<usize, UnknownName> {
    let (mut metrics, mut labels) = (Vec::new(), shown.to_vec());
    let words = split_expression(expression);
    for (word, is_label) in &words {
        match is_label {
            true => labels.push(word),
            false if OPERATORS.contains(&word.as_str()) => {}
            false => metrics.push(word),
        }
    }
    for metric in metrics.iter().copied() {
        let known = exported.get(metric).ok_or_else(|| UnknownName::Metric(metric.clone()))?;
        if let Some(label) = labels.iter().find(|label| !known.contains(**label)) {
            return Err(UnknownName::Label { metric: metric.clone(), label: (*label).to_owned() });
        }
    }
    Ok(metrics.len())
}

/// Lists the labels in a legend such as `{{run}} rank {{rank}}`.
fn list_legend_labels(legend: &str) -> Vec<&str> {
    legend.split("{{").skip(1).filter_map(|part| Some(part.split_once("}}")?.0.trim())).collect()
}

#[test]
fn the_dashboard_for_grafana_queries_exported_metrics_and_labels() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/grafana-dashboard.json");
    let text = fs::read_to_string(path).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let exported = list_exported_metrics();
    let panels = dashboard["panels"].as_array().expect("panels");
    for panel in panels {
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{panel}");
        for target in targets {
            let labels = list_legend_labels(target["legendFormat"].as_str().expect("a legend"));
            let expression = target["expr"].as_str().expect("an expression");
            let count = count_metrics(&exported, expression, &labels);
            assert!(count.as_ref().is_ok_and(|count| *count > 0), "{count:?}: {expression}");
        }
    }
    // The lists of jobs and runs come from `label_values(METRIC, LABEL)`.
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    let queries: Vec<&str> = variables.iter().filter_map(|v| v["query"]["query"].as_str()).collect();
    assert_eq!(queries.len(), RUN_LABELS.len(), "{queries:?}");
    for query in queries {
        let arguments = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let (metric, label) = arguments.and_then(|text| text.rsplit_once(", ")).expect(query);
        assert_eq!(count_metrics(&exported, metric, &[label]), Ok(1), "{query}");
    }
    let named: BTreeSet<&str> = variables.iter().filter_map(|v| v["name"].as_str()).collect();
    assert!(RUN_LABELS.iter().all(|label| named.contains(label)), "{named:?}");
}

#[test]
fn an_unknown_metric_or_label_in_an_expression_is_found() {
    let exported = list_exported_metrics();
    let count = |expression: &str, labels: &[&str]| count_metrics(&exported, expression, labels);
    assert_eq!(count("time() - launch_step{run=~\"$run\"} and launch_loss == 1", &["run"]), Ok(2));
    assert_eq!(count("launch_rank_rss_bytes{run=\"a {host} b\"}", &["rank"]), Ok(1));
    for (expression, labels, unknown) in [
        ("launch_steps", &[][..], "launch_steps"),
        ("launch_restarts", &[], "launch_restarts"),
        ("launch_step{host=\"a\"}", &[], "host"),
        ("launch_host_cpus", &["rank"], "rank"),
        ("time() - launch_step and launch_host_cpus{host=\"a\"}", &[], "host"),
    ] {
        let name = match count(expression, labels) {
            Err(UnknownName::Metric(name) | UnknownName::Label { label: name, .. }) => name,
            Ok(count) => panic!("{count} metrics: {expression}"),
        };
        assert_eq!(name, unknown, "{expression}");
    }
}
