//! Requests to a real server, over TCP.
use crate::run_directory::RunDirectory;
use dashboard::{Dashboard, bind};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// A server of the dashboard in a thread of this process, which ends with the process.
struct TestServer {
    run: RunDirectory,
    address: String,
    token: String,
    _directory: TempDir,
}

/// The time in which an answer must arrive, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

impl TestServer {
    fn start() -> TestServer {
        let directory = tempfile::tempdir().expect("a directory");
        let run = RunDirectory::create(directory.path(), 16);
        let source = RunDirectory { directory: directory.path().into() };
        let server = bind(Arc::new(Dashboard::new(Box::new(source))), 0).expect("a free port");
        let url = server.page_url("/");
        thread::spawn(move || server.run());
        let (address, token) = url.split_once("/?token=").expect("an address with a token");
        let address = address.strip_prefix("http://").expect("an address").to_owned();
        assert!(address.starts_with("127.0.0.1:"));
        TestServer { run, address, token: token.to_owned(), _directory: directory }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(TIMEOUT)).expect("set");
        stream
    }

    /// Sends a request, and returns the whole answer.
    fn send(&self, request: &str) -> String {
        let mut stream = self.connect();
        // The server may reject the request before it has read everything.
        _ = stream.write_all(request.as_bytes());
        let mut answer = Vec::new();
        _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).expect("text")
    }

    /// Requests a path with the token, and returns the whole answer.
    fn get(&self, path: &str, headers: &str) -> String {
        let (address, token) = (&self.address, &self.token);
        self.send(&format!(
            "GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n{headers}\r\n"
        ))
    }
}

/// Returns the status of an answer.
fn status(answer: &str) -> &str {
    answer.get(9..12).unwrap_or("none")
}

#[test]
fn every_path_requires_the_token() {
    let server = TestServer::start();
    let (host, token) = (&server.address, &server.token);
    let paths =
        ["/", "/app.js", "/style.css", "/metrics", "/api/runs", "/api/stream?run=r1", "/x", "/favicon.svg"];
    for path in paths {
        let bare = server.send(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert_eq!(status(&bare), "401", "{path}");
        assert!(!bare.contains("r1") && !bare.contains(token.as_str()), "{bare}");
        let wrong = server.send(&format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {}\r\n\r\n",
            "0".repeat(64)
        ));
        assert_eq!(status(&wrong), "401", "{path}");
        let other =
            server.send(&format!("GET /?token={token} HTTP/1.1\r\nHost: attacker.example:80\r\n\r\n"));
        assert_eq!(status(&other), "403", "{path}");
        let site = server.get(path, "Origin: http://attacker.example\r\n");
        assert_eq!(status(&site), "403", "{path}");
    }
    let page = server.send(&format!("GET /?token={token} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    assert_eq!(status(&page), "200");
    assert!(page.contains("Content-Security-Policy: default-src 'none'; script-src 'self';"), "{page}");
    assert_eq!(status(&server.get("/x", "")), "404");
    assert_eq!(status(&server.get("/api/log?run=r1&rank=../../etc/passwd", "")), "404");
    let post = format!("POST /?token={token} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(status(&server.send(&post)), "405");
}

#[test]
fn oversized_malformed_and_slow_requests_are_rejected() {
    let server = TestServer::start();
    assert_eq!(status(&server.get("/", &format!("X: {}\r\n", "y".repeat(20_000)))), "431");
    assert_eq!(status(&server.get("/", &"X: y\r\n".repeat(200))), "431");
    assert_eq!(status(&server.get("/", "Content-Length: 9\r\n")), "400");
    assert_eq!(status(&server.send("\u{16}\u{3}\u{1}\r\n\r\n")), "400");
    let began = Instant::now();
    let mut slow = server.connect();
    slow.write_all(b"GET / HTTP/1.1\r\nHost:").expect("sent");
    let mut answer = String::new();
    slow.read_to_string(&mut answer).expect("an answer");
    assert_eq!(status(&answer), "408");
    assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
}

#[test]
fn more_connections_than_the_limit_are_closed_and_others_still_answered() {
    let server = TestServer::start();
    let mut open: Vec<TcpStream> = (0..100).map(|_| server.connect()).collect();
    // The connections over the limit are closed without an answer.
    let is_closed = |stream: &mut TcpStream| matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_));
    let last = open.last_mut().expect("a connection");
    assert!(is_closed(last));
    drop(open);
    let end = Instant::now() + TIMEOUT;
    while status(&server.get("/", "")) != "200" {
        assert!(Instant::now() < end, "the server no longer answers");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn steps_arrive_through_the_stream_of_events() {
    let server = TestServer::start();
    let mut stream = server.connect();
    let (host, token) = (&server.address, &server.token);
    let request = format!(
        "GET /api/stream?run=r1&token={token} HTTP/1.1\r\nHost: {host}\r\nSec-Fetch-Site: same-origin\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut lines = BufReader::new(stream).lines().map(|line| line.expect("a line"));
    let mut next = |text: &str| loop {
        let line = lines.next().expect("the stream continues");
        if line.contains(text) {
            return line;
        }
    };
    assert_eq!(next("HTTP/1.1"), "HTTP/1.1 200 OK");
    assert_eq!(next("Content-Type"), "Content-Type: text/event-stream");
    let first = next("data: ");
    assert!(
        first.contains(r#""states":"rrrrrrrrrrrrrrrr""#) && first.contains(r#""host":"node-1""#),
        "{first}"
    );
    server.run.append_step(1);
    next(r#""loss":{"generation":1,"from":0,"buckets":[[1.0,2.5]]}"#);
    server.run.append_step(2);
    next(r#""from":0,"buckets":[[1.0,2.5],[2.0,1.6666666666666667]]"#);
}

#[test]
fn logs_and_runs_are_json() {
    let server = TestServer::start();
    let body = |path: &str| {
        let answer = server.get(path, "");
        assert_eq!(status(&answer), "200", "{answer}");
        let text = answer.split_once("\r\n\r\n").expect("a body").1.to_owned();
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")
    };
    assert_eq!(body("/api/runs")[0]["run"], "r1");
    assert_eq!(body("/api/logs?run=r1"), serde_json::json!([0]));
    let log = body("/api/log?run=r1&rank=0");
    assert_eq!(log["lines"], serde_json::json!(["hello", "<script>alert(1)</script>"]));
    let more = body(&format!("/api/log?run=r1&rank=0&file={}&end={}", log["file"], log["end"]));
    assert_eq!(more["lines"], serde_json::json!([]));
    assert_eq!(body("/api/search?run=r1&text=HELLO")["matches"][0]["line"], "hello");
}

/// Checks the syntax of OpenMetrics: families with help and type, samples of the open family, and
/// an end marker.
#[test]
fn metrics_are_in_the_requested_format() {
    let server = TestServer::start();
    server.run.append_step(1);
    let answer = server.get("/metrics", "Accept: application/openmetrics-text;version=1.0.0\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    assert!(head.contains("Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert!(body.ends_with("# EOF\n") && body.matches("# EOF").count() == 1);
    let (mut family, mut kind, mut samples) = ("", "", 0);
    for line in body.lines().filter(|line| *line != "# EOF") {
        if let Some(help) = line.strip_prefix("# HELP ") {
            family = help.split_once(' ').expect("a help text").0;
        } else if let Some(text) = line.strip_prefix("# TYPE ") {
            kind = text.strip_prefix(family).expect("the type of the family").trim();
            assert!(["gauge", "counter"].contains(&kind));
        } else {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let labels = format!(r#"{family}{suffix}{{run="r1",job_name="job"}} "#);
            let value = line.strip_prefix(&labels).unwrap_or_else(|| panic!("{line}"));
            value.parse::<f64>().expect("a number");
            samples += 1;
        }
    }
    assert!(samples > 10 && body.contains("launch_loss{run=\"r1\",job_name=\"job\"} 2.5\n"), "{body}");
    let plain = server.get("/metrics", "");
    assert!(plain.contains("Content-Type: text/plain; version=0.0.4") && !plain.contains("# EOF"));
}
