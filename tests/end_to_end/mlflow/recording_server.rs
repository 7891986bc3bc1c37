//! [`RecordingServer`]: an HTTP server that answers as MLflow does, and keeps what it receives.
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard},
};

/// The experiments, runs, parameters and metrics that the server has received.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReceivedData {
    /// The value of the header `Authorization` in the newest request.
    pub(crate) authorization: Option<String>,
    /// The names of the experiments.
    pub(crate) experiments: Vec<String>,
    /// The requests that have created runs.
    pub(crate) runs: Vec<Value>,
    pub(crate) params: BTreeMap<String, String>,
    pub(crate) tags: BTreeMap<String, String>,
    /// The steps and values of each metric, in the order of their arrival.
    pub(crate) metrics: BTreeMap<String, Vec<(u64, f64)>>,
    /// The states that runs were set to.
    pub(crate) states: Vec<String>,
    /// The number of requests that the server still has to reject.
    failures: u32,
}

/// A server on a loopback address. Its threads end with the process of the test.
pub(crate) struct RecordingServer {
    address: String,
    record: Arc<Mutex<ReceivedData>>,
}

impl RecordingServer {
    /// Starts a server that answers the first `failures` requests with status 503.
    pub(crate) fn start(failures: u32) -> RecordingServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let record = Arc::new(Mutex::new(ReceivedData { failures, ..ReceivedData::default() }));
        let shared = record.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || serve(&stream, &shared));
            }
        });
        RecordingServer { address, record }
    }

    pub(crate) fn address(&self) -> String {
        self.address.clone()
    }

    /// Returns what the server has received so far.
    pub(crate) fn received_data(&self) -> ReceivedData {
        self.record.lock().unwrap().clone()
    }
}

/// Answers the requests of a connection until it is closed.
fn serve(stream: &TcpStream, record: &Mutex<ReceivedData>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let (mut length, mut authorization) = (0, None);
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            let Some((name, value)) = header.trim_end().split_once(": ") else { break };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "authorization" => authorization = Some(value.to_owned()),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let mut record = record.lock().unwrap();
        record.authorization = authorization;
        let (status, answer) = answer(&path, &serde_json::from_slice(&body).unwrap_or_default(), &mut record);
        let text = answer.to_string();
        let head = format!("HTTP/1.1 {status} x\r\nContent-Type: application/json\r\n");
        let mut stream = stream;
        if write!(stream, "{head}Content-Length: {}\r\n\r\n{text}", text.len()).is_err() {
            return;
        }
    }
}

/// Returns the status and the body of the answer to a request.
fn answer(path: &str, body: &Value, record: &mut MutexGuard<'_, ReceivedData>) -> (u16, Value) {
    if record.failures > 0 {
        record.failures -= 1;
        return (503, json!({}));
    }
    let path = path.strip_prefix("/api/2.0/mlflow/").unwrap_or_default();
    match path.split('?').next().unwrap_or_default() {
        "experiments/get-by-name" if record.experiments.is_empty() => {
            (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no experiment"}))
        }
        "experiments/get-by-name" => (200, json!({"experiment": {"experiment_id": "5"}})),
        "experiments/create" => {
            record.experiments.push(body["name"].as_str().unwrap().to_owned());
            (200, json!({"experiment_id": "5"}))
        }
        "runs/create" => {
            record.add_tags(&body["tags"]);
            record.runs.push(body.clone());
            (200, json!({"run": {"info": {"run_id": format!("run{}", record.runs.len())}}}))
        }
        "runs/log-batch" => record.add_batch(body),
        "runs/update" => {
            record.states.push(body["status"].as_str().unwrap().to_owned());
            (200, json!({}))
        }
        other => (404, json!({"error_code": "ENDPOINT_NOT_FOUND", "message": other})),
    }
}

impl ReceivedData {
    fn add_tags(&mut self, tags: &Value) {
        for tag in tags.as_array().into_iter().flatten() {
            let text = |name: &str| tag[name].as_str().unwrap().to_owned();
            self.tags.insert(text("key"), text("value"));
        }
    }

    /// Records a batch of metrics and parameters. Rejects what MLflow rejects: too many items, and
    /// parameters that change.
    fn add_batch(&mut self, body: &Value) -> (u16, Value) {
        let invalid =
            |message: &str| (400, json!({"error_code": "INVALID_PARAMETER_VALUE", "message": message}));
        if body["run_id"] != "run1" {
            return (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no run"}));
        }
        let list = |name: &str| body[name].as_array().cloned().unwrap_or_default();
        let (metrics, params) = (list("metrics"), list("params"));
        if metrics.len() > 1000 || params.len() > 100 {
            return invalid("too many items");
        }
        for param in &params {
            let text = |name: &str| param[name].as_str().unwrap().to_owned();
            if self.params.insert(text("key"), text("value")).is_some_and(|old| old != text("value")) {
                return invalid("a parameter changes");
            }
        }
        for metric in &metrics {
            let point = (metric["step"].as_u64().unwrap(), metric["value"].as_f64().unwrap());
            self.metrics.entry(metric["key"].as_str().unwrap().to_owned()).or_default().push(point);
        }
        self.add_tags(&body["tags"]);
        (200, json!({}))
    }
}
