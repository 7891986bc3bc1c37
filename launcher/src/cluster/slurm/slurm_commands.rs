//! Runs the commands of Slurm, for example to submit a batch script or requeue a batch job.
use super::{
    allocation::{SlurmJobGpus, expand_node_list},
    srun,
};
use crate::cluster::batch_scheduler_types::{BatchJobEnd, BatchJobEndReason};
use diagnostic::{Diagnostic, codes::slurm};
use jiff::{Zoned, civil};
use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    process::{Command, ExitStatus, Output, Stdio},
    sync::OnceLock,
    time::Duration,
};

/// How long before the planned end of a Slurm job a SIGTERM is taken as the announcement that the
/// job reaches its time limit. The default of `slurm.signal_time` is as long.
const TIME_LIMIT_WINDOW: Duration = Duration::from_secs(120);

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

/// Asks Slurm why it ends the Slurm job `job`, after SIGTERM has announced the end of the job.
/// Blocks.
pub(super) fn query_job_end(job: u64) -> diagnostic::Result<BatchJobEnd> {
    let reason = parse_end_reason(&read_scontrol_show_job(job)?, civil::DateTime::from(Zoned::now()));
    Ok(BatchJobEnd { label: format!("Slurm job {job}"), reason })
}

/// Asks Slurm how many GPUs the Slurm job `job`, in which this process runs, has on each of its
/// nodes, and whether the job requested them. The numbers do not change, so calls after a
/// successful one return its result. Blocks.
pub(super) fn query_job_gpus(job: u64) -> diagnostic::Result<SlurmJobGpus> {
    static ANSWER: OnceLock<SlurmJobGpus> = OnceLock::new();
    if let Some(gpus) = ANSWER.get() {
        return Ok(gpus.clone());
    }
    let gpus = parse_job_gpus(&read_scontrol_show_job(job)?);
    Ok(ANSWER.get_or_init(|| gpus).clone())
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

/// Parses, from the output of `scontrol show job`, why Slurm ends a job whose processes have got
/// SIGTERM. `now` is the local time.
///
/// When Slurm ends a job at its time limit or after `scancel`, it sets the end time to the present.
/// While processes of the job still run, the state is then `COMPLETING`, and only the time limit
/// has a `Reason`. A job in preemption keeps the state `RUNNING` for its grace time.
fn parse_end_reason(output: &str, now: civil::DateTime) -> BatchJobEndReason {
    let field =
        |name: &str| output.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let time = |name: &str| field(name)?.parse::<civil::DateTime>().ok();
    // A negative duration becomes 0.
    let left = time("EndTime").map(|end| Duration::try_from(end.duration_since(now)).unwrap_or_default());
    // The time of a preemption remains when Slurm requeues the job.
    let is_preempted = |at: civil::DateTime| time("StartTime").is_none_or(|start| at >= start);
    if time("PreemptTime").is_some_and(is_preempted) {
        return BatchJobEndReason::Preemption { time_left: left.unwrap_or_default() };
    }
    match (field("JobState"), field("Reason"), left) {
        (Some("TIMEOUT"), ..) | (_, Some("TimeLimit"), _) => BatchJobEndReason::TimeLimit,
        (Some("CANCELLED"), ..) | (Some("COMPLETING"), Some("None"), _) => BatchJobEndReason::Cancelled,
        (Some("RUNNING"), _, Some(left)) if left <= TIME_LIMIT_WINDOW => BatchJobEndReason::TimeLimit,
        (Some("RUNNING"), ..) => BatchJobEndReason::Signal,
        _ => BatchJobEndReason::Unknown,
    }
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

    /// Parses the reason for the end of a job that began at 04:59:34. The present time is 04:59:40.
    fn parse_reason(output: &str) -> BatchJobEndReason {
        let now = "2026-11-24T04:59:40".parse().expect("a time");
        parse_end_reason(&format!("JobId=7 StartTime=2026-11-24T04:59:34 {output}"), now)
    }

    #[test]
    fn a_preemption_of_the_current_run_is_found() {
        let running = "JobState=RUNNING Reason=None EndTime=2026-11-24T05:00:08";
        let preemption = |seconds| BatchJobEndReason::Preemption { time_left: Duration::from_secs(seconds) };
        assert_eq!(parse_reason(&format!("{running} PreemptTime=2026-11-24T04:59:38")), preemption(28));
        for time in ["None", "2026-11-24T04:50:00"] {
            let reason = parse_reason(&format!("{running} PreemptTime={time}"));
            assert_eq!(reason, BatchJobEndReason::TimeLimit, "no preemption of the current run");
        }
        let ended = "PreemptTime=2026-11-24T04:59:38 EndTime=2026-11-24T04:59:39";
        assert_eq!(parse_reason(ended), preemption(0));
    }

    #[test]
    fn time_limit_cancellation_and_signal_are_distinguished() {
        let (past, future) = ("EndTime=2026-11-24T04:59:39", "EndTime=2026-11-24T09:59:34");
        for (state, end, reason) in [
            ("JobState=COMPLETING Reason=TimeLimit", past, BatchJobEndReason::TimeLimit),
            ("JobState=TIMEOUT Reason=TimeLimit", past, BatchJobEndReason::TimeLimit),
            ("JobState=RUNNING Reason=None", past, BatchJobEndReason::TimeLimit),
            ("JobState=RUNNING Reason=None", future, BatchJobEndReason::Signal),
            ("JobState=RUNNING Reason=None", "EndTime=Unknown", BatchJobEndReason::Signal),
            ("JobState=COMPLETING Reason=None", past, BatchJobEndReason::Cancelled),
            ("JobState=CANCELLED Reason=None", past, BatchJobEndReason::Cancelled),
            ("JobState=COMPLETING Reason=NodeDown", past, BatchJobEndReason::Unknown),
            ("slurm_load_jobs error", "", BatchJobEndReason::Unknown),
        ] {
            assert_eq!(parse_reason(&format!("{state} {end} PreemptTime=None")), reason, "{state} {end}");
        }
    }
}
