//! Workers: their introduction, what they say, their ends.
use super::{Command, Core, LAST_WORDS, STEP_ENDS, State, Worker};
use crate::agent::progress::Progress;
use contract::{
    control::{ExitStatus, FromAgent, FromWorker, ToWorker, VERSION, WorkerInit},
    ids::Rank,
};
use std::time::Duration;

/// Its number, on every Linux.
const SIGKILL: i32 = 9;

impl Core {
    pub(super) fn living(&self) -> Vec<Rank> {
        self.workers.iter().filter(|(_, w)| w.alive()).map(|(r, _)| *r).collect()
    }

    pub(super) fn tell(&mut self, rank: Rank, message: ToWorker) {
        match self.workers.get_mut(&rank) {
            Some(worker) if worker.welcome.is_some() => worker.waiting.push(message),
            _ => self.out.push(Command::Tell(rank, message)),
        }
    }

    pub(super) fn spawned(&mut self, now: Duration, rank: Rank, pid: u32) {
        let Some(plan) = self.plan.clone() else { return };
        let Some(worker) = plan.workers.iter().find(|w| w.rank == rank) else { return };
        let builtin = worker.command.is_none();
        let welcome = builtin.then(|| {
            Box::new(WorkerInit {
                version: VERSION,
                rank,
                local_rank: worker.local_rank,
                world: plan.world,
                local_world: worker.local_world,
                threads: worker.threads,
                epoch: plan.epoch,
                run: plan.run.clone(),
                run_dir: plan.run_dir.clone(),
                workdir: worker.workdir.clone(),
                job: plan.job.clone(),
            })
        });
        let worker = Worker {
            builtin,
            pid: Some(pid),
            welcome,
            waiting: Vec::new(),
            heard: now,
            silent: false,
            link_open: builtin,
            status: None,
            ended_at: now,
            tail: None,
            error: None,
            oom: false,
            gpu: None,
            progress: Progress::new(now),
        };
        self.workers.insert(rank, worker);
        self.send(FromAgent::Started { epoch: self.epoch, rank, pid });
        self.spawn_next();
    }

    pub(super) fn worker(&mut self, now: Duration, rank: Rank, message: FromWorker) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        worker.heard = now;
        let epoch = self.epoch;
        match message {
            FromWorker::Hello { version, pid } if version == VERSION && Some(pid) == worker.pid => {
                let (welcome, waiting) = (worker.welcome.take(), std::mem::take(&mut worker.waiting));
                let welcome = welcome.map(ToWorker::Welcome);
                self.out.extend(welcome.into_iter().chain(waiting).map(|m| Command::Tell(rank, m)));
            }
            FromWorker::Hello { version, pid } => {
                let message = format!(
                    "the worker introduced itself with version {version} and pid {pid}; version {VERSION} and pid {:?} were expected",
                    worker.pid
                );
                self.send(FromAgent::Failed { epoch, rank: Some(rank), message });
            }
            FromWorker::Progress { phase, step } => {
                if worker.progress.of_runtime(phase, step) {
                    self.moved(now, rank);
                }
                self.send(FromAgent::Progress { epoch, rank, phase, step });
            }
            FromWorker::Event(event) => self.send(FromAgent::Event { epoch, rank, event }),
            FromWorker::Fatal { exit, message } => self.send(FromAgent::Fatal { epoch, rank, exit, message }),
            FromWorker::Listening { addresses } => {
                self.send(FromAgent::Listening { rank, epoch, addresses });
            }
        }
    }

    pub(super) fn worker_link(&mut self, rank: Rank, error: Option<String>) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        worker.link_open = false;
        if let (Some(error), true) = (error, worker.alive()) {
            self.send(FromAgent::Failed { epoch: self.epoch, rank: Some(rank), message: error });
        }
    }

    pub(super) fn ended(
        &mut self,
        now: Duration,
        rank: Rank,
        status: ExitStatus,
        oom: bool,
        gpu: Option<String>,
    ) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        if worker.status.is_none() {
            (worker.status, worker.oom, worker.gpu) = (Some(status), oom, gpu);
            worker.ended_at = now;
            self.ended.push_back(rank);
            self.out.push(Command::Drain(rank));
        }
    }

    /// From when on it is told that a worker has ended.
    pub(super) fn told_at(&self, worker: &Worker) -> Duration {
        let complete = worker.tail.is_some() && !worker.link_open;
        let by_sigkill = |status| matches!(status, ExitStatus::Signal(number, _) if number == SIGKILL);
        let killed = worker.status.is_some_and(by_sigkill) && !worker.oom;
        let words = if complete { Duration::ZERO } else { LAST_WORDS };
        let step = if self.in_step && killed && self.kill_at.is_none() { STEP_ENDS } else { Duration::ZERO };
        worker.ended_at + words.max(step)
    }

    /// Reports ended workers in the order of their ends, each when its last words are known or waited for long enough.
    pub(super) fn report_ended(&mut self, now: Duration) {
        while let Some(&rank) = self.ended.front() {
            if self.workers.get(&rank).is_none_or(|worker| now < self.told_at(worker)) {
                return;
            }
            let Some(worker) = self.workers.get_mut(&rank) else { return };
            let (Some(status), Some(pid)) = (worker.status, worker.pid) else { return };
            let tail = worker.tail.take().unwrap_or_default();
            // Its own account first, then the driver's.
            let accounts = [worker.error.take(), worker.gpu.take()].into_iter().flatten();
            let error = accounts.reduce(|own, drivers| format!("{own}; {drivers}"));
            let error = error.filter(|_| status != ExitStatus::Code(0));
            let (epoch, oom) = (self.epoch, worker.oom);
            self.ended.pop_front();
            self.send(FromAgent::Exited { epoch, rank, pid, status, oom, tail, error });
        }
    }

    pub(super) fn sweep_if_all_ended(&mut self) {
        let all_ended = self.living().is_empty() && self.ended.is_empty() && !self.spawning;
        if self.state == State::Running && all_ended {
            self.state = State::Sweeping;
            // Nobody is left for whom anything could become due.
            (self.kill_at, self.watch_at, self.written_by) = (None, Duration::MAX, Duration::MAX);
            self.out.push(Command::Sweep);
        }
    }

    pub(super) fn swept(&mut self, left: &[i32]) {
        if self.state != State::Sweeping {
            return;
        }
        if !left.is_empty() {
            return self.refuse(format!(
                "processes {left:?} do not die of SIGKILL: they hang in the kernel, most often in a device or network file system"
            ));
        }
        self.state = State::Idle;
        self.send(FromAgent::WorkersEnded { epoch: self.epoch });
        if self.controller_gone {
            self.exit(1);
        }
    }
}
