//! Asking Slurm to start this job again.
use std::process::{Command, Stdio};

/// `scontrol requeue JOB`: Slurm ends what is left of this job and puts it back into the queue under the same id. The
/// error is what scontrol says.
pub(crate) fn requeue(job: u64) -> Result<(), String> {
    let output = Command::new("scontrol")
        .arg("requeue")
        .arg(job.to_string())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("scontrol can't be started: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " | ");
    Err(if said.is_empty() { format!("scontrol requeue {job}: {}", output.status) } else { said })
}
