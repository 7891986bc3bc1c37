//! The controller's decisions: what agents say, signals and time go in; orders, events and the outcome come out. No
//! I/O, no clock.
//!
//! The first failure by the controller's clock is the root cause; everything after it is its consequence. A start of the
//! job is an epoch: a message of another epoch changes nothing. The work per message doesn't depend on the number of
//! hosts or workers (what is told to all, and the end, are the exceptions).
mod ending;
mod hosts;
mod roster;
mod workers;

use super::{
    cause::Cause,
    introduce::Introductions,
    policy::{Ended, History},
};
use contract::{
    control::{ExitStatus, FromAgent, HostInventory, PeerAddress, ToAgent},
    event::{Event, Phase},
    exit::{self, WorkerExit},
    ids::Rank,
    job::{JobSpec, MinHosts, Reload},
};
use hosts::{Leases, Link, Node};
use std::{path::PathBuf, time::Duration};

/// Index of a host in the job's list.
pub(crate) type HostIndex = usize;

/// For an agent to introduce itself: a connection, a login, perhaps a copy of the executable.
pub(crate) const HELLO_LIMIT: Duration = Duration::from_secs(60);
/// An agent of this machine that says nothing for this long is lost.
pub(crate) const AGENT_LEASE: Duration = Duration::from_secs(30);
/// The same for an agent elsewhere, where a network may fail without a word.
pub(crate) const REMOTE_LEASE: Duration = Duration::from_secs(5);
/// Between two beats to an agent elsewhere.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// A host elsewhere that was lost isn't used again before this: its agent, if it lives, has found out by then that the
/// controller is silent and has ended its workers.
pub(crate) const COOLING: Duration = Duration::from_secs(crate::agent::CONTROLLER_LEASE.as_secs() + 7);
/// For the rendezvous of an epoch to be bound and its plan to be made.
pub(crate) const PREPARE_LIMIT: Duration = Duration::from_secs(15);
/// When the first exit seen only tells of another's failure: how long that failure is waited for.
pub(crate) const BETTER_CAUSE: Duration = Duration::from_millis(100);
/// From breaking built-in workers' collectives to SIGKILL.
pub(crate) const ABORT_GRACE: Duration = Duration::from_millis(500);
/// For the last lines of the failed rank.
pub(crate) const TAIL_LIMIT: Duration = Duration::from_secs(1);
/// After SIGKILL is due: for the agent to find that all is gone, before it is killed itself.
pub(crate) const AGENT_LIMIT: Duration = Duration::from_secs(10);
/// A host whose failures ended this many starts is left out, when the others are enough.
pub(crate) const MOST_FAILURES: u32 = 2;

/// A signal to the controller that asks for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Interrupt,
    Terminate,
    /// The time limit is near.
    Limit,
}

impl Stop {
    fn exit_code(self) -> u8 {
        match self {
            Stop::Interrupt => exit::INTERRUPTED,
            Stop::Terminate | Stop::Limit => exit::TERMINATED,
        }
    }
}

/// A host of the job.
#[derive(Clone, Debug)]
pub(crate) struct HostSetup {
    pub(crate) name: String,
    /// Its agent isn't a child of the controller.
    pub(crate) remote: bool,
}

/// What the core has to know of the job.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) hosts: Vec<HostSetup>,
    pub(crate) builtin: bool,
    pub(crate) grace: Duration,
    pub(crate) restarts: u32,
    /// Hosts that a start uses when they can be had.
    pub(crate) use_hosts: usize,
    /// `use_hosts` follows the list of hosts when that changes.
    pub(crate) use_all: bool,
    pub(crate) min_hosts: usize,
    /// For the length of pauses.
    pub(crate) seed: u64,
}

impl Setup {
    pub(crate) fn new(job: &JobSpec, hosts: Vec<HostSetup>, seed: u64) -> Self {
        let all = hosts.len();
        let use_hosts = job.cluster.use_hosts.map_or(all, |n| (n as usize).min(all));
        let min_hosts = match job.run.min_hosts {
            MinHosts::All => use_hosts,
            MinHosts::AtLeast(n) => (n as usize).min(use_hosts),
        };
        // A job that can't do with fewer hosts has no use for more: a host that comes is a spare.
        let use_all = job.cluster.use_hosts.is_none() && job.run.min_hosts != MinHosts::All;
        Setup {
            hosts,
            builtin: job.run.command.is_none(),
            grace: Duration::from_millis(job.run.grace_ms),
            restarts: job.run.restarts,
            use_hosts,
            use_all,
            min_hosts,
            seed,
        }
    }
}

/// A worker that an epoch's plan has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) log: PathBuf,
}

/// What happened.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Input {
    Agent(HostIndex, FromAgent),
    /// An agent is gone, and every process of its node with it, as far as this side can know.
    AgentGone {
        node: HostIndex,
        how: String,
    },
    /// The plan of an epoch: the workers of each of the hosts that [`Output::Prepare`] named, ranks ascending.
    Ready {
        epoch: u32,
        workers: Vec<Vec<Planned>>,
    },
    /// There is no plan with what was found, or no rendezvous.
    Refused {
        epoch: u32,
        message: String,
    },
    Stop(Stop),
    /// End it at once, without a save.
    Kill,
    /// Save and go on; the signal that asks for it.
    Save(i32),
    /// The job file changed: go on with these values.
    Reload(Reload),
    /// The list of hosts changed: these are new, and of those that were known these are in it (by [`NodeId`]).
    Hosts {
        added: Vec<HostSetup>,
        listed: Vec<bool>,
    },
    Tick,
}

/// What to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Output {
    Tell(HostIndex, ToAgent),
    /// A host's agent has introduced itself.
    Found(HostIndex, HostInventory),
    /// Plan this epoch on these hosts, and bind its rendezvous; answered by `Ready` or `Refused`.
    Prepare {
        epoch: u32,
        restarts: u32,
        nodes: Vec<HostIndex>,
        /// What this run has saved last.
        resume: Option<PathBuf>,
    },
    /// Start the workers of the plan that was made last.
    Start,
    /// Start the agent of this host, or start it again.
    StartAgent(HostIndex),
    /// The agent of this host is needed no more: close its stream.
    ReleaseAgent(HostIndex),
    /// Every built-in worker listens: tell all of them where, with a key of this epoch.
    Introduce {
        epoch: u32,
        members: Vec<PeerAddress>,
    },
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
    KillAgent(HostIndex),
    End(Outcome),
}

/// How a rank that wasn't the root cause ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) rank: Rank,
    pub(crate) host: String,
    pub(crate) how: String,
}

/// How the job ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) exit_code: u8,
    /// Stopped on request.
    pub(crate) stopped: bool,
    /// Stopped on request, without a chance to save.
    pub(crate) killed: bool,
    /// Stopped because the time limit is near.
    pub(crate) limit: bool,
    /// The cause is that a host was lost.
    pub(crate) host_lost: bool,
    /// It got further than it was at its start, as far as this side can know.
    pub(crate) progress: bool,
    /// The last step seen.
    pub(crate) step: Option<u64>,
    /// After a failure: how the other ranks ended.
    pub(crate) others: Vec<Other>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for the agents of the next start.
    Joining,
    /// Waiting for its plan.
    Preparing,
    Running,
    Stopping(Stop),
    /// Stopping, to go on without hosts that are no longer listed. `true`: one of them is lost, and what is left is killed.
    Draining(bool),
    /// Failed, or told twice to stop.
    Ending,
    /// Between a failure and the next start, until then.
    Resting(Duration),
    Over,
}

#[derive(Debug)]
struct Worker {
    node: HostIndex,
    log: PathBuf,
    pid: Option<u32>,
    ended: Option<(ExitStatus, Vec<String>)>,
    oom: bool,
    last_words: Option<(WorkerExit, String)>,
    /// Makes no progress, and since how long when that was told.
    still: Option<Duration>,
}

impl Worker {
    fn alive(&self) -> bool {
        self.pid.is_some() && self.ended.is_none()
    }
}

/// The state machine.
pub(crate) struct Core {
    setup: Setup,
    state: State,
    nodes: Vec<Node>,
    leases: Leases,
    history: History,
    /// The epoch that runs, or is to start next.
    epoch: u32,

    // ---- of this epoch ----
    /// Its hosts, in the order of ranks.
    members: Vec<HostIndex>,
    /// Members that may have processes of this epoch.
    active: usize,
    /// By rank.
    workers: Vec<Worker>,
    /// Workers that run.
    alive: usize,
    /// Of them, those that make no progress.
    still: usize,
    introductions: Introductions,
    /// A failure that may be the consequence of one not yet seen, and until when that one is waited for.
    suspect: Option<(Cause, Duration)>,
    cause: Option<Cause>,
    /// When the cause was found, until it is reported.
    unreported: Option<Duration>,
    /// The job is started again after this pause.
    restart: Option<Duration>,
    /// The step last seen in this epoch.
    epoch_step: Option<u64>,
    epoch_saved: bool,
    /// A host was lost.
    host_lost: bool,
    /// A step was done.
    stepped: bool,
    /// When agents that have not finished are killed; while preparing, when that has failed.
    limit: Option<Duration>,

    // ---- of the whole run ----
    asked: Option<Stop>,
    killed: bool,
    step: Option<u64>,
    /// The newest checkpoint of this run.
    saved: Option<PathBuf>,
    /// What the last restart was for.
    last_cause: Option<String>,
    any_remote: bool,
    beat_at: Duration,
    /// Hosts that are no longer listed and are still used.
    unlisted: usize,
    /// Members of the next start among the first `front` hosts: see [`Core::try_prepare`].
    front: HostIndex,
    front_joined: usize,
    out: Vec<Output>,
}

impl Core {
    pub(crate) fn new(setup: Setup) -> Self {
        let nodes = setup.hosts.iter().map(|_| Node::default()).collect();
        let any_remote = setup.hosts.iter().any(|h| h.remote);
        let history = History { budget: setup.restarts, builtin: setup.builtin, ..History::default() };
        Core {
            setup,
            state: State::Joining,
            nodes,
            leases: Leases::default(),
            history,
            epoch: 0,
            members: Vec::new(),
            active: 0,
            workers: Vec::new(),
            alive: 0,
            still: 0,
            introductions: Introductions::new(0, 0),
            suspect: None,
            cause: None,
            unreported: None,
            restart: None,
            epoch_step: None,
            epoch_saved: false,
            host_lost: false,
            stepped: false,
            limit: None,
            asked: None,
            killed: false,
            step: None,
            saved: None,
            last_cause: None,
            any_remote,
            beat_at: Duration::ZERO,
            unlisted: 0,
            front: 0,
            front_joined: 0,
            out: Vec::new(),
        }
    }

    /// The first outputs: every agent, all of which were just started, is greeted.
    pub(crate) fn start(&mut self, now: Duration) -> Vec<Output> {
        self.beat_at = now + BEAT;
        for id in 0..self.nodes.len() {
            if self.nodes[id].link == Link::Away {
                self.greet(now, id);
            }
        }
        std::mem::take(&mut self.out)
    }

    /// When the next `Tick` is due at the latest, if at all.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let suspect = self.suspect.as_ref().map(|(_, until)| *until);
        let tail = self.unreported.map(|since| since + TAIL_LIMIT);
        let rest = if let State::Resting(until) = self.state { Some(until) } else { None };
        let beat = self.any_remote.then_some(self.beat_at);
        [suspect, tail, rest, beat, self.limit, self.leases.next()].into_iter().flatten().min()
    }

    /// Takes in what happened at `now` (since any fixed start; never goes back).
    pub(crate) fn handle(&mut self, now: Duration, input: Input) -> Vec<Output> {
        if self.state == State::Over {
            return Vec::new();
        }
        match input {
            Input::Agent(node, message) if self.nodes.get(node).is_some_and(Node::heard_of) => {
                self.nodes[node].heard = now;
                self.agent(now, node, message);
            }
            Input::AgentGone { node, how } if node < self.nodes.len() => self.agent_gone(now, node, &how),
            Input::Ready { epoch, workers } if self.is_preparing(epoch) => self.ready(now, workers),
            Input::Refused { epoch, message } if self.is_preparing(epoch) => {
                let node = self.members.first().copied().unwrap_or(0);
                self.fail(now, Cause { node, rank: None, text: message, exit_code: exit::CLUSTER });
            }
            Input::Stop(stop) => self.stop(now, stop),
            Input::Kill => {
                self.stop(now, Stop::Terminate);
                self.stop(now, Stop::Terminate);
            }
            Input::Save(signal) => self.tell_all(&ToAgent::Save { epoch: self.epoch, signal }),
            Input::Reload(values) => self.tell_all(&ToAgent::Reload { epoch: self.epoch, values }),
            Input::Hosts { added, listed } => self.list(now, added, &listed),
            _ => {}
        }
        self.on_time(now);
        self.report_failure(now);
        self.finish(now);
        std::mem::take(&mut self.out)
    }

    /// To every agent that has workers of this epoch.
    fn tell_all(&mut self, message: &ToAgent) {
        let active = self.members.iter().filter(|id| self.nodes[**id].active);
        self.out.reserve(self.active);
        self.out.extend(active.map(|id| Output::Tell(*id, message.clone())));
    }

    fn notice(&mut self, message: String) {
        self.out.push(Output::Event(Event::Notice { rank: None, message }));
    }

    fn on_time(&mut self, now: Duration) {
        if self.suspect.as_ref().is_some_and(|(_, until)| now >= *until) {
            self.promote_suspect(now);
        }
        self.beat(now);
        self.check_leases(now);
        if self.limit.is_some_and(|limit| now >= limit) {
            self.limit = None;
            self.too_late(now);
        }
        if matches!(self.state, State::Resting(until) if now >= until) {
            self.join_again(now);
        }
    }

    fn agent(&mut self, now: Duration, node: HostIndex, message: FromAgent) {
        if let FromAgent::Hello { version, pid, found } = message {
            return self.hello(now, node, version, pid, found);
        }
        if self.nodes[node].link != Link::Joined {
            return;
        }
        // A late message of an old epoch changes nothing.
        let of_now = self.nodes[node].active && epoch_of(&message) == Some(self.epoch);
        let of_any = matches!(message, FromAgent::Line { .. } | FromAgent::Failed { rank: None, .. });
        if of_now || of_any {
            self.news(now, node, message);
        }
    }
}

/// The epoch a message belongs to.
fn epoch_of(message: &FromAgent) -> Option<u32> {
    match message {
        FromAgent::Bound { epoch, .. }
        | FromAgent::Started { epoch, .. }
        | FromAgent::Exited { epoch, .. }
        | FromAgent::Event { epoch, .. }
        | FromAgent::Progress { epoch, .. }
        | FromAgent::Listening { epoch, .. }
        | FromAgent::Stalled { epoch, .. }
        | FromAgent::Recovered { epoch, .. }
        | FromAgent::Fatal { epoch, .. }
        | FromAgent::Failed { epoch, .. }
        | FromAgent::WorkersEnded { epoch } => Some(*epoch),
        FromAgent::Hello { .. } | FromAgent::Line { .. } | FromAgent::Probed(_) | FromAgent::Heartbeat => None,
    }
}

/// What `launch` would exit with if this start's end were the job's.
fn ended(cause: &Cause, step: Option<u64>, saved: bool) -> Ended {
    Ended { exit_code: cause.exit_code, step, saved }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
