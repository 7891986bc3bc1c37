//! Serves the metrics of the run, if the job requests this.
use super::ControllerDriver;
use crate::{
    clock::read_unix_time,
    cluster::read_host_name,
    metrics_server::{MetricsFile, MetricsServer},
};
use dashboard::RunInfo;
use diagnostic::{Diagnostic, codes::run::METRICS_UNAVAILABLE};
use jobspec::MetricsAddress;
use std::io;

impl ControllerDriver {
    /// Starts to serve the metrics of the run at the address in `observe.metrics`, and to write
    /// them to the file in `observe.metrics_file`. Does nothing if the job does not request this.
    /// Fails if the port, the socket or the file is not available.
    pub(super) fn start_metrics_server(&mut self) -> diagnostic::Result<()> {
        let observe = self.job.observe.clone();
        if let Some(text) = &observe.metrics
            && let Some(address) = MetricsAddress::parse(text)
        {
            let server = MetricsServer::start(address, self.describe_run());
            self.metrics = Some(server.map_err(|error| metrics_error("observe.metrics", text, &error))?);
        }
        if let Some(path) = &observe.metrics_file {
            let file = MetricsFile::start(path.into(), self.describe_run());
            self.metrics_file =
                Some(file.map_err(|error| metrics_error("observe.metrics_file", path, &error))?);
        }
        Ok(())
    }

    /// Returns the description of this run, of which the metrics are.
    fn describe_run(&mut self) -> RunInfo {
        let elapsed = (self.earlier + self.clock.now()).as_secs_f64();
        RunInfo {
            run: self.plan.run.0.clone(),
            name: self.job.name.clone(),
            state: "running",
            is_active: true,
            is_named: true,
            world: self.plan.world,
            began_ms: ((read_unix_time() - elapsed) * 1000.0) as u64,
            host: read_host_name(),
            step: None,
            run_dir: self.plan.run_dir.clone(),
        }
    }
}

/// Creates the error that the metrics of the run cannot be served at, or written to, `place`, the
/// value of the key `key`.
fn metrics_error(key: &str, place: &str, error: &io::Error) -> Diagnostic {
    Diagnostic::error(METRICS_UNAVAILABLE, format!("cannot serve metrics at {place}"))
        .with_subject(key)
        .with_cause(error)
        .with_help(format!("choose another port or path for `{key}`, or remove the key"))
}
