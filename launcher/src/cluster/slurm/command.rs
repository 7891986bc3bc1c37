//! Runs the commands of Slurm: submits a batch script and requeues a batch job.
use super::srun;
use diagnostic::{Diagnostic, codes::slurm};
use std::{
    io::{self, Write as _},
    process::{Command, ExitStatus, Output, Stdio},
};

/// Submits a batch script with `sbatch OPTIONS…`. Returns the id of the job, a decimal number.
/// Blocks. Fails if sbatch fails or prints no id.
pub(super) fn submit_job(script: &str, options: &[String]) -> diagnostic::Result<String> {
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

/// Runs `scontrol requeue JOB`. Slurm ends the remaining processes of the job, including this one,
/// and queues the job again under the same id.
pub(super) fn requeue_job(job: &str) -> diagnostic::Result<()> {
    let output = Command::new("scontrol").arg("requeue").arg(job).stdin(Stdio::null()).output();
    check_output("scontrol requeue", output).map(drop)
}

/// Builds the error for a command of Slurm that could not be started.
pub(super) fn build_start_error(command: &str, error: &io::Error) -> Diagnostic {
    match error.kind() {
        io::ErrorKind::NotFound => {
            let message = format!("`{command}` is not in PATH");
            Diagnostic::error(slurm::SLURM_COMMAND_MISSING, message)
                .with_help("run launch on a node of a Slurm cluster, with Slurm's client in PATH")
        }
        _ => Diagnostic::error(slurm::SLURM_COMMAND_FAILED, format!("cannot start `{command}`"))
            .with_cause(error),
    }
    .with_subject(command)
}

/// Builds the error for a command of Slurm that ended with a nonzero exit status or by a signal.
fn build_command_error(command: &str, status: ExitStatus, stderr: &[u8]) -> Diagnostic {
    let stderr = join_lines(stderr);
    let separator = if stderr.is_empty() { "" } else { ": " };
    let code = srun::classify_output(&stderr).unwrap_or(slurm::SLURM_COMMAND_FAILED);
    Diagnostic::error(code, format!("`{command}` failed ({status}){separator}{stderr}"))
        .with_subject(command)
        .with_field("output", stderr)
}

/// Returns the output of a command of Slurm. Fails if the command could not be started, or if its
/// exit status is not 0.
pub(super) fn check_output(command: &str, output: io::Result<Output>) -> diagnostic::Result<Output> {
    let output = output.map_err(|error| build_start_error(command, &error))?;
    if output.status.success() {
        Ok(output)
    } else {
        Err(build_command_error(command, output.status, &output.stderr))
    }
}

/// Joins the lines of a text with ` | `, without white space at both ends.
fn join_lines(text: &[u8]) -> String {
    String::from_utf8_lossy(text).trim().replace('\n', " | ")
}
