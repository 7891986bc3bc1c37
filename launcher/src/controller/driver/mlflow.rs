//! Records the run with MLflow, if the job requests it.
use super::ControllerDriver;
use crate::{
    clock::read_unix_time,
    mlflow::{MlflowRecorder, RecordedRun},
    secrets::redact_job_secrets,
};
use std::time::Duration;

/// How long the controller waits at the end of a run until MLflow has received the rest of the run.
const MLFLOW_FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// The job section whose values launch does not send to MLflow: the environment variables in
/// `run.env`. Variables may be secrets, and other users can read what a server records.
const UNSENT_JOB_KEY_PREFIXES: &str = "run.env";

impl ControllerDriver {
    /// Starts to record the run with MLflow. Does nothing if the job does not request this.
    /// `is_taken_over` states whether a lost controller has begun to record the run.
    pub(super) fn start_mlflow(&mut self, is_taken_over: bool) {
        let Some(settings) = self.mlflow_settings.take() else { return };
        let elapsed = (self.earlier + self.clock.now()).as_secs_f64();
        let mut params = jobspec::list_key_values(&redact_job_secrets(&self.job));
        params.retain(|path, _| !path.starts_with(UNSENT_JOB_KEY_PREFIXES));
        let run = RecordedRun {
            run: self.plan.run.0.clone(),
            run_dir: self.plan.run_dir.clone(),
            job_name: self.job.name.clone(),
            world: self.plan.world,
            hosts: self.hosts.iter().map(|host| host.name.clone()).collect(),
            params,
            began_at: read_unix_time() - elapsed,
            is_taken_over,
        };
        match MlflowRecorder::start(settings, run) {
            Ok(recorder) => self.mlflow = Some(recorder),
            Err(error) => self.emit_notice(format!("cannot record the run with MLflow: {error}")),
        }
    }

    /// Shows the user the notices of the thread that records the run with MLflow. Never blocks.
    pub(super) fn emit_mlflow_notices(&mut self) {
        while let Some(notice) = self.mlflow.as_ref().and_then(MlflowRecorder::take_notice) {
            self.emit_notice(notice);
        }
    }

    /// Waits until MLflow has received the rest of the run, but at most for
    /// [`MLFLOW_FLUSH_TIMEOUT`]. The journal must be complete.
    pub(super) fn finish_mlflow(&mut self) {
        let Some(recorder) = self.mlflow.take() else { return };
        let unsent = recorder.finish(MLFLOW_FLUSH_TIMEOUT);
        let notices = std::iter::from_fn(|| recorder.take_notice());
        for message in notices.chain(unsent) {
            self.report.show_message(format!("launch: {message}"));
        }
    }
}
