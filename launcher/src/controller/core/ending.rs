//! The end of a start, and what follows: the root cause, another start, or the end of the job.
use super::{
    ABORT_GRACE, AGENT_LIMIT, Cause, Core, HostIndex, Other, Outcome, Output, State, Stop, TAIL_LIMIT, Worker,
    ended,
};
use crate::controller::{
    cause::{describe, out_of_memory},
    policy::Verdict,
};
use contract::{
    control::{ExitStatus, ToAgent},
    event::Event,
    exit,
};
use std::time::Duration;

impl Core {
    pub(super) fn stop(&mut self, now: Duration, stop: Stop) {
        if matches!(self.state, State::Stopping(_))
            && self.asked == Some(Stop::Limit)
            && stop != Stop::Interrupt
        {
            // The limit itself, or the batch system's end of the job: the workers stop already, and no second signal was
            // meant. The job isn't to be started again.
            self.asked = Some(stop);
            return;
        }
        self.asked.get_or_insert(stop);
        match self.state {
            State::Joining | State::Preparing | State::Resting(_) => {
                // Nothing runs.
                self.killed = self.epoch == 0;
                self.limit = None;
                self.state = State::Ending;
            }
            State::Running if self.suspect.is_none() => self.ask_to_stop(now, stop),
            State::Draining(false) if self.suspect.is_none() => {
                // The workers stop already; a second request would end some programs without a save.
                self.state = State::Stopping(stop);
                self.notice(
                    "the workers stop already, and aren't started again; a second signal kills them".into(),
                );
            }
            State::Running | State::Draining(_) | State::Stopping(_) | State::Ending => {
                self.not_again();
                self.killed |= self.cause.is_none();
                self.state = State::Ending;
                self.kill(now, "stopped by a second signal", Duration::ZERO, false);
            }
            State::Over => {}
        }
    }

    fn ask_to_stop(&mut self, now: Duration, stop: Stop) {
        self.state = State::Stopping(stop);
        self.tell_to_stop(now);
        let (builtin, grace) = (self.setup.builtin, self.setup.grace);
        let name = match stop {
            Stop::Interrupt => "SIGINT",
            Stop::Terminate => "SIGTERM",
            Stop::Limit => "SIGUSR1, the time limit is near",
        };
        self.notice(if builtin {
            format!("{name}: the workers save at the next step boundary and stop; a second signal kills them")
        } else {
            let grace = grace.as_secs_f64();
            format!("{name}: the workers got SIGTERM and have {grace} s; a second signal kills them")
        });
    }

    /// The built-in runtime saves and stops; programs get SIGTERM and their grace.
    pub(super) fn tell_to_stop(&mut self, now: Duration) {
        let (builtin, grace) = (self.setup.builtin, self.setup.grace);
        let deadline_ms = (!builtin).then_some(grace.as_millis() as u64);
        self.limit = (!builtin).then_some(now + grace + AGENT_LIMIT);
        self.tell_all(&ToAgent::Stop { epoch: self.epoch, deadline_ms });
    }

    /// Somebody asked for the end: the restart that was to come doesn't.
    fn not_again(&mut self) {
        if self.restart.take().is_some() && self.unreported.is_none() {
            // The cause was told with the restart; what ends the job now is the request.
            self.cause = None;
        }
    }

    /// A failure. The first one of an epoch ends it; of the later ones nothing is heard.
    pub(super) fn fail(&mut self, now: Duration, cause: Cause) {
        self.fail_with(now, cause, false);
    }

    /// The job hangs: before anything is killed, every worker's stacks are written down.
    pub(super) fn hung(&mut self, now: Duration, cause: Cause) {
        self.fail_with(now, cause, true);
    }

    fn fail_with(&mut self, now: Duration, cause: Cause, stacks: bool) {
        if matches!(self.state, State::Ending | State::Resting(_) | State::Over) {
            return;
        }
        let grace = if self.setup.builtin { ABORT_GRACE } else { self.setup.grace };
        let who = cause.rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
        let reason = format!("{who}{}", cause.text);
        let stopping = matches!(self.state, State::Stopping(_));
        let ran = !matches!(self.state, State::Joining | State::Preparing);
        let mut cause = cause;
        self.suspect = None;
        self.limit = None;
        self.state = State::Ending;
        self.nodes[cause.node].failures += u32::from(ran);
        match self.again(&cause, ran && !stopping) {
            Verdict::Restart(pause) => self.restart = Some(pause),
            Verdict::Stop(Some(why)) => cause.text = format!("{}; not started again: {why}", cause.text),
            Verdict::Stop(None) => {}
        }
        self.cause = Some(cause);
        self.unreported = Some(now);
        self.kill(now, &reason, grace, stacks);
    }

    /// Shall the job be started again?
    fn again(&mut self, cause: &Cause, may: bool) -> Verdict {
        if !may {
            return Verdict::Stop(None);
        }
        let chance = self.chance();
        self.history.judge(ended(cause, self.epoch_step, self.epoch_saved), chance)
    }

    /// A number from 0 to 1 that is the same whenever this run is played again: SplitMix64 of seed and epoch.
    fn chance(&self) -> f64 {
        let mut x = self.setup.seed.wrapping_add(u64::from(self.epoch).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(super) fn kill(&mut self, now: Duration, reason: &str, grace: Duration, stacks: bool) {
        let (epoch, grace_ms) = (self.epoch, grace.as_millis() as u64);
        self.tell_all(&ToAgent::Kill { epoch, reason: reason.to_owned(), grace_ms, stacks });
        let limit = now + grace + AGENT_LIMIT;
        self.limit = Some(self.limit.map_or(limit, |before| before.min(limit)));
    }

    /// Tells the cause, once, as soon as the last lines of the failed rank are there.
    pub(super) fn report_failure(&mut self, now: Duration) {
        let (Some(since), Some(cause)) = (self.unreported, &self.cause) else { return };
        let worker = cause.rank.and_then(|rank| self.workers.get(rank as usize));
        let tail_may_come = worker.is_some_and(Worker::alive);
        if tail_may_come && self.nodes[cause.node].active && now < since + TAIL_LIMIT {
            return;
        }
        self.unreported = None;
        let host = self.host(cause.node).to_owned();
        let pid = worker.map_or(self.nodes[cause.node].pid, |w| w.pid.unwrap_or(0));
        let log = worker.map(|w| w.log.clone());
        let tail = worker.and_then(|w| w.ended.as_ref()).map_or_else(Vec::new, |(_, tail)| tail.clone());
        let (rank, cause) = (cause.rank, cause.text.clone());
        let event = match self.restart {
            None => Event::Failure { rank, host, pid, cause, log, tail },
            Some(pause) => {
                let (epoch, left) = (self.history.used, self.history.budget - self.history.used);
                let pause_s = pause.as_secs_f64();
                Event::Restart { epoch, left, pause_s, rank, host, pid, cause, log, tail }
            }
        };
        self.out.push(Output::Event(event));
    }

    /// What takes longer than it may: a plan, or agents that can't end their workers.
    pub(super) fn too_late(&mut self, now: Duration) {
        if self.state == State::Preparing {
            let node = self.members.first().copied().unwrap_or(0);
            let seconds = super::PREPARE_LIMIT.as_secs();
            let text = format!("the rendezvous was not bound on {} for {seconds} s", self.host(node));
            return self.fail(now, Cause { node, rank: None, text, exit_code: exit::CLUSTER });
        }
        let late: Vec<HostIndex> = self.members.iter().copied().filter(|id| self.nodes[*id].active).collect();
        for id in late {
            self.out.push(Output::KillAgent(id));
            self.agent_gone(now, id, "did not end its workers in time and was killed");
        }
    }

    pub(super) fn promote_suspect(&mut self, now: Duration) {
        if let Some((cause, _)) = self.suspect.take() {
            self.fail(now, cause);
        }
    }

    pub(super) fn finish(&mut self, now: Duration) {
        let running =
            matches!(self.state, State::Running | State::Draining(_) | State::Stopping(_) | State::Ending);
        if !running || self.active > 0 {
            return;
        }
        self.promote_suspect(now);
        self.report_failure(now + TAIL_LIMIT);
        if let Some(pause) = self.restart.take() {
            return self.rest(now, pause);
        }
        if matches!(self.state, State::Draining(_)) && !self.all_done() {
            return self.rest(now, Duration::ZERO);
        }
        self.state = State::Over;
        let outcome = self.outcome();
        self.out.push(Output::End(outcome));
    }

    /// This epoch is over; the next one follows after a pause.
    fn rest(&mut self, now: Duration, pause: Duration) {
        self.epoch += 1;
        self.last_cause = self.cause.take().map(|cause| cause.text);
        (self.suspect, self.limit) = (None, None);
        (self.epoch_step, self.epoch_saved) = (None, false);
        self.members.clear();
        self.workers.clear();
        self.state = State::Resting(self.next_start(now, pause));
    }

    /// Built-in workers that were all done before they saw a request to stop were not stopped. A program's exit code says
    /// nothing of it.
    fn all_done(&self) -> bool {
        let done = |w: &Worker| matches!(w.ended, Some((ExitStatus::Code(0), _)));
        self.setup.builtin && !self.workers.is_empty() && self.workers.iter().all(done) && !self.killed
    }

    fn outcome(&mut self) -> Outcome {
        let asked = self.asked.filter(|_| !self.all_done());
        let (exit_code, stopped) = match (&self.cause, asked) {
            (Some(cause), _) => (cause.exit_code, false),
            (None, Some(stop)) => (stop.exit_code(), true),
            (None, None) => (exit::DONE, false),
        };
        let root = self.cause.as_ref().map(|c| c.rank);
        let workers = self.workers.iter().zip(0u32..);
        let others = workers.filter(|(_, rank)| root.is_some_and(|r| r != Some(*rank)));
        let how = |w: &Worker| match &w.ended {
            Some((status, _)) if w.oom => out_of_memory(*status),
            Some((status, _)) => describe(*status, self.setup.builtin),
            None if w.pid.is_some() => "lost with its agent".into(),
            None => "never started".into(),
        };
        let other = |(w, rank): (&Worker, _)| Other {
            rank,
            host: self.setup.hosts[w.node].name.clone(),
            how: how(w),
        };
        Outcome {
            exit_code,
            stopped,
            killed: stopped && self.killed,
            limit: stopped && asked == Some(Stop::Limit),
            host_lost: self.host_lost && root == Some(None),
            progress: self.stepped || !self.setup.builtin,
            step: self.step,
            others: others.map(other).collect(),
        }
    }
}
