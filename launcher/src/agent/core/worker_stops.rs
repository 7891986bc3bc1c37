//! The part of the agent's state machine that asks workers to save and stop, because the controller
//! requests it or because the controller was lost.
//!
//! A program gets the signal `run.stop_signal` first. If the program still runs after
//! `run.stop_timeout`, it gets SIGTERM, and then SIGKILL at the deadline of the request.
use super::{AgentAction, AgentCore, ProcessGroupSignal};
use jobspec::{StopSignal, ids::Rank};
use protocol::control::ToWorker;
use std::time::Duration;

impl AgentCore {
    /// Asks all workers of this host to save a checkpoint and exit. Schedules a kill of the workers
    /// that still run `deadline_ms` milliseconds after `now`. With `None`, no kill is scheduled.
    pub(super) fn stop_workers(&mut self, now: Duration, deadline_ms: Option<u64>) {
        // A second signal, from a later controller, would end some programs without a save.
        let is_repeated = std::mem::replace(&mut self.stop_requested, true);
        if !is_repeated {
            let delay = self.plan.as_ref().map_or(0, |plan| plan.job.run.sigterm_delay_ms());
            self.terminate_at = self.find_stop_signal().map(|_| now + Duration::from_millis(delay));
            self.running_ranks().into_iter().for_each(|rank| self.stop_worker(rank));
        }
        if self.preparing {
            // No worker was started, and the preparation may be blocked by a disk.
            (self.preparing, self.spawning) = (false, false);
        }
        if let Some(ms) = deadline_ms {
            self.schedule_kill(now + Duration::from_millis(ms));
        }
    }

    /// Asks the worker with the rank `rank` to save a checkpoint and exit. A built-in worker gets a
    /// message. A program gets the signal `run.stop_signal` or, if the time for this signal has
    /// passed, SIGTERM.
    pub(super) fn stop_worker(&mut self, rank: Rank) {
        let is_before_sigterm = self.terminate_at.is_some_and(|at| self.now < at);
        let signal = self.find_stop_signal().filter(|_| is_before_sigterm);
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        if worker.builtin {
            return self.send_to_worker(rank, ToWorker::Stop);
        }
        worker.awaits_sigterm = signal.is_some();
        self.out.push(match signal {
            Some(signal) => AgentAction::RequestStop(rank, signal),
            None => AgentAction::Signal(rank, ProcessGroupSignal::Terminate),
        });
    }

    /// Returns the signal by which the programs of this attempt are asked to save and stop before
    /// they get SIGTERM (`run.stop_signal`). Returns `None` if they get SIGTERM at once.
    fn find_stop_signal(&self) -> Option<StopSignal> {
        let plan = self.plan.as_ref()?;
        let has_program = plan.workers.iter().any(|worker| worker.command.is_some());
        Some(plan.job.run.stop_signal).filter(|signal| has_program && *signal != StopSignal::Term)
    }

    /// Sends SIGTERM to a program that has no handler for `run.stop_signal`, the signal that asks
    /// programs to save and stop. Warns the user once per attempt.
    pub(super) fn on_stop_signal_unhandled(&mut self, rank: Rank) {
        let is_awaiting = |worker: &&mut super::SupervisedWorker| worker.awaits_sigterm && worker.is_alive();
        let Some(worker) = self.workers.get_mut(&rank).filter(is_awaiting) else { return };
        worker.awaits_sigterm = false;
        self.out.push(AgentAction::Signal(rank, ProcessGroupSignal::Terminate));
        if !std::mem::replace(&mut self.unhandled_stop_reported, true) {
            let name = self.find_stop_signal().unwrap_or_default().name();
            let message = format!(
                "the program has no handler for {name} (`run.stop_signal`), so it gets SIGTERM at once, \
                 as do other ranks without a handler"
            );
            self.report_warning(rank, message);
        }
    }

    /// Sends SIGTERM to those programs that still run after the time `run.stop_timeout` has passed
    /// since they were asked to save and stop. Does nothing before this time.
    pub(super) fn terminate_remaining_programs(&mut self, now: Duration) {
        if self.terminate_at.is_none_or(|at| now < at) {
            return;
        }
        self.terminate_at = None;
        for (rank, worker) in &mut self.workers {
            if std::mem::take(&mut worker.awaits_sigterm) && worker.is_alive() {
                self.out.push(AgentAction::Signal(*rank, ProcessGroupSignal::Terminate));
            }
        }
    }
}
