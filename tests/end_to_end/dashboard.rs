//! Tests of `launch serve` and `launch report` with the real executable and a real run. If
//! Chromium and Node.js are installed, a browser opens the page.
use crate::support::{
    JobDirectory,
    environment::{LAUNCH_EXECUTABLE, clean_command, create_test_directory, isolated_command},
    live_run::read_events,
    output_to_text, report_skip,
    served_page::ServedPage,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

/// The time in which the server must send data, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The largest memory, in bytes, that a page with 1,000 ranks may need in the browser and in the
/// server.
const MAX_PAGE_BYTES: f64 = 100e6;
/// Settings of a training that does not end by itself. Its steps take so long that the curve of the
/// loss keeps each of them during the test.
const SLOW_STEPS: [&str; 6] = [
    "train.steps=100000",
    "train.model.hidden_size=192",
    "train.model.intermediate_size=384",
    "train.data.seq_len=96",
    "train.batch.global=12",
    "checkpoint.every=never",
];

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

/// Returns the path of a script of this repository that opens a page in Chromium. Returns `None` if
/// Chromium and Node.js are not installed; the test is then skipped.
fn find_browser_script_or_skip(test: &str, name: &str) -> Option<PathBuf> {
    let is_installed =
        |program: &str| clean_command(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !is_installed("node") || !is_installed("chromium") {
        report_skip(test, "Chromium and Node.js are not installed");
        return None;
    }
    Some(Path::new(env!("CARGO_MANIFEST_DIR")).join(name))
}

#[test]
fn a_browser_draws_the_loss_of_a_training_live_and_shows_its_end() {
    let test = "a_browser_draws_the_loss_of_a_training_live_and_shows_its_end";
    let Some(script) = find_browser_script_or_skip(test, "tests/dashboard/check_live_page.mjs") else {
        return;
    };
    let job = JobDirectory::new();
    let served = ServedPage::start(&job, &[]);
    let mut training = job.start(&SLOW_STEPS);
    let events = read_events(&mut training);
    // The pipe must not fill up.
    let reader = std::thread::spawn(move || events.for_each(drop));
    let mut node = clean_command("node")
        .arg(script)
        .arg(&served.url)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut grown = String::new();
    BufReader::new(node.stdout.as_mut().unwrap()).read_line(&mut grown).unwrap();
    kill(Pid::from_raw(training.id() as i32), Signal::SIGTERM).unwrap();
    let checked = node.wait_with_output().unwrap();
    assert!(checked.status.success(), "{grown}{}", String::from_utf8_lossy(&checked.stderr));
    assert_eq!(training.wait().unwrap().code(), Some(143));
    reader.join().unwrap();
}

/// Checks the memory that a page with 1,000 ranks needs. The times are only printed, because they
/// depend on the machine.
#[test]
fn a_page_with_a_thousand_ranks_needs_less_than_100_mb() {
    let test = "a_page_with_a_thousand_ranks_needs_less_than_100_mb";
    let Some(script) = find_browser_script_or_skip(test, "scripts/bench/dashboard.mjs") else { return };
    let directory = create_test_directory();
    let mut node = isolated_command("node", directory.path());
    node.arg(script).args(["--launch", LAUNCH_EXECUTABLE, "--ranks", "1000", "--steps", "20000", "--json"]);
    let measured = node.output().unwrap();
    assert!(measured.status.success(), "{}", output_to_text(&measured));
    let figures: Value = serde_json::from_slice(&measured.stdout).unwrap();
    println!("{figures:#}");
    assert!(figures["grid_ms"].as_f64() > Some(0.0), "{figures}");
    for name in ["js_heap_bytes", "page_bytes", "server_peak_bytes"] {
        let bytes = figures[name].as_f64().unwrap();
        assert!((1.0..MAX_PAGE_BYTES).contains(&bytes), "{name}: {figures}");
    }
}

#[test]
fn a_browser_shows_a_failed_run_and_runs_no_script_of_its_log() {
    let test = "a_browser_shows_a_failed_run_and_runs_no_script_of_its_log";
    let Some(script) = find_browser_script_or_skip(test, "tests/dashboard/check_page.mjs") else { return };
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
        let checked = clean_command("node").arg(&script).arg(address).output().unwrap();
        assert!(checked.status.success(), "{address}: {}", String::from_utf8_lossy(&checked.stderr));
    }
}
