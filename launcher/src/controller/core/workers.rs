//! What agents report about the workers of the current attempt.
use super::{
    Action, AttemptState, Core, FailureReason, HostIndex, ROOT_CAUSE_TIMEOUT, RootCause, WorkerState,
};
use crate::controller::root_cause::{ProcessEnd, aborted_by_peer, exit_code_for, worker_error};
use contract::{
    control::{ExitStatus, FromAgent},
    event::Event,
    exit::{self, WorkerExit},
    failure::GpuFault,
    ids::Rank,
};
use diagnostic::{Diagnostic, codes::run};
use std::{net::SocketAddr, time::Duration};

/// How a worker's process ended, from [`FromAgent::Exited`].
struct Exited {
    rank: Rank,
    pid: u32,
    status: ExitStatus,
    oom: bool,
    tail: Vec<String>,
    error: Option<String>,
    gpu: Option<GpuFault>,
}

impl Core {
    /// Processes a message that belongs to this attempt.
    pub(super) fn worker_message(&mut self, now: Duration, host: HostIndex, message: FromAgent) {
        match message {
            FromAgent::Started { rank, pid, .. } => self.worker_started(now, host, rank, pid),
            FromAgent::Exited { rank, pid, status, oom, tail, error, gpu, .. } => {
                self.worker_exited(now, host, Exited { rank, pid, status, oom, tail, error, gpu });
            }
            FromAgent::Line { rank, stderr, text } => {
                self.actions.push(Action::Line { rank, stderr, text });
            }
            FromAgent::Progress { rank, phase, .. } => self.actions.push(Action::Progress { rank, phase }),
            FromAgent::Listening { rank, addresses, .. } => self.worker_listens(host, rank, addresses),
            FromAgent::Event { event, .. } => self.worker_event(event),
            FromAgent::Fatal { rank, exit, diagnostic, gpu, .. } => {
                self.worker_fatal(now, (host, rank), exit, diagnostic, gpu);
            }
            FromAgent::Failed { rank: None, diagnostic, .. } => self.agent_failed(now, host, diagnostic),
            FromAgent::Failed { rank: Some(rank), diagnostic, .. } => {
                self.worker_failed(now, host, rank, diagnostic);
            }
            FromAgent::Stalled { rank, stalled_ms, suspended, .. } => {
                self.worker_stalled(now, host, rank, Duration::from_millis(stalled_ms), suspended);
            }
            FromAgent::Recovered { rank, .. } => {
                if self.worker(host, rank).is_some_and(|w| w.stalled_for.take().is_some()) {
                    self.stalled -= 1;
                }
            }
            FromAgent::WorkersEnded { .. } => self.workers_ended(now, host),
            // Handled by the driver, or without effect.
            FromAgent::Bound { .. }
            | FromAgent::Hello { .. }
            | FromAgent::Probed(_)
            | FromAgent::Heartbeat => {}
        }
    }

    /// The worker of this rank, if it is on this host.
    fn worker(&mut self, host: HostIndex, rank: Rank) -> Option<&mut WorkerState> {
        self.workers.get_mut(rank as usize).filter(|w| w.host == host)
    }

    fn worker_listens(&mut self, host: HostIndex, rank: Rank, addresses: Vec<SocketAddr>) {
        if self.worker(host, rank).is_none() {
            return;
        }
        let attempt = self.attempt;
        if let Some(members) = self.peer_exchange.add(host, rank, attempt, addresses) {
            self.actions.push(Action::SendPeers { attempt, members });
        }
    }

    fn worker_started(&mut self, now: Duration, host: HostIndex, rank: Rank, pid: u32) {
        let Some(worker) = self.worker(host, rank).filter(|w| w.pid.is_none() && w.ended.is_none()) else {
            return;
        };
        worker.pid = Some(pid);
        self.hosts[host].running += 1;
        self.running += 1;
        self.release_unlisted(now);
    }

    fn worker_event(&mut self, event: Event) {
        match &event {
            // Only the controller reports these.
            Event::Start { .. }
            | Event::Failure(_)
            | Event::Done { .. }
            | Event::Restart { .. }
            | Event::Placement { .. } => return,
            Event::Step { step, .. } => {
                (self.step, self.attempt_step) = (Some(*step), Some(*step));
                self.stepped = true;
            }
            Event::Resume { step, .. } => (self.step, self.attempt_step) = (Some(*step), Some(*step)),
            Event::Checkpoint { path, .. } => {
                self.checkpoint = Some(path.clone());
                self.attempt_saved = true;
            }
            Event::Ready { .. }
            | Event::Overflow { .. }
            | Event::Eval { .. }
            | Event::Sample { .. }
            | Event::Gather { .. }
            | Event::Reload { .. }
            | Event::Notice { .. } => {}
        }
        self.actions.push(Action::Event(event));
    }

    fn worker_fatal(
        &mut self,
        now: Duration,
        (host, rank): (HostIndex, Rank),
        exit: WorkerExit,
        diagnostic: Diagnostic,
        gpu: Option<GpuFault>,
    ) {
        let Some(worker) = self.worker(host, rank) else { return };
        worker.final_report.get_or_insert((exit, diagnostic.clone()));
        // It is about to exit; the others need not wait for that.
        if !matches!(exit, WorkerExit::Aborted | WorkerExit::Done | WorkerExit::Stopped) {
            self.fail(now, worker_error((host, rank), exit, diagnostic, gpu));
        }
    }

    /// Processes the report that an agent could not start or supervise a worker.
    fn worker_failed(&mut self, now: Duration, host: HostIndex, rank: Rank, diagnostic: Diagnostic) {
        let joining = matches!(self.state, AttemptState::Joining | AttemptState::Preparing);
        let exit_code = if joining { exit::CLUSTER } else { exit::FAILED };
        let code = diagnostic.code();
        let seconds = diagnostic.field("seconds").and_then(|seconds| seconds.as_u64()).unwrap_or(0);
        let was_started = self.worker(host, rank).is_some_and(|w| w.pid.is_some());
        let reason = match was_started {
            _ if code == run::WORKER_SILENT => FailureReason::WorkerSilent { seconds },
            true => FailureReason::WorkerError { code },
            false => FailureReason::StartFailed { code },
        };
        let cause = RootCause::new(host, reason, diagnostic.to_string())
            .with_rank(Some(rank))
            .with_exit_code(exit_code)
            .with_diagnostic(diagnostic);
        self.fail(now, cause);
    }

    fn worker_exited(&mut self, now: Duration, host: HostIndex, exited: Exited) {
        let Exited { rank, pid, status, oom, tail, error, gpu } = exited;
        let stopping = matches!(self.state, AttemptState::Stopping(_) | AttemptState::Draining { .. });
        let host_lost = self.state == (AttemptState::Draining { host_lost: true });
        let builtin = self.setup.builtin;
        let Some(worker) = self.worker(host, rank).filter(|w| w.ended.is_none()) else { return };
        let (was_running, was_stalled) = (worker.is_running(), worker.stalled_for.take().is_some());
        (worker.pid, worker.ended, worker.oom) = (Some(pid), Some((status, tail)), oom);
        let final_report = worker.final_report.clone();
        self.hosts[host].running -= usize::from(was_running);
        self.running -= usize::from(was_running);
        self.stalled -= usize::from(was_stalled);
        let meaning = match status {
            ExitStatus::Code(code) if builtin => WorkerExit::from_code(code),
            _ => None,
        };
        match (status, meaning) {
            (ExitStatus::Code(0), _) => {}
            _ if host_lost => {}
            (_, Some(WorkerExit::Stopped)) if stopping => {}
            _ if stopping && !builtin => {}
            (_, Some(WorkerExit::Aborted)) => {
                self.suspect_failure(now, aborted_by_peer((host, rank), final_report));
            }
            (_, exit) => {
                let memory = Some(self.hosts[host].memory).filter(|bytes| *bytes > 0);
                let oom = oom.then_some(memory);
                let cause = match (exit, final_report) {
                    (Some(exit), Some((_, diagnostic))) => worker_error((host, rank), exit, diagnostic, gpu),
                    (exit, _) => {
                        let end = ProcessEnd { status, builtin, oom, error, gpu };
                        let exit_code = exit.map_or(exit::FAILED, exit_code_for);
                        end.root_cause((host, rank)).with_exit_code(exit_code)
                    }
                };
                self.fail(now, cause);
            }
        }
    }

    /// Processes the report that a worker makes no progress. The job hangs when no worker makes
    /// progress or one is suspended.
    fn worker_stalled(
        &mut self,
        now: Duration,
        host: HostIndex,
        rank: Rank,
        stalled_for: Duration,
        suspended: bool,
    ) {
        let Some(worker) = self.worker(host, rank).filter(|w| w.is_running()) else { return };
        let is_new = worker.stalled_for.replace(stalled_for).is_none();
        self.stalled += usize::from(is_new);
        let seconds = stalled_for.as_secs();
        let cause = if suspended {
            let message =
                format!("no progress for {seconds} s: the process is suspended (state T, as after SIGSTOP)");
            RootCause::new(host, FailureReason::Suspended { seconds }, message).with_rank(Some(rank))
        } else if self.stalled == self.running && self.state == AttemptState::Running {
            let running = self.workers.iter().zip(0u32..).filter(|(w, _)| w.is_running());
            let ranks: Vec<Rank> = running.map(|(_, rank)| rank).collect();
            let message = format!(
                "no rank made progress for {seconds} s (ranks {}); the stack of each is in its log",
                crate::report::format_ranks(&ranks)
            );
            RootCause::new(host, FailureReason::Hang { seconds, ranks }, message)
        } else {
            return;
        };
        self.fail_with_stacks(now, cause);
    }

    fn workers_ended(&mut self, now: Duration, host: HostIndex) {
        if !self.hosts[host].active {
            return;
        }
        if self.hosts[host].running > 0 {
            let mut ranks = self.hosts[host].ranks.clone();
            let missing = ranks.find(|rank| self.workers[*rank as usize].is_running());
            let message = format!("the agent on {} did not report how the worker ended", self.hostname(host));
            self.fail(now, RootCause::new(host, FailureReason::WorkerLost, message).with_rank(missing));
        }
        self.deactivate(host);
    }

    /// Remembers a failure that is probably the consequence of a failure that is not reported yet.
    /// It becomes the root cause if no other failure is reported in time.
    fn suspect_failure(&mut self, now: Duration, cause: RootCause) {
        let has_workers = matches!(
            self.state,
            AttemptState::Running | AttemptState::Stopping(_) | AttemptState::Draining { host_lost: false }
        );
        if has_workers && self.suspect.is_none() {
            self.suspect = Some((cause, now + ROOT_CAUSE_TIMEOUT));
        }
    }
}
