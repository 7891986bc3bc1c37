//! Ends the workers after a failure, a stop request or their normal end, reports the root cause,
//! and then restarts the workers or ends the run.
use super::{
    ABORT_GRACE, AGENT_END_TIMEOUT, AgentEnd, AttemptState, ControllerAction, ControllerCore, FailureReason,
    HostIndex, OUTPUT_TAIL_TIMEOUT, RootCause, RunOutcome, StopRequest, WorkerState, build_attempt_end,
};
use crate::{
    controller::{core::host_state::AgentConnectionState, restart_policy::RestartDecision},
    leases::HEARTBEAT_INTERVAL,
    worker_end::{PeerWorkerEnd, WorkerEnd},
};
use diagnostic::{Diagnostic, codes::run};
use protocol::{
    control::{ExitStatus, ToAgent},
    event::{Event, FailureReport},
    exit,
};
use std::time::Duration;

/// The number of missed heartbeats after which a host counts as lost if a rank on another host has
/// failed while waiting for a rank on this host.
const MISSED_HEARTBEATS_UNTIL_LOST: u32 = 3;

impl ControllerCore {
    /// Handles a request to stop the run: the first one makes the workers save and stop, and the
    /// second one kills the workers. If no worker is running, the first request ends the run
    /// immediately. After a request of the batch system, only Ctrl-C counts as a second request.
    pub(super) fn handle_stop_request(&mut self, now: Duration, request: StopRequest) {
        if matches!(self.state, AttemptState::Stopping(_))
            && matches!(self.stop_request, Some(StopRequest::TimeLimit | StopRequest::BatchSystem))
            && request != StopRequest::Interrupt
        {
            // The batch system now ends the job. The workers are stopping already, and no user made
            // a second request. The job must not be requeued.
            self.stop_request = Some(request);
            return;
        }
        self.stop_request.get_or_insert(request);
        match self.state {
            AttemptState::Joining | AttemptState::Preparing | AttemptState::Backoff { .. } => {
                // No worker is running.
                self.killed = self.attempt == 0;
                self.phase_deadline = None;
                self.state = AttemptState::Ending;
            }
            AttemptState::Running if self.suspect.is_none() => self.request_save_and_stop(now, request),
            AttemptState::Draining { host_lost: false } if self.suspect.is_none() => {
                // The workers are stopping already. A second signal would end some programs without
                // a save.
                self.state = AttemptState::Stopping(request);
                self.emit_notice(
                    "the workers are stopping already and will not be restarted; \
                     a second signal kills them"
                        .into(),
                );
            }
            AttemptState::Running
            | AttemptState::Draining { .. }
            | AttemptState::Stopping(_)
            | AttemptState::Ending => {
                self.cancel_restart();
                self.killed |= self.cause.is_none();
                self.state = AttemptState::Ending;
                self.kill_workers(now, "stopped by a second signal", Duration::ZERO, false);
            }
            AttemptState::Adopting | AttemptState::Finished => {}
        }
    }

    /// Begins to stop the run after an agent has reported a signal by which the batch system
    /// announces the end of the job. Ignores the notice if the run is ending already, because the
    /// batch system notifies every agent. On nodes that join, a user may have sent the signal, so
    /// the notice names the node.
    pub(super) fn handle_termination_notice(&mut self, now: Duration, id: HostIndex) {
        self.end_announced = true;
        if self.stop_request.is_none() {
            if self.setup.arrival.max_returns > 0 {
                self.emit_notice(format!("{} received a signal to stop", self.format_host_label(id)));
            }
            self.handle_stop_request(now, StopRequest::BatchSystem);
        }
    }

    /// Asks the running workers to save a checkpoint and stop, and informs the user of the reason.
    fn request_save_and_stop(&mut self, now: Duration, request: StopRequest) {
        self.state = AttemptState::Stopping(request);
        self.send_stop_to_workers(now);
        let received = match request {
            StopRequest::Interrupt => "received SIGINT",
            StopRequest::Terminate => "received SIGTERM",
            StopRequest::TimeLimit => "received SIGUSR1 (the time limit is near)",
            StopRequest::BatchSystem => "the batch system is about to end the job",
        };
        self.emit_notice(if self.setup.builtin {
            format!("{received}: workers save at the next step boundary and stop; a second signal kills them")
        } else {
            let (sent, following) = self.setup.describe_program_stop();
            format!("{received}: sent {sent} to the workers, {following}; a second signal kills them now")
        });
    }

    /// Sends the request to save and stop to built-in workers, without a time limit. Programs get
    /// the signal to stop (`run.stop_signal`), SIGTERM, and SIGKILL after the grace period.
    pub(super) fn send_stop_to_workers(&mut self, now: Duration) {
        let time_to_kill = self.setup.sigterm_delay.saturating_add(self.setup.grace);
        let time_to_kill = (!self.setup.builtin).then_some(time_to_kill);
        let deadline_ms = time_to_kill.map(|time| time.as_millis() as u64);
        self.phase_deadline = time_to_kill.map(|time| now + time + AGENT_END_TIMEOUT);
        self.send_memo(now);
        self.broadcast_to_active_agents(&ToAgent::Stop { attempt: self.attempt, deadline_ms });
    }

    /// Cancels a restart of the workers that is waiting for its time, because the user or the batch
    /// system has requested the end of the run. If the restart was already reported, its failure is
    /// no longer the root cause of the run.
    fn cancel_restart(&mut self) {
        if self.restart_pause.take().is_some() && self.unreported_since.is_none() {
            // The restart event has reported the cause already, and now the request ends the run.
            self.cause = None;
        }
    }

    /// Ends the current attempt (start of all workers) because of the failure `cause`, which
    /// becomes the root cause. Ignores the failure if the attempt is ending already.
    pub(super) fn fail_attempt(&mut self, now: Duration, cause: RootCause) {
        self.end_failed_attempt(now, cause, false);
    }

    /// Ends the current start of the workers (attempt) because the workers hang, which means that
    /// they make no progress. The agents write the stacks of all workers to the logs before they
    /// kill the workers.
    pub(super) fn fail_hanging_attempt(&mut self, now: Duration, cause: RootCause) {
        self.end_failed_attempt(now, cause, true);
    }

    /// Ends a failed attempt (start of all workers): records the root cause, decides whether the
    /// workers are restarted, and requests that they be killed. With `stacks`, the agents first
    /// write the stacks of the workers. Ignores the failure if the attempt is ending already.
    fn end_failed_attempt(&mut self, now: Duration, cause: RootCause, stacks: bool) {
        if matches!(self.state, AttemptState::Ending | AttemptState::Backoff { .. } | AttemptState::Finished)
        {
            return;
        }
        let grace = if self.setup.builtin { ABORT_GRACE } else { self.setup.grace };
        let who = cause.rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
        let reason = format!("{who}{}", cause.message);
        let stopping = matches!(self.state, AttemptState::Stopping(_));
        let had_started = !matches!(self.state, AttemptState::Joining | AttemptState::Preparing);
        self.suspect = None;
        self.phase_deadline = None;
        self.state = AttemptState::Ending;
        // A rank that was aborted because a peer failed, or that waited for a peer for too long, is
        // no evidence against its own host.
        let blames_host =
            !matches!(cause.reason, FailureReason::AbortedByPeer | FailureReason::CollectiveTimeout { .. });
        if had_started && blames_host {
            let advanced = self.attempt_saved || self.attempt_step > self.history.furthest_step;
            self.count_host_failure(cause.host, advanced);
        }
        self.no_restart = None;
        if had_started && !stopping {
            let jitter = self.compute_jitter();
            let end = build_attempt_end(&cause, self.attempt_step, self.attempt_saved);
            match self.history.decide_restart(end, jitter) {
                RestartDecision::Restart(pause) => self.restart_pause = Some(pause),
                RestartDecision::Stop(why) => self.no_restart = why,
            }
        }
        self.cause = Some(cause);
        self.evidence.clear();
        self.unreported_since = Some(now);
        self.kill_workers(now, &reason, grace, stacks);
    }

    /// Returns a pseudo-random number from 0 to 1 for the pause before a restart (SplitMix64). The
    /// number depends only on the run's seed and the attempt.
    fn compute_jitter(&self) -> f64 {
        let mut x = self.setup.seed.wrapping_add(u64::from(self.attempt).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Orders the agents to end their workers, with SIGKILL for workers that still run after the
    /// time `grace`. With `stacks`, the agents first write the stacks of the workers to the logs.
    /// Agents get the `reason` of the kill. If another attempt follows, built-in workers may leave
    /// the attempt instead of ending. An agent that has not reported the end of its workers is
    /// itself killed [`AGENT_END_TIMEOUT`] after the grace period, or earlier if an earlier
    /// deadline is set.
    pub(super) fn kill_workers(&mut self, now: Duration, reason: &str, grace: Duration, stacks: bool) {
        let (attempt, grace_ms) = (self.attempt, grace.as_millis() as u64);
        // Stacks are written if workers hang, and such workers cannot leave.
        let may_leave = self.restart_pause.is_some() && !stacks && !grace.is_zero();
        let leave_timeout = self.setup.leave_timeout.filter(|_| may_leave);
        let leave_ms = leave_timeout.map(|timeout| timeout.as_millis() as u64);
        self.send_memo(now);
        let reason = reason.to_owned();
        self.broadcast_to_active_agents(&ToAgent::Kill { attempt, reason, grace_ms, stacks, leave_ms });
        let deadline = now + leave_timeout.map_or(grace, |timeout| grace.max(timeout)) + AGENT_END_TIMEOUT;
        self.phase_deadline = Some(self.phase_deadline.map_or(deadline, |before| before.min(deadline)));
    }

    /// Reports the root cause of a failed attempt to the user, together with the restart of the job
    /// or the end of the run. Does nothing while the last output lines of the failed rank are
    /// awaited; a later call then reports the root cause. Also does nothing if there is no root
    /// cause or it was reported already.
    pub(super) fn report_failure(&mut self, now: Duration) {
        if self.awaits_evidence(now) {
            return;
        }
        self.add_hang_verdict();
        let (Some(since), Some(cause)) = (self.unreported_since, &self.cause) else { return };
        let worker = cause.rank.and_then(|rank| self.workers.get(rank as usize));
        let tail_may_come = worker.is_some_and(WorkerState::is_running);
        if tail_may_come && self.hosts[cause.host].active && now < since + OUTPUT_TAIL_TIMEOUT {
            return;
        }
        self.unreported_since = None;
        let mut message = cause.message.clone();
        if let Some(why) = &self.no_restart {
            message.push_str(&format!("; not restarted: {why}"));
        }
        let failure = Box::new(FailureReport {
            rank: cause.rank,
            host: self.choose_hostname(cause.host).to_owned(),
            pid: worker.map_or(self.hosts[cause.host].pid, |w| w.pid.unwrap_or(0)),
            reason: cause.reason.clone(),
            message,
            help: cause.collect_help(),
            diagnostics: cause.diagnostics.clone(),
            log: worker.map(|w| w.log.clone()),
            tail: worker.and_then(|w| w.ended.as_ref()).map_or_else(Vec::new, |(_, tail)| tail.clone()),
        });
        let event = match self.restart_pause {
            None => Event::Failure(failure),
            Some(pause) => Event::Restart {
                attempt: self.history.used,
                restarts_left: self.history.budget - self.history.used,
                pause_s: pause.as_secs_f64(),
                failure,
            },
        };
        self.actions.push(ControllerAction::Event(event));
    }

    /// Ends the attempt if its rendezvous port was not bound in time, or kills the agents whose
    /// workers were not ended in time.
    pub(super) fn handle_phase_timeout(&mut self, now: Duration) {
        if self.state == AttemptState::Preparing {
            let host = self.members.first().copied().unwrap_or(0);
            let seconds = super::RENDEZVOUS_BIND_TIMEOUT.as_secs();
            let message =
                format!("the rendezvous was not bound on {} within {seconds} s", self.choose_hostname(host));
            let error = Diagnostic::error(run::RENDEZVOUS_TIMEOUT, message).with_field("seconds", seconds);
            return self.reject_attempt(now, error);
        }
        let late: Vec<HostIndex> = self.members.iter().copied().filter(|id| self.hosts[*id].active).collect();
        for id in late {
            self.actions.push(ControllerAction::KillAgent(id));
            self.handle_agent_gone(now, id, AgentEnd::KilledLate { seconds: AGENT_END_TIMEOUT.as_secs() });
        }
    }

    /// Fails the planned start of the workers (attempt) because no plan could be made or the
    /// rendezvous port (`MASTER_PORT`) could not be bound.
    pub(super) fn reject_attempt(&mut self, now: Duration, diagnostic: Diagnostic) {
        let host = self.members.first().copied().unwrap_or(0);
        let reason = FailureReason::Rejected { code: diagnostic.code() };
        let cause = RootCause::new(host, reason, diagnostic.to_string())
            .with_exit_code(exit::CLUSTER)
            .with_diagnostic(diagnostic);
        self.fail_attempt(now, cause);
    }

    /// Makes a failure that may only be a consequence the root cause of the failed attempt, after
    /// no other failure was reported in time. If the failure follows from a silent host, the loss
    /// of that host is the root cause instead. Does nothing without a suspected failure.
    pub(super) fn confirm_suspected_failure(&mut self, now: Duration) {
        let Some((cause, _)) = self.suspect.take() else { return };
        if let Some(id) = self.find_silent_host_of_peer(now, &cause) {
            let seconds = now.saturating_sub(self.hosts[id].last_heard).as_secs();
            self.actions.push(ControllerAction::KillAgent(id));
            self.handle_agent_gone(now, id, AgentEnd::Silent { seconds });
        }
        // This is ignored if the lost host has made the attempt fail.
        self.fail_attempt(now, cause);
    }

    /// Returns the host of the rank for which a failed rank has waited, if the controller also
    /// receives no heartbeats from that host. Ranks may notice the silence of a host before its
    /// lease expires.
    fn find_silent_host_of_peer(&self, now: Duration, cause: &RootCause) -> Option<HostIndex> {
        let peer = cause.diagnostics.first()?.field("peer")?.as_u64()?;
        let id = self.workers.get(peer as usize)?.host;
        let host = &self.hosts[id];
        let is_silent = now >= host.last_heard + HEARTBEAT_INTERVAL * MISSED_HEARTBEATS_UNTIL_LOST;
        let is_joined = host.agent == AgentConnectionState::Joined;
        (self.setup.hosts[id].remote && is_joined && is_silent).then_some(id)
    }

    /// Ends the run, or begins the pause before the restart of the workers, once all worker
    /// processes have ended. Does nothing if the attempt is neither running nor ending.
    pub(super) fn finish_attempt(&mut self, now: Duration) {
        let has_workers = matches!(
            self.state,
            AttemptState::Running
                | AttemptState::Draining { .. }
                | AttemptState::Stopping(_)
                | AttemptState::Ending
        );
        if !has_workers || self.active_hosts > 0 {
            return;
        }
        self.confirm_suspected_failure(now);
        self.report_failure(now + OUTPUT_TAIL_TIMEOUT);
        if let Some(pause) = self.restart_pause.take() {
            return self.begin_backoff(now, pause);
        }
        if matches!(self.state, AttemptState::Draining { .. }) && !self.is_training_done() {
            return self.begin_backoff(now, Duration::ZERO);
        }
        if self.find_eviction_deadline().is_some_and(|until| now < until) && !self.killed {
            return;
        }
        self.state = AttemptState::Finished;
        let outcome = self.build_outcome();
        self.actions.push(ControllerAction::End(outcome));
    }

    /// Resets the controller's records of the workers that have ended, and begins the pause before
    /// the workers are restarted.
    fn begin_backoff(&mut self, now: Duration, pause: Duration) {
        self.attempt += 1;
        self.last_failure = self.cause.take().map(|cause| cause.message);
        (self.suspect, self.phase_deadline) = (None, None);
        (self.attempt_step, self.attempt_saved) = (None, false);
        self.members.clear();
        self.workers.clear();
        self.state = AttemptState::Backoff { until: self.compute_next_attempt_time(now, pause) };
    }

    /// Returns whether all built-in workers had already finished training when a request to stop
    /// arrived. Returns `false` for programs, because their exit code 0 does not mean that the
    /// training is done.
    fn is_training_done(&self) -> bool {
        let finished = |w: &WorkerState| matches!(w.ended, Some((ExitStatus::Code(0), _)));
        self.setup.builtin && !self.workers.is_empty() && self.workers.iter().all(finished) && !self.killed
    }

    /// Builds the result of the run, such as its exit code, from the root cause, the stop request,
    /// and how each worker ended.
    fn build_outcome(&mut self) -> RunOutcome {
        let request = self.stop_request.filter(|_| !self.is_training_done());
        let (exit_code, stopped) = match (&self.cause, request) {
            (Some(cause), _) => (cause.exit_code, false),
            (None, Some(request)) => (request.to_exit_code(), true),
            (None, None) => (exit::DONE, false),
        };
        let failed_rank = self.cause.as_ref().map(|c| c.rank);
        let workers = self.workers.iter().zip(0u32..);
        let peers = workers.filter(|(_, rank)| failed_rank.is_some_and(|failed| failed != Some(*rank)));
        let end = |w: &WorkerState| match &w.ended {
            Some((status, _)) if w.oom => WorkerEnd::OutOfMemory(*status),
            Some((status, _)) => WorkerEnd::Exited { status: *status, builtin: self.setup.builtin },
            None if w.pid.is_some() => WorkerEnd::LostWithAgent,
            None => WorkerEnd::NeverStarted,
        };
        let peer_end = |(w, rank): (&WorkerState, _)| PeerWorkerEnd {
            rank,
            host: self.setup.hosts[w.host].name.clone(),
            end: end(w),
        };
        RunOutcome {
            exit_code,
            stopped,
            killed: stopped && self.killed,
            near_time_limit: stopped && request == Some(StopRequest::TimeLimit),
            ended_by_batch_system: stopped && request == Some(StopRequest::BatchSystem),
            end_announced: stopped && self.end_announced,
            host_lost: self.host_lost && failed_rank == Some(None),
            made_progress: self.stepped || !self.setup.builtin,
            has_checkpoint: self.checkpoint.is_some(),
            step: self.step,
            peers: peers.map(peer_end).collect(),
        }
    }
}
