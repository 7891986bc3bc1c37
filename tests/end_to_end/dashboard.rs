//! Tests of `launch serve` and `launch report` with the real executable and a real run. If
//! Chromium and Node.js are installed, a browser opens the page.
use crate::support::{JobDirectory, environment::clean_command, report_skip, served_page::ServedPage};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    time::Duration,
};

/// The time in which the server must send data, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn a_page_is_live_during_a_run_and_a_report_keeps_it() {
    let job = JobDirectory::new();
    let served = ServedPage::start(&job, &[]);
    assert!(served.get("/metrics", false).starts_with("HTTP/1.1 401 "));
    let mut process = job.start(&[]);
    let end = std::time::Instant::now() + TIMEOUT;
    let run = loop {
        let runs = served.get("/api/runs", true);
        let runs: Value = serde_json::from_str(runs.split_once("\r\n\r\n").unwrap().1).unwrap();
        if let Some(run) = runs[0]["run"].as_str() {
            break run.to_owned();
        }
        assert!(std::time::Instant::now() < end, "the run is not listed");
        std::thread::sleep(Duration::from_millis(100));
    };
    // The stream continues until the run has ended.
    let stream = BufReader::new(served.request(&format!("/api/stream?run={run}"), true));
    let (mut steps, mut ended) = (Vec::new(), None);
    for line in stream.lines() {
        let line = line.unwrap();
        let Some(data) = line.strip_prefix("data: ") else { continue };
        let update: Value = serde_json::from_str(data).unwrap();
        steps.extend(update["numbers"]["step"].as_u64());
        if update["numbers"]["exit_code"].is_u64() {
            ended = Some(update);
            break;
        }
    }
    assert!(process.wait().unwrap().success());
    let ended = ended.expect("the end of the run arrives");
    assert!(
        steps.is_sorted() && steps.last() == ended["numbers"]["total_steps"].as_u64().as_ref(),
        "{steps:?}"
    );
    let metrics = served.get("/metrics", true);
    assert!(metrics.contains(&format!(r#"launch_run_exit_code{{run="{run}""#)), "{metrics}");

    let file = job.path("report.html");
    let output = job.run_launch(&["report", &run, "--output", "report.html"]);
    assert!(output.status.success(), "{output:?}");
    let report = fs::read_to_string(&file).unwrap();
    assert!(report.contains(&run) && report.contains(r#""exit_code":0"#));
    assert!(!report.contains("http:") && !report.contains("https:"), "a report loads nothing");
}

#[test]
fn a_browser_shows_a_failed_run_and_runs_no_script_of_its_log() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/dashboard/check_page.mjs");
    let is_installed =
        |program: &str| clean_command(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !is_installed("node") || !is_installed("chromium") {
        let test = "a_browser_shows_a_failed_run_and_runs_no_script_of_its_log";
        return report_skip(test, "Chromium and Node.js are not installed");
    }
    let job = JobDirectory::new();
    let text =
        "echo '</script><script>window.attacked=1</script><img src=x onerror=window.attacked=1>'; exit 7";
    let output = job.run_launch(&["run", "--workers", "2", "--", "sh", "-c", text]);
    assert_eq!(output.status.code(), Some(1));
    let served = ServedPage::start(&job, &[]);
    let report = job.run_launch(&["report", "--output", "report.html"]);
    assert!(report.status.success(), "{report:?}");
    let file = format!("file://{}", job.path("report.html").display());
    for address in [&served.url, &file] {
        let checked = clean_command("node").args([script, address]).output().unwrap();
        assert!(checked.status.success(), "{address}: {}", String::from_utf8_lossy(&checked.stderr));
    }
}
