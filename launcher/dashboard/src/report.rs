//! Formats a report about runs: the page of the dashboard with the data of the runs, as one HTML
//! file.
use crate::{
    dashboard::{Dashboard, lock_ignoring_poison},
    log_files::{list_logs, read_log_part},
    page::format_static_page,
    tracked_run::RunReadPosition,
};
use serde_json::{Value, json};
use std::{io, time::Duration};

/// The largest number of runs that one report (a self-contained HTML file) shows.
pub const MAX_REPORT_RUNS: usize = 4;
/// How long the creation of a report waits until the journal (file of events) of a run is read.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// The largest number of ranks whose log lines are included in a report about a run.
const MAX_LOGS: usize = 16;
/// The number of random bytes in the nonce that allows browsers to run the script of a report.
const NONCE_BYTES: usize = 16;

/// Formats a report about the runs with the IDs `runs`: the page of the dashboard with its data, as
/// one self-contained HTML file. Fails if a run does not exist, or has a journal that takes too
/// long to read.
pub fn format_report(dashboard: &Dashboard, runs: &[String]) -> io::Result<String> {
    let runs: Vec<Value> = runs
        .iter()
        .take(MAX_REPORT_RUNS)
        .map(|run| collect_run_data(dashboard, run))
        .collect::<io::Result<_>>()?;
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    let data = serde_json::to_string(&json!({ "runs": runs }))?;
    Ok(format_static_page(&nonce, &data))
}

/// Collects the data of a run that a report contains, including the last log lines of its ranks, as
/// JSON. The logs of failed ranks come first.
fn collect_run_data(dashboard: &Dashboard, run: &str) -> io::Result<Value> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, format!("there is no run {run}"));
    let shared = dashboard.load_run(run, LOAD_TIMEOUT).ok_or_else(missing)?;
    let tracked = lock_ignoring_poison(&shared);
    if !tracked.is_loaded {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the journal takes too long to read"));
    }
    let update = tracked.take_update(&mut RunReadPosition::default());
    let logs = list_logs(&tracked.info.run_dir.join("logs"));
    let failed = tracked.view.numbers.failure.as_ref().and_then(|failure| failure["rank"].as_u64());
    let mut ranks: Vec<u32> = logs.keys().copied().collect();
    ranks.sort_by_key(|rank| (failed != Some(u64::from(*rank)), *rank));
    let read = |rank: &u32| {
        let part = read_log_part(dashboard.source(), &logs[rank], None).ok()?;
        Some((rank.to_string(), json!(part)))
    };
    let parts: serde_json::Map<String, Value> = ranks.iter().take(MAX_LOGS).filter_map(read).collect();
    Ok(json!({ "update": update, "logs": parts }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::build_dashboard;

    #[test]
    fn a_report_contains_the_run_and_no_text_of_it_is_markup() {
        let (_directory, dashboard) = build_dashboard("job");
        let report = format_report(&dashboard, &["r1".to_owned()]).expect("a report");
        let start = report.find(r#"id="data">"#).expect("data") + r#"id="data">"#.len();
        let data = &report[start..start + report[start..].find("</script>").expect("end")];
        let data: Value = serde_json::from_str(data).expect("JSON");
        let run = &data["runs"][0];
        assert_eq!(run["update"]["numbers"]["step"], 3);
        assert_eq!(run["update"]["numbers"]["failure"]["tail"][0], "</script><script>alert(1)</script>");
        assert_eq!(run["logs"]["0"]["lines"][1], "<img src=x onerror=alert(1)>");
        assert_eq!(report.matches("<img").count() + report.matches("alert(1)</script>").count(), 0);
        format_report(&dashboard, &["r2".to_owned()]).expect_err("no such run");
    }
}
