//! Runs the commands of Slurm, for example to submit a batch script or requeue a batch job.
use super::{
    allocation::{SlurmJobGpus, expand_node_list},
    srun,
};
use crate::cluster::batch_scheduler_types::Preemption;
use diagnostic::{Diagnostic, codes::slurm};
use jiff::{Zoned, civil};
use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    process::{Command, ExitStatus, Output, Stdio},
    time::Duration,
};

/// Submits the batch script `script` to Slurm's queue with `sbatch OPTIONS…`. Returns the id of the
/// job, a decimal number. Blocks. Fails if sbatch fails or prints no id.
pub(super) fn submit_job(script: &str, options: &[String]) -> diagnostic::Result<String> {
    let mut command = Command::new("sbatch");
    command.arg("--parsable").args(options);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| build_start_error("sbatch", &error))?;
    if let Some(mut stdin) = child.stdin.take() {
        // If sbatch has ended already, its exit status and output explain why.
        _ = stdin.write_all(script.as_bytes());
    }
    let output = check_command_output("sbatch", child.wait_with_output())?;
    // `ID` or `ID;CLUSTER`
    let text = String::from_utf8_lossy(&output.stdout);
    let job = text.trim().split(';').next().unwrap_or_default();
    if !job.is_empty() && job.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(job.to_owned());
    }
    let message = format!("`sbatch` printed `{}`; expected the id of the job", text.trim());
    Err(Diagnostic::error(slurm::SLURM_COMMAND_FAILED, message).with_subject("sbatch"))
}

/// Asks Slurm to queue the running batch job `job` again, with `scontrol requeue JOB`. Slurm ends
/// the remaining processes of the job, including this one, and queues the job again under the same
/// id.
pub(super) fn requeue_job(job: &str) -> diagnostic::Result<()> {
    let output = Command::new("scontrol").arg("requeue").arg(job).stdin(Stdio::null()).output();
    check_command_output("scontrol requeue", output).map(drop)
}

/// Asks Slurm whether it is preempting the Slurm job `job`, and returns how much time the job has
/// left, or `None` if it is not. Blocks.
pub(super) fn find_preemption(job: u64) -> diagnostic::Result<Option<Preemption>> {
    Ok(parse_preemption(job, &read_scontrol_show_job(job)?, civil::DateTime::from(Zoned::now())))
}

/// Asks Slurm how many GPUs the Slurm job `job` has on each of its nodes, and whether the job
/// requested them. Blocks.
pub(super) fn query_job_gpus(job: u64) -> diagnostic::Result<SlurmJobGpus> {
    Ok(parse_job_gpus(&read_scontrol_show_job(job)?))
}

/// Returns the output of `scontrol --details show job` for the Slurm job `job`. Blocks.
fn read_scontrol_show_job(job: u64) -> diagnostic::Result<String> {
    let mut command = Command::new("scontrol");
    command.args(["--details", "show", "job", &job.to_string()]).stdin(Stdio::null());
    let output = check_command_output("scontrol show job", command.output())?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Parses the GPUs of a job from the output of `scontrol --details show job`. In this output, the
/// GPUs of nodes are in lines such as `Nodes=h[1-2] CPU_IDs=0-7 Mem=1000 GRES=gpu:a100:2(IDX:0,3)`.
/// A job that has requested GPUs has a field such as `TresPerNode=gres:gpu:2`.
fn parse_job_gpus(output: &str) -> SlurmJobGpus {
    let mut counts = BTreeMap::new();
    for line in output.lines() {
        let field = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name));
        let (Some(nodes), Some(resources)) = (field("Nodes="), field("GRES=")) else { continue };
        // The indices of devices in parentheses may contain commas.
        let outside: String =
            resources.split('(').map(|part| part.rsplit(')').next().unwrap_or(part)).collect();
        let gpus = outside.split(',').filter(|resource| resource.starts_with("gpu:"));
        let count = gpus.filter_map(|resource| resource.rsplit(':').next()?.parse::<u32>().ok()).sum();
        counts.extend(expand_node_list(nodes).unwrap_or_default().into_iter().map(|node| (node, count)));
    }
    let is_request = |word: &str| word.starts_with("TresPer") && word.contains("gpu");
    SlurmJobGpus { counts, are_requested: output.split_whitespace().any(is_request) }
}

/// Parses, from the output of `scontrol show job`, whether Slurm is preempting the job and how much
/// time is left. Returns the preemption of the job, if the job is being preempted in its current
/// run. `now` is the local time.
fn parse_preemption(job: u64, output: &str, now: civil::DateTime) -> Option<Preemption> {
    let field = |name: &str| {
        let value = |word: &str| word.strip_prefix(name)?.strip_prefix('=')?.parse::<civil::DateTime>().ok();
        output.split_whitespace().find_map(value)
    };
    // The time remains when Slurm requeues the job.
    let preempted = field("PreemptTime")?;
    if field("StartTime").is_some_and(|start| preempted < start) {
        return None;
    }
    let left = field("EndTime").and_then(|end| Duration::try_from(end.duration_since(now)).ok());
    Some(Preemption { label: format!("Slurm job {job}"), time_left: left.unwrap_or_default() })
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
    let code = srun::classify_failure_output(&stderr).unwrap_or(slurm::SLURM_COMMAND_FAILED);
    Diagnostic::error(code, format!("`{command}` failed ({status}){separator}{stderr}"))
        .with_subject(command)
        .with_field("output", stderr)
}

/// Returns the output of a Slurm command that has ended, or an error if the command has failed.
/// Fails if the command could not be started, or if its exit status is not 0.
pub(super) fn check_command_output(command: &str, output: io::Result<Output>) -> diagnostic::Result<Output> {
    let output = output.map_err(|error| build_start_error(command, &error))?;
    if output.status.success() {
        Ok(output)
    } else {
        Err(build_command_error(command, output.status, &output.stderr))
    }
}

/// Joins the lines of a command's output with ` | ` for an error message, after removing the white
/// space at both ends of the output.
fn join_lines(text: &[u8]) -> String {
    String::from_utf8_lossy(text).trim().replace('\n', " | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_counted_on_each_node() {
        let output = "JobId=1 JobName=wrap\n   NumNodes=4 NumCPUs=2\n\
                      \x20    Nodes=h[1-2] CPU_IDs=0-7 Mem=1000 GRES=gpu:a100:2(IDX:0,3),gpu:h100:1(IDX:4)\n\
                      \x20    Nodes=h3 CPU_IDs=0 Mem=1000 GRES=shard:4,gpu:1(IDX:0)\n\
                      \x20    Nodes=h4 CPU_IDs=0 Mem=1000 GRES=";
        let job = parse_job_gpus(output);
        let counts: Vec<(String, u32)> = job.counts.into_iter().collect();
        let expected = [("h1", 3), ("h2", 3), ("h3", 1), ("h4", 0)];
        assert_eq!(counts, expected.map(|(node, count)| (node.to_owned(), count)));
        assert!(!job.are_requested);
        assert!(parse_job_gpus(&format!("{output}\n   TresPerNode=gres:gpu:2")).are_requested);
        assert!(!parse_job_gpus(&format!("{output}\n   TresPerNode=gres:license:2")).are_requested);
    }

    #[test]
    fn a_preemption_of_the_current_run_is_found() {
        let now = "2026-11-24T04:59:40".parse().expect("a time");
        let find = |text: &str| parse_preemption(7, text, now).map(|found| found.time_left.as_secs());
        let times = "StartTime=2026-11-24T04:59:34 EndTime=2026-11-24T05:00:08";
        assert_eq!(find(&format!("JobId=7 {times} PreemptTime=2026-11-24T04:59:38")), Some(28));
        assert_eq!(find(&format!("JobId=7 {times} PreemptTime=None")), None);
        assert_eq!(find(&format!("JobId=7 {times} PreemptTime=2026-11-24T04:50:00")), None, "an earlier run");
        assert_eq!(find("PreemptTime=2026-11-24T04:59:38 EndTime=2026-11-24T04:59:39"), Some(0));
        assert_eq!(find("slurm_load_jobs error"), None);
    }
}
