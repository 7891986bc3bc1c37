//! Submits a batch script to Slurm.
use super::{build_start_error, check_output};
use diagnostic::{Diagnostic, codes::slurm};
use std::{
    io::Write as _,
    process::{Command, Stdio},
};

/// Submits a batch script with `sbatch OPTIONS…`. Returns the id of the job, a decimal number.
/// Blocks. Fails if sbatch fails or prints no id.
pub(crate) fn submit_job(script: &str, options: &[String]) -> diagnostic::Result<String> {
    let mut command = Command::new("sbatch");
    command.arg("--parsable").args(options);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| build_start_error("sbatch", &error))?;
    if let Some(mut stdin) = child.stdin.take() {
        // If sbatch has ended already, its exit status and output explain why.
        _ = stdin.write_all(script.as_bytes());
    }
    let output = check_output("sbatch", child.wait_with_output())?;
    // `ID` or `ID;CLUSTER`
    let text = String::from_utf8_lossy(&output.stdout);
    let job = text.trim().split(';').next().unwrap_or_default();
    if !job.is_empty() && job.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(job.to_owned());
    }
    let message = format!("`sbatch` printed `{}`; expected the id of the job", text.trim());
    Err(Diagnostic::error(slurm::SLURM_COMMAND_FAILED, message).with_subject("sbatch"))
}
