//! [`LinkSet`]: the connections and send queues of one process (agent or controller) to the agents
//! with which it is directly connected.
use super::frame::{MAX_TREE_FRAME_BYTES, TreeFrame};
use crate::connection::{FrameError, encode_frame, frame_tasks::BATCH_BYTES, read_short_frame};
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader},
    sync::mpsc,
    task::{JoinHandle, JoinSet},
    time::{Instant, timeout},
};

/// The number that identifies a direct connection to another process of the tree of agents (a link)
/// within this process.
pub(crate) type LinkId = u64;
/// A message that arrived over a direct connection to another process of the tree of agents, or
/// `None` when this connection has ended.
pub(crate) type LinkInput = (LinkId, Option<TreeFrame>);

/// The largest number of bytes that may wait to be sent on one direct connection in the tree of
/// agents before this connection is closed. A link with more is closed, and the streams on it find
/// another way.
const MAX_QUEUED_BYTES: usize = 64 << 20;
/// The number of bytes in an agent's send queue towards the controller above which the agent stops
/// reading from the agents whose messages it forwards.
const UPLINK_HIGH_WATER_BYTES: usize = 1 << 20;
/// The estimated memory, in bytes, that a queued message (frame) needs in addition to its content.
const FRAME_OVERHEAD_BYTES: usize = 64;
/// How long the queued messages of a closed connection in the tree of agents may take to be written
/// before they are dropped. Afterwards the frames are dropped, because the neighbour takes none.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// A direct connection of this process to another process in the tree of agents, with its send
/// queue and its reading and writing tasks.
struct Link {
    queue: mpsc::Sender<TreeFrame>,
    /// The number of bytes in the queue.
    queued: Arc<AtomicUsize>,
    last_heard: Instant,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

impl Link {
    /// Closes a direct connection in the tree of agents after its queued messages were written, or
    /// after [`FLUSH_TIMEOUT`].
    async fn flush_and_close(self) {
        let Link { queue, reader, mut writer, .. } = self;
        reader.abort();
        drop(queue);
        if timeout(FLUSH_TIMEOUT, &mut writer).await.is_err() {
            writer.abort();
        }
    }
}

/// All direct connections (links) of the controller or of one agent to other processes in the tree
/// of agents.
#[derive(Default)]
pub(crate) struct LinkSet {
    links: HashMap<LinkId, Link>,
    /// The number of links so far.
    count: LinkId,
    /// The links that were closed because their queues were full, and not reported yet.
    overflowed: Vec<LinkId>,
}

impl LinkSet {
    /// Adds a direct connection to another process of the tree of agents, over the streams `input`
    /// and `output`, and starts its two tasks. Its frames arrive in `inbox`.
    pub(crate) fn add_link(
        &mut self,
        input: impl AsyncRead + Send + Unpin + 'static,
        output: impl AsyncWrite + Send + Unpin + 'static,
        inbox: mpsc::Sender<LinkInput>,
    ) -> LinkId {
        self.count += 1;
        let id = self.count;
        // So many frames have more than the permitted number of bytes.
        let (queue, frames) = mpsc::channel(MAX_QUEUED_BYTES / FRAME_OVERHEAD_BYTES);
        let queued = Arc::new(AtomicUsize::new(0));
        let writer = tokio::spawn(write_frames_to_link(output, frames, queued.clone()));
        let reader = tokio::spawn(read_frames_of_link(id, input, inbox));
        self.links.insert(id, Link { queue, queued, last_heard: Instant::now(), reader, writer });
        id
    }

    /// Queues a message to be sent on the direct connection `link` to another process of the tree
    /// of agents. Closes a link whose queue is full, which [`LinkSet::take_overflowed_links`]
    /// reports. Never blocks.
    pub(crate) fn send_frame(&mut self, link: LinkId, frame: TreeFrame) {
        let Some(target) = self.links.get(&link) else { return };
        let size = estimate_frame_bytes(&frame);
        if target.queued.fetch_add(size, Ordering::Relaxed) + size > MAX_QUEUED_BYTES {
            self.close_link(link);
            self.overflowed.push(link);
            return;
        }
        // An error means that the link has ended, which its reader reports.
        _ = target.queue.try_send(frame);
    }

    /// Returns the tree connections that were closed since the last call because their send queues
    /// had become too long.
    pub(crate) fn take_overflowed_links(&mut self) -> Vec<LinkId> {
        std::mem::take(&mut self.overflowed)
    }

    /// Records that a message has just arrived on the connection `link`, so that the process at the
    /// other end counts as alive. Returns whether the link is open.
    pub(crate) fn record_frame_arrival(&mut self, link: LinkId) -> bool {
        let found = self.links.get_mut(&link);
        found.map(|link| link.last_heard = Instant::now()).is_some()
    }

    /// Closes the direct connection `link` to another process in the tree of agents. The frames in
    /// its queue are still written, for [`FLUSH_TIMEOUT`] at most.
    pub(crate) fn close_link(&mut self, link: LinkId) {
        if let Some(link) = self.links.remove(&link) {
            tokio::spawn(link.flush_and_close());
        }
    }

    /// Closes all direct connections in the tree of agents after their queued messages were
    /// written, or after [`FLUSH_TIMEOUT`].
    pub(crate) async fn flush_and_close_all(&mut self) {
        let mut closed: JoinSet<()> = self.links.drain().map(|(_, link)| link.flush_and_close()).collect();
        while closed.join_next().await.is_some() {}
    }

    /// Returns the direct connections in the tree of agents on which no message has arrived for
    /// longer than `lease`.
    pub(crate) fn list_silent_links(&self, lease: Duration) -> Vec<LinkId> {
        let silent = self.links.iter().filter(|(_, link)| link.last_heard.elapsed() > lease);
        silent.map(|(id, _)| *id).collect()
    }

    /// Queues a heartbeat on each direct connection in the tree of agents, by which the other end
    /// recognizes that this process is alive.
    pub(crate) fn send_heartbeats(&mut self) {
        let links: Vec<LinkId> = self.links.keys().copied().collect();
        for link in links {
            self.send_frame(link, TreeFrame::Heartbeat);
        }
    }

    /// Postpones the silence time limits of all neighbours in the tree by `pause`, because this
    /// process was paused and could not receive messages.
    pub(crate) fn exclude_pause_from_silence(&mut self, pause: Duration) {
        let now = Instant::now();
        for link in self.links.values_mut() {
            link.last_heard = (link.last_heard + pause).min(now);
        }
    }

    /// Restarts the silence time limits of all neighbours in the tree except `except`, because this
    /// process has not read their messages until now.
    pub(crate) fn reset_silence_except(&mut self, except: Option<LinkId>) {
        let now = Instant::now();
        let renewed = self.links.iter_mut().filter(|(id, _)| Some(**id) != except);
        renewed.for_each(|(_, link)| link.last_heard = now);
    }

    /// Returns all direct connections of this process in the tree of agents, without the connection
    /// `except`.
    pub(crate) fn list_links_except(&self, except: Option<LinkId>) -> Vec<LinkId> {
        self.links.keys().copied().filter(|link| Some(*link) != except).collect()
    }

    /// Returns whether the send queue of the connection `link` is so long that this process must
    /// pause reading messages that it forwards over `link`.
    pub(crate) fn is_congested(&self, link: Option<LinkId>) -> bool {
        let link = link.and_then(|link| self.links.get(&link));
        link.is_some_and(|link| link.queued.load(Ordering::Relaxed) > UPLINK_HIGH_WATER_BYTES)
    }
}

/// Estimates how many bytes of memory a message occupies while it waits in a send queue.
fn estimate_frame_bytes(frame: &TreeFrame) -> usize {
    FRAME_OVERHEAD_BYTES
        + match frame {
            TreeFrame::Data { bytes, .. } => bytes.0.len(),
            TreeFrame::Stderr { text, .. } => text.len(),
            _ => 0,
        }
}

/// Reads the messages that arrive on one direct connection in the tree of agents, and passes them
/// to the channel `inbox` until either is closed. An error is an end, too, because nothing after it
/// can be read.
async fn read_frames_of_link(id: LinkId, input: impl AsyncRead + Unpin, inbox: mpsc::Sender<LinkInput>) {
    let mut input = BufReader::new(input);
    loop {
        let frame: Result<Option<TreeFrame>, FrameError> =
            read_short_frame(&mut input, MAX_TREE_FRAME_BYTES).await;
        let frame = frame.unwrap_or_else(|error| {
            tracing::debug!(target: "tree", link = id, %error, "link broke");
            None
        });
        let is_last = frame.is_none();
        if inbox.send((id, frame)).await.is_err() || is_last {
            return;
        }
    }
}

/// Writes the queued messages of one direct connection in the tree of agents, until the queue is
/// closed and empty or the connection fails.
async fn write_frames_to_link(
    mut output: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<TreeFrame>,
    queued: Arc<AtomicUsize>,
) {
    while let Some(first) = queue.recv().await {
        let (mut bytes, mut size) = (Vec::new(), 0);
        let mut next = Some(first);
        while let Some(frame) = next {
            size += estimate_frame_bytes(&frame);
            // The frames of a tree are much shorter than the limit of a frame.
            bytes.extend(encode_frame(&frame).unwrap_or_default());
            next = if bytes.len() < BATCH_BYTES { queue.try_recv().ok() } else { None };
        }
        let write = async {
            output.write_all(&bytes).await?;
            output.flush().await
        };
        let written: io::Result<()> = write.await;
        queued.fetch_sub(size, Ordering::Relaxed);
        if written.is_err() {
            return;
        }
    }
    _ = output.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::tree::frame::StreamBytes;

    #[tokio::test]
    async fn a_link_whose_queue_is_full_is_closed_and_reported_once() {
        let (mut links, (inbox, _frames)) = (LinkSet::default(), mpsc::channel(1));
        // The neighbours read nothing.
        let (near, _far) = tokio::io::duplex(1 << 10);
        let (input, output) = tokio::io::split(near);
        let full = links.add_link(input, output, inbox.clone());
        let (near, _other_far) = tokio::io::duplex(1 << 10);
        let (input, output) = tokio::io::split(near);
        let other = links.add_link(input, output, inbox);
        let data = || TreeFrame::Data { stream: 1, offset: 0, bytes: StreamBytes(vec![0; 1 << 20]) };
        for _ in 1..MAX_QUEUED_BYTES >> 20 {
            links.send_frame(full, data());
        }
        assert!(links.take_overflowed_links().is_empty());
        links.send_frame(full, data());
        // The link does not exist any more.
        links.send_heartbeats();
        assert_eq!((links.take_overflowed_links(), links.take_overflowed_links()), (vec![full], Vec::new()));
        assert_eq!(links.list_links_except(None), [other]);
    }

    #[tokio::test]
    async fn a_pause_of_the_process_does_not_count_as_silence() {
        let (mut links, (inbox, _frames)) = (LinkSet::default(), mpsc::channel(1));
        let (near, _far) = tokio::io::duplex(1 << 10);
        let (input, output) = tokio::io::split(near);
        let link = links.add_link(input, output, inbox);
        let minutes = |count: u64| Duration::from_secs(60 * count);
        links.links.get_mut(&link).expect("the link").last_heard = Instant::now() - minutes(30);
        links.exclude_pause_from_silence(minutes(20));
        assert_eq!(
            (links.list_silent_links(minutes(11)), links.list_silent_links(minutes(9))),
            (vec![], vec![link])
        );
        // The pause is longer than the silence.
        links.exclude_pause_from_silence(minutes(60));
        assert!(links.list_silent_links(minutes(1)).is_empty());
        assert!(links.links[&link].last_heard <= Instant::now());
    }
}
