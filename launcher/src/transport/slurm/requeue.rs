//! Requeues a batch job in Slurm.
use super::check_output;
use std::process::{Command, Stdio};

/// Runs `scontrol requeue JOB`. Slurm ends the remaining processes of the job, including this one,
/// and queues the job again under the same id.
pub(crate) fn requeue_job(job: u64) -> diagnostic::Result<()> {
    let output = Command::new("scontrol").arg("requeue").arg(job.to_string()).stdin(Stdio::null()).output();
    check_output("scontrol requeue", output).map(drop)
}
