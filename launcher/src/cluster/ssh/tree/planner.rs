//! [`TreePlanner`]: decides through which other agent each agent of a large job reaches the
//! controller, and from which host each host downloads launch's executable. A state machine without
//! I/O and clock.
use crate::connection::tree::{StreamId, TreeParent};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

/// The largest number of hosts to which one host of the job sends the executable of launch at the
/// same time. Transfers share the network of the sender, so with one transfer at a time the number
/// of senders grows fastest.
const MAX_TRANSFERS_PER_HOST: usize = 1;
/// The largest number of hosts to which the controller sends the executable of launch at the same
/// time. A slow host does not delay all others.
const MAX_CONTROLLER_TRANSFERS: usize = 2;
/// The largest number of agents on the path from a new agent to the controller whose addresses the
/// new agent receives as possible parents. A tree of the default width with as many levels has
/// millions of agents.
const MAX_ANCESTOR_PARENTS: usize = 8;
/// The largest number of agents with a direct connection to the controller whose addresses an agent
/// receives as additional possible parents.
const MAX_FALLBACK_PARENTS: usize = 4;

/// The largest number of agents that get a new list of possible parent agents from one call of
/// [`TreePlanner::take_parent_updates`].
const MAX_PARENT_UPDATES_AT_ONCE: usize = 64;

/// The connection that an agent is to open to reach the controller: directly to the controller, or
/// to the first of several other agents that accepts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TreePlace {
    /// The agent is connected with the controller.
    Root,
    /// The agent connects to the first of these agents that accepts it.
    Below(Vec<TreeParent>),
}

/// The source from which a host gets the executable of launch: the controller or another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExecutableSource {
    /// From the controller, over SSH.
    Controller,
    /// From the host of another agent.
    Agent(TreeParent),
}

/// What the planner knows about one agent of the tree: its parent, depth, number of children, and
/// the addresses at which it accepts other agents.
#[derive(Debug, Default)]
struct PlannedAgent {
    /// The number of agents between the agent and the controller.
    depth: usize,
    /// The neighbour above; `None` for an agent that is connected with the controller.
    parent: Option<StreamId>,
    /// The number of agents that were placed below the agent.
    children: usize,
    /// The number of hosts to which the agent's host sends the executable.
    transfers: usize,
    /// The addresses at which the agent accepts others; `None` while it accepts none.
    addresses: Option<Vec<SocketAddr>>,
}

/// The planner that decides to which process each agent connects (the controller or another agent),
/// and from where each host gets launch's executable.
#[derive(Debug)]
pub(crate) struct TreePlanner {
    /// The largest number of agents below the controller, and below each agent.
    width: usize,
    agents: BTreeMap<StreamId, PlannedAgent>,
    roots: BTreeSet<StreamId>,
    /// The agents that accept others, by depth and number of agents below them.
    open: BTreeSet<(usize, usize, StreamId)>,
    /// The agents whose hosts can send the executable, by their numbers of transfers.
    sources: BTreeSet<(usize, StreamId)>,
    /// The number of hosts to which the controller sends the executable.
    controller_transfers: usize,
    /// Whether agents to which others may connect have changed since the last round of updates
    /// began.
    has_changed: bool,
    /// The agent with which the present round of updates continues; `None` between rounds.
    next_update: Option<StreamId>,
}

impl TreePlanner {
    /// Creates the planner of a tree of agents without agents, in which the controller and each
    /// agent accept at most `width` connections of agents.
    pub(crate) fn new(width: usize) -> TreePlanner {
        TreePlanner {
            width: width.max(1),
            agents: BTreeMap::new(),
            roots: BTreeSet::new(),
            open: BTreeSet::new(),
            sources: BTreeSet::new(),
            controller_transfers: 0,
            has_changed: false,
            next_update: None,
        }
    }

    /// Decides whether the agent `stream` connects to the controller or, if the controller has
    /// enough connections, to another agent. Returns `None` if the agent has to wait until another
    /// agent accepts agents.
    pub(crate) fn place_agent(&mut self, stream: StreamId) -> Option<TreePlace> {
        if self.roots.len() < self.width {
            self.roots.insert(stream);
            self.agents.insert(stream, PlannedAgent::default());
            return Some(TreePlace::Root);
        }
        let (depth, _, parent) = *self.open.first()?;
        self.change_agent(parent, |agent| agent.children += 1);
        let depth = depth + 1;
        self.agents.insert(stream, PlannedAgent { depth, parent: Some(parent), ..PlannedAgent::default() });
        Some(TreePlace::Below(self.list_possible_parents_below(parent)))
    }

    /// Lists the agents through which the agent `stream` may reach the controller, or nothing for
    /// an agent that is connected to the controller directly.
    pub(crate) fn list_possible_parents_of(&self, stream: StreamId) -> Vec<TreeParent> {
        let parent = self.agents.get(&stream).and_then(|agent| agent.parent);
        parent.map(|parent| self.list_possible_parents_below(parent)).unwrap_or_default()
    }

    /// Lists the possible parents of a new agent in order of preference: `parent`, the agents
    /// between `parent` and the controller, and a few other agents.
    fn list_possible_parents_below(&self, parent: StreamId) -> Vec<TreeParent> {
        let mut parents: Vec<TreeParent> = Vec::new();
        let mut next = Some(parent);
        while let Some(stream) = next.filter(|_| parents.len() < MAX_ANCESTOR_PARENTS) {
            parents.extend(self.describe_as_parent(stream));
            next = self.agents.get(&stream).and_then(|agent| agent.parent);
        }
        let known: Vec<StreamId> = parents.iter().map(|parent| parent.stream).collect();
        // Begins behind the agent's number, so that the agents below a lost one go to several.
        let others = self.roots.range(parent..).chain(self.roots.range(..parent));
        let spares =
            others.filter(|root| !known.contains(root)).filter_map(|root| self.describe_as_parent(*root));
        parents.extend(spares.take(MAX_FALLBACK_PARENTS));
        parents
    }

    /// Returns the ID and the listening addresses of an agent in the tree, or `None` if this agent
    /// does not accept connections of other agents.
    fn describe_as_parent(&self, stream: StreamId) -> Option<TreeParent> {
        let addresses = self.agents.get(&stream)?.addresses.clone()?;
        Some(TreeParent { stream, addresses })
    }

    /// Records that an agent accepts connections of other agents at `addresses`, and that its host
    /// has the executable of launch.
    pub(crate) fn mark_accepting_agents(&mut self, stream: StreamId, addresses: Vec<SocketAddr>) {
        self.change_agent(stream, |agent| agent.addresses = Some(addresses));
    }

    /// Returns new lists of possible parents for the next few agents, after agents have joined or
    /// left the tree of agents. After a change, a round of calls lists every agent, so that each
    /// one knows several others that are alive. Without a change, the list is empty.
    pub(crate) fn take_parent_updates(&mut self) -> Vec<(StreamId, Vec<TreeParent>)> {
        let first = match self.next_update {
            Some(stream) => stream,
            None if std::mem::take(&mut self.has_changed) => 0,
            None => return Vec::new(),
        };
        let mut rest = self.agents.range(first..).map(|(stream, agent)| (*stream, agent.parent));
        let considered: Vec<_> = rest.by_ref().take(MAX_PARENT_UPDATES_AT_ONCE).collect();
        self.next_update = rest.next().map(|(stream, _)| stream);
        let list = |(stream, parent): (StreamId, Option<StreamId>)| {
            Some((stream, self.list_possible_parents_below(parent?)))
        };
        considered.into_iter().filter_map(list).filter(|(_, parents)| !parents.is_empty()).collect()
    }

    /// Records that an agent of the tree cannot reach the controller any more, so that the planner
    /// gives it no more child agents.
    pub(crate) fn mark_detached(&mut self, stream: StreamId) {
        self.change_agent(stream, |agent| agent.addresses = None);
    }

    /// Removes an agent that has ended from the plan of the tree of agents, so that the planner no
    /// longer names it as a possible parent.
    pub(crate) fn remove_agent(&mut self, stream: StreamId) {
        self.mark_detached(stream);
        self.roots.remove(&stream);
        if let Some(parent) = self.agents.remove(&stream).and_then(|agent| agent.parent) {
            self.change_agent(parent, |agent| agent.children = agent.children.saturating_sub(1));
        }
    }

    /// Chooses a host or the controller to send launch's executable to the next host, and counts
    /// this transfer against the limit of the chosen sender. Returns `None` if all hosts that have
    /// it are busy.
    pub(crate) fn reserve_executable_source(&mut self) -> Option<ExecutableSource> {
        match self.sources.first().copied() {
            Some((transfers, stream)) if transfers < MAX_TRANSFERS_PER_HOST => {
                let source = self.describe_as_parent(stream)?;
                self.change_agent(stream, |agent| agent.transfers += 1);
                Some(ExecutableSource::Agent(source))
            }
            _ if self.controller_transfers < MAX_CONTROLLER_TRANSFERS => {
                self.controller_transfers += 1;
                Some(ExecutableSource::Controller)
            }
            _ => None,
        }
    }

    /// Records that the transfer of launch's executable from `source` to a host has ended, so that
    /// `source` can serve another host.
    pub(crate) fn release_executable_source(&mut self, source: &ExecutableSource) {
        match source {
            ExecutableSource::Controller => {
                self.controller_transfers = self.controller_transfers.saturating_sub(1)
            }
            ExecutableSource::Agent(TreeParent { stream, .. }) => {
                self.change_agent(*stream, |agent| agent.transfers = agent.transfers.saturating_sub(1));
            }
        }
    }

    /// Changes the planner's record of one agent with the function `change`, and updates which
    /// agents can accept other agents or send the executable.
    fn change_agent(&mut self, stream: StreamId, change: impl FnOnce(&mut PlannedAgent)) {
        let Some(agent) = self.agents.get_mut(&stream) else { return };
        self.open.remove(&(agent.depth, agent.children, stream));
        self.sources.remove(&(agent.transfers, stream));
        let was_ready = agent.addresses.is_some();
        change(agent);
        let is_named = agent.parent.is_none() || agent.children > 0;
        self.has_changed |= is_named && was_ready != agent.addresses.is_some();
        if agent.addresses.is_some() {
            self.sources.insert((agent.transfers, stream));
            if agent.children < self.width {
                self.open.insert((agent.depth, agent.children, stream));
            }
        }
    }
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
