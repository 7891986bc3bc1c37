//! The part of the controller's state machine that processes the reports of agents about their
//! workers, such as a start, an exit or a stall.
use super::{
    AttemptState, CONNECTION_LOSS_TIMEOUT, ControllerAction, ControllerCore, FailureReason, HostIndex,
    ROOT_CAUSE_TIMEOUT, RootCause, WorkerState,
};
use crate::controller::root_cause::{
    WorkerProcessEnd, build_aborted_cause, build_worker_error_cause, to_launch_exit_code,
};
use diagnostic::{Diagnostic, codes::run};
use jobspec::ids::Rank;
use protocol::{
    control::{ExitStatus, FromAgent},
    event::Event,
    exit::{self, WorkerExit},
    failure::{GpuFault, LostConnection},
    hang::RankEvidence,
};
use std::{net::SocketAddr, time::Duration};

/// The end of a worker's process as the agent reports it ([`FromAgent::Exited`]): exit status, last
/// output and details of the failure.
struct WorkerExitReport {
    rank: Rank,
    pid: u32,
    status: ExitStatus,
    oom: bool,
    tail: Vec<String>,
    error: Option<String>,
    gpu: Option<GpuFault>,
    timeout: Option<Box<RankEvidence>>,
    lost_connection: Option<LostConnection>,
}

impl ControllerCore {
    /// Processes a message of the agent on `host` about one of its workers, such as a start, an
    /// exit, an output line or a failure. Lines of output and failures of the agent may belong to
    /// an earlier attempt.
    pub(super) fn handle_worker_message(&mut self, now: Duration, host: HostIndex, message: FromAgent) {
        match message {
            FromAgent::Started { rank, pid, .. } => self.handle_worker_started(now, host, rank, pid),
            FromAgent::Exited {
                rank, pid, status, oom, tail, error, gpu, timeout, lost_connection, ..
            } => self.handle_worker_exit(
                now,
                host,
                WorkerExitReport { rank, pid, status, oom, tail, error, gpu, timeout, lost_connection },
            ),
            FromAgent::Line { rank, stderr, text } => {
                self.actions.push(ControllerAction::Line { rank, stderr, text });
            }
            FromAgent::Progress { rank, phase, .. } => {
                self.actions.push(ControllerAction::Progress { rank, phase })
            }
            FromAgent::StepTimes { times, .. } => self.actions.push(ControllerAction::StepTimes(times)),
            FromAgent::Usage { usage, .. } => {
                let hosts = self.members.len();
                self.actions.push(ControllerAction::Usage { host, hosts, usage });
            }
            FromAgent::Listening { rank, addresses, .. } => {
                self.handle_worker_listening(host, rank, addresses)
            }
            FromAgent::Event { event, is_restored: false, .. } => self.handle_worker_event(event),
            FromAgent::Event { event, is_restored: true, .. } => self.handle_restored_step(event),
            FromAgent::Fatal { rank, exit, diagnostic, gpu, .. } => {
                self.handle_final_report(now, (host, rank), exit, diagnostic, gpu);
            }
            FromAgent::Left { rank, pid, .. } => self.handle_worker_left(host, rank, pid),
            FromAgent::Failed { rank: None, diagnostic, .. } => {
                self.handle_agent_failure(now, host, diagnostic)
            }
            FromAgent::Failed { rank: Some(rank), diagnostic, .. } => {
                self.handle_worker_failure(now, host, rank, diagnostic);
            }
            FromAgent::Stalled { rank, stalled_ms, suspended, shows_hang, .. } => {
                let stalled_for = Duration::from_millis(stalled_ms);
                self.handle_stalled_worker(now, (host, rank), stalled_for, suspended, shows_hang);
            }
            FromAgent::HangEvidence { evidence, .. } => self.store_hang_evidence(host, *evidence),
            FromAgent::Recovered { rank, .. } => {
                if self.find_worker(host, rank).is_some_and(|w| w.stalled_for.take().is_some()) {
                    self.stalled -= 1;
                }
            }
            FromAgent::WorkersEnded { .. } => self.handle_workers_ended(now, host),
            // These messages are handled before, or they only prove that the agent is alive.
            FromAgent::Bound { .. }
            | FromAgent::Hello { .. }
            | FromAgent::Report { .. }
            | FromAgent::Adopted(_)
            | FromAgent::NotAdopted(_)
            | FromAgent::Terminating
            | FromAgent::Released { .. }
            | FromAgent::Probed(_)
            | FromAgent::Exec { .. }
            | FromAgent::Heartbeat => {}
        }
    }

    /// Returns the host on which the worker of rank `rank` is started or runs, and whether it runs.
    /// Returns `None` if there is no such worker at present.
    pub(crate) fn find_host_of_worker(&self, rank: Rank) -> Option<(HostIndex, bool)> {
        let worker = self.workers.get(rank as usize).filter(|worker| worker.ended.is_none())?;
        let is_running = worker.is_running();
        (is_running || matches!(self.state, AttemptState::Running)).then_some((worker.host, is_running))
    }

    /// Returns the state of the worker with rank `rank`, or `None` if host `id` does not run that
    /// rank.
    pub(super) fn find_worker(&mut self, host: HostIndex, rank: Rank) -> Option<&mut WorkerState> {
        self.workers.get_mut(rank as usize).filter(|w| w.host == host)
    }

    /// Stores the network addresses at which a built-in worker listens for the other workers. Once
    /// all workers listen, sends every worker the addresses of all workers.
    fn handle_worker_listening(&mut self, host: HostIndex, rank: Rank, addresses: Vec<SocketAddr>) {
        if self.find_worker(host, rank).is_none() {
            return;
        }
        let attempt = self.attempt;
        if let Some(members) = self.peer_exchange.add_worker_addresses(host, rank, attempt, addresses) {
            self.actions.push(ControllerAction::SendPeers { attempt, members });
        }
    }

    /// Stores that the process of a worker has started. A drain of unlisted hosts that waited for
    /// this worker may then begin.
    fn handle_worker_started(&mut self, now: Duration, host: HostIndex, rank: Rank, pid: u32) {
        let Some(worker) = self.find_worker(host, rank).filter(|w| w.pid.is_none() && w.ended.is_none())
        else {
            return;
        };
        worker.pid = Some(pid);
        self.hosts[host].running += 1;
        self.running += 1;
        self.release_unlisted_hosts(now);
    }

    /// Processes an event of a worker: records the reported step or checkpoint, writes the event to
    /// the journal, and shows it to the user. Drops events that only the controller may report.
    fn handle_worker_event(&mut self, event: Event) {
        if is_controller_event(&event) {
            return;
        }
        self.record_run_progress(&event);
        match &event {
            Event::Step { step, .. } | Event::Resume { step, .. } => self.attempt_step = Some(*step),
            Event::Checkpoint { .. } => self.attempt_saved = true,
            _ => {}
        }
        self.pass_on_worker_event(event);
    }

    /// Passes on the event of a step from before a restart to the journal and the user, unless a
    /// later step of the run was already reported. The step is no progress of the current attempt.
    fn handle_restored_step(&mut self, event: Event) {
        if self.is_unreported_step(&event) {
            self.record_run_progress(&event);
            self.pass_on_worker_event(event);
        }
    }

    /// Returns whether `event` reports a training step with a higher number than the newest step of
    /// the run that workers have reported.
    pub(super) fn is_unreported_step(&self, event: &Event) -> bool {
        matches!(event, Event::Step { step, .. } if self.step.is_none_or(|newest| *step > newest))
    }

    /// Adds an action by which an event of a worker is written to the journal (the run's file of
    /// events) and shown to the user.
    fn pass_on_worker_event(&mut self, event: Event) {
        self.actions.push(match self.current_report.take() {
            Some((report, age)) => ControllerAction::WorkerEvent { report, age, event: Some(event) },
            None => ControllerAction::Event(event),
        });
    }

    /// Records the newest step or checkpoint of the run from an event of a worker, even if the
    /// worker was started before a restart of the job.
    pub(super) fn record_run_progress(&mut self, event: &Event) {
        match event {
            Event::Step { step, .. } => (self.step, self.stepped) = (Some(*step), true),
            Event::Resume { step, .. } => self.step = Some(*step),
            Event::Checkpoint { path, .. } => self.checkpoint = Some(path.clone()),
            _ => {}
        }
    }

    /// Records the final report of a worker: the exit code and reason that it sends before it
    /// exits. If the report contains an error, fails the attempt immediately, without waiting for
    /// the exit.
    fn handle_final_report(
        &mut self,
        now: Duration,
        (host, rank): (HostIndex, Rank),
        exit: WorkerExit,
        diagnostic: Diagnostic,
        gpu: Option<GpuFault>,
    ) {
        let Some(worker) = self.find_worker(host, rank) else { return };
        worker.final_report.get_or_insert((exit, diagnostic.clone()));
        if exit == WorkerExit::Aborted && self.setup.leave_timeout.is_some() {
            // The worker does not exit before it learns whether it may leave the attempt.
            let final_report = Some((exit, diagnostic));
            let cause = build_aborted_cause((host, rank), final_report);
            return self.record_suspected_failure(now, cause, ROOT_CAUSE_TIMEOUT);
        }
        // The worker is about to exit. Killing the others need not wait for that.
        if !matches!(exit, WorkerExit::Aborted | WorkerExit::Done | WorkerExit::Stopped) {
            self.fail_attempt(now, build_worker_error_cause((host, rank), exit, diagnostic, gpu));
        }
    }

    /// Fails the current start of all workers (attempt) because an agent could not start or
    /// supervise one of them. The exit code of `launch` is that of the diagnostic's code: 3 if, for
    /// example, the host lacks the program.
    fn handle_worker_failure(&mut self, now: Duration, host: HostIndex, rank: Rank, diagnostic: Diagnostic) {
        let joining = matches!(self.state, AttemptState::Joining | AttemptState::Preparing);
        let exit_code = if joining { exit::CLUSTER } else { diagnostic.category().exit_code() };
        let code = diagnostic.code();
        let seconds = diagnostic.field("seconds").and_then(|seconds| seconds.as_u64()).unwrap_or(0);
        let was_started = self.find_worker(host, rank).is_some_and(|w| w.pid.is_some());
        let reason = match was_started {
            _ if code == run::WORKER_SILENT => FailureReason::WorkerSilent { seconds },
            true => FailureReason::WorkerError { code },
            false => FailureReason::StartFailed { code },
        };
        let cause = RootCause::new(host, reason, diagnostic.to_string())
            .with_rank(Some(rank))
            .with_exit_code(exit_code)
            .with_diagnostic(diagnostic);
        self.fail_attempt(now, cause);
    }

    /// Stores how a worker's process ended: its exit code or signal. Fails the attempt if the
    /// worker neither finished nor was asked to stop. A worker that was aborted by a peer only
    /// counts as a suspected failure.
    fn handle_worker_exit(&mut self, now: Duration, host: HostIndex, exited: WorkerExitReport) {
        let WorkerExitReport { rank, pid, status, oom, tail, error, gpu, timeout, lost_connection } = exited;
        let stopping = matches!(self.state, AttemptState::Stopping(_) | AttemptState::Draining { .. });
        let host_lost = self.state == (AttemptState::Draining { host_lost: true });
        let builtin = self.setup.builtin;
        let Some(worker) = self.find_worker(host, rank).filter(|w| w.ended.is_none()) else { return };
        let (was_running, was_stalled) = (worker.is_running(), worker.stalled_for.take().is_some());
        (worker.pid, worker.ended, worker.oom) = (Some(pid), Some((status, tail)), oom);
        let final_report = worker.final_report.clone();
        self.hosts[host].running -= usize::from(was_running);
        self.running -= usize::from(was_running);
        self.stalled -= usize::from(was_stalled);
        let meaning = match status {
            ExitStatus::Code(code) if builtin => WorkerExit::from_exit_code(code),
            _ => None,
        };
        match (status, meaning) {
            (ExitStatus::Code(0), _) => {}
            _ if host_lost => {}
            (_, Some(WorkerExit::Stopped)) if stopping => {}
            _ if stopping && !builtin => {}
            (_, Some(WorkerExit::Aborted)) => {
                let cause = build_aborted_cause((host, rank), final_report);
                self.record_suspected_failure(now, cause, ROOT_CAUSE_TIMEOUT);
            }
            (_, exit) => {
                let memory = Some(self.hosts[host].memory).filter(|bytes| *bytes > 0);
                let oom = oom.then_some(memory);
                let cause = match (exit, final_report) {
                    (Some(exit), Some((_, diagnostic))) => {
                        build_worker_error_cause((host, rank), exit, diagnostic, gpu)
                    }
                    (exit, _) => {
                        let end = WorkerProcessEnd { status, builtin, oom, error, gpu };
                        let exit_code = exit.map_or(exit::FAILED, to_launch_exit_code);
                        end.into_root_cause((host, rank)).with_exit_code(exit_code)
                    }
                };
                match timeout {
                    Some(evidence) => self.fail_attempt_after_timeout(now, cause, *evidence),
                    None => self.fail_attempt_of_ended_worker(now, cause, lost_connection),
                }
            }
        }
    }

    /// Ends all workers because a collective timed out and torch ended one worker, and has agents
    /// collect evidence about the other workers, such as stacks. `evidence` is what the worker
    /// leaves about its collectives.
    fn fail_attempt_after_timeout(&mut self, now: Duration, cause: RootCause, evidence: RankEvidence) {
        let host = cause.host;
        self.fail_hanging_attempt(now, cause.into_collective_timeout());
        self.store_hang_evidence(host, evidence);
    }

    /// Ends all workers because one worker has ended, unless the worker only lost its connection to
    /// another rank, whose failure may still be reported. If torch has lost the connection of the
    /// worker to another rank (`lost_connection`), the failure of the other rank is probably the
    /// root cause, and its report may arrive later.
    fn fail_attempt_of_ended_worker(
        &mut self,
        now: Duration,
        cause: RootCause,
        lost_connection: Option<LostConnection>,
    ) {
        match lost_connection.filter(|_| cause.is_process_end()) {
            Some(connection) => {
                let cause = cause.into_connection_loss(connection);
                self.record_suspected_failure(now, cause, CONNECTION_LOSS_TIMEOUT);
            }
            None => self.fail_attempt(now, cause),
        }
    }

    /// Records that a built-in worker has given up the failed attempt (start of all workers), while
    /// its process waits to take part in the next one. For this attempt, the worker has ended
    /// because a peer failed.
    fn handle_worker_left(&mut self, host: HostIndex, rank: Rank, pid: u32) {
        let Some(worker) = self.find_worker(host, rank).filter(|w| w.ended.is_none()) else { return };
        let (was_running, was_stalled) = (worker.is_running(), worker.stalled_for.take().is_some());
        let aborted = ExitStatus::Code(WorkerExit::Aborted.exit_code());
        (worker.pid, worker.ended) = (Some(pid), Some((aborted, Vec::new())));
        self.hosts[host].running -= usize::from(was_running);
        self.running -= usize::from(was_running);
        self.stalled -= usize::from(was_stalled);
    }

    /// Records that a worker has made no progress for `stalled_for`, and ends all workers if every
    /// running worker has stalled and one seems to hang. Also fails the attempt if the process of
    /// the worker is suspended (`suspended`), for example by SIGSTOP.
    fn handle_stalled_worker(
        &mut self,
        now: Duration,
        (host, rank): (HostIndex, Rank),
        stalled_for: Duration,
        suspended: bool,
        shows_hang: bool,
    ) {
        let Some(worker) = self.find_worker(host, rank).filter(|w| w.is_running()) else { return };
        let is_new = worker.stalled_for.replace(stalled_for).is_none();
        worker.stall_shows_hang = shows_hang;
        self.stalled += usize::from(is_new);
        let seconds = stalled_for.as_secs();
        let cause = if suspended {
            let message =
                format!("no progress for {seconds} s: the process is suspended (state T, as after SIGSTOP)");
            RootCause::new(host, FailureReason::Suspended { seconds, verdict: None }, message)
                .with_rank(Some(rank))
        } else if self.stalled == self.running
            && self.state == AttemptState::Running
            && self.workers.iter().any(|w| w.is_running() && w.stall_shows_hang)
        {
            let running = self.workers.iter().zip(0u32..).filter(|(w, _)| w.is_running());
            let ranks: Vec<Rank> = running.map(|(_, rank)| rank).collect();
            let message = format!(
                "no rank made progress for {seconds} s (ranks {}); the stack of each is in its log",
                crate::format::format_ranks(&ranks)
            );
            RootCause::new(host, FailureReason::Hang { seconds, ranks, verdict: None }, message)
        } else {
            return;
        };
        self.fail_hanging_attempt(now, cause);
    }

    /// Records that the workers of a host have ended, and reports a failure if the agent did not
    /// report how each worker ended.
    fn handle_workers_ended(&mut self, now: Duration, host: HostIndex) {
        if !self.hosts[host].active {
            return;
        }
        if self.hosts[host].running > 0 {
            let mut ranks = self.hosts[host].ranks.clone();
            let missing = ranks.find(|rank| self.workers[*rank as usize].is_running());
            let message =
                format!("the agent on {} did not report how the worker ended", self.choose_hostname(host));
            self.fail_attempt(
                now,
                RootCause::new(host, FailureReason::WorkerLost, message).with_rank(missing),
            );
        }
        self.mark_host_inactive(host);
    }

    /// Stores a failure that may only be a consequence of another failure, and waits for the report
    /// of this other failure. The recorded failure becomes the root cause if no other failure is
    /// reported within `timeout`.
    fn record_suspected_failure(&mut self, now: Duration, cause: RootCause, timeout: Duration) {
        let has_workers = matches!(
            self.state,
            AttemptState::Running | AttemptState::Stopping(_) | AttemptState::Draining { host_lost: false }
        );
        if has_workers && self.suspect.is_none() {
            self.suspect = Some((cause, now + timeout));
        }
    }
}

/// Returns whether `event` is of a kind that only the controller reports, such as the start, the
/// restart or the end of the run.
pub(super) fn is_controller_event(event: &Event) -> bool {
    match event {
        Event::Start { .. }
        | Event::Failure(_)
        | Event::Done { .. }
        | Event::Restart { .. }
        | Event::Placement { .. }
        | Event::Takeover { .. } => true,
        Event::Ready { .. }
        | Event::Resume { .. }
        | Event::Step { .. }
        | Event::StepTimes(_)
        | Event::Straggler(_)
        | Event::Overflow { .. }
        | Event::Eval { .. }
        | Event::Sample { .. }
        | Event::Checkpoint { .. }
        | Event::Gather { .. }
        | Event::Reload { .. }
        | Event::Notice { .. } => false,
    }
}
