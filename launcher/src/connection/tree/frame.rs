//! [`TreeFrame`]: a message on a connection between two agents, or between agent and controller, of
//! which one forwards messages for the other.
use diagnostic::Diagnostic;
use jobspec::{InterfaceSelector, PortSelection};
use protocol::control::JobSecretKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, net::SocketAddr};

/// The largest size, in bytes, of a message on a connection between two agents, or between agent
/// and controller, in the tree of agents.
pub(crate) const MAX_TREE_FRAME_BYTES: u32 = 64 << 10;

/// The number of an agent in the tree of agents, which also identifies the control connection
/// between this agent and the controller. A controller gives each agent that it starts another
/// number.
pub(crate) type StreamId = u64;

/// A message between directly connected processes in the tree of agents, such as forwarded bytes of
/// another agent's control connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum TreeFrame {
    /// The first message to an agent on its standard input: its place in the tree.
    Setup(Box<TreeSetup>),
    /// The answer of an agent to [`TreeFrame::Setup`] on its standard output: the agent is
    /// connected with another agent, and closes its standard input and output.
    Joined,
    /// The answer of an agent to [`TreeFrame::Setup`]: the agent cannot connect to another agent.
    NotJoined(Diagnostic),
    /// Upwards: the stream can be reached through this link.
    Register { stream: StreamId },
    /// Upwards: the stream can no longer be reached through this link.
    Detached { stream: StreamId },
    /// Upwards: the agent of the stream accepts connections of other agents at these addresses.
    Ready { stream: StreamId, addresses: Vec<SocketAddr> },
    /// Upwards: output of the agent on its standard error.
    Stderr { stream: StreamId, text: String },
    /// Bytes of a stream. The first one has this offset in the stream.
    Data { stream: StreamId, offset: u64, bytes: StreamBytes },
    /// The end of one direction of a stream, after this number of bytes.
    Fin { stream: StreamId, offset: u64 },
    /// The reader at the sender's end has taken all bytes before this offset.
    Ack { stream: StreamId, acknowledged: u64 },
    /// Downwards: the answer to [`TreeFrame::Register`]. The controller states what it has
    /// received, and the agent sends the rest.
    Sync { stream: StreamId, progress: StreamProgress },
    /// Upwards: the answer to [`TreeFrame::Sync`]. The agent states what it has received, and the
    /// controller sends the rest.
    SyncAck { stream: StreamId, progress: StreamProgress },
    /// The stream has ended in both directions.
    Abort { stream: StreamId },
    /// Downwards: the sender is about to end, or has no connection to the controller. The receiver
    /// connects to another agent.
    Leave,
    /// Downwards, repeated at each heartbeat: nothing arrives from the controller. The receiver
    /// connects to another agent as soon as one accepts it, and keeps this link until then.
    ControllerSilent,
    /// Downwards: the agents to which the agent of the stream may connect from now on.
    Parents { stream: StreamId, parents: Vec<TreeParent> },
    /// Downwards, the first message on a link between two agents: the agent at the end of this
    /// stream accepts the link.
    Welcome { stream: StreamId },
    /// A sign of life of the neighbour.
    Heartbeat,
}

impl TreeFrame {
    /// Returns examples of messages between neighbours of the tree, for tests of untrusted input.
    pub(crate) fn build_test_frames() -> Vec<TreeFrame> {
        let progress = StreamProgress { received: 3, acknowledged: 3 };
        let addresses = vec![SocketAddr::from(([10, 0, 0, 1], 4000))];
        [1, 2]
            .into_iter()
            .flat_map(|stream| {
                [
                    TreeFrame::Register { stream },
                    TreeFrame::Ready { stream, addresses: addresses.clone() },
                    TreeFrame::Data { stream, offset: 0, bytes: StreamBytes(vec![7; 3]) },
                    TreeFrame::Sync { stream, progress },
                    TreeFrame::SyncAck { stream, progress },
                    TreeFrame::Ack { stream, acknowledged: 3 },
                    TreeFrame::Stderr { stream, text: "line".into() },
                    TreeFrame::Parents {
                        stream,
                        parents: vec![TreeParent { stream: 3, addresses: addresses.clone() }],
                    },
                    TreeFrame::Fin { stream, offset: 3 },
                    TreeFrame::Detached { stream },
                    TreeFrame::Abort { stream },
                ]
            })
            .chain([TreeFrame::Heartbeat, TreeFrame::Leave, TreeFrame::ControllerSilent])
            .collect()
    }
}

/// An agent through which other agents may reach the controller, given by its ID and its listening
/// addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TreeParent {
    /// The stream whose end the agent is.
    pub(crate) stream: StreamId,
    pub(crate) addresses: Vec<SocketAddr>,
}

/// The first message to a new agent of the tree, with the key for connections between agents, the
/// agents to connect to, and time limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TreeSetup {
    /// The stream whose end the agent is.
    pub(crate) stream: StreamId,
    /// The key with which neighbours prove to each other that they belong to the tree.
    pub(crate) key: JobSecretKey,
    /// The agents to which the agent may connect, in order of preference. If the list is empty, the
    /// connection that carries this message is the link to the controller.
    pub(crate) parents: Vec<TreeParent>,
    /// The name of the agent's host, for the handshake.
    pub(crate) host: String,
    /// The network interface at which other agents connect.
    pub(crate) interface: InterfaceSelector,
    /// The TCP ports at which other agents may connect.
    pub(crate) ports: PortSelection,
    /// The silence after which a link counts as broken, in milliseconds.
    pub(crate) link_lease_ms: u64,
    /// The time that the agent has to connect to another agent after its link has ended, in
    /// milliseconds.
    pub(crate) reconnect_ms: u64,
    /// The largest number of agents that may be connected with the agent.
    pub(crate) max_children: u32,
    /// The text with which a host asks for the executable.
    pub(crate) fetch_token: String,
}

/// The number of bytes of an agent's control connection that have arrived at one end, and how many
/// of these the process there has read. The end of a direction counts as one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StreamProgress {
    /// The offset behind the last received byte.
    pub(crate) received: u64,
    /// The offset behind the last byte that the reader has taken.
    pub(crate) acknowledged: u64,
}

/// Bytes of an agent's control connection that are sent through the tree of agents, encoded as
/// MessagePack binary data instead of an array.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct StreamBytes(pub(crate) Vec<u8>);

impl fmt::Debug for StreamBytes {
    /// Formats only the number of the bytes for debugging, because the bytes themselves may contain
    /// secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamBytes({})", self.0.len())
    }
}

impl Serialize for StreamBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for StreamBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// A serde visitor that accepts only MessagePack binary data, and copies the data into a
        /// [`StreamBytes`].
        struct BytesVisitor;
        impl de::Visitor<'_> for BytesVisitor {
            type Value = StreamBytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("binary data")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<StreamBytes, E> {
                Ok(StreamBytes(bytes.to_vec()))
            }
            fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<StreamBytes, E> {
                Ok(StreamBytes(bytes))
            }
        }
        deserializer.deserialize_byte_buf(BytesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::frame::{HEADER_BYTES, decode_body, encode_frame};

    #[test]
    fn bytes_of_a_stream_are_encoded_without_expansion() {
        let bytes = vec![0xee; 10_000];
        let frame = TreeFrame::Data { stream: 7, offset: 1 << 40, bytes: StreamBytes(bytes) };
        let encoded = encode_frame(&frame).expect("encoded");
        assert!(encoded.len() < 10_100, "{}", encoded.len());
        assert_eq!(decode_body::<TreeFrame>(&encoded[HEADER_BYTES..]).expect("decoded"), frame);
    }
}
