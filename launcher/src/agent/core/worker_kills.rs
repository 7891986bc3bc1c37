//! The part of the agent's state machine that ends the workers of an attempt on request of the
//! controller.
use super::{
    AgentAction, AgentCore, AgentState, ProcessGroupSignal, STACKS_TIMEOUT, kill_request::KillRequest,
};
use protocol::{
    control::{FromAgent, ToWorker},
    hang::RankEvidence,
};
use std::time::Duration;

impl AgentCore {
    /// Ends all workers of this host within the grace period that the controller's request to end
    /// them contains.
    ///
    /// With `stacks`, first writes the stacks of the workers to their logs. The grace period then
    /// begins after the stacks were written. A second request in this time ends the workers
    /// immediately, without waiting for the stacks.
    pub(super) fn kill_workers(&mut self, now: Duration, request: KillRequest, stacks: bool) {
        let living = self.running_ranks();
        if stacks && self.kill_after_stacks.is_none() && !living.is_empty() {
            self.kill_after_stacks = Some(request);
            self.stacks_deadline = now + STACKS_TIMEOUT;
            return self.out.push(AgentAction::WriteStacks(living));
        }
        // A second kill request does not wait for the stacks that the first one requested.
        self.kill_after_stacks = None;
        self.end_workers_with_grace_period(now, request);
    }

    /// Reports to the controller what each hanging worker does, after the stacks of these workers
    /// were written to their logs. The workers then continue until the controller repeats its kill
    /// request, because their end would end ranks on other hosts, about which there may be no
    /// evidence yet. Without evidence, executes the kill request.
    pub(super) fn on_stacks_written(&mut self, now: Duration, evidence: Vec<RankEvidence>) {
        if evidence.is_empty() {
            return self.execute_postponed_kill(now);
        }
        if self.kill_after_stacks.is_none() {
            return; // the workers have ended or are ending
        }
        for evidence in evidence {
            let attempt = self.attempt;
            self.send_to_controller(FromAgent::HangEvidence { attempt, evidence: Box::new(evidence) });
        }
    }

    /// Executes a kill request of the controller that was postponed until the stacks of the workers
    /// were written to their logs.
    pub(super) fn execute_postponed_kill(&mut self, now: Duration) {
        self.stacks_deadline = Duration::MAX;
        if let Some(request) = self.kill_after_stacks.take() {
            self.end_workers_with_grace_period(now, request);
        }
    }

    /// Asks all workers of this host to end now, and schedules a kill of those that still run after
    /// the grace period in `request`.
    ///
    /// Initialized built-in workers get an abort message, and all others get SIGTERM. With a grace
    /// period of 0, all workers are killed immediately instead.
    fn end_workers_with_grace_period(&mut self, now: Duration, request: KillRequest) {
        let KillRequest { reason, grace_ms, leave_ms } = request;
        // Programs get SIGTERM or SIGKILL now.
        self.terminate_at = None;
        let leave_ms = leave_ms.filter(|_| self.runs_builtin_workers());
        self.may_leave = leave_ms.is_some();
        if !self.may_leave {
            self.kill_waiting_workers(|_| true);
        }
        self.schedule_kill(now + Duration::from_millis(leave_ms.unwrap_or(grace_ms)));
        // A later controller repeats the request. A second SIGTERM would disturb some programs.
        let is_repeated = std::mem::replace(&mut self.kill_requested, true);
        if grace_ms == 0 || is_repeated {
            return; // `act_on_deadlines` kills the workers
        }
        for rank in self.running_ranks() {
            let worker = &self.workers[&rank];
            // An initialized built-in worker exits by itself after an abort message aborts its
            // collectives.
            if worker.builtin && worker.init.is_none() {
                let keep = self.may_leave && !worker.silence_reported;
                self.send_to_worker(rank, ToWorker::Abort { reason: reason.clone(), keep });
            } else {
                self.out.push(AgentAction::Signal(rank, ProcessGroupSignal::Terminate));
            }
        }
    }

    /// Schedules SIGKILL for all workers of this host at the time `at`. Keeps an earlier time that
    /// is already scheduled.
    pub(super) fn schedule_kill(&mut self, at: Duration) {
        if self.state == AgentState::Running {
            self.kill_at = Some(self.kill_at.map_or(at, |before| before.min(at)));
        }
    }
}
