//! Tests of `observe.metrics` and `observe.metrics_file`: the controller serves the metrics of its
//! run, and writes them to a file, while the run is active.
use crate::support::{
    self, FinishedRun, JobDirectory, environment::clean_command, openmetrics::parse_open_metrics,
    output_to_text, report_skip, served_page::ServedPage,
};
use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

/// The time in which an expected condition must hold, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A job whose program runs until the test creates the file `done`.
const WAITING_PROGRAM: &str = "\
name: served
run: {command: [sh, -c, ': > started; while [ ! -e done ]; do sleep 0.05; done']}
cluster: {workers_per_host: 2}
";

/// Waits until `look` returns a value.
#[track_caller]
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Requests the metrics in the format OpenMetrics, and returns the body of the answer.
#[track_caller]
fn scrape(stream: impl Read + Write, host: &str) -> String {
    request_metrics(stream, host, "application/openmetrics-text; version=1.0.0")
}

/// Requests the metrics in the format `accept`, and returns the body of the answer.
#[track_caller]
fn request_metrics(mut stream: impl Read + Write, host: &str, accept: &str) -> String {
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.contains(&format!("Content-Type: {accept}")), "{head}");
    body.to_owned()
}

/// Passes a text to the stdin of a program, and returns the output. Panics if the program fails.
#[track_caller]
fn filter_text(mut program: Command, text: &str) -> Output {
    let piped = || Stdio::piped();
    let mut process = program.stdin(piped()).stdout(piped()).stderr(piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{text}", output_to_text(&output));
    output
}

/// Checks texts in the format of Prometheus with `promtool check metrics`, if it is installed. The
/// program also reports names and help texts that violate the conventions of Prometheus.
fn check_with_promtool(test: &str, texts: &[&str]) {
    let Some(promtool) = support::find_promtool_or_skip(test) else { return };
    for text in texts {
        let mut program = clean_command(&promtool);
        program.args(["check", "metrics"]);
        let output = filter_text(program, text);
        assert_eq!(output_to_text(&output), "", "{text}");
    }
    let mut wrong = clean_command(&promtool);
    wrong.args(["check", "metrics"]);
    let mut process = wrong.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(b"launch_step{run=\"a\"} x\n").unwrap();
    assert!(!process.wait().unwrap().success(), "promtool accepts a wrong text");
}

/// Checks a text with the parser of Prometheus's Python client, if it is installed.
fn check_with_python_client(test: &str, text: &str) {
    let Some(python) = support::find_prometheus_python_or_skip(test) else { return };
    let script = "import sys\n\
                  from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse\n\
                  print(sum(len(family.samples) for family in parse(sys.stdin.read())))";
    let mut client = clean_command(python);
    client.args(["-c", script]);
    let output = filter_text(client, text);
    let count: usize = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
    assert_eq!(count, parse_open_metrics(text).len());
}

/// Returns the names of the metrics of a run.
fn list_names(samples: &std::collections::BTreeMap<String, f64>, run: &str) -> BTreeSet<String> {
    let of_run = samples.keys().filter(|sample| sample.contains(&format!("run=\"{run}\"")));
    of_run.map(|sample| sample.split('{').next().unwrap().to_owned()).collect()
}

/// Checks that a process of another user cannot connect to the socket. Only root can start one.
fn check_other_user(test: &str, socket: &Path) {
    if !nix::unistd::geteuid().is_root() {
        return report_skip(test, "needs root, to become another user");
    }
    let script = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\n\
                  try:\n    s.connect(sys.argv[1])\nexcept PermissionError:\n    print('denied')";
    let mut python = clean_command("python3");
    python.args(["-c", script]).arg(socket).uid(65_534).gid(65_534).current_dir("/");
    let output = python.env("PATH", "/usr/bin:/bin").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "denied\n", "{}", output_to_text(&output));
}

#[test]
fn a_private_socket_has_the_metrics_of_the_run_until_its_end() {
    let test = "a_private_socket_has_the_metrics_of_the_run_until_its_end";
    let job = JobDirectory::new();
    // The directory is open to other users, so only the socket keeps them out.
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = directory.path().join("metrics.sock");
    fs::write(job.path("job.yaml"), WAITING_PROGRAM).unwrap();
    let file = directory.path().join("launch.prom");
    let settings = [
        format!("observe.metrics=unix:{}", socket.display()),
        format!("observe.metrics_file={}", file.display()),
    ];
    let process = job.start(&settings.each_ref().map(String::as_str));
    wait_for("the program runs", || job.path("started").exists().then_some(()));
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let connect = || UnixStream::connect(&socket).unwrap();
    let run = fs::read_dir(job.path("runs/served")).unwrap().flatten();
    let run =
        run.map(|entry| entry.file_name().into_string().unwrap()).find(|name| name != "latest").unwrap();
    let label = format!(r#"{{run="{run}",job_name="served"}}"#);
    let text = wait_for("the measurements of the ranks", || {
        let text = scrape(connect(), "localhost");
        let samples = parse_open_metrics(&text);
        (samples.keys().any(|sample| sample.starts_with("launch_rank_rss_bytes{"))).then_some(text)
    });
    let samples = parse_open_metrics(&text);
    assert_eq!(samples[&format!("launch_workers{label}")], 2.0, "{text}");
    assert_eq!(samples[&format!("launch_run_active{label}")], 1.0, "{text}");
    assert!(samples.keys().all(|sample| sample.contains(&format!("run=\"{run}\""))), "{text}");
    check_with_python_client(test, &text);
    let served = ServedPage::start(&job, &[&run, "--textfile", "metrics.prom"]);
    let of_endpoint = request_metrics(connect(), "localhost", "text/plain; version=0.0.4");
    assert!(of_endpoint.contains("launch_rank_rss_bytes{"), "{of_endpoint}");
    let of_file = fs::read_to_string(job.path("metrics.prom")).unwrap();
    assert!(of_file.contains(&format!("launch_workers{label} 2.0\n")), "{of_file}");
    // The controller has written its file once when it started.
    let of_run = fs::read_to_string(&file).unwrap();
    assert!(of_run.contains(&format!("launch_run_active{label} 1.0\n")), "{of_run}");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
    check_with_promtool(test, &[&of_endpoint, &of_file, &of_run]);
    wait_for("launch serve has the same metrics", || {
        let (host, token) = served.host_and_token();
        let host = host.to_owned();
        let of_server =
            scrape(TcpStream::connect(&host).unwrap(), &format!("{host}\r\nAuthorization: Bearer {token}"));
        let names = list_names(&parse_open_metrics(&of_server), &run);
        (names == list_names(&parse_open_metrics(&scrape(connect(), "localhost")), &run)).then_some(())
    });
    check_other_user(test, &socket);
    // A client that sends nothing does not delay the end of the run.
    let _silent = connect();
    fs::write(job.path("done"), "").unwrap();
    FinishedRun::from_output(&process.wait_with_output().unwrap()).expect_success();
    assert!(!socket.exists() && !file.exists(), "the socket and the file are removed");
}

#[test]
fn a_port_in_use_ends_the_run_before_it_starts_a_process() {
    let job = JobDirectory::new();
    fs::write(job.path("job.yaml"), WAITING_PROGRAM).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let setting = format!("observe.metrics={}", listener.local_addr().unwrap());
    let plan = job.run_launch(&["plan", "job.yaml", "--set", &setting]);
    assert!(plan.status.success(), "the plan does not bind the port: {}", output_to_text(&plan));
    let ran = job.run(&[&setting]);
    assert_eq!(ran.failure_code(), "metrics-unavailable");
    assert_eq!(ran.code, 3);
    assert!(!job.path("started").exists());
    let address = listener.local_addr().unwrap();
    drop(listener);
    let process = job.start(&[&setting]);
    wait_for("the program runs", || job.path("started").exists().then_some(()));
    let text = scrape(TcpStream::connect(address).unwrap(), &address.to_string());
    assert!(parse_open_metrics(&text).keys().any(|sample| sample.starts_with("launch_workers{")), "{text}");
    fs::write(job.path("done"), "").unwrap();
    FinishedRun::from_output(&process.wait_with_output().unwrap()).expect_success();
}
