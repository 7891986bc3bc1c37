//! Handing a batch script to Slurm.
use std::{
    io::Write as _,
    process::{Command, Stdio},
};

/// `sbatch OPTIONS…` with the script on its stdin: the job's id. The error is what sbatch says.
pub(crate) fn submit(script: &str, options: &[String]) -> Result<String, String> {
    let mut command = Command::new("sbatch");
    command.arg("--parsable").args(options);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "sbatch isn't in PATH: is this a node of a Slurm cluster?".to_owned(),
        _ => format!("sbatch can't be started: {error}"),
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        // If sbatch is gone already, it says why.
        _ = stdin.write_all(script.as_bytes());
    }
    let output = child.wait_with_output().map_err(|error| format!("sbatch: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " | ");
    if !output.status.success() {
        return Err(if said.is_empty() { format!("sbatch: {}", output.status) } else { said });
    }
    // `ID` or `ID;CLUSTER`
    let text = String::from_utf8_lossy(&output.stdout);
    let job = text.trim().split(';').next().unwrap_or_default();
    let number = !job.is_empty() && job.bytes().all(|b| b.is_ascii_digit());
    if number {
        Ok(job.to_owned())
    } else {
        Err(format!("sbatch answered `{}`, which is no job id", text.trim()))
    }
}
