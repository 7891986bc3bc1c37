//! Records a run with an MLflow server, by its REST interface (`observe.mlflow` in the job).
//!
//! [`MlflowRecorder`] sends the parameters, metrics, tags and the result of a run. Its thread reads
//! them from the files of the run directory. The controller therefore never waits for the server,
//! and the journal is the queue: nothing is lost while the server is away, and no data waits in
//! memory. A later controller continues the same run of MLflow where the lost controller stopped.
mod batch;
mod journal_reader;
mod recorder;
mod rest_client;
mod run_recorder;
mod settings;
mod stored_run;

pub(crate) use recorder::MlflowRecorder;
pub(crate) use run_recorder::RecordedRun;
pub(crate) use settings::{MlflowSettings, resolve_mlflow_settings};

use diagnostic::Diagnostic;
use jobspec::JobSpec;
use rest_client::RequestError;
use std::path::Path;
use stored_run::StoredMlflowRun;

/// Returns the MLflow settings for a controller that takes over a run, with the MLflow server to
/// which the lost controller sent the run's data.
pub(crate) fn resolve_stored_settings(
    job: &JobSpec,
    run_dir: &Path,
) -> Result<Option<MlflowSettings>, Vec<Diagnostic>> {
    let mut job = job.clone();
    if let (Some(spec), Ok(Some(stored))) = (&mut job.observe.mlflow, StoredMlflowRun::read(run_dir)) {
        spec.uri = Some(stored.uri);
    }
    resolve_mlflow_settings(&job)
}

/// Parses untrusted text as an answer of an MLflow server: a line with the HTTP status, and the
/// body. Also reads the IDs of an experiment and of runs from the answer, which may lack them.
pub(crate) fn parse_untrusted_answer(text: &str) -> Result<(), RequestError> {
    let no_status = || RequestError::Unavailable("the first line is not an HTTP status".to_owned());
    let (status, body) = text.split_once('\n').ok_or_else(no_status)?;
    let status = status.parse().map_err(|_| no_status())?;
    match rest_client::classify_answer(status, body) {
        Ok(answer) => {
            _ = run_recorder::read_experiment_id(&answer);
            _ = run_recorder::read_created_run_id(&answer);
            _ = run_recorder::read_found_run_id(&answer);
            Ok(())
        }
        Err(RequestError::Rejected { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
