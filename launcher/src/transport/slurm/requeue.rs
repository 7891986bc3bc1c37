//! Asks Slurm to run a batch job again.
use super::successful_output;
use std::process::{Command, Stdio};

/// Runs `scontrol requeue JOB`. Slurm ends the processes of the job that are left and queues the
/// job again under the same id.
pub(crate) fn requeue_job(job: u64) -> diagnostic::Result<()> {
    let output = Command::new("scontrol").arg("requeue").arg(job.to_string()).stdin(Stdio::null()).output();
    successful_output("scontrol requeue", output).map(drop)
}
