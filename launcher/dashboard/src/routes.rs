//! Builds the responses to HTTP requests that contain the dashboard's token: the page, metrics,
//! runs and logs.
use crate::{
    access::Token,
    dashboard::{Dashboard, lock_ignoring_poison},
    log_files::{list_logs, read_log_part, search_logs},
    metrics::{MetricsFormat, format_metrics},
    page,
    request::Request,
    response::Response,
};
use serde_json::json;
use std::collections::BTreeMap;

/// The URL path of the stream of server-sent events, by which the page receives new data.
pub(crate) const STREAM_PATH: &str = "/api/stream";

/// The URL path of the metrics.
pub(crate) const METRICS_PATH: &str = "/metrics";

/// Returns the response to an HTTP request: the page or one of its files, metrics, the list of
/// runs, or logs. Reads files, so the caller must be allowed to block.
pub(crate) fn answer_request(dashboard: &Dashboard, token: &Token, request: &Request) -> Response {
    match request.path.as_str() {
        "/" | "/index.html" => Response::new("text/html; charset=utf-8", page::format_live_page(token)),
        "/app.js" => Response::new("text/javascript; charset=utf-8", page::SCRIPT),
        "/style.css" => Response::new("text/css; charset=utf-8", page::STYLE),
        "/favicon.svg" => Response::new("image/svg+xml", page::ICON),
        METRICS_PATH => answer_metrics_request(dashboard, request),
        "/api/runs" => Response::json(&*dashboard.list_runs()),
        "/api/logs" => answer_log_list(dashboard, request),
        "/api/log" => answer_log(dashboard, request),
        "/api/search" => answer_search(dashboard, request),
        _ => Response::error(404, "no such page"),
    }
}

/// Responds with the metrics, as OpenMetrics text if the `Accept` header of the request names this
/// format, and otherwise as Prometheus text. Reads files, so the caller must be allowed to block.
pub(crate) fn answer_metrics_request(dashboard: &Dashboard, request: &Request) -> Response {
    let is_open = request.accept.contains("application/openmetrics-text");
    let format = if is_open { MetricsFormat::OpenMetrics } else { MetricsFormat::Prometheus };
    Response::new(format.content_type(), format_metrics(dashboard, format))
}

/// Responds with the list of the ranks of a run that have a log file on this machine.
fn answer_log_list(dashboard: &Dashboard, request: &Request) -> Response {
    match list_requested_logs(dashboard, request) {
        Some(logs) => Response::json(&logs.keys().collect::<Vec<_>>()),
        None => Response::error(404, "no such run"),
    }
}

/// Responds with the last lines of a rank's log, or with the lines that were added since an earlier
/// response.
fn answer_log(dashboard: &Dashboard, request: &Request) -> Response {
    let number = |name: &str| request.parameter(name).and_then(|value| value.parse::<u64>().ok());
    let rank = number("rank").and_then(|rank| u32::try_from(rank).ok());
    let path =
        list_requested_logs(dashboard, request).zip(rank).and_then(|(mut logs, rank)| logs.remove(&rank));
    let Some(path) = path else { return Response::error(404, "no such log") };
    match read_log_part(dashboard.source(), &path, number("file").zip(number("end"))) {
        Ok(part) => Response::json(&part),
        Err(_) => Response::error(404, "the log is not readable"),
    }
}

/// Responds with the log lines of a run that contain the text that the request searches for.
fn answer_search(dashboard: &Dashboard, request: &Request) -> Response {
    let Some(mut logs) = list_requested_logs(dashboard, request) else {
        return Response::error(404, "no such run");
    };
    if let Some(rank) = request.parameter("rank").and_then(|rank| rank.parse::<u32>().ok()) {
        logs.retain(|r, _| *r == rank);
    }
    match request.parameter("text") {
        Some(text) if !text.is_empty() => Response::json(&search_logs(dashboard.source(), &logs, text)),
        _ => Response::json(&json!({"matches": [], "is_cut": false})),
    }
}

/// Finds the newest log file of each rank of the run that an HTTP request names, and returns their
/// paths by rank.
fn list_requested_logs(
    dashboard: &Dashboard,
    request: &Request,
) -> Option<BTreeMap<u32, std::path::PathBuf>> {
    let run = dashboard.find_or_track_run(request.parameter("run")?)?;
    let directory = lock_ignoring_poison(&run).info.run_dir.join("logs");
    Some(list_logs(&directory))
}
