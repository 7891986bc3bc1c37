//! [`MlflowSettings`]: the address of an MLflow server, and the credentials for it.
use base64::{Engine as _, prelude::BASE64_STANDARD};
use diagnostic::{
    Diagnostic,
    codes::{host, job as job_codes},
};
use jobspec::{
    JobSpec, MAX_MLFLOW_NAME_BYTES,
    env::{
        MLFLOW_EXPERIMENT_NAME, MLFLOW_TRACKING_INSECURE_TLS, MLFLOW_TRACKING_PASSWORD,
        MLFLOW_TRACKING_SERVER_CERT_PATH, MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_URI,
        MLFLOW_TRACKING_USERNAME, UNSUPPORTED_MLFLOW_VARIABLES,
    },
    is_server_address,
};
use std::{ffi::OsString, fmt, path::PathBuf};

/// The name of the job.yaml key with the MLflow settings, for use in error messages.
const MLFLOW_JOB_KEY: &str = "observe.mlflow";

/// The settings for recording a run with MLflow: the server, its credentials, and the names of the
/// experiment and the run. The credentials come from environment variables, and are never printed
/// or stored.
#[derive(Clone, PartialEq)]
pub(crate) struct MlflowSettings {
    /// The address of the server, without a slash at its end.
    pub(super) uri: String,
    /// The name of the experiment.
    pub(super) experiment: String,
    /// The name of the run in MLflow; `None` for the ID of the run.
    pub(super) run_name: Option<String>,
    /// The value of the header `Authorization`, which is a secret; `None` to send no credentials.
    pub(super) authorization: Option<String>,
    /// Whether the certificate of the server is accepted without a check.
    pub(super) is_insecure: bool,
    /// A file with the certificates of the authorities that identify the server; `None` for those
    /// of the system.
    pub(super) certificates: Option<PathBuf>,
}

impl fmt::Debug for MlflowSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MlflowSettings")
            .field("uri", &self.uri)
            .field("experiment", &self.experiment)
            .field("has_credentials", &self.authorization.is_some())
            .finish_non_exhaustive()
    }
}

/// Reads the settings for recording a run with MLflow from the key `observe.mlflow` of job.yaml and
/// from the environment variables of MLflow's client. Returns `None` for a job that is not recorded
/// with MLflow. The errors list every setting that cannot be used.
pub(crate) fn resolve_mlflow_settings(job: &JobSpec) -> Result<Option<MlflowSettings>, Vec<Diagnostic>> {
    resolve_settings_with_env(job, &|name| std::env::var_os(name))
}

/// Reads the settings for recording a run with MLflow from job.yaml and from environment variables,
/// whose values the function `read` returns.
fn resolve_settings_with_env(
    job: &JobSpec,
    read: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Option<MlflowSettings>, Vec<Diagnostic>> {
    let Some(spec) = &job.observe.mlflow else { return Ok(None) };
    let mut errors = Vec::new();
    let mut variable = |name: &str| {
        let value = read(name).filter(|value| !value.is_empty())?;
        let text = value.into_string().ok().filter(|text| !text.contains(char::is_control));
        if text.is_none() {
            errors.push(build_variable_error(name, "is not text on one line"));
        }
        text
    };
    let uri = spec.uri.clone().or_else(|| variable(MLFLOW_TRACKING_URI));
    let experiment = spec.experiment.clone().or_else(|| variable(MLFLOW_EXPERIMENT_NAME));
    let (user, password) = (variable(MLFLOW_TRACKING_USERNAME), variable(MLFLOW_TRACKING_PASSWORD));
    let token = variable(MLFLOW_TRACKING_TOKEN);
    let is_insecure = variable(MLFLOW_TRACKING_INSECURE_TLS);
    let certificates = variable(MLFLOW_TRACKING_SERVER_CERT_PATH).map(PathBuf::from);
    let unsupported =
        UNSUPPORTED_MLFLOW_VARIABLES.iter().filter(|name| read(name).is_some_and(|v| !v.is_empty()));
    errors.extend(unsupported.map(|name| {
        build_variable_error(name, "is not supported")
            .with_help("use MLFLOW_TRACKING_TOKEN, or a user name and a password")
    }));
    let uri = uri.unwrap_or_else(|| {
        let message = format!("the variable `{MLFLOW_TRACKING_URI}` is not set");
        let error = Diagnostic::error(job_codes::JOB_ENV_VALUE_MISSING, message);
        errors.push(
            error
                .with_field("variable", MLFLOW_TRACKING_URI)
                .with_help("set it, or set `observe.mlflow.uri` to the address of the server"),
        );
        String::new()
    });
    if spec.uri.is_none() && !uri.is_empty() && !is_server_address(&uri) {
        // The value may contain a password.
        let reason = "is not an address with http:// or https:// and without a user name";
        let help = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD for a user name";
        errors.push(build_variable_error(MLFLOW_TRACKING_URI, reason).with_help(help));
    }
    let experiment = experiment.unwrap_or_else(|| job.name.clone());
    if experiment.len() > MAX_MLFLOW_NAME_BYTES {
        let reason = format!("is longer than {MAX_MLFLOW_NAME_BYTES} bytes");
        errors.push(build_variable_error(MLFLOW_EXPERIMENT_NAME, &reason));
    }
    if !errors.is_empty() {
        return Err(errors.into_iter().map(|error| error.with_subject(MLFLOW_JOB_KEY)).collect());
    }
    Ok(Some(MlflowSettings {
        uri: uri.trim_end_matches('/').to_owned(),
        experiment,
        run_name: spec.run_name.clone(),
        authorization: build_authorization(user, password, token),
        is_insecure: is_insecure.is_some_and(|value| ["true", "1"].contains(&value.to_lowercase().as_str())),
        certificates,
    }))
}

/// Builds the value of the HTTP header `Authorization` for requests to the MLflow server. As with
/// MLflow's client, a user name with a password precedes a token.
fn build_authorization(
    user: Option<String>,
    password: Option<String>,
    token: Option<String>,
) -> Option<String> {
    match (user, password, token) {
        (Some(user), Some(password), _) => {
            Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
        }
        (_, _, Some(token)) => Some(format!("Bearer {token}")),
        _ => None,
    }
}

/// Builds the error that a variable of MLflow's client has an unusable value, such as a value with
/// several lines. `reason` follows its name.
fn build_variable_error(name: &str, reason: &str) -> Diagnostic {
    let message = format!("the variable `{name}` {reason}");
    Diagnostic::error(host::ENV_VALUE_INVALID, message).with_field("variable", name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jobspec::MlflowSpec;

    fn resolve(uri: Option<&str>, variables: &[(&str, &str)]) -> Result<MlflowSettings, Vec<String>> {
        let mut job = crate::testing::sample_job();
        let uri = uri.map(str::to_owned);
        job.observe.mlflow = Some(MlflowSpec { uri, experiment: None, run_name: None });
        let read = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into());
        let settings = resolve_settings_with_env(&job, &read);
        settings
            .map(|settings| settings.expect("the job has the section"))
            .map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn values_come_from_the_job_and_then_from_variables() {
        let variables = [(MLFLOW_TRACKING_URI, "https://b/"), (MLFLOW_EXPERIMENT_NAME, "e")];
        let settings = resolve(Some("http://a:5000"), &variables).expect("settings");
        assert_eq!((settings.uri.as_str(), settings.experiment.as_str()), ("http://a:5000", "e"));
        let settings = resolve(None, &variables[..1]).expect("settings");
        assert_eq!((settings.uri.as_str(), settings.experiment.as_str()), ("https://b", "sample"));
        assert_eq!(resolve_settings_with_env(&crate::testing::sample_job(), &|_| None), Ok(None));
    }

    #[test]
    fn credentials_are_those_of_the_client_and_are_not_shown() {
        let user = [(MLFLOW_TRACKING_USERNAME, "me"), (MLFLOW_TRACKING_PASSWORD, "pw")];
        let token = (MLFLOW_TRACKING_TOKEN, "t0ken");
        let authorize = |variables: &[(&str, &str)]| {
            let settings = resolve(Some("http://a"), variables).expect("settings");
            assert!(!format!("{settings:?}").contains("t0ken"));
            settings.authorization
        };
        assert_eq!(authorize(&[]), None);
        assert_eq!(authorize(&[token]).as_deref(), Some("Bearer t0ken"));
        assert_eq!(authorize(&[user[0], user[1], token]).as_deref(), Some("Basic bWU6cHc="));
        assert_eq!(authorize(&[user[0], token]).as_deref(), Some("Bearer t0ken"));
    }

    #[test]
    fn settings_that_cannot_be_honoured_are_errors() {
        let mut messages = vec![resolve(None, &[]).expect_err("no address")];
        messages.push(resolve(None, &[(MLFLOW_TRACKING_URI, "http://me:secret@h")]).expect_err("a password"));
        messages.push(resolve(None, &[(MLFLOW_TRACKING_URI, "sqlite:///m.db")]).expect_err("no server"));
        messages.push(
            resolve(Some("http://a"), &[(UNSUPPORTED_MLFLOW_VARIABLES[1], "x")]).expect_err("unsupported"),
        );
        messages.push(resolve(Some("http://a"), &[(MLFLOW_TRACKING_TOKEN, "a\nb")]).expect_err("two lines"));
        assert!(!format!("{messages:?}").contains("secret"), "{messages:?}");
        assert!(messages.iter().all(|errors| errors.len() == 1), "{messages:?}");
    }
}
