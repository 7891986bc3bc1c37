//! `observe`: the services, such as MLflow, that record what the job does.
use crate::keys::{
    key::Key,
    section::{optional_inner_section, section},
    text::{formatted_text_type, text_type},
    value_type::ValueType,
};
use serde_json::json;
use std::{net::SocketAddr, path::PathBuf};

/// The largest length of the address of a server, in bytes.
const MAX_URI_BYTES: usize = 2048;
/// The largest length of the name of an MLflow experiment or run, in bytes.
pub const MAX_MLFLOW_NAME_BYTES: usize = 500;
/// The longest path of a Unix socket on Linux, in bytes.
const MAX_SOCKET_PATH_BYTES: usize = 107;

section! {
    /// The services that record what the job does.
    #[derive(Default)]
    pub struct ObserveSpec at "observe";
    /// The address at which the controller serves the metrics of the run.
    pub metrics: Option<String> = Key::optional(metrics_address_type(), "no metrics are served");
    /// The file to which the controller writes the metrics of the run, for the textfile collector
    /// of a node exporter.
    pub metrics_file: Option<String> = Key::optional(metrics_file_type(), "no file is written");
    /// The MLflow server that records the run; `None` for no server.
    pub mlflow: Option<MlflowSpec> = optional_inner_section();
}

section! {
    /// The MLflow server that records parameters, metrics and the result of the run.
    pub struct MlflowSpec at "observe.mlflow";
    /// The address of the server; `env`: the variable `MLFLOW_TRACKING_URI`.
    pub uri: Option<String> = Key::new(server_address_type().or_none("env"), "env");
    /// The name of the experiment, which is created if it does not exist.
    pub experiment: Option<String> =
        Key::optional(mlflow_name_type(), "`MLFLOW_EXPERIMENT_NAME`, else the name of the job");
    /// The name of the run in MLflow.
    pub run_name: Option<String> = Key::optional(mlflow_name_type(), "the ID of the run");
}

impl ObserveSpec {
    /// Returns whether the section `observe` has no effect, because the job sets no key of it.
    pub(crate) fn is_empty(&self) -> bool {
        self.mlflow.is_none() && self.metrics.is_none() && self.metrics_file.is_none()
    }
}

/// Where the controller of a run serves the metrics of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A port of a loopback address, to which every user of the machine can connect.
    Port(SocketAddr),
    /// The absolute path of a Unix socket, to which only this user can connect.
    Socket(PathBuf),
}

impl MetricsAddress {
    /// Parses the value of `observe.metrics`, such as `127.0.0.1:9400` or `unix:/run/launch.sock`.
    /// Returns `None` if the text is no loopback address with a port, and not `unix:` with an
    /// absolute path.
    pub fn parse(text: &str) -> Option<MetricsAddress> {
        if let Some(path) = text.strip_prefix("unix:") {
            let is_valid =
                path.starts_with('/') && !path.ends_with('/') && path.len() <= MAX_SOCKET_PATH_BYTES;
            return is_valid.then(|| MetricsAddress::Socket(PathBuf::from(path)));
        }
        let address: SocketAddr = text.parse().ok()?;
        (address.ip().is_loopback() && address.port() > 0).then_some(MetricsAddress::Port(address))
    }
}

/// Returns the parser and printer ([`ValueType`]) for `observe.metrics`: a loopback address with a
/// port, or `unix:` and an absolute path.
fn metrics_address_type() -> ValueType<String> {
    formatted_text_type(
        "`127.0.0.1:PORT`, `[::1]:PORT` or `unix:PATH`",
        "a loopback address with a port, such as `127.0.0.1:9400`, or `unix:` and an absolute path",
        "^(127(\\.[0-9]{1,3}){3}:[1-9][0-9]{0,4}|\\[::1\\]:[1-9][0-9]{0,4}|unix:/.*[^/])$",
        |text| MetricsAddress::parse(text).is_some(),
    )
}

/// Returns the parser and printer ([`ValueType`]) for `observe.metrics_file`: the absolute path of
/// a file whose name ends with `.prom`, because a node exporter reads no other files.
fn metrics_file_type() -> ValueType<String> {
    formatted_text_type(
        "absolute path that ends with `.prom`",
        "an absolute path that ends with `.prom`, such as `/var/lib/node_exporter/launch.prom`",
        "^/(.*/)?[^/]+\\.prom$",
        is_metrics_file,
    )
}

/// Returns whether a text is a value of `observe.metrics_file`: an absolute path of a file whose
/// name ends with `.prom`.
fn is_metrics_file(text: &str) -> bool {
    let name = text.rsplit('/').next().unwrap_or_default();
    text.starts_with('/') && name.strip_suffix(".prom").is_some_and(|stem| !stem.is_empty())
}

/// Returns the parser and printer ([`ValueType`]) for names of experiments and runs in MLflow.
fn mlflow_name_type() -> ValueType<String> {
    let expected = "text of at most 500 bytes";
    text_type()
        .restricted_to(expected, json!({"maxLength": MAX_MLFLOW_NAME_BYTES}), |name| {
            name.len() <= MAX_MLFLOW_NAME_BYTES
        })
        .documented_as(expected)
}

/// Returns the parser and printer ([`ValueType`]) for addresses of MLflow servers.
fn server_address_type() -> ValueType<String> {
    let expected = "an address such as `https://mlflow.example.com:5000`, without a user name";
    formatted_text_type(
        "address with `http://` or `https://`",
        expected,
        "^https?://[^/@?#\\s]+(/[^@?#\\s]*)?$",
        is_server_address,
    )
}

/// Returns whether a text is the address of an HTTP server: `http://` or `https://`, a host, and
/// optionally a port and a path. Addresses with a user name, a query or a fragment are not
/// accepted.
pub fn is_server_address(uri: &str) -> bool {
    let Some(rest) = uri.strip_prefix("http://").or_else(|| uri.strip_prefix("https://")) else {
        return false;
    };
    let is_forbidden = |c: char| c.is_whitespace() || c.is_control() || "@?#\\\"<>".contains(c);
    !rest.is_empty() && !rest.starts_with('/') && !rest.contains(is_forbidden) && uri.len() <= MAX_URI_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_served_at_loopback_ports_and_sockets_only() {
        for text in ["127.0.0.1:9400", "127.9.9.9:1", "[::1]:65535", "unix:/run/user/1000/a b.sock"] {
            assert!(MetricsAddress::parse(text).is_some(), "{text}");
        }
        let long = format!("unix:/{}", "s".repeat(MAX_SOCKET_PATH_BYTES));
        for text in [
            "",
            "9400",
            ":9400",
            "127.0.0.1",
            "127.0.0.1:0",
            "0.0.0.0:9400",
            "10.0.0.1:9400",
            "localhost:9400",
            "[::]:9400",
            "unix:a.sock",
            "unix:/",
            "unix:/a/",
            "/a.sock",
            &long,
        ] {
            assert_eq!(MetricsAddress::parse(text), None, "{text}");
        }
    }

    #[test]
    fn files_of_metrics_are_those_that_a_node_exporter_reads() {
        for text in ["/launch.prom", "/var/lib/node exporter/a.b.prom"] {
            assert!(is_metrics_file(text), "{text}");
        }
        for text in ["", "launch.prom", "/a/.prom", "/a.prom/", "/a.prom/b", "/a.txt"] {
            assert!(!is_metrics_file(text), "{text}");
        }
    }

    #[test]
    fn addresses_have_a_host_and_no_secret() {
        for uri in ["http://h", "https://h:5000", "http://[::1]:5000/base/", "http://10.0.0.1:80"] {
            assert!(is_server_address(uri), "{uri}");
        }
        let long = format!("http://{}", "h".repeat(MAX_URI_BYTES));
        for uri in ["", "h:5000", "http://", "http:///a", "file:/tmp/x", "http://u:p@h", "http://h?a", &long]
        {
            assert!(!is_server_address(uri), "{uri}");
        }
    }
}
