//! What agents tell of the workers of this epoch.
use super::{BETTER_CAUSE, Cause, Core, HostIndex, Output, State, Worker};
use crate::controller::cause::{describe, of_worker_exit, out_of_memory, secondary};
use contract::{
    control::{ExitStatus, FromAgent},
    event::Event,
    exit::{self, WorkerExit},
    ids::Rank,
};
use std::{net::SocketAddr, time::Duration};

/// How a worker's process ended, as its agent tells it.
struct Exit {
    rank: Rank,
    pid: u32,
    status: ExitStatus,
    oom: bool,
    tail: Vec<String>,
    error: Option<String>,
}

impl Core {
    /// A message of this epoch.
    pub(super) fn news(&mut self, now: Duration, node: HostIndex, message: FromAgent) {
        match message {
            FromAgent::Started { rank, pid, .. } => self.started(now, node, rank, pid),
            FromAgent::Exited { rank, pid, status, oom, tail, error, .. } => {
                self.exited(now, node, Exit { rank, pid, status, oom, tail, error });
            }
            FromAgent::Line { rank, stderr, text } => self.out.push(Output::Line { rank, stderr, text }),
            FromAgent::Progress { rank, phase, .. } => self.out.push(Output::Progress { rank, phase }),
            FromAgent::Listening { rank, addresses, .. } => self.listening(node, rank, addresses),
            FromAgent::Event { event, .. } => self.event(event),
            FromAgent::Fatal { rank, exit, message, .. } => self.fatal(now, node, rank, exit, message),
            FromAgent::Failed { rank, message, .. } => self.failed(now, node, rank, message),
            FromAgent::Stalled { rank, for_ms, stopped, .. } => {
                self.still(now, node, rank, Duration::from_millis(for_ms), stopped);
            }
            FromAgent::Recovered { rank, .. } => {
                if self.worker(node, rank).is_some_and(|w| w.still.take().is_some()) {
                    self.still -= 1;
                }
            }
            FromAgent::WorkersEnded { .. } => self.all_gone(now, node),
            // The driver's, or nothing to decide.
            FromAgent::Bound { .. } | FromAgent::Hello { .. } | FromAgent::Probed(_) | FromAgent::Heartbeat => {}
        }
    }

    /// A worker of this node in this epoch.
    fn worker(&mut self, node: HostIndex, rank: Rank) -> Option<&mut Worker> {
        self.workers.get_mut(rank as usize).filter(|w| w.node == node)
    }

    fn listening(&mut self, node: HostIndex, rank: Rank, addresses: Vec<SocketAddr>) {
        if self.worker(node, rank).is_none() {
            return;
        }
        let epoch = self.epoch;
        if let Some(members) = self.introductions.hear(node, rank, epoch, addresses) {
            self.out.push(Output::Introduce { epoch, members });
        }
    }

    fn started(&mut self, now: Duration, node: HostIndex, rank: Rank, pid: u32) {
        let Some(worker) = self.worker(node, rank).filter(|w| w.pid.is_none() && w.ended.is_none()) else {
            return;
        };
        worker.pid = Some(pid);
        self.nodes[node].alive += 1;
        self.alive += 1;
        self.release(now);
    }

    fn event(&mut self, event: Event) {
        match &event {
            // The beginning, the end and what lies between two starts are ours to tell.
            Event::Start { .. }
            | Event::Failure { .. }
            | Event::Done { .. }
            | Event::Restart { .. }
            | Event::Placed { .. } => return,
            Event::Step { step, .. } | Event::Resume { step, .. } => {
                (self.step, self.epoch_step) = (Some(*step), Some(*step));
                self.stepped |= matches!(event, Event::Step { .. });
            }
            Event::Checkpoint { path, .. } => {
                self.saved = Some(path.clone());
                self.epoch_saved = true;
            }
            _ => {}
        }
        self.out.push(Output::Event(event));
    }

    fn fatal(&mut self, now: Duration, node: HostIndex, rank: Rank, exit: WorkerExit, message: String) {
        let Some(worker) = self.worker(node, rank) else { return };
        worker.last_words.get_or_insert((exit, message.clone()));
        // It will exit now; the others need not wait for that.
        if !matches!(exit, WorkerExit::Aborted | WorkerExit::Done | WorkerExit::Stopped) {
            let exit_code = of_worker_exit(exit);
            self.fail(now, Cause { node, rank: Some(rank), text: message, exit_code });
        }
    }

    fn failed(&mut self, now: Duration, node: HostIndex, rank: Option<Rank>, message: String) {
        let Some(rank) = rank else { return self.unfit(now, node, &message) };
        let joining = matches!(self.state, State::Joining | State::Preparing);
        let exit_code = if joining { exit::CLUSTER } else { exit::FAILED };
        self.fail(now, Cause { node, rank: Some(rank), text: message, exit_code });
    }

    fn exited(&mut self, now: Duration, node: HostIndex, exit: Exit) {
        let Exit { rank, pid, status, oom, tail, error } = exit;
        let stopping = matches!(self.state, State::Stopping(_) | State::Draining(_));
        let (builtin, cut) = (self.setup.builtin, self.state == State::Draining(true));
        let Some(worker) = self.worker(node, rank).filter(|w| w.ended.is_none()) else { return };
        let (was_alive, was_still) = (worker.alive(), worker.still.take().is_some());
        (worker.pid, worker.ended, worker.oom) = (Some(pid), Some((status, tail)), oom);
        let last_words = worker.last_words.clone();
        self.nodes[node].alive -= usize::from(was_alive);
        self.alive -= usize::from(was_alive);
        self.still -= usize::from(was_still);
        let cause = |text: String, exit_code: u8| Cause { node, rank: Some(rank), text, exit_code };
        let meaning = match status {
            ExitStatus::Code(code) if builtin => WorkerExit::from_code(code),
            _ => None,
        };
        match (status, meaning) {
            (ExitStatus::Code(0), _) => {}
            _ if cut => {}
            (_, Some(WorkerExit::Stopped)) if stopping => {}
            _ if stopping && !builtin => {}
            (_, Some(WorkerExit::Aborted)) => {
                self.suspect(now, secondary(cause(String::new(), 1), last_words))
            }
            (_, Some(exit)) => {
                let text = last_words.map_or_else(|| describe(status, builtin), |(_, text)| text);
                self.fail(now, cause(text, of_worker_exit(exit)));
            }
            (_, None) => {
                let said = error.map_or_else(String::new, |error| format!(": {error}"));
                let how = if oom { out_of_memory(status) } else { describe(status, builtin) };
                self.fail(now, cause(how + &said, exit::FAILED));
            }
        }
    }

    /// A worker makes no progress. The job hangs when no worker makes any, or one is stopped.
    fn still(&mut self, now: Duration, node: HostIndex, rank: Rank, lasted: Duration, stopped: bool) {
        let Some(worker) = self.worker(node, rank).filter(|w| w.alive()) else { return };
        let news = worker.still.replace(lasted).is_none();
        self.still += usize::from(news);
        let seconds = lasted.as_secs();
        let text = if stopped {
            format!("made no progress for {seconds} s: its process is stopped (state T, as after SIGSTOP)")
        } else if self.still == self.alive && self.state == State::Running {
            let ranks = self.workers.iter().zip(0u32..).filter(|(w, _)| w.alive()).map(|(_, rank)| rank);
            let ranks = crate::report::ranks(&ranks.collect::<Vec<_>>());
            format!("no rank made progress for {seconds} s (ranks {ranks}); where they were is in their logs")
        } else {
            return;
        };
        let rank = stopped.then_some(rank);
        self.hung(now, Cause { node, rank, text, exit_code: exit::FAILED });
    }

    fn all_gone(&mut self, now: Duration, node: HostIndex) {
        if !self.nodes[node].active {
            return;
        }
        if self.nodes[node].alive > 0 {
            let mut ranks = self.nodes[node].ranks.clone();
            let missing = ranks.find(|rank| self.workers[*rank as usize].alive());
            let text = format!("its agent lost track of it ({})", self.host(node));
            self.fail(now, Cause { node, rank: missing, text, exit_code: exit::FAILED });
        }
        self.deactivate(node);
    }

    /// A failure that another one, not yet seen, has caused.
    fn suspect(&mut self, now: Duration, cause: Cause) {
        if matches!(self.state, State::Running | State::Stopping(_) | State::Draining(false))
            && self.suspect.is_none()
        {
            self.suspect = Some((cause, now + BETTER_CAUSE));
        }
    }
}
