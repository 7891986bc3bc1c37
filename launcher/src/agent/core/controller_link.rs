//! The part of the agent's state machine that decides which controller the agent obeys, and what
//! the agent does without one.
use super::{
    AgentAction, AgentCore, AgentState, build_protocol_error, kill_request::KillRequest,
    previous_controller::PreviousController, received_memo::ReceivedMemo,
};
use crate::leases::HEARTBEAT_INTERVAL;
use diagnostic::{Diagnostic, codes::run};
use jobspec::ControllerLossAction;
use protocol::control::{
    AdoptedAgent, AttachPurpose, AttachRejection, ControllerToken, FromAgent, PROTOCOL_VERSION,
    SupervisionTerms, ToAgent,
};
use std::time::Duration;

impl AgentCore {
    /// Handles a message of the controller, such as to start, stop or kill the workers, or to save
    /// a checkpoint. Ignores messages for an attempt that has ended.
    pub(super) fn on_controller_message(&mut self, now: Duration, message: ToAgent) {
        if self.state == AgentState::AwaitingHello {
            return match message {
                ToAgent::Hello { version, terms } if version == PROTOCOL_VERSION => {
                    self.state = AgentState::Idle;
                    self.heartbeat_at = now + HEARTBEAT_INTERVAL;
                    self.terms = terms.map(|terms| *terms);
                    let (pid, stream, inventory) = (self.pid, self.stream, self.inventory.clone());
                    self.send_if_connected(FromAgent::Hello { version, pid, stream, inventory });
                }
                ToAgent::Hello { version, .. } => self.fail_and_exit(build_protocol_version_error(version)),
                _ => {
                    self.fail_and_exit(build_protocol_error("the controller's first message was not a hello"))
                }
            };
        }
        // Every message proves that the controller is alive.
        self.controller_heard_at = self.controller_heard_at.map(|_| now);
        if message != ToAgent::Heartbeat {
            // The first order of a new controller shows that the controller has taken over the run.
            self.previous_controller = None;
        }
        let is_current = |attempt: u32| attempt == self.attempt;
        match message {
            ToAgent::Hello { .. } | ToAgent::Attach(_) => {
                self.fail_and_exit(build_protocol_error("the controller sent a second hello"))
            }
            // The driver answers probes, which do not change the state.
            // The driver answers these.
            ToAgent::Probe(_) | ToAgent::Exec { .. } => {}
            ToAgent::Heartbeat => self.controller_heard_at = Some(now),
            ToAgent::Memo(text) => self.memo = Some(ReceivedMemo { text, at: now }),
            ToAgent::Acknowledge { seq } => self.reports.acknowledge(seq),
            ToAgent::End { .. } => self.kill_workers_and_end_agent(),
            ToAgent::Bind(bind) => self.out.push(AgentAction::Bind(bind)),
            ToAgent::Start(plan) => self.start_attempt(now, plan),
            ToAgent::Stop { attempt, deadline_ms } if is_current(attempt) => {
                self.stop_workers(now, deadline_ms)
            }
            ToAgent::Save { attempt, signal } if is_current(attempt) => self.request_saves(signal),
            ToAgent::Kill { attempt, reason, grace_ms, stacks, leave_ms } if is_current(attempt) => {
                self.kill_workers(now, KillRequest { reason, grace_ms, leave_ms }, stacks);
            }
            ToAgent::Reload { attempt, values } if is_current(attempt) => self.apply_changed_job(values),
            // The message is for an attempt that has ended.
            ToAgent::Stop { .. } | ToAgent::Save { .. } | ToAgent::Kill { .. } | ToAgent::Reload { .. } => {}
            ToAgent::Peers(peers) => self.forward_peer_addresses(peers),
        }
    }

    /// Decides what happens to the workers after the controller was lost: they continue without a
    /// controller, or the agent ends them. The loss is the end of the connection or, with
    /// `silent_for`, silence of this length.
    pub(super) fn on_controller_lost(&mut self, now: Duration, silent_for: Option<Duration>) {
        if self.is_ending || self.unattended_since.is_some() || self.state == AgentState::Exiting {
            return;
        }
        let seconds = silent_for.map(|silent| silent.as_secs());
        // An agent that never got a memo has never had workers.
        let continues = self.memo.is_some()
            && self.terms.as_ref().is_some_and(|t| t.on_controller_loss == ControllerLossAction::Continue);
        if let Some(previous) = self.previous_controller.take() {
            return self.return_to_previous_controller(previous);
        }
        if continues {
            if let Some(silent) = silent_for {
                let silent_ms = silent.as_millis() as u64;
                self.send_if_connected(FromAgent::Released { token: None, silent_ms: Some(silent_ms) });
            }
            self.out.push(AgentAction::Disconnect);
            (self.unattended_since, self.controller_heard_at) = (Some(now), None);
            return;
        }
        if let Some(seconds) = seconds {
            let message = format!("no message from the controller for {seconds} s");
            let diagnostic =
                Diagnostic::error(run::CONTROLLER_SILENT, message).with_field("seconds", seconds);
            self.send_to_controller(FromAgent::Failed { attempt: self.attempt, rank: None, diagnostic });
        }
        self.kill_workers_and_end_agent();
    }

    /// Ends this newly started agent, because an older agent on this host already obeys a newer
    /// controller.
    pub(super) fn exit_for_newer_controller(&mut self, token: ControllerToken) {
        self.send_if_connected(FromAgent::Released { token: Some(token), silent_ms: None });
        self.request_exit(0);
    }

    /// Makes the agent obey its previous controller again, because the new controller was lost
    /// before taking over the run.
    fn return_to_previous_controller(&mut self, previous: PreviousController) {
        if let Some(terms) = &mut self.terms {
            terms.token = previous.token;
        }
        self.out.push(AgentAction::Disconnect);
        (self.unattended_since, self.controller_heard_at) = (Some(previous.unattended_since), None);
    }

    /// Kills the workers of this host, and ends the agent as soon as no worker is left.
    fn kill_workers_and_end_agent(&mut self) {
        self.is_ending = true;
        match self.state {
            AgentState::AwaitingHello | AgentState::Idle => self.request_exit(0),
            AgentState::Running => self.kill_at = Some(Duration::ZERO),
            AgentState::Sweeping | AgentState::Exiting => {}
        }
    }

    /// Detects that the controller has been silent for longer than its lease, and ends workers that
    /// have been without a controller for too long.
    pub(super) fn check_controller_deadlines(&mut self, now: Duration) {
        let Some(terms) = &self.terms else { return };
        let lease = Duration::from_millis(terms.controller_lease_ms);
        if let Some(heard_at) = self.controller_heard_at.filter(|heard_at| now > *heard_at + lease) {
            self.on_controller_lost(now, Some(now - heard_at));
        }
        if self.unattended_deadline().is_some_and(|deadline| now >= deadline) {
            self.end_unattended_workers(now);
        }
    }

    /// Returns the time by which the agent makes the workers save and stop if no controller has
    /// returned. Returns `None` if the agent has a controller, or if the workers are stopping.
    pub(super) fn unattended_deadline(&self) -> Option<Duration> {
        let timeout = Duration::from_millis(self.terms.as_ref()?.controller_timeout_ms);
        self.unattended_since.filter(|_| !self.is_ending).map(|since| since + timeout)
    }

    /// Makes the workers save a checkpoint and stop, because no controller has returned, and ends
    /// the agent as soon as no worker is left.
    fn end_unattended_workers(&mut self, now: Duration) {
        let (Some(plan), AgentState::Running) = (&self.plan, self.state) else {
            return self.kill_workers_and_end_agent();
        };
        self.is_ending = true;
        let stop_ms = plan.job.run.unattended_stop_ms();
        self.stop_workers(now, Some(stop_ms));
    }

    /// Handles the SIGTERM by which a batch system, such as Slurm, announces that it will end the
    /// job, by reporting the signal to the controller. Without a controller, lets the workers save
    /// and stop.
    pub(super) fn on_batch_system_sigterm(&mut self, now: Duration) {
        match self.unattended_since {
            Some(_) if !self.is_ending => self.end_unattended_workers(now),
            Some(_) => {}
            None => self.send_to_controller(FromAgent::Terminating),
        }
    }

    // ---- other controllers ----

    /// Accepts or rejects a request of another process: that this agent obey another controller, or
    /// that this agent end in favor of a later agent. The driver executes the decision for the
    /// connection that carries the request.
    pub(super) fn on_attach_requested(
        &mut self,
        now: Duration,
        token: ControllerToken,
        purpose: AttachPurpose,
    ) {
        let rejection = match (&self.terms, purpose) {
            _ if self.state == AgentState::Exiting => Some(AttachRejection::NoAgent),
            (None, _) => Some(AttachRejection::NoAgent),
            (Some(terms), AttachPurpose::Adopt) => self.find_adoption_conflict(now, terms, token),
            (Some(terms), AttachPurpose::Evict { below }) => {
                let is_obsolete = (terms.token, terms.number) < (token, below);
                (!is_obsolete).then_some(AttachRejection::Controlled { token: terms.token, silent_ms: 0 })
            }
        };
        match (rejection, purpose) {
            (Some(rejection), _) => self.out.push(AgentAction::RejectRequest(rejection)),
            (None, AttachPurpose::Adopt) => self.obey_new_controller(now, token),
            (None, AttachPurpose::Evict { .. }) => {
                self.out.push(AgentAction::AcceptEviction);
                self.kill_workers_and_end_agent();
            }
        }
    }

    /// Returns why this agent may not obey a new controller, for example because its present
    /// controller is alive, or `None` if it may.
    fn find_adoption_conflict(
        &self,
        now: Duration,
        terms: &SupervisionTerms,
        token: ControllerToken,
    ) -> Option<AttachRejection> {
        if self.is_ending {
            return Some(AttachRejection::NoAgent);
        }
        let silence =
            self.controller_heard_at.map_or(Duration::ZERO, |heard_at| now.saturating_sub(heard_at));
        let host_lease = Duration::from_millis(terms.host_lease_ms);
        if self.unattended_since.is_none() && silence <= host_lease {
            let silent_ms = silence.as_millis() as u64;
            return Some(AttachRejection::Controlled { token: terms.token, silent_ms });
        }
        (token <= terms.token).then_some(AttachRejection::Stale { token: terms.token })
    }

    /// Makes the agent obey the controller with the token `token`, which is newer than the
    /// controller that the agent has obeyed so far. Releases the previous controller, reports the
    /// state of this agent, and repeats the kept reports.
    fn obey_new_controller(&mut self, now: Duration, token: ControllerToken) {
        let since = self.unattended_since.or(self.controller_heard_at).unwrap_or(now);
        let unattended_ms = now.saturating_sub(since).as_millis() as u64;
        if self.unattended_since.is_none() {
            self.send_if_connected(FromAgent::Released {
                token: Some(token),
                silent_ms: Some(unattended_ms),
            });
            self.out.push(AgentAction::Disconnect);
        }
        let Some(terms) = &mut self.terms else { return };
        let previous = PreviousController { token: terms.token, unattended_since: since };
        // Several controllers may try and fail before one takes over.
        self.previous_controller.get_or_insert(previous);
        terms.token = token;
        let number = terms.number;
        (self.unattended_since, self.controller_heard_at) = (None, None);
        self.heartbeat_at = now + HEARTBEAT_INTERVAL;
        self.reports.resend_kept_reports();
        self.out.push(AgentAction::AcceptController);
        self.send_if_connected(FromAgent::Adopted(Box::new(AdoptedAgent {
            pid: self.pid,
            stream: self.stream,
            number,
            inventory: self.inventory.clone(),
            last_report: self.reports.last_kept_number(),
            memo: self.memo.as_ref().map(|memo| memo.text.clone()),
            memo_age_ms: self.memo.as_ref().map_or(0, |memo| memo.age_ms(now)),
            plan: self.plan.as_deref().cloned().map(Box::new),
            peers: self.peers.clone(),
            unattended_ms,
        })));
    }
}

/// Creates the error that the controller uses version `version` of the control protocol, which this
/// agent does not know.
fn build_protocol_version_error(version: u32) -> Diagnostic {
    let message = format!(
        "the agent speaks version {PROTOCOL_VERSION} of the control protocol and the controller version {version}"
    );
    Diagnostic::error(run::AGENT_VERSION_MISMATCH, message)
        .with_help("install the same build of launch on every host")
}
