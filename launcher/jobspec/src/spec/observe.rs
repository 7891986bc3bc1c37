//! `observe`: the services, such as MLflow, that record what the job does.
use crate::keys::{
    key::Key,
    section::{optional_inner_section, section},
    text::{formatted_text_type, text_type},
    value_type::ValueType,
};
use serde_json::json;

/// The largest length of the address of a server, in bytes.
const MAX_URI_BYTES: usize = 2048;
/// The largest length of the name of an MLflow experiment or run, in bytes.
const MAX_NAME_BYTES: usize = 500;

section! {
    /// The services that record what the job does.
    #[derive(Default)]
    pub struct ObserveSpec at "observe";
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
    /// Returns whether the job names no service, such as MLflow, that records it.
    pub(crate) fn is_empty(&self) -> bool {
        self.mlflow.is_none()
    }
}

/// Returns the value type ([`ValueType`]) of names of experiments and runs in MLflow.
fn mlflow_name_type() -> ValueType<String> {
    let expected = "text of at most 500 bytes";
    text_type()
        .restricted_to(expected, json!({"maxLength": MAX_NAME_BYTES}), |name| name.len() <= MAX_NAME_BYTES)
        .documented_as(expected)
}

/// Returns the value type ([`ValueType`]) of addresses of MLflow servers.
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
