//! [`RestClient`]: sends requests to the REST interface of an MLflow server (version 2.0).
use super::settings::MlflowSettings;
use crate::private_files::open_regular_file;
use serde_json::Value;
use std::{
    io::{self, Read},
    path::Path,
    sync::Arc,
    time::Duration,
};
use ureq::{
    Agent,
    tls::{PemItem, RootCerts, TlsConfig, TlsProvider, parse_pem},
};

/// The time limit for a request to the MLflow server with its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for connecting to the MLflow server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The size of the largest answer of the MLflow server that is read, in bytes.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// The size of the largest file with TLS certificates that is read, in bytes.
const MAX_CERTIFICATES_BYTES: u64 = 8 << 20;
/// The largest number of characters of a text from the MLflow server, such as an error message,
/// that the user sees.
const MAX_SHOWN_CHARS: usize = 200;
/// The HTTP status codes below 500 after which a request to the MLflow server is repeated later,
/// such as 429 (too many requests).
const TRANSIENT_STATUS_CODES: [u16; 3] = [408, 425, 429];

/// The reason why a request to an MLflow server has failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum RequestError {
    /// The request may succeed later: the server is not available, or rejects the credentials.
    /// Contains the reason.
    #[error("{0}")]
    Unavailable(String),
    /// MLflow has rejected the request, and will reject it again.
    #[error("{code}: {message}")]
    Rejected {
        /// The code of MLflow's error, such as `RESOURCE_DOES_NOT_EXIST`.
        code: String,
        /// The message of MLflow.
        message: String,
    },
}

/// Sends requests to an MLflow server, over a connection that it keeps open.
pub(super) struct RestClient {
    agent: Agent,
    /// The address of the interface.
    base: String,
    authorization: Option<String>,
}

impl RestClient {
    /// Creates a client for the MLflow server at the address `uri`, with the credentials in
    /// `settings`. Fails if the file with certificates cannot be used. Does not connect.
    pub(super) fn new(uri: &str, settings: &MlflowSettings) -> io::Result<RestClient> {
        let root_certs = match &settings.certificates {
            Some(path) => read_certificates(path)?,
            None => RootCerts::PlatformVerifier,
        };
        let tls = TlsConfig::builder()
            .provider(TlsProvider::NativeTls)
            .root_certs(root_certs)
            .disable_verification(settings.is_insecure);
        // A redirection could send the credentials to another server.
        let config = Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(REQUEST_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .user_agent(concat!("launch/", env!("CARGO_PKG_VERSION")));
        let base = format!("{uri}/api/2.0/mlflow");
        Ok(RestClient {
            agent: config.build().new_agent(),
            base,
            authorization: settings.authorization.clone(),
        })
    }

    /// Sends a GET request for `path` with one parameter to the MLflow server, and returns the
    /// answer.
    pub(super) fn get(&self, path: &str, (name, value): (&str, &str)) -> Result<Value, RequestError> {
        let mut request = self.agent.get(format!("{}/{path}", self.base)).query(name, value);
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        read_answer(request.call())
    }

    /// Sends a POST request with a JSON body to the MLflow server, and returns the answer.
    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value, RequestError> {
        let mut request =
            self.agent.post(format!("{}/{path}", self.base)).header("Content-Type", "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        read_answer(request.send(body.to_string()))
    }
}

/// Reads the answer of the MLflow server to a request.
fn read_answer(answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<Value, RequestError> {
    let unavailable = |error: ureq::Error| RequestError::Unavailable(shorten_server_text(&error.to_string()));
    let mut answer = answer.map_err(unavailable)?;
    let status = answer.status().as_u16();
    let text = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_string();
    let text = match text {
        Ok(text) => text,
        // The status is more important than an unreadable page of a proxy.
        Err(_) if status >= 300 => String::new(),
        Err(error) => return Err(unavailable(error)),
    };
    classify_answer(status, &text)
}

/// Returns the content of an answer of the MLflow server, or the error that the answer contains.
pub(super) fn classify_answer(status: u16, text: &str) -> Result<Value, RequestError> {
    let json: Option<Value> = serde_json::from_str(text).ok();
    let field = |name: &str| json.as_ref().and_then(|json| json[name].as_str()).map(shorten_server_text);
    let reason = |reason: &str| match field("message") {
        Some(message) => format!("{reason}: {message}"),
        None => reason.to_owned(),
    };
    match (status, field("error_code")) {
        (200..300, _) => json.ok_or_else(|| RequestError::Unavailable("its answer is not JSON".to_owned())),
        (401 | 403, _) => Err(RequestError::Unavailable(reason(&format!(
            "it rejects the credentials (HTTP status {status})"
        )))),
        (status, Some(code)) if status < 500 && !TRANSIENT_STATUS_CODES.contains(&status) => {
            Err(RequestError::Rejected { code, message: field("message").unwrap_or_default() })
        }
        _ => Err(RequestError::Unavailable(reason(&format!("HTTP status {status}")))),
    }
}

/// Shortens a text that the MLflow server has sent, and removes its control characters.
fn shorten_server_text(text: &str) -> String {
    text.chars().take(MAX_SHOWN_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Reads a file with TLS certificates in PEM format.
fn read_certificates(path: &Path) -> io::Result<RootCerts> {
    let mut bytes = Vec::new();
    open_regular_file(path)?.take(MAX_CERTIFICATES_BYTES).read_to_end(&mut bytes)?;
    let certificates = parse_pem(&bytes).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<_> = certificates.collect();
    match certificates.is_empty() {
        true => Err(io::Error::other("the file contains no certificate")),
        false => Ok(RootCerts::Specific(Arc::new(certificates))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_transient_unless_mlflow_rejects_the_request() {
        let code = r#"{"error_code": "X", "message": "a\nb"}"#;
        assert_eq!(classify_answer(200, r#"{"run": 1}"#), Ok(serde_json::json!({"run": 1})));
        let rejected = RequestError::Rejected { code: "X".into(), message: "a b".into() };
        assert_eq!(classify_answer(400, code), Err(rejected.clone()));
        assert_eq!(classify_answer(404, code), Err(rejected));
        for (status, text) in [
            (200, "<html>"),
            (302, ""),
            (401, code),
            (403, "Forbidden"),
            (404, "<html>"),
            (408, code),
            (429, code),
            (500, code),
            (503, ""),
        ] {
            let error = classify_answer(status, text).expect_err("an error");
            assert!(matches!(error, RequestError::Unavailable(_)), "{status}: {error:?}");
        }
        let long = format!(r#"{{"error_code": "X", "message": "{}"}}"#, "m".repeat(5000));
        let Err(RequestError::Rejected { message, .. }) = classify_answer(400, &long) else { panic!() };
        assert_eq!(message.len(), MAX_SHOWN_CHARS);
    }
}
