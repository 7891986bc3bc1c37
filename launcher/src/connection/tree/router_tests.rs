//! Tests that break links and end agents of a tree at random, and check that every stream delivers
//! its bytes once and in order.
use super::*;
use crate::connection::tree::resumable_stream::WINDOW_BYTES;
use proptest::prelude::*;
use std::collections::VecDeque;

/// The index of the controller in lists of routers.
const CONTROLLER_INDEX: usize = 0;

/// A simulated link between two routers, with the frames in both directions.
#[derive(Debug)]
struct TestLink {
    upper: usize,
    lower: usize,
    down: VecDeque<TreeFrame>,
    up: VecDeque<TreeFrame>,
}

/// The bytes that were written to and read from one direction of a stream.
#[derive(Debug, Default)]
struct TestStreamDirection {
    /// The number of bytes that were written, and the number that the writer may still write.
    written: usize,
    space: usize,
    received: Vec<u8>,
    /// The number of received bytes that the reader has taken.
    taken: usize,
    is_finished: bool,
}

/// A simulated tree of routers, whose links deliver frames when the test asks for it.
struct TestTree {
    routers: Vec<Option<TreeRouter>>,
    /// The number of routers between each router and the controller.
    depths: Vec<usize>,
    links: HashMap<LinkId, TestLink>,
    link_count: LinkId,
    /// The directions to and from the agent of each stream.
    down: Vec<TestStreamDirection>,
    up: Vec<TestStreamDirection>,
    ended: Vec<Option<StreamEnd>>,
}

/// Returns the test byte at an offset of a stream.
fn build_byte(stream: usize, offset: usize) -> u8 {
    (stream * 31 + offset * 7 + (offset >> 8)) as u8
}

impl TestTree {
    /// Connects `agents` agents, of which the agent `i` is below the router `(i - 1) / 2`.
    fn new(agents: usize) -> TestTree {
        let new_direction = || TestStreamDirection { space: WINDOW_BYTES, ..TestStreamDirection::default() };
        let mut tree = TestTree {
            routers: vec![Some(TreeRouter::new_controller())],
            depths: vec![0],
            links: HashMap::new(),
            link_count: 0,
            down: (0..=agents).map(|_| new_direction()).collect(),
            up: (0..=agents).map(|_| new_direction()).collect(),
            ended: vec![None; agents + 1],
        };
        for agent in 1..=agents {
            let parent = (agent - 1) / 2;
            tree.depths.push(tree.depths[parent] + 1);
            tree.routers.push(Some(TreeRouter::new_agent(agent as StreamId)));
            tree.router(CONTROLLER_INDEX).open_stream(agent as StreamId);
            tree.connect(agent, parent);
        }
        tree
    }

    fn router(&mut self, index: usize) -> &mut TreeRouter {
        self.routers[index].as_mut().expect("a router that is alive")
    }

    /// Connects an agent with a router above it.
    fn connect(&mut self, lower: usize, upper: usize) {
        self.link_count += 1;
        let link = self.link_count;
        self.links.insert(link, TestLink { upper, lower, down: VecDeque::new(), up: VecDeque::new() });
        self.router(lower).set_uplink(link);
        self.execute(lower);
    }

    /// Breaks a link with the loss of its frames, and connects the lower end with a router above it
    /// that is alive.
    fn break_link(&mut self, link: LinkId) {
        let Some(TestLink { upper, lower, .. }) = self.links.remove(&link) else { return };
        if self.routers[upper].is_some() {
            self.router(upper).remove_child(link);
            self.execute(upper);
        }
        if self.routers[lower].is_some() {
            self.router(lower).remove_uplink();
            let parent = (0..upper).rev().find(|above| {
                self.routers[*above].is_some() && self.depths[*above] < self.depths[lower] && *above != upper
            });
            self.connect(lower, parent.unwrap_or(CONTROLLER_INDEX));
        }
    }

    /// Ends an agent.
    fn kill_agent(&mut self, agent: usize) {
        self.routers[agent] = None;
        let touches = |link: &TestLink| link.upper == agent || link.lower == agent;
        let links: Vec<LinkId> =
            self.links.iter().filter(|(_, link)| touches(link)).map(|(id, _)| *id).collect();
        links.into_iter().for_each(|link| self.break_link(link));
    }

    /// Executes the actions of a router.
    fn execute(&mut self, at: usize) {
        loop {
            let actions = self.router(at).take_actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.execute_action(at, action);
            }
        }
    }

    fn execute_action(&mut self, at: usize, action: RouterAction) {
        let (sent, received) = match at == CONTROLLER_INDEX {
            true => (&mut self.down, &mut self.up),
            false => (&mut self.up, &mut self.down),
        };
        match action {
            RouterAction::Send(id, frame) => {
                let Some(link) = self.links.get_mut(&id) else { return };
                if link.upper == at { &mut link.down } else { &mut link.up }.push_back(frame);
            }
            RouterAction::Deliver(stream, bytes) => received[stream as usize].received.extend(bytes),
            RouterAction::AddSpace(stream, count) => sent[stream as usize].space += count,
            RouterAction::End(stream, end) if at == CONTROLLER_INDEX => {
                self.ended[stream as usize] = Some(end)
            }
            _ => {}
        }
    }

    /// Writes up to `count` bytes at one end of a stream.
    fn write(&mut self, stream: usize, from_controller: bool, count: usize) {
        let at = if from_controller { CONTROLLER_INDEX } else { stream };
        if self.routers[at].is_none() {
            return;
        }
        let direction = if from_controller { &mut self.down[stream] } else { &mut self.up[stream] };
        let count = count.min(direction.space);
        if direction.is_finished || count == 0 {
            return;
        }
        let start = direction.written;
        let bytes: Vec<u8> = (start..start + count).map(|offset| build_byte(stream, offset)).collect();
        (direction.written, direction.space) = (start + count, direction.space - count);
        self.router(at).write_to_stream(stream as StreamId, &bytes);
        self.execute(at);
    }

    /// Lets the reader at one end of a stream take everything that has arrived.
    fn take_received_bytes(&mut self, stream: usize, at_controller: bool) {
        let at = if at_controller { CONTROLLER_INDEX } else { stream };
        let direction = if at_controller { &mut self.up[stream] } else { &mut self.down[stream] };
        let count =
            direction.received.len() - std::mem::replace(&mut direction.taken, direction.received.len());
        if self.routers[at].is_some() {
            self.router(at).record_consumed_bytes(stream as StreamId, count);
            self.execute(at);
        }
    }

    /// Delivers the first frame of one direction of a link. Returns whether there was one.
    fn deliver_first_frame(&mut self, id: LinkId, is_down: bool) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return false };
        let (upper, lower) = (link.upper, link.lower);
        let frame = if is_down { link.down.pop_front() } else { link.up.pop_front() };
        let Some(frame) = frame else { return false };
        let to = if is_down { lower } else { upper };
        match is_down {
            true => self.router(to).process_uplink_frame(frame),
            false => self.router(to).process_child_frame(id, frame),
        }
        self.execute(to);
        true
    }

    /// Delivers all frames, and reads all received bytes, until nothing changes any more.
    fn deliver_all_frames(&mut self) {
        loop {
            let mut ids: Vec<LinkId> = self.links.keys().copied().collect();
            ids.sort_unstable();
            let mut has_moved = false;
            for id in ids {
                while self.deliver_first_frame(id, true) || self.deliver_first_frame(id, false) {
                    has_moved = true;
                }
            }
            for stream in 1..self.routers.len() {
                self.take_received_bytes(stream, true);
                self.take_received_bytes(stream, false);
            }
            let waiting = self.links.values().any(|link| !link.down.is_empty() || !link.up.is_empty());
            if !has_moved && !waiting {
                return;
            }
        }
    }

    /// Checks that both ends of the streams of all living agents have received everything.
    fn check_delivered(&self) {
        for stream in 1..self.routers.len() {
            for (direction, is_down) in [(&self.down[stream], true), (&self.up[stream], false)] {
                let received = &direction.received;
                let is_prefix =
                    received.iter().enumerate().all(|(offset, byte)| *byte == build_byte(stream, offset));
                assert!(is_prefix, "stream {stream}, down {is_down}: other bytes");
                if self.routers[stream].is_some() {
                    assert_eq!(received.len(), direction.written, "stream {stream}, down {is_down}");
                } else {
                    assert!(received.len() <= direction.written);
                }
            }
        }
    }
}

/// A step of a random test.
#[derive(Clone, Debug)]
enum TestStep {
    Write { stream: usize, from_controller: bool, count: usize },
    Take { stream: usize, at_controller: bool },
    Deliver { link: usize, is_down: bool },
    Break { link: usize },
    Kill { agent: usize },
}

/// The number of agents in random tests.
const AGENTS: usize = 14;

fn draw_step() -> impl Strategy<Value = TestStep> {
    prop_oneof![
        6 => (1..=AGENTS, any::<bool>(), 1..60_000usize)
            .prop_map(|(stream, from_controller, count)| TestStep::Write { stream, from_controller, count }),
        4 => (1..=AGENTS, any::<bool>()).prop_map(|(stream, at_controller)| TestStep::Take { stream, at_controller }),
        20 => (any::<usize>(), any::<bool>()).prop_map(|(link, is_down)| TestStep::Deliver { link, is_down }),
        2 => any::<usize>().prop_map(|link| TestStep::Break { link }),
        1 => (1..=AGENTS).prop_map(|agent| TestStep::Kill { agent }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn streams_survive_broken_links_and_lost_agents(steps in prop::collection::vec(draw_step(), 1..400)) {
        let mut tree = TestTree::new(AGENTS);
        for step in steps {
            let pick = |tree: &TestTree, number: usize| {
                let mut ids: Vec<LinkId> = tree.links.keys().copied().collect();
                ids.sort_unstable();
                (!ids.is_empty()).then(|| ids[number % ids.len()])
            };
            match step {
                TestStep::Write { stream, from_controller, count } => tree.write(stream, from_controller, count),
                TestStep::Take { stream, at_controller } => tree.take_received_bytes(stream, at_controller),
                TestStep::Deliver { link, is_down } => {
                    if let Some(link) = pick(&tree, link) {
                        tree.deliver_first_frame(link, is_down);
                    }
                }
                TestStep::Break { link } => {
                    if let Some(link) = pick(&tree, link) {
                        tree.break_link(link);
                    }
                }
                TestStep::Kill { agent } => tree.kill_agent(agent),
            }
        }
        tree.deliver_all_frames();
        tree.check_delivered();
        assert!(tree.ended.iter().all(Option::is_none), "{:?}", tree.ended);
    }
}

#[test]
fn the_end_of_a_stream_arrives_after_its_bytes_also_on_another_way() {
    let mut tree = TestTree::new(6);
    tree.deliver_all_frames();
    // The agent 5 is below the agent 2. The bytes and the end are lost with the link of agent 2.
    tree.write(5, false, 100_000);
    tree.router(5).finish_writing(5);
    tree.execute(5);
    assert!(tree.deliver_first_frame(5, false));
    tree.kill_agent(2);
    tree.deliver_all_frames();
    assert_eq!(tree.up[5].received.len(), 100_000);
    assert_eq!(tree.ended[5], Some(StreamEnd::Finished));
    assert!(tree.router(5).is_delivered(5));
}

#[test]
fn an_aborted_or_unknown_stream_ends_at_the_agent() {
    let mut tree = TestTree::new(6);
    tree.deliver_all_frames();
    tree.router(CONTROLLER_INDEX).abort_stream(5);
    tree.execute(CONTROLLER_INDEX);
    tree.deliver_all_frames();
    assert!(tree.router(5).is_delivered(5), "the agent has no stream any more");
    // An agent that was not reachable learns of it when it connects again.
    tree.router(CONTROLLER_INDEX).abort_stream(6);
    tree.router(CONTROLLER_INDEX).take_actions();
    let link = tree.links.iter().find(|(_, link)| link.lower == 6).map(|(id, _)| *id).expect("a link");
    tree.break_link(link);
    tree.deliver_all_frames();
    assert!(tree.router(6).is_delivered(6), "the agent has no stream any more");
}

#[test]
fn a_late_report_about_an_old_way_does_not_detach_a_stream() {
    let mut tree = TestTree::new(6);
    tree.deliver_all_frames();
    // Agent 5 connects to the controller. Its old neighbour, agent 2, notices the end of the link
    // later.
    let link = tree.links.iter().find(|(_, link)| link.lower == 5).map(|(id, _)| *id).expect("a link");
    tree.links.remove(&link);
    tree.router(5).remove_uplink();
    tree.connect(5, CONTROLLER_INDEX);
    tree.deliver_all_frames();
    tree.router(2).remove_child(link);
    tree.execute(2);
    tree.deliver_all_frames();
    tree.write(5, true, 1000);
    tree.deliver_all_frames();
    assert_eq!(tree.down[5].received.len(), 1000);
}

#[test]
fn a_writer_that_ignores_the_window_ends_its_stream() {
    let mut router = TreeRouter::new_controller();
    router.open_stream(1);
    router.process_child_frame(1, TreeFrame::Register { stream: 1 });
    let bytes = vec![0; 32 << 10];
    for offset in (0..=WINDOW_BYTES as u64).step_by(bytes.len()) {
        let bytes = crate::connection::tree::frame::StreamBytes(bytes.clone());
        router.process_child_frame(1, TreeFrame::Data { stream: 1, offset, bytes });
    }
    let end = router.take_actions().pop();
    assert_eq!(end, Some(RouterAction::End(1, StreamEnd::Violation)));
}
