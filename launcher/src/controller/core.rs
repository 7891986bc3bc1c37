//! The controller's decisions: what agents say, signals and time go in; orders, events and the outcome come out. No
//! I/O, no clock.
//!
//! The first failure by the controller's clock is the root cause; everything after it is its consequence.
use super::cause::{Cause, describe, of_worker_exit, secondary};
use contract::{
    control::{ExitStatus, FromAgent, NodePlan, ToAgent, VERSION},
    event::{Event, Phase},
    exit::{self, WorkerExit},
    ids::Rank,
};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};

/// Index of a node in the plan.
pub(crate) type NodeId = usize;

/// For an agent to introduce itself.
pub(crate) const HELLO_LIMIT: Duration = Duration::from_secs(30);
/// An agent that says nothing for this long is lost.
pub(crate) const AGENT_LEASE: Duration = Duration::from_secs(30);
/// When the first exit seen only tells of another's failure: how long that failure is waited for.
pub(crate) const BETTER_CAUSE: Duration = Duration::from_millis(100);
/// From breaking built-in workers' collectives to SIGKILL.
pub(crate) const ABORT_GRACE: Duration = Duration::from_millis(500);
/// For the last lines of the failed rank.
pub(crate) const TAIL_LIMIT: Duration = Duration::from_secs(1);
/// After SIGKILL is due: for the agent to find that all is gone, before it is killed itself.
pub(crate) const AGENT_LIMIT: Duration = Duration::from_secs(10);

/// A signal to the controller that asks for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Interrupt,
    Terminate,
}

impl Stop {
    fn exit_code(self) -> u8 {
        match self {
            Stop::Interrupt => exit::INTERRUPTED,
            Stop::Terminate => exit::TERMINATED,
        }
    }
}

/// What happened.
#[derive(Debug)]
pub(crate) enum Input {
    Agent(NodeId, FromAgent),
    /// An agent is gone, and every process of its node with it.
    AgentGone {
        node: NodeId,
        how: String,
    },
    Stop(Stop),
    /// Save at the next step boundary and go on.
    Save,
    Tick,
}

/// What to do.
#[derive(Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "made and taken apart one at a time, hardly stored")]
pub(crate) enum Output {
    Tell(NodeId, ToAgent),
    /// Start the workers: every agent has introduced itself.
    Start,
    Event(Event),
    Line {
        rank: Rank,
        stderr: bool,
        text: String,
    },
    Progress {
        rank: Rank,
        phase: Phase,
    },
    /// This agent does not answer.
    KillAgent(NodeId),
    End(Outcome),
}

/// How the job ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) exit_code: u8,
    /// Stopped on request.
    pub(crate) stopped: bool,
    /// Stopped on request, without a chance to save.
    pub(crate) killed: bool,
    /// The last step seen.
    pub(crate) step: Option<u64>,
    /// After a failure: how the other ranks ended.
    pub(crate) others: Vec<(Rank, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for the agents.
    Joining,
    Running,
    Stopping(Stop),
    /// Failed, or told twice to stop.
    Ending,
    Over,
}

#[derive(Debug)]
struct Node {
    host: String,
    pid: u32,
    cpus: Vec<u32>,
    joined: bool,
    started: bool,
    gone: bool,
    heard: Duration,
}

#[derive(Debug)]
struct Worker {
    node: NodeId,
    log: PathBuf,
    pid: Option<u32>,
    ended: Option<(ExitStatus, Vec<String>)>,
    last_words: Option<(WorkerExit, String)>,
}

/// The state machine.
pub(crate) struct Core {
    state: State,
    builtin: bool,
    grace: Duration,
    nodes: Vec<Node>,
    workers: BTreeMap<Rank, Worker>,
    started_at: Duration,
    /// A failure that may be the consequence of one not yet seen, and until when that one is waited for.
    suspect: Option<(Cause, Duration)>,
    cause: Option<Cause>,
    /// When the cause was found, until it is reported.
    unreported: Option<Duration>,
    asked: Option<Stop>,
    killed: bool,
    step: Option<u64>,
    /// When agents that have not finished are killed.
    limit: Option<Duration>,
    out: Vec<Output>,
}

impl Core {
    pub(crate) fn new(plans: &[NodePlan]) -> Self {
        let mut workers = BTreeMap::new();
        let mut nodes = Vec::new();
        for (node, plan) in plans.iter().enumerate() {
            for w in &plan.workers {
                let log = w.log.clone();
                workers.insert(w.rank, Worker { node, log, pid: None, ended: None, last_words: None });
            }
            nodes.push(Node {
                host: String::new(),
                pid: 0,
                cpus: plan.workers.iter().flat_map(|w| w.cpus.iter().copied()).collect(),
                joined: false,
                started: false,
                gone: false,
                heard: Duration::ZERO,
            });
        }
        Core {
            state: State::Joining,
            builtin: plans.iter().flat_map(|p| &p.workers).all(|w| w.command.is_none()),
            grace: Duration::from_millis(plans.iter().map(|p| p.grace_ms).max().unwrap_or(0)),
            nodes,
            workers,
            started_at: Duration::ZERO,
            suspect: None,
            cause: None,
            unreported: None,
            asked: None,
            killed: false,
            step: None,
            limit: None,
            out: Vec::new(),
        }
    }

    /// The first outputs: every agent is greeted.
    pub(crate) fn start(&mut self, now: Duration) -> Vec<Output> {
        self.started_at = now;
        for (id, node) in self.nodes.iter_mut().enumerate() {
            node.heard = now;
            self.out.push(Output::Tell(id, ToAgent::Hello { version: VERSION }));
        }
        std::mem::take(&mut self.out)
    }

    /// When the next `Tick` is due at the latest, if at all.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let suspect = self.suspect.as_ref().map(|(_, until)| *until);
        let tail = self.unreported.map(|since| since + TAIL_LIMIT);
        [suspect, tail, self.limit].into_iter().flatten().min()
    }

    /// Takes in what happened at `now` (since any fixed start; never goes back).
    pub(crate) fn handle(&mut self, now: Duration, input: Input) -> Vec<Output> {
        if self.state == State::Over {
            return Vec::new();
        }
        match input {
            Input::Agent(node, message) if node < self.nodes.len() && !self.nodes[node].gone => {
                self.nodes[node].heard = now;
                self.agent(now, node, message);
            }
            Input::AgentGone { node, how } if node < self.nodes.len() => self.agent_gone(now, node, how),
            Input::Stop(stop) => self.stop(now, stop),
            Input::Save => self.tell_all(&ToAgent::Save),
            _ => {}
        }
        self.on_time(now);
        self.report_failure(now);
        self.finish(now);
        std::mem::take(&mut self.out)
    }

    fn tell_all(&mut self, message: &ToAgent) {
        let nodes = self.nodes.iter().enumerate().filter(|(_, n)| n.started && !n.gone);
        self.out.extend(nodes.map(|(id, _)| Output::Tell(id, message.clone())));
    }

    fn notice(&mut self, message: String) {
        self.out.push(Output::Event(Event::Notice { rank: None, message }));
    }

    // ---- agents ----

    fn agent(&mut self, now: Duration, node: NodeId, message: FromAgent) {
        match message {
            FromAgent::Hello { version, host, pid, cpus } => self.hello(now, node, version, host, pid, &cpus),
            FromAgent::Started { rank, pid } => {
                if let Some(worker) = self.worker(node, rank) {
                    worker.pid = Some(pid);
                }
            }
            FromAgent::Exited { rank, pid, status, tail, error } => {
                self.exited(now, node, rank, pid, status, tail, error);
            }
            FromAgent::Line { rank, stderr, text } => self.out.push(Output::Line { rank, stderr, text }),
            FromAgent::Progress { rank, phase, .. } => self.out.push(Output::Progress { rank, phase }),
            FromAgent::Event { event, .. } => self.event(event),
            FromAgent::Fatal { rank, exit, message } => self.fatal(now, node, rank, exit, message),
            FromAgent::Failed { rank: Some(rank), message } => {
                let code = if self.state == State::Joining { exit::CLUSTER } else { exit::FAILED };
                self.fail(now, Cause { node, rank: Some(rank), text: message, exit_code: code });
            }
            FromAgent::Failed { rank: None, message } => {
                let code = if self.state == State::Joining { exit::CLUSTER } else { exit::FAILED };
                let text = format!("the agent on {} failed: {message}", self.host(node));
                self.fail(now, Cause { node, rank: None, text, exit_code: code });
            }
            FromAgent::AllGone => self.all_gone(now, node),
            FromAgent::Beat => {}
        }
    }

    fn hello(&mut self, now: Duration, node: NodeId, version: u32, host: String, pid: u32, cpus: &[u32]) {
        let found = &mut self.nodes[node];
        if found.joined {
            return;
        }
        found.joined = true;
        found.host = host;
        found.pid = pid;
        let missing: Vec<u32> = found.cpus.iter().copied().filter(|c| !cpus.contains(c)).collect();
        let text = if version != VERSION {
            format!(
                "the agent speaks version {version} of the control messages, this controller version {VERSION}: two \
                 different builds of `launch` are mixed; install the same one on every node"
            )
        } else if !missing.is_empty() {
            format!("workers shall be bound to CPUs {missing:?}, but only CPUs {cpus:?} may be used there")
        } else {
            if self.state == State::Joining && self.nodes.iter().all(|n| n.joined) {
                self.state = State::Running;
                self.nodes.iter_mut().for_each(|n| n.started = true);
                self.out.push(Output::Start);
            }
            return;
        };
        self.fail(now, Cause { node, rank: None, text, exit_code: exit::CLUSTER });
    }

    fn worker(&mut self, node: NodeId, rank: Rank) -> Option<&mut Worker> {
        self.workers.get_mut(&rank).filter(|w| w.node == node)
    }

    fn host(&self, node: NodeId) -> &str {
        match self.nodes[node].host.as_str() {
            "" => "this machine",
            host => host,
        }
    }

    fn event(&mut self, event: Event) {
        match &event {
            // The beginning and the end are ours to tell.
            Event::Start { .. } | Event::Failure { .. } | Event::Done { .. } => return,
            Event::Step { step, .. } | Event::Resume { step, .. } => self.step = Some(*step),
            _ => {}
        }
        self.out.push(Output::Event(event));
    }

    fn fatal(&mut self, now: Duration, node: NodeId, rank: Rank, exit: WorkerExit, message: String) {
        let Some(worker) = self.worker(node, rank) else { return };
        worker.last_words.get_or_insert((exit, message.clone()));
        // It will exit now; the others need not wait for that.
        if !matches!(exit, WorkerExit::Aborted | WorkerExit::Done | WorkerExit::Stopped) {
            let exit_code = of_worker_exit(exit);
            self.fail(now, Cause { node, rank: Some(rank), text: message, exit_code });
        }
    }

    fn exited(
        &mut self,
        now: Duration,
        node: NodeId,
        rank: Rank,
        pid: u32,
        status: ExitStatus,
        tail: Vec<String>,
        error: Option<String>,
    ) {
        let (builtin, stopping) = (self.builtin, matches!(self.state, State::Stopping(_)));
        let Some(worker) = self.worker(node, rank) else { return };
        if worker.ended.is_some() {
            return;
        }
        worker.pid = Some(pid);
        worker.ended = Some((status, tail));
        let last_words = worker.last_words.clone();
        let cause = |text: String, exit_code: u8| Cause { node, rank: Some(rank), text, exit_code };
        let meaning = match status {
            ExitStatus::Code(code) if builtin => WorkerExit::from_code(code),
            _ => None,
        };
        match (status, meaning) {
            (ExitStatus::Code(0), _) => {}
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
                self.fail(now, cause(describe(status, builtin) + &said, exit::FAILED));
            }
        }
    }

    fn all_gone(&mut self, now: Duration, node: NodeId) {
        let missing =
            self.workers.iter().find(|(_, w)| w.node == node && w.ended.is_none() && w.pid.is_some());
        if let Some((rank, _)) = missing.map(|(r, w)| (*r, w)) {
            let text = format!("its agent lost track of it ({})", self.host(node));
            self.fail(now, Cause { node, rank: Some(rank), text, exit_code: exit::FAILED });
        }
        self.nodes[node].gone = true;
    }

    fn agent_gone(&mut self, now: Duration, node: NodeId, how: String) {
        if std::mem::replace(&mut self.nodes[node].gone, true) {
            return;
        }
        let code = if self.state == State::Joining { exit::CLUSTER } else { exit::FAILED };
        let text = format!("the agent on {} (pid {}) {how}", self.host(node), self.nodes[node].pid);
        self.fail(now, Cause { node, rank: None, text, exit_code: code });
    }

    // ---- the end ----

    fn stop(&mut self, now: Duration, stop: Stop) {
        self.asked.get_or_insert(stop);
        match self.state {
            State::Joining => {
                self.killed = true;
                self.state = State::Ending;
            }
            State::Running if self.suspect.is_none() => {
                self.state = State::Stopping(stop);
                let name = if stop == Stop::Interrupt { "SIGINT" } else { "SIGTERM" };
                let deadline_ms = (!self.builtin).then_some(self.grace.as_millis() as u64);
                self.limit = (!self.builtin).then_some(now + self.grace + AGENT_LIMIT);
                self.tell_all(&ToAgent::Stop { deadline_ms });
                self.notice(if self.builtin {
                    format!("{name}: the workers save at the next step boundary and stop; a second signal kills them")
                } else {
                    let grace = self.grace.as_secs_f64();
                    format!("{name}: the workers got SIGTERM and have {grace} s; a second signal kills them")
                });
            }
            State::Running | State::Stopping(_) | State::Ending => {
                self.killed |= self.cause.is_none();
                self.state = State::Ending;
                self.kill(now, "stopped by a second signal", Duration::ZERO);
            }
            State::Over => {}
        }
    }

    /// A failure that another one, not yet seen, has caused.
    fn suspect(&mut self, now: Duration, cause: Cause) {
        if matches!(self.state, State::Running | State::Stopping(_)) && self.suspect.is_none() {
            self.suspect = Some((cause, now + BETTER_CAUSE));
        }
    }

    /// A failure. The first one ends the job; of the later ones nothing is heard.
    fn fail(&mut self, now: Duration, cause: Cause) {
        if matches!(self.state, State::Ending | State::Over) {
            return;
        }
        let grace = if self.builtin { ABORT_GRACE } else { self.grace };
        let who = cause.rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
        let reason = format!("{who}{}", cause.text);
        self.suspect = None;
        self.cause = Some(cause);
        self.unreported = Some(now);
        self.state = State::Ending;
        self.kill(now, &reason, grace);
    }

    fn kill(&mut self, now: Duration, reason: &str, grace: Duration) {
        let grace_ms = grace.as_millis() as u64;
        self.tell_all(&ToAgent::Kill { reason: reason.to_owned(), grace_ms });
        let limit = now + grace + AGENT_LIMIT;
        self.limit = Some(self.limit.map_or(limit, |before| before.min(limit)));
    }

    /// Tells the cause, once, as soon as the last lines of the failed rank are there.
    fn report_failure(&mut self, now: Duration) {
        let (Some(since), Some(cause)) = (self.unreported, &self.cause) else { return };
        let worker = cause.rank.and_then(|rank| self.workers.get(&rank));
        let tail_may_come = worker.is_some_and(|w| w.pid.is_some() && w.ended.is_none());
        if tail_may_come && !self.nodes[cause.node].gone && now < since + TAIL_LIMIT {
            return;
        }
        self.unreported = None;
        let pid = worker.map_or(self.nodes[cause.node].pid, |w| w.pid.unwrap_or(0));
        self.out.push(Output::Event(Event::Failure {
            rank: cause.rank,
            host: self.host(cause.node).to_owned(),
            pid,
            cause: cause.text.clone(),
            log: worker.map(|w| w.log.clone()),
            tail: worker.and_then(|w| w.ended.as_ref()).map_or_else(Vec::new, |(_, tail)| tail.clone()),
        }));
    }

    fn on_time(&mut self, now: Duration) {
        if self.suspect.as_ref().is_some_and(|(_, until)| now >= *until) {
            self.promote_suspect(now);
        }
        for id in 0..self.nodes.len() {
            let node = &self.nodes[id];
            if node.gone || self.state == State::Over {
                continue;
            }
            let limit = if node.joined { AGENT_LEASE } else { HELLO_LIMIT };
            if now > node.heard + limit {
                let what = if node.joined { "stopped responding" } else { "did not introduce itself" };
                self.out.push(Output::KillAgent(id));
                self.agent_gone(now, id, format!("{what} for {} s", limit.as_secs()));
            }
        }
        if self.limit.is_some_and(|limit| now >= limit) {
            self.limit = None;
            let late: Vec<NodeId> = (0..self.nodes.len()).filter(|id| !self.nodes[*id].gone).collect();
            for id in late {
                self.out.push(Output::KillAgent(id));
                self.agent_gone(now, id, "did not end its workers in time and was killed".into());
            }
        }
    }

    fn promote_suspect(&mut self, now: Duration) {
        if let Some((cause, _)) = self.suspect.take() {
            self.fail(now, cause);
        }
    }

    fn finish(&mut self, now: Duration) {
        let all_gone = self.nodes.iter().all(|n| n.gone || !n.started);
        if !all_gone || self.state == State::Joining || self.state == State::Over {
            return;
        }
        self.promote_suspect(now);
        self.report_failure(now + TAIL_LIMIT);
        self.state = State::Over;
        let outcome = self.outcome();
        self.out.push(Output::End(outcome));
    }

    fn outcome(&self) -> Outcome {
        let done = |w: &Worker| matches!(w.ended, Some((ExitStatus::Code(0), _)));
        // Built-in workers that were all done before they saw the request were not stopped.
        let all_done = self.builtin && self.workers.values().all(done);
        let asked = self.asked.filter(|_| !all_done);
        let (exit_code, stopped) = match (&self.cause, asked) {
            (Some(cause), _) => (cause.exit_code, false),
            (None, Some(stop)) => (stop.exit_code(), true),
            (None, None) => (exit::DONE, false),
        };
        let root = self.cause.as_ref().map(|c| c.rank);
        let others = self.workers.iter().filter(|(rank, _)| root.is_some_and(|r| r != Some(**rank)));
        let how = |w: &Worker| match &w.ended {
            Some((status, _)) => describe(*status, self.builtin),
            None if w.pid.is_some() => "lost with its agent".into(),
            None => "never started".into(),
        };
        Outcome {
            exit_code,
            stopped,
            killed: stopped && self.killed,
            step: self.step,
            others: others.map(|(rank, w)| (*rank, how(w))).collect(),
        }
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
