//! Tests of the controller's node of the tree, whose agents the tests play.
use super::*;
use crate::connection::{encode_frame, read_short_frame, tree::MAX_TREE_FRAME_BYTES};
use std::net::SocketAddr;
use tokio::time::timeout;

/// The host lease in the tests. A heartbeat is a tenth of it.
const HOST_LEASE: Duration = Duration::from_secs(1);
/// The time limit of one wait in the tests.
const WAIT_LIMIT: Duration = Duration::from_secs(20);

/// The agent's end of the connection to an agent.
struct AgentEnd(UnixStream);

impl AgentEnd {
    /// Connects the agent of a stream with the controller, and reports that it accepts others.
    async fn connect(hub: &TreeHub, stream: StreamId) -> AgentEnd {
        let (near, far) = StdStream::pair().expect("a pair");
        let (stderr, _) = StdStream::pair().expect("a pair");
        hub.add_top_agent(hub.build_first_message(stream, "h", Vec::new()), near, stderr);
        far.set_nonblocking(true).expect("a socket");
        let mut end = AgentEnd(UnixStream::from_std(far).expect("a socket"));
        end.receive_until(|frame| matches!(frame, TreeFrame::Setup(_))).await;
        end.register(stream).await;
        end
    }

    /// Registers a stream on the connection, and reports that its agent accepts others.
    async fn register(&mut self, stream: StreamId) {
        let addresses = vec![build_address(stream)];
        for frame in [TreeFrame::Register { stream }, TreeFrame::Ready { stream, addresses }] {
            let bytes = encode_frame(&frame).expect("encoded");
            self.0.write_all(&bytes).await.expect("written");
        }
    }

    /// Reads frames until one is expected, and returns it.
    async fn receive_until(&mut self, is_expected: impl Fn(&TreeFrame) -> bool) -> TreeFrame {
        let read = async {
            loop {
                let frame: Option<TreeFrame> =
                    read_short_frame(&mut self.0, MAX_TREE_FRAME_BYTES).await.expect("a frame");
                let frame = frame.expect("an open connection");
                if is_expected(&frame) {
                    return frame;
                }
            }
        };
        timeout(WAIT_LIMIT, read).await.expect("the expected frame")
    }
}

/// Returns the address at which the agent of a stream accepts others.
fn build_address(stream: StreamId) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, stream as u8], 4000))
}

/// An agent is placed when only one other agent is ready, and is connected later than the other
/// ones. Until then, no list of agents reaches it.
#[tokio::test]
async fn an_agent_that_is_connected_late_learns_which_agents_became_ready_before() {
    let settings = TreeSettings {
        width: 3,
        host_lease: HOST_LEASE,
        interface: InterfaceSelector::Auto,
        ports: PortSelection::default(),
    };
    let hub = TreeHub::start(settings).expect("a hub");
    let streams: Vec<StartingAgentStreams> =
        (0..4).map(|_| hub.open_agent_stream("h", Arc::new(ConnectionProgress::new().0))).collect();
    let [first, second, third, late] = [0, 1, 2, 3].map(|index| streams[index].id);
    for root in [first, second, third] {
        assert_eq!(hub.try_place_agent(root), Some(TreePlace::Root));
    }
    let mut parent = AgentEnd::connect(&hub, first).await;
    let place = hub.wait_for_place(late, || false).expect("a place");
    let names_of = |parents: &[TreeParent]| parents.iter().map(|parent| parent.stream).collect::<Vec<_>>();
    let TreePlace::Below(planned) = place else { panic!("{place:?}") };
    assert_eq!(names_of(&planned), [first]);
    let _others = (AgentEnd::connect(&hub, second).await, AgentEnd::connect(&hub, third).await);
    while hub.list_possible_parents(late).len() < 3 {
        tokio::time::sleep(HOST_LEASE / 100).await;
    }
    // The hub sends the new list in vain, because the agent has no way to the controller yet.
    tokio::time::sleep(HOST_LEASE / 2).await;
    parent.register(late).await;
    let frame = parent.receive_until(|frame| matches!(frame, TreeFrame::Parents { .. })).await;
    let TreeFrame::Parents { stream, mut parents } = frame else { unreachable!("another frame") };
    parents.sort_by_key(|parent| parent.stream);
    assert_eq!((stream, names_of(&parents)), (late, vec![first, second, third]));
    let routes = [&streams[0], &streams[3]].map(|stream| stream.connection.tree_route());
    let route = |agent, first| Some(TreeRoute { agent, first });
    assert_eq!(routes, [route(first, first), route(late, first)]);
}
