//! [`NodeTable`]: records which nodes have joined a run, and decides whether another connection may
//! join as a node.
//!
//! A node that is started again has the rank of its predecessor, whose connection may look alive
//! for a while. A second node with the rank of a living one is a mistake of the user. The table
//! distinguishes the two by the messages of the first node: agents send one each second.
use crate::cluster::pending_agent::AgentConnectionSlot;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// How long, after a second node has asked for the node rank of a first node, messages of the first
/// node do not prove that it is alive. The first node may have sent them before it died.
const LATE_MESSAGE_WINDOW: Duration = Duration::from_millis(1500);
/// How long a node that asks for no particular node rank waits for a free rank in the run before
/// node 0 rejects it. After this time the node is rejected.
const FREE_PLACE_TIMEOUT: Duration = Duration::from_secs(15);

/// The number of a connection that a node has opened to node 0, counted from 1 in the order of
/// arrival.
pub(super) type ConnectionNumber = u64;

/// A node that has proved to node 0 that it has the shared key, and asks to join the run.
#[derive(Debug)]
pub(super) struct JoinCandidate {
    pub(super) number: ConnectionNumber,
    /// The node rank that the node asks for; `None` if it takes any free one.
    pub(super) rank: Option<u32>,
    pub(super) arrived: Instant,
    /// How often bytes had arrived from the joined node with the same rank when this candidate had
    /// waited for [`LATE_MESSAGE_WINDOW`]; `None` while the candidate has waited for a shorter
    /// time. If more bytes arrive, the joined node is alive.
    baseline: Option<u64>,
}

impl JoinCandidate {
    /// Creates the record of a node that has connected to node 0 at the time `now` and asks to join
    /// with the node rank `rank`.
    pub(super) fn new(number: ConnectionNumber, rank: Option<u32>, now: Instant) -> JoinCandidate {
        JoinCandidate { number, rank, arrived: now, baseline: None }
    }
}

/// The decision of node 0 about a node that asks to join the run: accept the node, let it wait, or
/// reject it.
pub(super) enum JoinDecision {
    /// The node joins with this rank, and its connection fills this slot. The caller must call
    /// [`NodeTable::release_claims`] afterwards.
    Take(AgentConnectionSlot, u32),
    /// The node has to wait, because its place is not free yet. The caller asks again.
    Wait,
    /// The node is rejected, because another node has this rank. The text states which one, such as
    /// `host-2 has joined`.
    Duplicate(u32, String),
    /// The node is rejected, because all nodes of the run have joined.
    Full,
}

/// The record of node 0 about one node rank: whether a node has joined with this rank, and which
/// other connection wants to join with it.
#[derive(Default)]
struct NodeTableEntry {
    /// The slot for the node's connection that the controller opened most recently; `None` before
    /// the first one.
    slot: Option<AgentConnectionSlot>,
    /// Becomes `true` when the slot is closed because no node joined in time.
    expired: Arc<AtomicBool>,
    opened_at: Option<Instant>,
    /// The connection to which the slot was promised, until the connection has filled it.
    claim: Option<ConnectionNumber>,
    /// The connection that waits until the controller opens a slot for this node.
    parked: Option<ConnectionNumber>,
    /// The host name of the node that joined most recently.
    host: String,
}

impl NodeTableEntry {
    /// Returns whether node 0 still waits for this node to join the run.
    fn is_waiting(&self) -> bool {
        self.slot.as_ref().is_some_and(AgentConnectionSlot::is_waiting)
    }

    /// Returns whether this node has joined the run and its connection was not aborted since.
    fn is_connected(&self) -> bool {
        self.slot.as_ref().is_some_and(AgentConnectionSlot::is_connected)
    }
}

/// The table in which node 0 records which nodes have joined the run, and which connections are
/// waiting to join it. The entry of node 0 is not used, because node 0 does not join.
pub(super) struct NodeTable {
    entries: Vec<NodeTableEntry>,
    /// The number of nodes, including node 0, with which the job can begin.
    min_nodes: usize,
    /// The time for which a slot waits for its node. Then the slot is closed.
    timeout: Duration,
    /// The time for which the slots wait for further nodes, once `min_nodes` nodes have joined.
    last_call: Duration,
    /// The time since which at least `min_nodes` nodes have joined; `None` if fewer have joined.
    enough_since: Option<Instant>,
}

impl NodeTable {
    /// Creates the table for a job with `nodes` nodes, in which no node has joined yet.
    pub(super) fn new(nodes: u32, min_nodes: u32, timeout: Duration, last_call: Duration) -> NodeTable {
        let entries = (0..nodes).map(|_| NodeTableEntry::default()).collect();
        NodeTable { entries, min_nodes: min_nodes as usize, timeout, last_call, enough_since: None }
    }

    /// Permits a node to join with the node rank `rank` from now on, and stores `slot`, through
    /// which the controller then gets the node's connection. Returns a flag that becomes `true` if
    /// the slot is closed because no node joined in time.
    pub(super) fn open_slot(
        &mut self,
        rank: u32,
        slot: AgentConnectionSlot,
        now: Instant,
    ) -> Arc<AtomicBool> {
        let Some(entry) = self.entries.get_mut(rank as usize) else { return Arc::default() };
        (entry.slot, entry.opened_at, entry.claim) = (Some(slot), Some(now), None);
        entry.expired = Arc::default();
        self.enough_since = None;
        entry.expired.clone()
    }

    /// Decides at the time `now` whether `candidate`, a node that asks to join the run, is
    /// accepted, must wait, or is rejected. The caller repeats the question while the answer is
    /// [`JoinDecision::Wait`].
    pub(super) fn decide_join(&mut self, candidate: &mut JoinCandidate, now: Instant) -> JoinDecision {
        match candidate.rank {
            Some(rank) => self.decide_join_with_rank(rank, candidate, now),
            None => self.decide_join_without_rank(candidate, now),
        }
    }

    /// Decides at the time `now` whether `candidate`, a node that asks for the node rank `rank`,
    /// may join the run.
    fn decide_join_with_rank(
        &mut self,
        rank: u32,
        candidate: &mut JoinCandidate,
        now: Instant,
    ) -> JoinDecision {
        let Some(entry) = self.entries.get_mut(rank as usize) else { return JoinDecision::Full };
        let age = now.saturating_duration_since(candidate.arrived);
        match &entry.slot {
            Some(slot) if slot.is_waiting() => match entry.claim {
                Some(other) if other != candidate.number => JoinDecision::Wait,
                _ => {
                    entry.claim = Some(candidate.number);
                    JoinDecision::Take(slot.clone(), rank)
                }
            },
            Some(slot) if slot.is_connected() => {
                let received = slot.count_reads();
                let baseline = match age >= LATE_MESSAGE_WINDOW {
                    true => *candidate.baseline.get_or_insert(received),
                    false => received,
                };
                match received > baseline {
                    true => JoinDecision::Duplicate(rank, format!("{} has joined", entry.host)),
                    false => JoinDecision::Wait,
                }
            }
            _ => match entry.parked {
                Some(other) if other != candidate.number && age >= LATE_MESSAGE_WINDOW => {
                    JoinDecision::Duplicate(rank, "another node waits to join".to_owned())
                }
                Some(_) => JoinDecision::Wait,
                None => {
                    entry.parked = Some(candidate.number);
                    JoinDecision::Wait
                }
            },
        }
    }

    /// Decides at the time `now` whether `candidate`, a node that asks for no particular node rank,
    /// may join the run, and with which rank.
    fn decide_join_without_rank(&mut self, candidate: &mut JoinCandidate, now: Instant) -> JoinDecision {
        let ranks = || 1..self.entries.len();
        let is_own = |other: Option<ConnectionNumber>| other.is_none_or(|other| other == candidate.number);
        let is_free = |rank: &usize| {
            let entry = &self.entries[*rank];
            entry.is_waiting() && is_own(entry.claim) && is_own(entry.parked)
        };
        let can_park = |rank: &usize| {
            let entry = &self.entries[*rank];
            !entry.is_waiting() && !entry.is_connected() && is_own(entry.parked)
        };
        if let Some(rank) = ranks().find(is_free).or_else(|| ranks().find(can_park)) {
            return self.decide_join_with_rank(rank as u32, candidate, now);
        }
        match now.saturating_duration_since(candidate.arrived) >= FREE_PLACE_TIMEOUT {
            true => JoinDecision::Full,
            false => JoinDecision::Wait,
        }
    }

    /// Cancels the reservation of a node rank by the connection with the number `number`, and the
    /// wait of this connection for a node rank. `host` is the host name of its node if the node has
    /// joined.
    pub(super) fn release_claims(&mut self, number: ConnectionNumber, host: Option<&str>) {
        for entry in &mut self.entries {
            if entry.claim == Some(number) {
                entry.claim = None;
                host.iter().for_each(|host| entry.host = (*host).to_owned());
            }
            entry.parked = entry.parked.filter(|parked| *parked != number);
        }
    }

    /// Stops waiting for nodes that have not joined the run in time, so that the controller learns
    /// that they are missing.
    pub(super) fn close_slots_of_missing_nodes(&mut self, now: Instant) {
        let joined = 1 + self.entries.iter().filter(|entry| entry.is_connected()).count();
        self.enough_since = if joined >= self.min_nodes { self.enough_since.or(Some(now)) } else { None };
        let is_last_call_over = self.min_nodes < self.entries.len()
            && self.enough_since.is_some_and(|since| now >= since + self.last_call);
        for entry in self.entries.iter().filter(|entry| entry.is_waiting() && entry.claim.is_none()) {
            let is_late = entry.opened_at.is_some_and(|opened| now >= opened + self.timeout);
            if is_late || is_last_call_over {
                entry.expired.store(true, Ordering::Relaxed);
                entry.slot.iter().for_each(AgentConnectionSlot::stop_waiting);
            }
        }
    }

    /// Returns the node ranks of the nodes that have not joined and for which node 0 still waits.
    pub(super) fn list_awaited_ranks(&self) -> Vec<u32> {
        let awaited = self.entries.iter().enumerate().filter(|(_, entry)| entry.is_waiting());
        awaited.map(|(rank, _)| rank as u32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::pending_agent::PendingAgent;

    const SECOND: Duration = Duration::from_secs(1);

    /// Formats a decision as text, such as `wait` or `take NAME RANK`.
    fn describe(decision: &JoinDecision) -> String {
        match decision {
            JoinDecision::Take(slot, rank) => format!("take {} {rank}", slot.name),
            JoinDecision::Wait => "wait".to_owned(),
            JoinDecision::Duplicate(rank, other) => format!("duplicate {rank} {other}"),
            JoinDecision::Full => "full".to_owned(),
        }
    }

    /// A table of nodes, with the agents whose streams keep its slots open.
    struct TestTable {
        table: NodeTable,
        agents: Vec<PendingAgent>,
        start: Instant,
    }

    impl TestTable {
        fn new(nodes: u32, min_nodes: u32) -> TestTable {
            let table = NodeTable::new(nodes, min_nodes, 60 * SECOND, 5 * SECOND);
            TestTable { table, agents: Vec::new(), start: Instant::now() }
        }

        fn open(&mut self, rank: u32, at: Duration) -> Arc<AtomicBool> {
            let agent = PendingAgent::new(&format!("node-{rank}"));
            let expired = self.table.open_slot(rank, agent.slot.clone(), self.start + at);
            self.agents.push(agent);
            expired
        }

        fn decide(&mut self, candidate: &mut JoinCandidate, at: Duration) -> String {
            describe(&self.table.decide_join(candidate, self.start + at))
        }

        fn candidate(&self, number: u64, rank: Option<u32>) -> JoinCandidate {
            JoinCandidate::new(number, rank, self.start)
        }
    }

    #[test]
    fn early_nodes_wait_and_second_ones_are_duplicates() {
        let mut bench = TestTable::new(3, 3);
        let (mut first, mut second) = (bench.candidate(1, Some(2)), bench.candidate(2, Some(2)));
        assert_eq!(bench.decide(&mut first, Duration::ZERO), "wait");
        assert_eq!(bench.decide(&mut second, Duration::ZERO), "wait", "the first one may be gone");
        assert_eq!(bench.decide(&mut second, 2 * SECOND), "duplicate 2 another node waits to join");
        bench.open(2, 2 * SECOND);
        assert_eq!(bench.decide(&mut first, 2 * SECOND), "take node-2 2");
        assert_eq!(bench.decide(&mut second, 2 * SECOND), "wait");
        // The first connection breaks before it has joined.
        bench.table.release_claims(1, None);
        assert_eq!(bench.decide(&mut second, 2 * SECOND), "take node-2 2");
        assert_eq!(bench.decide(&mut bench.candidate(3, Some(7)), SECOND), "full");
    }

    #[test]
    fn nodes_without_a_rank_take_free_places() {
        let mut bench = TestTable::new(3, 3);
        (1..3).for_each(|rank| _ = bench.open(rank, Duration::ZERO));
        let mut any: Vec<JoinCandidate> = (1..4).map(|number| bench.candidate(number, None)).collect();
        assert_eq!(bench.decide(&mut any[0], Duration::ZERO), "take node-1 1");
        assert_eq!(bench.decide(&mut any[1], Duration::ZERO), "take node-2 2");
        assert_eq!(bench.decide(&mut any[2], Duration::ZERO), "wait");
        assert_eq!(bench.decide(&mut any[2], 16 * SECOND), "full");
    }

    #[test]
    fn slots_close_at_their_time_limit_or_after_the_last_call() {
        let mut bench = TestTable::new(3, 3);
        let expired = bench.open(1, Duration::ZERO);
        bench.table.close_slots_of_missing_nodes(bench.start + 59 * SECOND);
        assert_eq!(bench.table.list_awaited_ranks(), [1]);
        bench.table.close_slots_of_missing_nodes(bench.start + 60 * SECOND);
        assert!(bench.table.list_awaited_ranks().is_empty() && expired.load(Ordering::Relaxed));
        let mut bench = TestTable::new(3, 1);
        let expired = bench.open(1, Duration::ZERO);
        bench.table.close_slots_of_missing_nodes(bench.start);
        bench.table.close_slots_of_missing_nodes(bench.start + 4 * SECOND);
        assert!(!expired.load(Ordering::Relaxed));
        bench.table.close_slots_of_missing_nodes(bench.start + 5 * SECOND);
        assert!(expired.load(Ordering::Relaxed), "node 0 alone is enough for the job");
    }
}
