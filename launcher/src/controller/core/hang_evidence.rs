//! The part of the controller's state machine that waits for the evidence of a job that hangs, and
//! adds the verdict to the root cause.
use super::{ABORT_GRACE, ControllerAction, ControllerCore, FailureReason, HostIndex, RootCause};
use crate::controller::{hang_text::describe_verdict, hang_verdict::find_verdict};
use protocol::{
    control::ToAgent,
    hang::{HangFile, HangVerdict, RankEvidence},
};
use std::time::Duration;

/// How long the report of a hang waits for the evidence of all running workers.
const EVIDENCE_TIMEOUT: Duration = Duration::from_secs(10);

impl ControllerCore {
    /// Stores the hang evidence that an agent has collected about a worker of its host. A later
    /// report about the same rank is ignored.
    pub(super) fn handle_hang_evidence(&mut self, host: HostIndex, evidence: RankEvidence) {
        let is_new = self.evidence.iter().all(|known| known.rank != evidence.rank);
        if is_new && self.find_worker(host, evidence.rank).is_some() {
            self.evidence.push(evidence);
        }
    }

    /// Returns whether the root cause is a hang, and evidence of a running worker may still arrive.
    pub(super) fn awaits_evidence(&mut self, now: Duration) -> bool {
        let is_hang = self.cause.as_mut().is_some_and(|cause| find_verdict_field(cause).is_some());
        let is_early = self.unreported_since.is_some_and(|since| now < since + EVIDENCE_TIMEOUT);
        is_hang && is_early && self.active_hosts > 0 && self.evidence.len() < self.running
    }

    /// Adds the verdict to a root cause that is a hang and was not reported yet, and writes the
    /// evidence to a file. Does nothing without evidence.
    pub(super) fn add_hang_verdict(&mut self) {
        let is_unreported = self.unreported_since.is_some() && !self.evidence.is_empty();
        let Some(cause) = self.cause.as_mut().filter(|_| is_unreported) else { return };
        let Some(field @ None) = find_verdict_field(cause) else { return };
        let verdict = find_verdict(&self.evidence);
        let evidence = std::mem::take(&mut self.evidence);
        *field = Some(Box::new(verdict.clone()));
        let path = self.setup.run_dir.join(HangFile::file_name(self.attempt));
        let text = describe_verdict(&verdict);
        cause.message = format!("{text}; {}; evidence: {}", cause.message, path.display());
        let file = HangFile { verdict, evidence };
        self.actions.push(ControllerAction::WriteHangFile { attempt: self.attempt, file });
        self.repeat_kill_request(text);
    }

    /// Repeats the request to kill the workers for agents that delay it until their evidence has
    /// arrived.
    fn repeat_kill_request(&mut self, reason: String) {
        let grace = if self.setup.builtin { ABORT_GRACE } else { self.setup.grace };
        let (attempt, grace_ms) = (self.attempt, grace.as_millis() as u64);
        // Workers that hang cannot leave.
        let kill = ToAgent::Kill { attempt, reason, grace_ms, stacks: false, leave_ms: None };
        self.broadcast_to_agents(&kill);
    }
}

/// Returns the verdict in the reason of a root cause; `None` if the reason is not a hang.
fn find_verdict_field(cause: &mut RootCause) -> Option<&mut Option<Box<HangVerdict>>> {
    match &mut cause.reason {
        FailureReason::Hang { verdict, .. } | FailureReason::Suspended { verdict, .. } => Some(verdict),
        _ => None,
    }
}
