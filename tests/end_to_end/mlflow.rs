//! Tests that runs are recorded with MLflow: with a server of the test, whose failures the test
//! controls, and with the real server if `scripts/setup-tests --mlflow` has installed it.
mod recording_server;

use crate::support::{self, JobDirectory, environment::isolated_command, output_to_text};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use recording_server::RecordingServer;
use serde_json::Value;
use std::{
    fs,
    os::unix::process::CommandExt as _,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

/// The time in which an expected condition must hold, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Waits until a condition holds.
#[track_caller]
fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_true() {
        assert!(began.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the setting that names the server.
fn uri_setting(address: &str) -> String {
    format!("observe.mlflow.uri={address}")
}

#[test]
fn a_training_is_recorded_and_its_token_is_stored_nowhere() {
    let server = RecordingServer::start(0);
    let job = JobDirectory::new();
    let uri = uri_setting(&server.address());
    let ran = job.run_with_env(&[&uri, "checkpoint.every=10"], "MLFLOW_TRACKING_TOKEN", "s3cret-token");
    let ran = ran.expect_success();
    let record = server.received_data();
    assert_eq!(record.authorization.as_deref(), Some("Bearer s3cret-token"));
    assert_eq!((record.experiments.as_slice(), record.runs.len()), (["tiny".to_owned()].as_slice(), 1));
    let run = &ran.events_named("start")[0]["run"];
    assert_eq!(
        (&record.runs[0]["run_name"], &record.tags["launch.run"]),
        (run, &run.as_str().unwrap().into())
    );
    assert_eq!(record.params["train.steps"], "20");
    let losses: Vec<(u64, u64)> = ran.collect_losses().iter().map(|(step, loss, _)| (*step, *loss)).collect();
    let recorded: Vec<(u64, u64)> =
        record.metrics["train/loss"].iter().map(|(step, value)| (*step, value.to_bits())).collect();
    assert_eq!(recorded, losses, "each step once, with equal bits");
    assert!(record.metrics.contains_key("checkpoint/seconds"));
    assert!(record.tags["launch.checkpoint"].ends_with("step-00000020"), "{:?}", record.tags);
    assert_eq!(record.states, ["FINISHED"]);
    // A short run ends before its first notice.
    let shown = format!("{}\n{}", ran.notice_messages().join("\n"), ran.stderr);
    assert!(shown.contains("MLflow records the run: http://"), "{shown}");
    let run_dir = job.path(ran.events_named("start")[0]["run_dir"].as_str().unwrap());
    for file in support::list_files_below(&run_dir) {
        let content = fs::read(run_dir.join(&file)).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&content).contains("s3cret-token"), "{file}");
    }
}

#[test]
fn a_server_that_fails_for_a_while_gets_everything_later() {
    let server = RecordingServer::start(2);
    let job = JobDirectory::new();
    let command = "sleep 1; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3; sleep 6; exit 4";
    let text = format!(
        "name: program\nobserve: {{mlflow: {{uri: \"{}\", experiment: e, run_name: r}}}}\n\
         run: {{command: [sh, -c, '{command}'], restarts: 1}}\ncluster: {{workers_per_host: 2}}\n",
        server.address()
    );
    fs::write(job.path("job.yaml"), text).unwrap();
    let ran = job.run(&[]);
    assert_eq!(ran.code, 1);
    let record = server.received_data();
    assert_eq!((record.runs.len(), &record.runs[0]["run_name"]), (1, &"r".into()));
    assert_eq!(
        (record.tags["launch.restarts"].as_str(), record.states.as_slice()),
        ("1", ["FAILED".to_owned()].as_slice())
    );
    assert!(record.tags["launch.failure"].contains("exited with code 4"), "{:?}", record.tags);
    let is_usage = |key: &&String| key.starts_with("system/") && key.ends_with("cpu_utilization_percentage");
    assert!(record.metrics.keys().any(|key| is_usage(&key)), "{:?}", record.metrics.keys());
    // The event file of TensorBoard has the same metrics.
    let run_dir = job.path(ran.events_named("start")[0]["run_dir"].as_str().unwrap());
    let files = support::list_files_below(&run_dir);
    let file = files.iter().find(|file| file.starts_with("events.out.tfevents.")).expect("an event file");
    let content = fs::read(run_dir.join(file)).unwrap();
    for tag in ["launch/restarts", "system/rank-1/memory_usage_megabytes"] {
        assert!(content.windows(tag.len()).any(|bytes| bytes == tag.as_bytes()), "{tag}");
    }
    // A notice at the end of the run is only on stderr, which has the others, too.
    assert_eq!(ran.stderr.matches("is not available (HTTP status 503)").count(), 1, "{}", ran.stderr);
    assert_eq!(ran.stderr.matches("accepts data again after").count(), 1, "{}", ran.stderr);
}

#[test]
fn a_server_that_is_away_neither_fails_nor_delays_a_run() {
    let job = JobDirectory::new();
    let address = {
        // The port is free again, so connections are rejected.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let output = job.run_launch(&["job.yaml", "--set", &uri_setting(&address)]);
    let text = output_to_text(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("is not available").count(), 1, "{text}");
    assert!(text.contains("has not received the end of the run"), "{text}");
}

#[test]
fn settings_that_cannot_be_honoured_are_rejected() {
    let job = JobDirectory::new();
    let (code, error) = job.expect_rejection(&["plan", "job.yaml", "--set", "observe.mlflow={}"]);
    assert_eq!(code, 2, "{error}");
    assert!(error.to_string().contains("MLFLOW_TRACKING_URI"), "{error}");
    let secret = "observe.mlflow.uri=http://me:s3cret@h";
    let (code, error) = job.expect_rejection(&["plan", "job.yaml", "--set", secret]);
    assert_eq!(code, 2, "{error}");
}

/// The real server, whose process group is killed at the end of the test.
struct ServerProcess(Child);

impl Drop for ServerProcess {
    fn drop(&mut self) {
        _ = kill(Pid::from_raw(-(self.0.id() as i32)), Signal::SIGKILL);
        _ = self.0.wait();
    }
}

#[test]
fn a_later_controller_continues_the_same_run() {
    let server = RecordingServer::start(0);
    let job = JobDirectory::new();
    let uri = uri_setting(&server.address());
    let set = [uri.as_str(), "run.on_controller_loss=continue", "train.steps=400", "checkpoint.every=never"];
    let mut lost = job.start(&set);
    wait_until("the first metrics", || server.received_data().metrics.contains_key("train/loss"));
    kill(Pid::from_raw(lost.id() as i32), Signal::SIGKILL).unwrap();
    lost.wait().unwrap();
    let output = job.run_launch(&["attach", "--json"]);
    assert!(output.status.success(), "{}", output_to_text(&output));
    let record = server.received_data();
    assert_eq!(
        (record.runs.len(), record.states.as_slice()),
        (1, ["RUNNING".to_owned(), "FINISHED".into()].as_slice())
    );
    let mut steps: Vec<u64> = record.metrics["train/loss"].iter().map(|(step, _)| *step).collect();
    steps.sort_unstable();
    steps.dedup();
    assert_eq!(steps, (1..=400).collect::<Vec<u64>>());
}

#[test]
fn the_real_server_has_the_run() {
    let test = "the_real_server_has_the_run";
    let Some(python) = support::find_optional_python(test, "mlflow", "MLflow (850 MB)") else { return };
    let job = JobDirectory::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut server = isolated_command(&python, &job.path(""));
    let store = format!("sqlite:///{}", job.path("mlflow.db").display());
    server.args(["-m", "mlflow", "server", "--workers", "1", "--backend-store-uri", &store]);
    server.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
    server.stdout(Stdio::null()).stderr(Stdio::null());
    let _server = ServerProcess(server.process_group(0).spawn().unwrap());
    wait_until("the server", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let address = format!("http://127.0.0.1:{port}");
    let ran = job.run(&[&uri_setting(&address), "checkpoint.every=10"]).expect_success();
    let script = "import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name('tiny')
run = client.search_runs([experiment.experiment_id])[0]
losses = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, 'train/loss')]
print(json.dumps({'status': run.info.status, 'params': run.data.params, 'tags': run.data.tags,
                  'losses': losses, 'ended': run.info.end_time > run.info.start_time}))";
    let output = isolated_command(&python, &job.path("")).args(["-c", script, &address]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["status"], &found["ended"]), (&"FINISHED".into(), &true.into()), "{found}");
    assert_eq!(found["params"]["train.steps"], "20");
    assert!(found["tags"]["launch.checkpoint"].as_str().is_some_and(|path| path.ends_with("step-00000020")));
    let losses: Vec<(u64, u64)> = found["losses"]
        .as_array()
        .unwrap()
        .iter()
        .map(|point| (point[0].as_u64().unwrap(), point[1].as_f64().unwrap().to_bits()))
        .collect();
    let expected: Vec<(u64, u64)> =
        ran.collect_losses().iter().map(|(step, loss, _)| (*step, *loss)).collect();
    assert_eq!(losses, expected);
}
