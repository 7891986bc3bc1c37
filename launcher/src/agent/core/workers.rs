//! The part of the agent's state machine that handles the start, the messages and the exits of
//! workers.
use super::{
    AgentAction, AgentCore, AgentState, FINAL_OUTPUT_TIMEOUT, ProcessGroupSignal, SupervisedWorker,
    kept_workers::MAX_WAIT_FOR_NEXT_ATTEMPT,
};
use crate::agent::lost_connection::find_lost_connection;
use crate::agent::progress::WorkerProgress;
use diagnostic::{Diagnostic, codes::run};
use jobspec::ids::Rank;
use protocol::{
    control::{ExitStatus, FromAgent, FromWorker, PROTOCOL_VERSION, ToWorker, WorkerInit},
    exit::WorkerExit,
    failure::GpuFault,
};
use std::time::Duration;

/// The number of SIGABRT on Linux, with which torch ends a process after a timeout.
const SIGABRT: i32 = 6;
/// The number of SIGKILL on Linux.
const SIGKILL: i32 = 9;
/// The number of SIGTERM on Linux.
const SIGTERM: i32 = 15;

impl AgentCore {
    /// Returns the ranks of the workers that were started and have not been reaped, in ascending
    /// order.
    pub(super) fn running_ranks(&self) -> Vec<Rank> {
        self.workers.iter().filter(|(_, w)| w.is_alive()).map(|(r, _)| *r).collect()
    }

    /// Sends a message to the built-in worker with the rank `rank`. Before the worker is
    /// initialized, holds the message back until the initialization.
    pub(super) fn send_to_worker(&mut self, rank: Rank, message: ToWorker) {
        match self.workers.get_mut(&rank) {
            Some(worker) if worker.init.is_some() => worker.after_init.push(message),
            _ => self.out.push(AgentAction::SendToWorker(rank, message)),
        }
    }

    /// Records that a worker's process, either new or kept from an earlier attempt (start of all
    /// workers), takes part in the current attempt. Reports the start to the controller, and
    /// requests the start of the next worker.
    pub(super) fn on_spawned(&mut self, now: Duration, rank: Rank, pid: u32, rejoins: bool) {
        let Some(plan) = self.plan.clone() else { return };
        let Some(worker) = plan.workers.iter().find(|w| w.rank == rank) else { return };
        let builtin = worker.command.is_none();
        let mut init = builtin.then(|| {
            Box::new(WorkerInit {
                version: PROTOCOL_VERSION,
                rank,
                local_rank: worker.local_rank,
                world: plan.world,
                local_world: worker.local_world,
                threads: worker.threads,
                attempt: plan.attempt,
                run: plan.run.clone(),
                run_dir: plan.run_dir.clone(),
                workdir: worker.workdir.clone(),
                job: plan.job.clone(),
                batch_job: plan.batch_job.clone(),
                continues_batch_job: plan.continues_batch_job,
            })
        });
        if let Some(init) = init.take_if(|_| rejoins) {
            // The worker waits for this message, and sends no second hello.
            self.out.push(AgentAction::SendToWorker(rank, ToWorker::Init(init)));
        }
        let worker = SupervisedWorker {
            builtin,
            pid: Some(pid),
            init,
            after_init: Vec::new(),
            last_message_at: now,
            silence_reported: false,
            connection_open: builtin,
            status: None,
            ended_at: now,
            tail: None,
            error: None,
            timeout: None,
            oom: false,
            gpu: None,
            progress: WorkerProgress::new(now),
            has_left: false,
            awaits_sigterm: false,
        };
        self.workers.insert(rank, worker);
        self.send_to_controller(FromAgent::Started { attempt: self.attempt, rank, pid });
        // A request may have arrived while the worker was being started.
        if self.kill_requested && rejoins {
            // Built-in workers that are initialized ignore SIGTERM.
            let reason = "the attempt is ending".to_owned();
            self.send_to_worker(rank, ToWorker::Abort { reason, keep: self.may_leave });
        } else if self.kill_requested {
            self.out.push(AgentAction::Signal(rank, ProcessGroupSignal::Terminate));
        } else if self.stop_requested {
            self.stop_worker(rank);
        }
        self.spawn_next_worker();
    }

    /// Handles a message of a built-in worker, such as its first message, an event for the
    /// controller or a sign of progress. Answers the hello with the first message to the worker,
    /// and reports events and progress to the controller.
    pub(super) fn on_worker_message(&mut self, now: Duration, rank: Rank, message: FromWorker) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        worker.last_message_at = now;
        if worker.has_left {
            return; // the worker sends only signs of life
        }
        let attempt = self.attempt;
        match message {
            FromWorker::Hello { version, pid } if version == PROTOCOL_VERSION && Some(pid) == worker.pid => {
                let (init, after_init) = (worker.init.take(), std::mem::take(&mut worker.after_init));
                let init = init.map(ToWorker::Init);
                self.out
                    .extend(init.into_iter().chain(after_init).map(|m| AgentAction::SendToWorker(rank, m)));
            }
            FromWorker::Hello { version, pid } => {
                let message = format!(
                    "the worker's hello has version {version} and pid {pid}; expected version {PROTOCOL_VERSION} and pid {}",
                    worker.pid.unwrap_or(0)
                );
                let diagnostic = Diagnostic::error(run::WORKER_HANDSHAKE_FAILED, message);
                self.send_to_controller(FromAgent::Failed { attempt, rank: Some(rank), diagnostic });
            }
            FromWorker::Progress { phase, step } => {
                if worker.progress.record_runtime_report(phase, step) {
                    self.on_progress(now, rank);
                }
                self.send_to_controller(FromAgent::Progress { attempt, rank, phase, step });
            }
            FromWorker::StepTimes(times) => {
                self.send_to_controller(FromAgent::StepTimes { attempt, times });
            }
            FromWorker::Event(event) => {
                self.send_to_controller(FromAgent::Event { attempt, rank, event, is_restored: false });
            }
            FromWorker::RestoredStep(event) => {
                self.send_to_controller(FromAgent::Event { attempt, rank, event, is_restored: true });
            }
            FromWorker::Fatal { exit, diagnostic } => {
                self.send_to_controller(FromAgent::Fatal { attempt, rank, exit, diagnostic, gpu: None });
            }
            FromWorker::Listening { addresses } => {
                self.send_to_controller(FromAgent::Listening { rank, attempt, addresses });
            }
            FromWorker::Left { attempt: left } => self.on_worker_left(rank, left),
        }
    }

    /// Passes the final report of a built-in worker (its last message before it exits) to the
    /// controller.
    pub(super) fn on_final_report(
        &mut self,
        now: Duration,
        rank: Rank,
        (exit, diagnostic): (WorkerExit, Diagnostic),
        gpu: Option<GpuFault>,
    ) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        worker.last_message_at = now;
        self.send_to_controller(FromAgent::Fatal { attempt: self.attempt, rank, exit, diagnostic, gpu });
    }

    /// Records that the control connection between a worker and the agent has ended. Reports an
    /// error of the connection to the controller if the worker is alive.
    pub(super) fn on_worker_connection_ended(&mut self, rank: Rank, error: Option<Diagnostic>) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        worker.connection_open = false;
        if let (Some(diagnostic), true) = (error, worker.is_alive()) {
            self.send_to_controller(FromAgent::Failed {
                attempt: self.attempt,
                rank: Some(rank),
                diagnostic,
            });
        }
    }

    /// Records how a worker's process ended, and requests that the output left in the worker's
    /// pipes be copied to its log.
    pub(super) fn on_worker_exited(
        &mut self,
        now: Duration,
        rank: Rank,
        status: ExitStatus,
        oom: bool,
        gpu: Option<GpuFault>,
    ) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        if worker.has_left {
            // The end of a process that waits for an attempt is no failure of an attempt.
            worker.status = Some(status);
            return;
        }
        if worker.status.is_none() {
            (worker.status, worker.oom, worker.gpu) = (Some(status), oom, gpu);
            worker.ended_at = now;
            self.unreported.push_back(rank);
            self.out.push(AgentAction::DrainOutput(rank));
        }
    }

    /// Returns the time from which the agent may report the end of a worker's process to the
    /// controller, which leaves time for the worker's last output.
    ///
    /// This is the end of the worker if all output and messages of the worker have arrived, else
    /// [`FINAL_OUTPUT_TIMEOUT`] later. After a SIGKILL or SIGTERM that the agent did not send, it
    /// is at least `kill_report_delay` later.
    pub(super) fn exit_report_time(&self, worker: &SupervisedWorker) -> Duration {
        let complete = worker.tail.is_some() && !worker.connection_open;
        let is_of_batch_system = |status| match status {
            ExitStatus::Signal(SIGKILL, _) => !worker.oom,
            ExitStatus::Signal(SIGTERM, _) => !self.stop_requested,
            _ => false,
        };
        let output_delay = if complete { Duration::ZERO } else { FINAL_OUTPUT_TIMEOUT };
        let is_unexpected = worker.status.is_some_and(is_of_batch_system) && self.kill_at.is_none();
        let kill_delay = if is_unexpected { self.kill_report_delay } else { Duration::ZERO };
        worker.ended_at + output_delay.max(kill_delay)
    }

    /// Reports ended workers to the controller in the order of their ends, up to the first worker
    /// whose report must still be delayed. See [`Self::exit_report_time`]. A report that is not due
    /// delays the reports of workers that ended later.
    pub(super) fn report_ended_workers(&mut self, now: Duration) {
        while let Some(&rank) = self.unreported.front() {
            if self.workers.get(&rank).is_none_or(|worker| now < self.exit_report_time(worker)) {
                return;
            }
            let Some(worker) = self.workers.get_mut(&rank) else { return };
            let (Some(status), Some(pid)) = (worker.status, worker.pid) else { return };
            let tail = worker.tail.take().unwrap_or_default();
            let failed = status != ExitStatus::Code(0);
            let error = worker.error.take().filter(|_| failed);
            let gpu = worker.gpu.take().filter(|_| failed);
            // A program may also dump its flight recorder without a hang.
            let is_aborted = matches!(status, ExitStatus::Signal(SIGABRT, _));
            let timeout = worker
                .timeout
                .take()
                .filter(|evidence| failed && (is_aborted || !evidence.collective_timeouts.is_empty()));
            let lost_connection = match failed && !worker.builtin {
                true => find_lost_connection(&tail, error.as_deref()),
                false => None,
            };
            let (attempt, oom) = (self.attempt, worker.oom);
            self.unreported.pop_front();
            self.send_to_controller(FromAgent::Exited {
                attempt,
                rank,
                pid,
                status,
                oom,
                tail,
                error,
                gpu,
                timeout,
                lost_connection,
            });
        }
    }

    /// Requests the kill of all processes that workers left behind, once every worker of this host
    /// has ended and was reported to the controller.
    pub(super) fn sweep_if_all_ended(&mut self) {
        let all_ended = self.running_ranks().is_empty() && self.unreported.is_empty() && !self.spawning;
        if self.state == AgentState::Running && all_ended {
            self.state = AgentState::Sweeping;
            // Without workers no deadline applies.
            (self.kill_at, self.activity_at, self.stacks_deadline) = (None, Duration::MAX, Duration::MAX);
            self.terminate_at = None;
            self.out.push(AgentAction::Sweep { kept: self.waiting_ranks() });
        }
    }

    /// Reports to the controller that the workers of the attempt have ended, after the processes
    /// that they left behind were killed. Ends the agent with an error if processes `left` did not
    /// end after SIGKILL.
    pub(super) fn on_sweep_finished(&mut self, left: &[i32]) {
        if self.state != AgentState::Sweeping {
            return;
        }
        if !left.is_empty() {
            let message =
                format!("processes {left:?} did not end after SIGKILL; they are blocked in the kernel");
            return self.fail_and_exit(
                Diagnostic::error(run::PROCESS_UNKILLABLE, message)
                    .with_field("pids", left)
                    .with_help("check the devices and network file systems of the host"),
            );
        }
        self.state = AgentState::Idle;
        let is_waiting = !self.waiting_ranks().is_empty();
        self.waiting_until = is_waiting.then(|| self.now + MAX_WAIT_FOR_NEXT_ATTEMPT);
        self.send_to_controller(FromAgent::WorkersEnded { attempt: self.attempt });
        if self.is_ending {
            self.request_exit(1);
        }
    }
}
