//! Tests of the planner, which cover places, senders of the executable, the controller's work with
//! 10,000 agents, and the computed time of their start.
use super::*;
use crate::connection::tree::{LinkId, RouterAction, TreeRouter};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

/// Returns the address of the agent of a stream.
fn build_address(stream: StreamId) -> Vec<SocketAddr> {
    vec![SocketAddr::from(([10, (stream >> 16) as u8, (stream >> 8) as u8, stream as u8], 4000))]
}

/// Places this number of agents, each of which accepts others at once. Returns their places.
fn place_agents(planner: &mut TreePlanner, count: StreamId) -> Vec<TreePlace> {
    let place = |stream| {
        let place = planner.place_agent(stream).expect("a place");
        planner.mark_accepting_agents(stream, build_address(stream));
        place
    };
    (1..=count).map(place).collect()
}

/// Returns the numbers of the agents in a list of parents.
fn list_streams(place: &TreePlace) -> Vec<StreamId> {
    match place {
        TreePlace::Root => Vec::new(),
        TreePlace::Below(parents) => parents.iter().map(|parent| parent.stream).collect(),
    }
}

#[test]
fn agents_are_placed_level_by_level_and_evenly() {
    let mut planner = TreePlanner::new(2);
    let places = place_agents(&mut planner, 8);
    assert_eq!(places[..2], [TreePlace::Root, TreePlace::Root]);
    let first_parents: Vec<StreamId> = places[2..].iter().map(|place| list_streams(place)[0]).collect();
    assert_eq!(first_parents, [1, 2, 1, 2, 3, 4]);
    // The neighbour above, the one above that, and another one of the first level.
    assert_eq!(list_streams(&places[6]), [3, 1, 2]);
    for (agents, width, depth) in [(64, 64, 0), (65, 64, 1), (4160, 64, 1), (10_000, 64, 2), (10_000, 2, 12)]
    {
        let mut planner = TreePlanner::new(width);
        place_agents(&mut planner, agents);
        assert_eq!(planner.agents.values().map(|agent| agent.depth).max(), Some(depth), "{agents}");
        assert!(planner.agents.values().all(|agent| agent.children <= width));
    }
}

#[test]
fn no_agent_is_placed_below_one_that_is_lost_or_not_ready() {
    let mut planner = TreePlanner::new(1);
    assert_eq!(planner.place_agent(1), Some(TreePlace::Root));
    assert_eq!(planner.place_agent(2), None, "no agent accepts others yet");
    planner.mark_accepting_agents(1, build_address(1));
    assert_eq!(planner.place_agent(2).map(|place| list_streams(&place)), Some(vec![1]));
    planner.mark_accepting_agents(2, build_address(2));
    planner.mark_detached(2);
    assert_eq!(planner.place_agent(3), None);
    planner.mark_accepting_agents(2, build_address(2));
    assert_eq!(planner.place_agent(3).map(|place| list_streams(&place)), Some(vec![2, 1]));
    planner.remove_agent(3);
    planner.remove_agent(1);
    assert_eq!(planner.place_agent(4), Some(TreePlace::Root), "the place of a lost agent is free");
    planner.remove_agent(2);
    assert_eq!(planner.place_agent(5), None);
}

#[test]
fn agents_learn_of_others_that_become_ready_or_are_lost() {
    let mut planner = TreePlanner::new(2);
    assert_eq!(
        [planner.place_agent(1), planner.place_agent(2)],
        [Some(TreePlace::Root), Some(TreePlace::Root)]
    );
    planner.mark_accepting_agents(1, build_address(1));
    assert_eq!(planner.place_agent(3).map(|place| list_streams(&place)), Some(vec![1]));
    let list = |planner: &mut TreePlanner| -> Vec<(StreamId, Vec<StreamId>)> {
        let updates = planner.take_parent_updates().into_iter();
        updates.map(|(stream, parents)| (stream, list_streams(&TreePlace::Below(parents)))).collect()
    };
    planner.mark_accepting_agents(2, build_address(2));
    assert_eq!(list(&mut planner), [(3, vec![1, 2])]);
    planner.mark_accepting_agents(3, build_address(3));
    assert_eq!(list(&mut planner), [], "no agent connects to agent 3 yet");
    planner.remove_agent(1);
    assert_eq!(list(&mut planner), [(3, vec![2])]);
    assert_eq!(list(&mut planner), [], "nothing has changed");
    // A round with many agents takes several calls, and each agent is listed once.
    let mut planner = TreePlanner::new(64);
    place_agents(&mut planner, 1000);
    let mut rounds = Vec::new();
    while planner.has_changed || planner.next_update.is_some() {
        rounds.push(list(&mut planner).len());
    }
    assert_eq!(
        (rounds.len(), rounds.iter().sum::<usize>()),
        (1000usize.div_ceil(MAX_PARENT_UPDATES_AT_ONCE), 1000 - 64)
    );
}

#[test]
fn the_number_of_hosts_that_send_the_executable_doubles() {
    let mut planner = TreePlanner::new(64);
    let mut ready = 0;
    let mut rounds = Vec::new();
    while ready < 1000 {
        let sources: Vec<ExecutableSource> =
            std::iter::from_fn(|| planner.reserve_executable_source()).collect();
        for source in &sources {
            planner.release_executable_source(source);
            ready += 1;
            planner.place_agent(ready);
            planner.mark_accepting_agents(ready, build_address(ready));
        }
        rounds.push(sources.len());
    }
    assert_eq!(rounds, [2, 4, 8, 16, 32, 64, 128, 256, 512]);
    let mut planner = TreePlanner::new(64);
    place_agents(&mut planner, 1);
    let source = planner.reserve_executable_source().expect("a source");
    assert!(matches!(source, ExecutableSource::Agent(TreeParent { stream: 1, .. })), "{source:?}");
    planner.remove_agent(1);
    planner.release_executable_source(&source);
    assert_eq!(planner.reserve_executable_source(), Some(ExecutableSource::Controller));
}

/// Routers that are connected as a planner has decided. Links deliver frames at once.
struct RoutedTree {
    routers: HashMap<StreamId, TreeRouter>,
    /// The upper and the lower end of each link. The stream 0 is the controller.
    links: HashMap<LinkId, (StreamId, StreamId)>,
    /// The number of frames that the controller has received or sent.
    controller_frames: u64,
}

impl RoutedTree {
    /// Connects this number of agents in a tree of this width.
    fn connect(agents: StreamId, width: usize) -> RoutedTree {
        let mut planner = TreePlanner::new(width);
        let mut tree = RoutedTree { routers: HashMap::new(), links: HashMap::new(), controller_frames: 0 };
        tree.routers.insert(0, TreeRouter::new_controller());
        for stream in 1..=agents {
            let place = planner.place_agent(stream).expect("a place");
            planner.mark_accepting_agents(stream, build_address(stream));
            let parent = list_streams(&place).first().copied().unwrap_or(0);
            tree.router(0).open_stream(stream);
            tree.routers.insert(stream, TreeRouter::new_agent(stream));
            tree.links.insert(stream, (parent, stream));
            tree.router(stream).set_uplink(stream);
            tree.deliver(stream);
        }
        tree
    }

    fn router(&mut self, stream: StreamId) -> &mut TreeRouter {
        self.routers.get_mut(&stream).expect("a router")
    }

    /// Delivers frames until no router has any more, beginning at one router. Returns the bytes
    /// that were delivered to the ends of streams.
    fn deliver(&mut self, first: StreamId) -> Vec<(StreamId, usize)> {
        let (mut pending, mut delivered) = (vec![first], Vec::new());
        while let Some(at) = pending.pop() {
            for action in self.router(at).take_actions() {
                match action {
                    RouterAction::Send(link, frame) => {
                        let (upper, lower) = self.links[&link];
                        self.controller_frames += u64::from(upper == 0);
                        let to = if at == upper { lower } else { upper };
                        match at == upper {
                            true => self.router(to).process_uplink_frame(frame),
                            false => self.router(to).process_child_frame(link, frame),
                        }
                        pending.push(to);
                    }
                    RouterAction::Deliver(stream, bytes) => delivered.push((stream, bytes.len())),
                    _ => {}
                }
            }
        }
        delivered
    }
}

#[test]
fn the_work_of_the_controller_per_host_does_not_depend_on_the_number_of_hosts() {
    let mut frames_per_host = Vec::new();
    for agents in [100, 1000, 10_000] {
        let mut tree = RoutedTree::connect(agents, 64);
        let connected = tree.links.values().filter(|(upper, _)| *upper == 0).count();
        assert_eq!(connected, 64, "connections of the controller to {agents} agents");
        let mut delivered = 0;
        for stream in 1..=agents {
            // A plan to the agent, then a report and a heartbeat of the agent.
            tree.router(0).write_to_stream(stream, &[1; 3000]);
            delivered += tree.deliver(0).len();
            tree.router(stream).write_to_stream(stream, &[2; 500]);
            tree.router(stream).write_to_stream(stream, &[3; 5]);
            delivered += tree.deliver(stream).len();
        }
        assert_eq!(delivered as u64, 3 * agents);
        frames_per_host.push(tree.controller_frames as f64 / agents as f64);
    }
    assert_eq!(frames_per_host, [6.0; 3], "register, sync and its answer, and three messages");
}

/// The size of the executable, in bits.
const EXECUTABLE_BITS: f64 = 36e6 * 8.0;
/// The rate of each host's network, in bits per second.
const LINK_RATE: f64 = 1e9;
/// The time of a login and of the search for the executable, in seconds. `docs/benchmarks/scale.md`
/// states how they were measured.
const LOGIN_S: f64 = 0.15;
/// The time from the end of a transfer until the started agent accepts other agents, in seconds.
const AGENT_READY_S: f64 = 0.1;
/// The CPU time of the controller for each host, in seconds.
const CONTROLLER_CPU_S: f64 = 0.003;

/// An event of the simulated start of the agents.
#[derive(Clone, Debug, PartialEq)]
enum StartEvent {
    LoggedIn,
    Copied(ExecutableSource),
    Ready(StreamId),
}

/// Simulates the start of agents on this number of hosts, of which none has the executable, and
/// returns the time in seconds. Also returns the largest number of transfers by one host.
fn simulate_start_time(hosts: u64, fanout: usize, copies: usize) -> (f64, usize) {
    let mut planner = TreePlanner::new(fanout);
    let mut events: Vec<Option<StartEvent>> = Vec::new();
    let mut queue: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let schedule = |events: &mut Vec<Option<StartEvent>>,
                    queue: &mut BinaryHeap<Reverse<(u64, usize)>>,
                    at: f64,
                    event| {
        queue.push(Reverse(((at * 1e9) as u64, events.len())));
        events.push(Some(event));
    };
    let (mut logins, mut started_logins, mut copying, mut waiting) = (0, 0, 0, 0);
    let (mut placed, mut next_stream, mut done, mut now, mut cpu_free) = (0, 1, 0, 0.0, 0.0_f64);
    let mut sent: HashMap<StreamId, usize> = HashMap::new();
    let mut ready_to_place: Vec<StreamId> = Vec::new();
    loop {
        // A host logs in when it has a turn and a place.
        while logins < fanout && started_logins < hosts {
            let Some(_) = planner.place_agent(next_stream) else { break };
            (next_stream, started_logins, logins, placed) =
                (next_stream + 1, started_logins + 1, logins + 1, placed + 1);
            cpu_free = cpu_free.max(now) + CONTROLLER_CPU_S;
            ready_to_place.push(next_stream - 1);
            schedule(&mut events, &mut queue, cpu_free + LOGIN_S, StartEvent::LoggedIn);
        }
        while copying < copies && waiting > 0 {
            let Some(source) = planner.reserve_executable_source() else { break };
            (copying, waiting) = (copying + 1, waiting - 1);
            let share = match &source {
                ExecutableSource::Controller => MAX_CONTROLLER_TRANSFERS,
                ExecutableSource::Agent(parent) => {
                    *sent.entry(parent.stream).or_default() += 1;
                    MAX_TRANSFERS_PER_HOST
                }
            };
            let time = EXECUTABLE_BITS / LINK_RATE * share as f64;
            schedule(&mut events, &mut queue, now + time, StartEvent::Copied(source));
        }
        let Some(Reverse((at, index))) = queue.pop() else { break };
        now = at as f64 / 1e9;
        match events[index].take().expect("an event") {
            // The turn is free once the transfer can wait with the other ones.
            StartEvent::LoggedIn => (logins, waiting) = (logins - 1, waiting + 1),
            StartEvent::Copied(source) => {
                planner.release_executable_source(&source);
                copying -= 1;
                let stream = ready_to_place.remove(0);
                schedule(&mut events, &mut queue, now + AGENT_READY_S, StartEvent::Ready(stream));
            }
            StartEvent::Ready(stream) => {
                planner.mark_accepting_agents(stream, build_address(stream));
                done += 1;
            }
        }
    }
    assert_eq!((done, placed), (hosts, hosts));
    (now, sent.values().copied().max().unwrap_or(0))
}

#[test]
fn ten_thousand_hosts_start_within_a_minute() {
    let (seconds, most_sent) = simulate_start_time(10_000, 64, 128);
    println!("10,000 hosts: {seconds:.1} s, at most {most_sent} transfers by one host");
    assert!(seconds < 60.0, "{seconds}");
    let without_tree = 10_000.0 * EXECUTABLE_BITS / LINK_RATE;
    assert!(without_tree > 40.0 * seconds, "{without_tree} s without a tree");
    for hosts in [100, 1000] {
        let (seconds, _) = simulate_start_time(hosts, 64, 128);
        println!("{hosts} hosts: {seconds:.1} s");
        assert!(seconds < 20.0, "{hosts}: {seconds}");
    }
}
