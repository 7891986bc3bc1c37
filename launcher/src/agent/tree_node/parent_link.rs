//! Connects an agent to its parent, which is the agent above it in the tree of agents and leads to
//! the controller.
use super::neighbour_link::NeighbourLink;
use crate::connection::{
    FrameError,
    handshake::{HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_controller},
    read_short_frame,
    tree::{MAX_TREE_FRAME_BYTES, StreamId, TreeFrame, TreeParent, TreeSetup},
};
use diagnostic::{Diagnostic, codes::host};
use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{sleep, timeout},
};

/// The delay between the starts of parallel attempts to connect to possible parents in the tree of
/// agents, or to a parent's addresses.
const NEXT_ATTEMPT_DELAY: Duration = Duration::from_millis(200);
/// The time limit of one attempt to connect to a possible parent in the tree of agents, through
/// which the agent would reach the controller.
const CONNECT_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause between the first and the second attempt of an agent to connect to one possible parent
/// in the tree of agents. It doubles after each attempt.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause before an agent tries again to connect to the same possible parent in the tree
/// of agents.
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(2);
/// How long a new agent tries to connect to possible parents in the tree of agents, which may
/// reject it at first, before the agent gives up.
const MAX_FIRST_CONNECT_TIME: Duration = Duration::from_secs(20);

/// The kinds of failures after which an agent tries again to connect to a possible parent in the
/// tree of agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RetryPolicy {
    /// Attempts that the other agent has rejected, because it has no way to the controller at this
    /// moment or is about to end.
    Rejections,
    /// All attempts.
    AllFailures,
}

/// Why an attempt to connect to a possible parent in the tree of agents, through which the agent
/// would reach the controller, has failed.
enum AttemptFailure {
    /// The other agent has the key, and does not accept the connection.
    Rejected,
    /// There is no connection to the other agent.
    Failed(HandshakeError),
}

impl From<HandshakeError> for AttemptFailure {
    fn from(error: HandshakeError) -> AttemptFailure {
        AttemptFailure::Failed(error)
    }
}

impl From<io::Error> for AttemptFailure {
    fn from(error: io::Error) -> AttemptFailure {
        AttemptFailure::Failed(error.into())
    }
}

impl fmt::Display for AttemptFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttemptFailure::Rejected => {
                f.write_str("the agent is about to end, has too many neighbours or hears no controller")
            }
            AttemptFailure::Failed(error) => error.fmt(f),
        }
    }
}

/// Connects a newly started agent to one of its possible parents in the tree of agents, so that the
/// agent can reach the controller. Fails if none can be reached, or if those that can be reached
/// reject the agent for too long.
pub(super) async fn connect_to_parent(setup: &TreeSetup) -> diagnostic::Result<NeighbourLink> {
    let limit = Duration::from_millis(setup.reconnect_ms).min(MAX_FIRST_CONNECT_TIME);
    race_possible_parents(setup, limit, RetryPolicy::Rejections).await
}

/// Connects an agent whose parent in the tree of agents was lost to another possible parent, so
/// that the agent reaches the controller again. Tries them repeatedly, for the time that the
/// controller has set.
pub(super) async fn reconnect_to_parent(setup: &TreeSetup) -> diagnostic::Result<NeighbourLink> {
    race_possible_parents(setup, Duration::from_millis(setup.reconnect_ms), RetryPolicy::AllFailures).await
}

/// Tries to connect to all possible parents in the tree of agents, with a short delay between the
/// starts, and returns the first accepted connection. A neighbour that does not answer delays no
/// other one. Fails if no connection is accepted within `limit`.
async fn race_possible_parents(
    setup: &TreeSetup,
    limit: Duration,
    repetition: RetryPolicy,
) -> diagnostic::Result<NeighbourLink> {
    let mut attempts = JoinSet::new();
    let failures: Arc<Mutex<BTreeMap<SocketAddr, String>>> = Arc::default();
    let mut delay = Duration::ZERO;
    for TreeParent { stream, addresses } in &setup.parents {
        for address in addresses {
            let (stream, address, failures) = (*stream, *address, failures.clone());
            let (key, name) = (HandshakeKey::from_job_key(&setup.key), setup.host.clone());
            attempts.spawn(async move {
                sleep(delay).await;
                let record = |failure: &AttemptFailure| {
                    let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
                    failures.insert(address, format!("{address}: {failure}"));
                };
                let attempt = || try_address(stream, address, &key, &name);
                retry_address(attempt, repetition, record).await
            });
            delay += NEXT_ATTEMPT_DELAY;
        }
    }
    let wait_for_connection = async {
        while let Some(finished) = attempts.join_next().await {
            // The other attempts end when the set is dropped.
            if let Ok(Some(link)) = finished {
                return Some(link);
            }
        }
        None
    };
    if let Ok(Some(link)) = timeout(limit, wait_for_connection).await {
        return Ok(link);
    }
    let failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
    Err(build_unreachable_error(setup, &failures.values().cloned().collect::<Vec<_>>()))
}

/// Calls `attempt`, which connects to one address, repeatedly until it succeeds or fails with an
/// error after which `repetition` permits no retry. Reports each failure to `record`.
async fn retry_address<T, F>(
    attempt: impl Fn() -> F,
    repetition: RetryPolicy,
    record: impl Fn(&AttemptFailure),
) -> Option<T>
where
    F: Future<Output = Result<T, AttemptFailure>>,
{
    let mut pause = FIRST_RETRY_PAUSE;
    loop {
        let result = timeout(CONNECT_ATTEMPT_TIMEOUT, attempt()).await;
        let failure = match result.unwrap_or(Err(HandshakeError::Timeout.into())) {
            Ok(link) => return Some(link),
            Err(failure) => failure,
        };
        record(&failure);
        if repetition == RetryPolicy::Rejections && !matches!(failure, AttemptFailure::Rejected) {
            return None;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
    }
}

/// Connects to another agent at one address, and asks that agent to become the parent of this agent
/// in the tree of agents. Fails if another process answers, or if the agent does not accept the
/// connection.
async fn try_address(
    stream: StreamId,
    address: SocketAddr,
    key: &HandshakeKey,
    name: &str,
) -> Result<NeighbourLink, AttemptFailure> {
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let verified = timeout(HANDSHAKE_TIMEOUT, authenticate_controller(socket, key, name))
        .await
        .unwrap_or(Err(HandshakeError::Timeout))?;
    let (mut input, output) = verified.send_proof_of_key().await?.into_halves(TcpStream::into_split);
    let first: Result<Option<TreeFrame>, FrameError> =
        read_short_frame(&mut input, MAX_TREE_FRAME_BYTES).await;
    match first.map_err(io::Error::other)? {
        Some(TreeFrame::Welcome { stream: other }) if other == stream => Ok(NeighbourLink { input, output }),
        Some(TreeFrame::Welcome { .. }) => {
            Err(io::Error::other("another agent of the job answers at this address").into())
        }
        _ => Err(AttemptFailure::Rejected),
    }
}

/// Builds the error that no possible parent in the tree of agents accepts this agent, with the
/// failure of each connection attempt.
fn build_unreachable_error(setup: &TreeSetup, failures: &[String]) -> Diagnostic {
    let name = &setup.host;
    let no_answer = ["no answer".to_owned()];
    let failures = if failures.is_empty() { &no_answer } else { failures };
    Diagnostic::error(
        host::TREE_PARENT_UNREACHABLE,
        format!("host {name} cannot connect to another host of the job ({})", failures.join("; ")),
    )
    .with_subject(name)
    .with_field(
        "addresses",
        setup
            .parents
            .iter()
            .flat_map(|parent| &parent.addresses)
            .map(ToString::to_string)
            .collect::<Vec<_>>(),
    )
    .with_remedy()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{cell::Cell, time::Instant};

    /// The results of attempts that are rejected twice, then fail, and then succeed.
    fn attempt(number: u32) -> Result<u32, AttemptFailure> {
        match number {
            1 | 2 => Err(AttemptFailure::Rejected),
            3 => Err(io::Error::from(io::ErrorKind::ConnectionRefused).into()),
            _ => Ok(number),
        }
    }

    #[tokio::test]
    async fn an_agent_that_starts_repeats_rejected_attempts_only() {
        for (repetition, expected, pauses) in
            [(RetryPolicy::Rejections, None, 3), (RetryPolicy::AllFailures, Some(4), 7)]
        {
            let (attempts, failures, began) = (Cell::new(0), Cell::new(0), Instant::now());
            let run = || async {
                attempts.set(attempts.get() + 1);
                attempt(attempts.get())
            };
            let result = retry_address(run, repetition, |_| failures.set(failures.get() + 1)).await;
            assert_eq!((result, failures.get()), (expected, 3), "{repetition:?}");
            let elapsed = began.elapsed();
            assert!(elapsed >= FIRST_RETRY_PAUSE * pauses, "{repetition:?}: {elapsed:?}");
        }
    }
}
