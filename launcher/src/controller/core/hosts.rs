//! Hosts: who has joined, who is lost, and which of them a start uses.
use super::{
    AGENT_LEASE, BEAT, COOLING, Cause, Core, HELLO_LIMIT, MOST_FAILURES, HostIndex, Output, PREPARE_LIMIT,
    Planned, REMOTE_LEASE, State, Worker,
};
use crate::controller::introduce::Introductions;
use contract::{
    control::{HostInventory, ToAgent, VERSION},
    event::Event,
    exit,
    ids::Rank,
};
use std::{cmp::Reverse, collections::BinaryHeap, ops::Range, time::Duration};

/// How far an agent is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Link {
    /// Not started.
    #[default]
    Away,
    /// Started, and hasn't introduced itself.
    Greeting,
    Joined,
    Lost,
}

/// A host and its agent.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) link: Link,
    /// The host's own name for itself.
    pub(super) host: String,
    pub(super) pid: u32,
    pub(super) heard: Duration,
    /// Starts that it ended.
    pub(super) failures: u32,
    pub(super) left_out: bool,
    /// The list of hosts has it no more.
    pub(super) unlisted: bool,
    /// That it is used all the same was told.
    pub(super) kept: bool,
    /// A lost one: when no process of it can live any more.
    pub(super) cool_at: Duration,
    /// It may have processes of this epoch.
    pub(super) active: bool,
    /// Its ranks in this epoch.
    pub(super) ranks: Range<Rank>,
    /// Its workers that run.
    pub(super) alive: usize,
    /// Its entry in the heap of leases; an older one says nothing.
    ticket: u32,
}

impl Node {
    /// Is anybody there who could say something?
    pub(super) fn heard_of(&self) -> bool {
        matches!(self.link, Link::Greeting | Link::Joined)
    }
}

/// When each agent's silence is looked at next: one entry for each, brought up to date when it is due, so that a message
/// costs nothing here.
#[derive(Debug, Default)]
pub(super) struct Leases(BinaryHeap<Reverse<(Duration, HostIndex, u32)>>);

impl Leases {
    pub(super) fn next(&self) -> Option<Duration> {
        // A lease is over when it is exceeded.
        self.0.peek().map(|Reverse((at, ..))| *at + Duration::from_nanos(1))
    }
}

impl Core {
    fn lease(&self, id: HostIndex) -> Duration {
        match self.nodes[id].link {
            Link::Joined if self.setup.hosts[id].remote => REMOTE_LEASE,
            Link::Joined => AGENT_LEASE,
            _ => HELLO_LIMIT,
        }
    }

    fn watch(&mut self, id: HostIndex) {
        let due = self.nodes[id].heard + self.lease(id);
        let ticket = self.nodes[id].ticket.wrapping_add(1);
        self.nodes[id].ticket = ticket;
        self.leases.0.push(Reverse((due, id, ticket)));
    }

    /// An agent was started: greets it.
    pub(super) fn greet(&mut self, now: Duration, id: HostIndex) {
        let node = &mut self.nodes[id];
        (node.link, node.heard, node.pid) = (Link::Greeting, now, 0);
        self.watch(id);
        self.out.push(Output::Tell(id, ToAgent::Hello { version: VERSION }));
    }

    pub(super) fn start_agent(&mut self, now: Duration, id: HostIndex) {
        self.out.push(Output::StartAgent(id));
        self.greet(now, id);
    }

    pub(super) fn hello(&mut self, now: Duration, id: HostIndex, version: u32, pid: u32, found: HostInventory) {
        let node = &mut self.nodes[id];
        if node.link != Link::Greeting {
            return;
        }
        (node.link, node.pid) = (Link::Joined, pid);
        node.host.clone_from(&found.host);
        // The lease of a joined agent is shorter than the limit of its hello.
        self.watch(id);
        if version != VERSION {
            let message = format!(
                "it speaks version {version} of the control messages, this controller version {VERSION}: two different \
                 builds of `launch` are mixed; install the same one on every node"
            );
            return self.unfit(now, id, &message);
        }
        if self.setup.hosts[id].remote {
            // From its first beat on it knows that silence means the end.
            self.out.push(Output::Tell(id, ToAgent::Heartbeat));
        }
        self.out.push(Output::Found(id, found));
        self.release(now);
        self.try_prepare(now);
    }

    /// A host's agent can't do its work. Who runs nothing of this start is given up, and the others go on.
    pub(super) fn unfit(&mut self, now: Duration, id: HostIndex, message: &str) {
        let joining = matches!(self.state, State::Joining | State::Preparing);
        if !joining && !self.nodes[id].active {
            self.out.push(Output::KillAgent(id));
            return self.agent_gone(now, id, &format!("can't be used: its agent failed: {message}"));
        }
        let text = format!("the agent on {} failed: {message}", self.host(id));
        let exit_code = if joining { exit::CLUSTER } else { exit::FAILED };
        self.fail(now, Cause { node: id, rank: None, text, exit_code });
    }

    /// Goes on when the first hosts that can be had are there, as many as the job uses, or no more can come.
    ///
    /// `front` moves over the list once, so that joining costs the same for each host.
    pub(super) fn try_prepare(&mut self, now: Duration) {
        if self.state != State::Joining {
            return;
        }
        while self.front < self.nodes.len() && self.front_joined < self.setup.use_hosts {
            let node = &self.nodes[self.front];
            match node.link {
                Link::Greeting => return,
                Link::Joined if !node.left_out => self.front_joined += 1,
                _ => {}
            }
            self.front += 1;
        }
        if self.front_joined < self.setup.min_hosts {
            return self.too_few(now);
        }
        let joined = |id: &HostIndex| self.nodes[*id].link == Link::Joined && !self.nodes[*id].left_out;
        self.members = (0..self.front).filter(joined).collect();
        self.state = State::Preparing;
        self.limit = Some(now + PREPARE_LIMIT);
        self.out.push(Output::Prepare {
            epoch: self.epoch,
            restarts: self.history.used,
            nodes: self.members.clone(),
            resume: self.saved.clone(),
        });
    }

    /// Counts the hosts for the next start from the beginning.
    pub(super) fn count_again(&mut self) {
        (self.front, self.front_joined) = (0, 0);
    }

    /// A start can't be had with the hosts that are left.
    fn too_few(&mut self, now: Duration) {
        let (left, needed) = (self.front_joined, self.setup.min_hosts);
        let before =
            self.last_cause.as_ref().map_or_else(String::new, |c| format!("; the job had failed: {c}"));
        let text = format!("{left} hosts are left and {needed} are needed (`run.min_hosts`){before}");
        let node = (0..self.nodes.len()).find(|id| self.nodes[*id].link != Link::Joined).unwrap_or(0);
        self.fail(now, Cause { node, rank: None, text, exit_code: exit::CLUSTER });
    }

    pub(super) fn is_preparing(&self, epoch: u32) -> bool {
        self.state == State::Preparing && epoch == self.epoch
    }

    /// The plan is made: the workers start.
    pub(super) fn ready(&mut self, now: Duration, plan: Vec<Vec<Planned>>) {
        self.limit = None;
        self.workers.clear();
        for (&id, planned) in self.members.iter().zip(plan) {
            let first = self.workers.len() as Rank;
            let workers = planned.into_iter().map(|worker| Worker {
                node: id,
                log: worker.log,
                pid: None,
                ended: None,
                oom: false,
                last_words: None,
                still: None,
            });
            self.workers.extend(workers);
            let node = &mut self.nodes[id];
            (node.active, node.alive) = (true, 0);
            node.ranks = first..self.workers.len() as Rank;
        }
        (self.active, self.alive, self.still) = (self.members.len(), 0, 0);
        self.introductions = Introductions::new(self.epoch, self.workers.len());
        self.state = State::Running;
        if self.nodes.len() > 1 || self.epoch > 0 {
            let hosts = self.members.iter().map(|id| self.setup.hosts[*id].name.clone()).collect();
            let world = self.workers.len() as u32;
            self.out.push(Output::Event(Event::Placed { epoch: self.epoch, world, hosts }));
        }
        self.out.push(Output::Start);
        // Who has gone meanwhile takes its part with it.
        let lost = self.members.iter().copied().find(|id| self.nodes[*id].link != Link::Joined);
        for id in self.members.clone() {
            if self.nodes[id].link != Link::Joined {
                self.deactivate(id);
            }
        }
        if let Some(node) = lost {
            let text = format!("{} was lost before its workers started", self.place(node));
            self.fail(now, Cause { node, rank: None, text, exit_code: exit::CLUSTER });
        }
    }

    /// No process of this epoch is left on the node.
    pub(super) fn deactivate(&mut self, id: HostIndex) {
        let node = &mut self.nodes[id];
        if std::mem::take(&mut node.active) {
            self.active -= 1;
            self.alive -= node.alive;
            node.alive = 0;
            for rank in node.ranks.clone() {
                let worker = &mut self.workers[rank as usize];
                if worker.alive() && worker.still.take().is_some() {
                    self.still -= 1;
                }
            }
        }
    }

    pub(super) fn agent_gone(&mut self, now: Duration, id: HostIndex, how: &str) {
        let before = self.nodes[id].link;
        // One that was let go may leave.
        if matches!(before, Link::Lost | Link::Away) {
            return;
        }
        let remote = self.setup.hosts[id].remote;
        let node = &mut self.nodes[id];
        node.link = Link::Lost;
        node.cool_at = if remote { now + COOLING } else { now };
        let was_active = node.active;
        let text = match (remote, self.nodes[id].pid) {
            (true, _) => format!("{} {how}", self.place(id)),
            (false, 0) => format!("the agent on {} {how}", self.host(id)),
            (false, pid) => format!("the agent on {} (pid {pid}) {how}", self.host(id)),
        };
        self.deactivate(id);
        self.lost(now, id, text, was_active);
    }

    /// What follows from the loss of a host.
    fn lost(&mut self, now: Duration, id: HostIndex, text: String, was_active: bool) {
        self.host_lost = true;
        let cause = |exit_code| Cause { node: id, rank: None, text: text.clone(), exit_code };
        match self.state {
            State::Joining => {
                if id < self.front {
                    self.count_again();
                }
                self.nodes[id].failures += 1;
                if self.can_do_without_lost() {
                    self.notice(format!("{text}; it is left out"));
                    self.try_prepare(now);
                } else {
                    self.fail(now, cause(exit::CLUSTER));
                }
            }
            State::Preparing if self.members.contains(&id) => {
                self.nodes[id].failures += 1;
                if self.can_do_without_lost() {
                    self.notice(format!("{text}; it is left out"));
                    self.state = State::Joining;
                    self.limit = None;
                    self.count_again();
                    // A plan that is being made is of no use any more.
                    self.epoch += 1;
                    self.try_prepare(now);
                } else {
                    self.fail(now, cause(exit::CLUSTER));
                }
            }
            State::Draining(_) if was_active && self.nodes[id].unlisted => self.cut_short(now, &text),
            _ if was_active => self.fail(now, cause(exit::FAILED)),
            State::Over => {}
            State::Resting(until) => {
                self.notice(text);
                self.state = State::Resting(until.max(self.next_start(now, Duration::ZERO)));
            }
            // A spare, or a host whose part was over.
            _ => self.notice(text),
        }
    }

    /// Are the hosts that are there, or may still come, enough?
    fn can_do_without_lost(&self) -> bool {
        let usable = |n: &&Node| n.heard_of() && !n.left_out;
        self.nodes.iter().filter(usable).count() >= self.setup.min_hosts
    }

    /// Beats to the agents elsewhere.
    pub(super) fn beat(&mut self, now: Duration) {
        if now < self.beat_at {
            return;
        }
        self.beat_at = now + BEAT;
        let remote = |id: &HostIndex| self.setup.hosts[*id].remote && self.nodes[*id].link == Link::Joined;
        self.out.extend((0..self.nodes.len()).filter(remote).map(|id| Output::Tell(id, ToAgent::Heartbeat)));
    }

    pub(super) fn check_leases(&mut self, now: Duration) {
        while let Some(Reverse((due, id, ticket))) = self.leases.0.peek().copied()
            && now > due
            && self.state != State::Over
        {
            self.leases.0.pop();
            if !self.nodes[id].heard_of() || self.nodes[id].ticket != ticket {
                continue;
            }
            let lease = self.lease(id);
            if now <= self.nodes[id].heard + lease {
                self.watch(id);
                continue;
            }
            let seconds = lease.as_secs();
            let how = match (self.nodes[id].link, self.setup.hosts[id].remote) {
                (Link::Greeting, _) => format!("did not introduce itself for {seconds} s"),
                (_, true) => format!("is lost: nothing was heard of its agent for {seconds} s"),
                _ => format!("stopped responding for {seconds} s"),
            };
            self.out.push(Output::KillAgent(id));
            self.agent_gone(now, id, &how);
        }
    }

    /// A failed start's hosts, made ready for the next one: who failed too often is left out, lost agents are started
    /// again, as far as they are needed.
    pub(super) fn join_again(&mut self, now: Duration) {
        self.state = State::Joining;
        self.count_again();
        let suspects = (0..self.nodes.len()).filter(|id| {
            let node = &self.nodes[*id];
            node.failures >= MOST_FAILURES && !node.left_out
        });
        for id in suspects.collect::<Vec<_>>() {
            let others = (0..self.nodes.len()).filter(|o| *o != id && !self.nodes[*o].left_out);
            let others =
                others.filter(|o| self.nodes[*o].heard_of() || self.nodes[*o].failures < MOST_FAILURES);
            if others.count() >= self.setup.min_hosts {
                self.nodes[id].left_out = true;
                let name = self.place(id);
                self.notice(format!("{name} failed {MOST_FAILURES} times and is left out"));
            }
        }
        let usable = self.nodes.iter().filter(|n| n.link == Link::Joined && !n.left_out).count();
        if usable < self.setup.use_hosts {
            let absent = |id: &HostIndex| {
                let node = &self.nodes[*id];
                matches!(node.link, Link::Lost | Link::Away) && !node.left_out && now >= node.cool_at
            };
            for id in (0..self.nodes.len()).filter(absent).collect::<Vec<_>>() {
                self.start_agent(now, id);
            }
        }
        self.release(now);
        self.try_prepare(now);
    }

    /// When the next start may begin: not before the hosts that it needs can't have processes of the last one.
    pub(super) fn next_start(&self, now: Duration, pause: Duration) -> Duration {
        let usable = self.nodes.iter().filter(|n| n.link == Link::Joined && !n.left_out).count();
        let lost = self.nodes.iter().filter(|n| n.link == Link::Lost && !n.left_out);
        let cool = if usable >= self.setup.use_hosts { None } else { lost.map(|n| n.cool_at).max() };
        (now + pause).max(cool.unwrap_or_default())
    }

    /// The host's own name, for a person.
    pub(super) fn host(&self, id: HostIndex) -> &str {
        match self.nodes[id].host.as_str() {
            "" if self.setup.hosts[id].name.is_empty() => "this machine",
            "" => &self.setup.hosts[id].name,
            host => host,
        }
    }

    /// `host NAME`, as the job names it.
    pub(super) fn place(&self, id: HostIndex) -> String {
        format!("host {}", self.setup.hosts[id].name)
    }
}
