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
