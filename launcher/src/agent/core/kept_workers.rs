//! The part of the agent's state machine that keeps the processes of workers between attempts
//! (starts of all workers).
//!
//! After a failure of another worker, the controller may allow built-in workers to leave the
//! attempt instead of ending. The process of a worker that has left waits for the next attempt. It
//! takes part in that attempt if its place in the job is unchanged, and is killed otherwise.
use super::{AgentAction, AgentCore, ProcessGroupSignal, SupervisedWorker};
use jobspec::{env, ids::Rank};
use protocol::control::{FromAgent, HostPlan, WorkerPlan};
use std::{collections::BTreeMap, time::Duration};

/// How long a worker that has left an attempt (one start of all workers) waits for the next
/// attempt, before its process is killed. The controller may wait this long for a lost host, and a
/// host may be a spare host from now on.
pub(super) const MAX_WAIT_FOR_NEXT_ATTEMPT: Duration = Duration::from_secs(600);
/// The largest age of a worker's last message at which the agent still keeps the worker's process
/// for the next attempt (start of all workers). Workers send a heartbeat every second, so an older
/// message means that the process is stopped or its connection does not work.
const MAX_REJOIN_MESSAGE_AGE: Duration = Duration::from_secs(4);
/// The environment variables that differ between attempts (starts of all workers) and are ignored
/// when the settings of two attempts are compared.
const PER_ATTEMPT_VARIABLES: [&str; 1] = [env::MASTER_PORT];

impl AgentCore {
    /// Returns whether all workers of this host are built-in workers, whose processes can take part
    /// in several attempts (starts of all workers).
    pub(super) fn runs_builtin_workers(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.workers.iter().all(|w| w.command.is_none()))
    }

    /// Returns the ranks of the workers that have left an attempt (start of all workers) and whose
    /// processes wait for the next one, in ascending order.
    pub(super) fn waiting_ranks(&self) -> Vec<Rank> {
        self.workers.iter().filter(|(_, w)| w.is_waiting_for_next_attempt()).map(|(r, _)| *r).collect()
    }

    /// Records that a worker has left the current attempt (start of all workers) but keeps its
    /// process for the next attempt, and informs the controller. Ignores a worker that must end
    /// instead, which is killed after the grace period.
    pub(super) fn on_worker_left(&mut self, rank: Rank, attempt: u32) {
        let may_leave = self.may_leave && attempt == self.attempt;
        let may_leave =
            |worker: &SupervisedWorker| may_leave && worker.is_alive() && !worker.silence_reported;
        let Some(worker) = self.workers.get_mut(&rank).filter(|worker| may_leave(worker)) else { return };
        worker.has_left = true;
        if let Some(pid) = worker.pid {
            self.send_to_controller(FromAgent::Left { attempt, rank, pid });
        }
    }

    /// Kills the process of each worker that waits for the next attempt (start of all workers) and
    /// has a rank that `selects` accepts.
    pub(super) fn kill_waiting_workers(&mut self, selects: impl Fn(Rank) -> bool) {
        let ranks = self.waiting_ranks().into_iter().filter(|rank| selects(*rank));
        self.out.extend(ranks.map(|rank| AgentAction::Signal(rank, ProcessGroupSignal::Kill)));
    }

    /// Selects the waiting worker processes to reuse in the next attempt (start of all workers):
    /// those with a working connection and unchanged settings. Kills the other waiting processes.
    pub(super) fn select_rejoining_and_kill_others(&mut self, now: Duration, next: &HostPlan) {
        let can_rejoin = |rank: &Rank| {
            let worker = &self.workers[rank];
            worker.connection_open
                && now <= worker.last_message_at + MAX_REJOIN_MESSAGE_AGE
                && self.plan.as_deref().is_some_and(|last| is_worker_unchanged(last, next, *rank))
        };
        let ranks = self.waiting_ranks().into_iter().filter(can_rejoin);
        let pid_of = |rank: Rank| self.workers[&rank].pid.map(|pid| (rank, pid));
        let rejoining: BTreeMap<Rank, u32> = ranks.filter_map(pid_of).collect();
        self.kill_waiting_workers(|rank| !rejoining.contains_key(&rank));
        (self.rejoining, self.waiting_until) = (rejoining, None);
    }
}

/// Returns whether two attempts (starts of all workers) have equal settings for the job and for a
/// built-in worker, apart from values that each attempt sets differently.
fn is_worker_unchanged(last: &HostPlan, next: &HostPlan, rank: Rank) -> bool {
    let find =
        |plan: &HostPlan| plan.workers.iter().find(|w| w.rank == rank).cloned().map(remove_attempt_values);
    // The checkpoint from which an attempt resumes is in the first message of each attempt.
    let job = |plan: &HostPlan| {
        let mut job = plan.job.clone();
        job.resume = next.job.resume.clone();
        job
    };
    let is_builtin = |worker: &WorkerPlan| worker.command.is_none();
    find(next).is_some_and(|worker| is_builtin(&worker) && find(last) == Some(worker))
        && (&last.run, &last.run_dir, last.world) == (&next.run, &next.run_dir, next.world)
        && job(last) == next.job
}

/// Returns the settings of a worker without the environment variables that differ between attempts
/// (starts of all workers), so that two attempts can be compared.
fn remove_attempt_values(mut worker: WorkerPlan) -> WorkerPlan {
    worker.env.retain(|(name, _)| !PER_ATTEMPT_VARIABLES.contains(&name.as_str()));
    worker
}
