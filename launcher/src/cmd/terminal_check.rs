//! [`check_terminal`]: checks that one rank, which `run.terminal` selects, can use the terminal of
//! this process for input and output.
use crate::{cluster::HostTarget, plan::Plan, report::command_output};
use diagnostic::{Diagnostic, codes::host, quantity::format_count};
use jobspec::JobSpec;

/// Checks that this process has a terminal and that the rank that `run.terminal` selects will run
/// on this machine. `is_detached` states whether this process is a controller in the background.
pub(super) fn check_terminal(
    job: &JobSpec,
    plan: &Plan,
    hosts: &[HostTarget],
    is_detached: bool,
) -> diagnostic::Result<()> {
    let Some(rank) = job.run.terminal else { return Ok(()) };
    let error = |code, message: String| {
        Err(Diagnostic::error(code, message)
            .with_subject("run.terminal")
            .with_field("rank", rank)
            .with_remedy())
    };
    let has_rank = |index: &usize| plan.host_plans[*index].workers.iter().any(|worker| worker.rank == rank);
    let host = (0..plan.host_plans.len()).find(has_rank).and_then(|index| hosts.get(index));
    match host {
        None => {
            let workers = format_count(plan.world, "worker");
            error(host::TERMINAL_RANK_UNKNOWN, format!("there is no rank {rank}: the job has {workers}"))
        }
        Some(host) if !host.local => {
            let message =
                format!("rank {rank} runs on host {}, and the terminal is on this machine", host.name);
            error(host::TERMINAL_RANK_REMOTE, message)
        }
        Some(_) if is_detached || !command_output::stdin_is_terminal() => {
            error(host::TERMINAL_MISSING, format!("rank {rank} needs a terminal, and stdin is none"))
        }
        Some(_) => Ok(()),
    }
}
