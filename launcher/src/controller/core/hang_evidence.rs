//! The part of the controller's state machine that collects evidence about the ranks of a hanging
//! job and determines which ranks block it.
use super::{
    ABORT_GRACE, ControllerAction, ControllerCore, FailureReason, HostIndex, RootCause, WorkerState,
};
use crate::controller::{hang_verdict::find_hang_verdict, hang_verdict_text::describe_verdict};
use protocol::{
    control::{ExitStatus, ToAgent},
    hang::{HangFile, HangVerdict, RankEvidence},
};
use std::time::Duration;

/// How long the report of a hang waits until the agents have examined all running workers.
const EVIDENCE_TIMEOUT: Duration = Duration::from_secs(10);

impl ControllerCore {
    /// Stores what an agent has found out about a worker of a job that hangs, such as its stack
    /// (hang evidence). A later report about the same rank is ignored.
    pub(super) fn store_hang_evidence(&mut self, host: HostIndex, evidence: RankEvidence) {
        let is_new = self.evidence.iter().all(|known| known.rank != evidence.rank);
        if is_new && self.find_worker(host, evidence.rank).is_some() {
            self.evidence.push(evidence);
        }
    }

    /// Returns whether the job hangs and the controller still waits for agents to send evidence,
    /// such as stacks, about running workers.
    pub(super) fn awaits_evidence(&mut self, now: Duration) -> bool {
        let is_hang = self.cause.as_mut().is_some_and(|cause| find_verdict_of_cause(cause).is_some());
        let is_early = self.unreported_since.is_some_and(|since| now < since + EVIDENCE_TIMEOUT);
        if !is_hang || !is_early || self.active_hosts == 0 {
            return false;
        }
        // After a timeout of torch, there is also evidence about ranks that have ended.
        let of_running = self
            .evidence
            .iter()
            .filter(|known| self.workers.get(known.rank as usize).is_some_and(WorkerState::is_running));
        of_running.count() < self.running
    }

    /// Determines which ranks block the hanging job and where, adds the result to the failure
    /// report, and writes the collected evidence to a file. Does nothing without evidence.
    pub(super) fn add_hang_verdict(&mut self) {
        let is_unreported = self.unreported_since.is_some() && !self.evidence.is_empty();
        let Some(cause) = self.cause.as_mut().filter(|_| is_unreported) else { return };
        let Some(field @ None) = find_verdict_of_cause(cause) else { return };
        let mut evidence = std::mem::take(&mut self.evidence);
        evidence.extend(list_finished_workers(&self.workers, &evidence));
        let verdict = find_hang_verdict(&evidence);
        *field = Some(Box::new(verdict.clone()));
        let path = self.setup.run_dir.join(HangFile::file_name(self.attempt));
        let text = describe_verdict(&verdict);
        cause.message = format!("{text}; {}; evidence: {}", cause.message, path.display());
        let file = HangFile { verdict, evidence };
        self.actions.push(ControllerAction::WriteHangFile { attempt: self.attempt, file });
        self.repeat_kill_request(text);
    }

    /// Asks the agents again to kill the hanging workers, without first collecting the stacks of
    /// the workers.
    fn repeat_kill_request(&mut self, reason: String) {
        let grace = if self.setup.builtin { ABORT_GRACE } else { self.setup.grace };
        let (attempt, grace_ms) = (self.attempt, grace.as_millis() as u64);
        // Workers that hang cannot leave.
        let kill = ToAgent::Kill { attempt, reason, grace_ms, stacks: false, leave_ms: None };
        self.broadcast_to_active_agents(&kill);
    }
}

/// Returns evidence about the workers that have ended without an error, and thus enter no
/// collective any more. `known` is the evidence about the other workers.
fn list_finished_workers(workers: &[WorkerState], known: &[RankEvidence]) -> Vec<RankEvidence> {
    let is_finished = |worker: &WorkerState| {
        worker.ended.as_ref().is_some_and(|(status, _)| *status == ExitStatus::Code(0))
    };
    let finished = (0..).zip(workers).filter(|(_, worker)| is_finished(worker));
    let new = finished.filter(|(rank, _)| known.iter().all(|known| known.rank != *rank));
    new.map(|(rank, _)| RankEvidence { rank, ..RankEvidence::default() }).collect()
}

/// Returns the verdict (which ranks hold up the job, and where) of a root cause that is a hang;
/// `None` for any other root cause.
fn find_verdict_of_cause(cause: &mut RootCause) -> Option<&mut Option<Box<HangVerdict>>> {
    match &mut cause.reason {
        FailureReason::Hang { verdict, .. }
        | FailureReason::Suspended { verdict, .. }
        | FailureReason::CollectiveTimeout { verdict } => Some(verdict),
        _ => None,
    }
}
