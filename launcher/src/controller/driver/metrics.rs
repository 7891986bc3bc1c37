//! Serves the metrics of the run, if the job requests this.
use super::ControllerDriver;
use crate::{clock::read_unix_time, cluster::read_host_name, metrics_server::MetricsServer};
use dashboard::RunInfo;
use diagnostic::{Diagnostic, codes::run::METRICS_UNAVAILABLE};
use jobspec::MetricsAddress;

impl ControllerDriver {
    /// Starts to serve the metrics of the run at the address in `observe.metrics`. Does nothing if
    /// the job does not request this. Fails if the port or the socket is not available.
    pub(super) fn start_metrics_server(&mut self) -> diagnostic::Result<()> {
        let Some(text) = &self.job.observe.metrics else { return Ok(()) };
        let Some(address) = MetricsAddress::parse(text) else { return Ok(()) };
        let elapsed = (self.earlier + self.clock.now()).as_secs_f64();
        let info = RunInfo {
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
        };
        let server = MetricsServer::start(address, info).map_err(|error| {
            Diagnostic::error(METRICS_UNAVAILABLE, format!("cannot serve metrics at {text}"))
                .with_subject("observe.metrics")
                .with_cause(&error)
                .with_help("choose another port or path for `observe.metrics`, or remove the key")
        })?;
        self.metrics = Some(server);
        Ok(())
    }
}
