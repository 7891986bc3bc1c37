//! Formats events as one line of text for people.
use crate::format::{format_hosts, format_number};
use diagnostic::quantity::{format_bytes, format_count, format_duration};
use protocol::event::{Event, FailureReport, ResumeSource, StepTimesReport};

/// Formats an event of a run, such as a step or a failure, as one line of text. Omits the output
/// lines and the help of a failure.
pub(crate) fn format_event(event: &Event) -> String {
    match event {
        Event::Start { run, run_dir, world } => {
            let workers = format_count(*world, "worker");
            format!("run {run}: {workers}, run directory {}", run_dir.display())
        }
        Event::Ready { step, total_steps, parameters, tokens_per_step } => {
            let (parameters, tokens) =
                (format_number(*parameters as f64), format_number(*tokens_per_step as f64));
            format!(
                "training {parameters} parameters from step {step} to {total_steps}, {tokens} tokens per step"
            )
        }
        Event::Resume { .. } => format_resume(event),
        Event::Step { step, loss, grad_norm, lr, tokens_per_s, .. } => {
            let speed = format_number(*tokens_per_s);
            format!("step {step}  loss {loss:.4}  grad norm {grad_norm:.3}  lr {lr:.3e}  {speed} tokens/s")
        }
        Event::StepTimes(times) => format_step_times(times),
        Event::Straggler(report) => report.message.clone(),
        Event::Overflow { step, loss_scale, skipped, .. } => format!(
            "step {step}: skipped because a gradient overflowed fp16 ({skipped} skipped so far); \
             loss scale {loss_scale}"
        ),
        Event::Eval { step, loss, perplexity, .. } => {
            format!("step {step}: eval loss {loss:.4}, perplexity {perplexity:.2}")
        }
        Event::Sample { step, prompt, text } => format!("step {step}: prompt {prompt:?} continues {text:?}"),
        Event::Checkpoint { step, path, bytes, seconds } => {
            let size = format_bytes(*bytes);
            format!("step {step}: saved checkpoint {} ({size} in {seconds:.1} s)", path.display())
        }
        Event::Gather { step, path, bytes } => {
            format!("step {step}: saved full weights {} ({})", path.display(), format_bytes(*bytes))
        }
        Event::Reload { step, .. } => format!("job file reloaded, effective from step {}", step + 1),
        Event::Takeover { host, pid, unattended_s } => {
            let unattended = format_duration(*unattended_s);
            format!(
                "the controller on {host} (pid {pid}) has taken over the run, which had none for {unattended}"
            )
        }
        Event::Notice { rank: None, message, .. } => message.clone(),
        Event::Notice { rank: Some(rank), message, .. } => format!("rank {rank}: {message}"),
        Event::Placement { attempt, world, hosts, .. } => {
            let verb = if *attempt > 0 { "restarting" } else { "starting" };
            let workers = format_count(*world, "worker");
            format!("{verb} {workers} on {}", format_hosts(hosts))
        }
        Event::Failure(failure) => format_failure(failure),
        Event::Restart { attempt, restarts_left, pause_s, failure } => {
            let restart = format_restart(*attempt, *restarts_left, *pause_s);
            format!("{}; {restart}", format_failure(failure))
        }
        Event::Done { exit_code: 0, seconds, .. } => format!("done in {}", format_duration(*seconds)),
        Event::Done { exit_code, seconds, .. } => {
            format!("ended with exit code {exit_code} after {}", format_duration(*seconds))
        }
    }
}

/// Formats the event that a run resumes from a checkpoint or from in-memory copies as one line,
/// with the step and the origin. Returns an empty text for other events.
fn format_resume(event: &Event) -> String {
    let Event::Resume { step, path, world, stage, source, reason } = event else { return String::new() };
    let stage = stage.map_or_else(String::new, |stage| format!(" at ZeRO stage {stage}"));
    let workers = world.map(|world| format_count(world, "worker"));
    let writer = workers.map_or_else(String::new, |workers| format!(" (written by {workers}{stage})"));
    let path = match source {
        ResumeSource::Memory => "copies in memory".to_owned(),
        ResumeSource::Checkpoint => path.display().to_string(),
    };
    let reason = reason.as_ref().map_or_else(String::new, |reason| format!("; {reason}"));
    format!("resuming at step {step} from {path}{writer}{reason}")
}

/// Formats how long a training step took, and between which times, in seconds, the ranks worked and
/// waited for other ranks.
fn format_step_times(times: &StepTimesReport) -> String {
    let (work, waiting) = (&times.work_s, &times.waiting_s);
    format!(
        "step {}: {:.3} s per step; ranks work for {:.3} to {:.3} s (rank {}) and wait for {:.3} to {:.3} s",
        times.step, times.step_s, work.min, work.max, times.slowest_rank, waiting.min, waiting.max
    )
}

/// Formats a failure as one line, such as
/// `error[worker-exited]: rank 1 (pid 4711 on node-3): exited with code 3`.
pub(super) fn format_failure(failure: &FailureReport) -> String {
    let FailureReport { rank, host, pid, reason, message, .. } = failure;
    let subject = match rank {
        Some(rank) if *pid != 0 => format!("rank {rank} (pid {pid} on {host}): "),
        Some(rank) => format!("rank {rank} (on {host}): "),
        None => String::new(),
    };
    format!("error[{}]: {subject}{message}", reason.code())
}

/// Formats the number of a restart, the number of allowed restarts and the pause before the
/// restart: `restart 1 of 3 in 2.0 s`.
pub(super) fn format_restart(restart: u32, restarts_left: u32, pause_s: f64) -> String {
    let total = u64::from(restart) + u64::from(restarts_left);
    format!("restart {restart} of {total} in {pause_s:.1} s")
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{
        event::{StepTimesReport, TimeStatistics},
        failure::FailureReason,
    };

    fn sample_failure() -> Box<FailureReport> {
        Box::new(FailureReport {
            rank: Some(1),
            host: "node-3".into(),
            pid: 4711,
            reason: FailureReason::Signal { name: "SIGKILL".into(), number: 9, core_dumped: false },
            message: "killed by SIGKILL".into(),
            ..FailureReport::default()
        })
    }

    #[test]
    fn each_event_has_a_line() {
        let path = || "runs/a/checkpoints/step-00000040".into();
        let hosts = |n: usize| (0..n).map(|i| format!("h{i}")).collect();
        let events = [
            Event::Start { run: "r1".into(), run_dir: "runs/a/r1".into(), world: 1 },
            Event::Start { run: "r1".into(), run_dir: "runs/a/r1".into(), world: 8 },
            Event::Ready { step: 0, total_steps: 100, parameters: 124_000_000, tokens_per_step: 8192 },
            Event::Resume {
                step: 40,
                path: path(),
                world: Some(4),
                stage: Some(2),
                source: ResumeSource::Checkpoint,
                reason: None,
            },
            Event::Resume {
                step: 40,
                path: path(),
                world: None,
                stage: None,
                source: ResumeSource::Memory,
                reason: Some("step 41 in memory has no copy of rank 3".into()),
            },
            Event::Step {
                step: 7,
                loss: 3.25,
                grad_norm: 0.5,
                lr: 3e-4,
                tokens: 1,
                tokens_per_s: 12_345.0,
                peak_rss: 1,
                exposed_comm_s: 0.0,
            },
            Event::StepTimes(StepTimesReport {
                step: 7,
                steps: 5,
                step_s: 0.5,
                work_s: TimeStatistics { min: 0.3, median: 0.31, max: 0.45 },
                waiting_s: TimeStatistics { min: 0.05, median: 0.19, max: 0.2 },
                collective_s: TimeStatistics::default(),
                slowest_rank: 2,
            }),
            Event::Overflow { step: 7, loss: 3.25, loss_scale: 1024.0, skipped: 2 },
            Event::Eval { step: 10, loss: 2.0, perplexity: 7.389, tokens: 5 },
            Event::Sample { step: 10, prompt: "Once".into(), text: " upon".into() },
            Event::Checkpoint { step: 40, path: path(), bytes: 1 << 20, seconds: 0.25 },
            Event::Gather { step: 40, path: "weights".into(), bytes: 1 << 30 },
            Event::Takeover { host: "login1".into(), pid: 77, unattended_s: 12.5 },
            Event::new_notice(None, "draining host h1"),
            Event::new_notice(Some(3), "slow storage"),
            Event::Placement { attempt: 0, world: 4, hosts: hosts(2), workers: vec![2; 2] },
            Event::Placement { attempt: 1, world: 64, hosts: hosts(64), workers: vec![1; 64] },
            Event::Failure(sample_failure()),
            Event::Failure(Box::new(FailureReport { pid: 0, ..*sample_failure() })),
            Event::Restart { attempt: 1, restarts_left: 2, pause_s: 1.0, failure: sample_failure() },
            Event::Done { exit_code: 0, step: Some(100), seconds: 75.0 },
            Event::Done { exit_code: 1, step: None, seconds: 3.0 },
        ];
        insta::assert_snapshot!(events.iter().map(format_event).collect::<Vec<_>>().join("\n"));
    }
}
