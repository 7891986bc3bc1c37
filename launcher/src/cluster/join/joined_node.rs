//! Runs launch on a node other than node 0: connects to node 0, starts the agent of this machine,
//! and passes the messages between the two.
//!
//! The agent is a child process with the control stream on its standard input and output, as on
//! node 0. So it ends with this process. This process handles the signals of the node, kills what
//! the agent leaves, and exits with the exit code of the run.
use super::{
    job_hashes::hash_job_settings,
    join_key::read_join_key,
    node_0_connection::{JoinAttemptError, JoinTarget, JoinedNode, try_join_once},
    node_relay::{NodeEndReason, NodeRelay},
    node_signals::NodeSignals,
};
use crate::{
    core_dumps::disable_core_dumps,
    processes::{become_subreaper, kill_descendants, list_children, reap_children},
    report::command_output::write_message,
};
use diagnostic::{Diagnostic, codes::host, quantity::format_duration};
use jobspec::{JobSpec, hosts::RendezvousAddress};
use protocol::{
    control::{JoinRequest, PROTOCOL_VERSION},
    exit,
    host_name::read_host_name,
};
use std::{
    io,
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout_at};

/// The pause after a node's first failed attempt to connect to node 0. Each further attempt doubles
/// it.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause between two attempts of a node to connect to node 0.
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(2);
/// How long a node tries to connect to node 0 before it first informs the user that it waits.
const FIRST_WAITING_REPORT_DELAY: Duration = Duration::from_secs(10);
/// How long a node waits until the processes that its agent has left behind, and that the node has
/// killed, have ended.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two searches of a node for processes that its agent has left behind.
const SWEEP_INTERVAL: Duration = Duration::from_millis(5);

/// Joins the run that node 0 controls, with the node rank `node_rank` or, if that is `None`, with a
/// rank that node 0 chooses. Blocks until the run ends, and returns the exit code of the run. Fails
/// if node 0 does not accept the node, or is lost.
pub(crate) fn join_run(
    job: &JobSpec,
    address: &RendezvousAddress,
    node_rank: Option<u32>,
) -> diagnostic::Result<u8> {
    let join = &job.cluster.join;
    let request = JoinRequest {
        version: PROTOCOL_VERSION,
        node_rank,
        nodes: join.nodes.unwrap_or(1),
        host: read_host_name(),
        pid: std::process::id(),
        job: hash_job_settings(job),
    };
    let target = JoinTarget { address: address.clone(), key: read_join_key(join)?, request };
    let cannot_start = |error: io::Error| {
        Diagnostic::error(host::AGENT_START_FAILED, "cannot start the agent of this node").with_cause(&error)
    };
    disable_core_dumps().map_err(cannot_start)?;
    let earlier_children = list_children();
    become_subreaper().map_err(cannot_start)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot_start)?;
    let result = runtime.block_on(async {
        let mut signals = NodeSignals::install().map_err(cannot_start)?;
        let timeout = Duration::from_millis(join.timeout_ms);
        let joined = tokio::select! {
            joined = join_with_retries(&target, timeout) => joined?,
            code = signals.receive_end_signal() => {
                write_message("launch: stopped before the node joined\n");
                return Ok(code);
            }
        };
        run_agent(joined, &target, &mut signals).await.map_err(cannot_start)?
    });
    kill_processes_left_by_agent(&earlier_children);
    result
}

/// Repeats attempts to join the run of node 0 until node 0 accepts this node. Fails if node 0
/// rejects the node, or after the time limit.
async fn join_with_retries(target: &JoinTarget, limit: Duration) -> diagnostic::Result<JoinedNode> {
    let began = Instant::now();
    let deadline = tokio::time::Instant::now() + limit;
    let (mut pause, mut is_reported) = (FIRST_RETRY_PAUSE, false);
    let mut reason = "no answer".to_owned();
    loop {
        match timeout_at(deadline, try_join_once(target)).await {
            Ok(Ok(joined)) => return Ok(joined),
            Ok(Err(JoinAttemptError::Rejected(error))) => return Err(error),
            Ok(Err(JoinAttemptError::Unreachable(text))) => reason = text,
            Err(_) => {}
        }
        if tokio::time::Instant::now() + pause >= deadline {
            let limit = format_duration(limit.as_secs_f64());
            let message =
                format!("node 0 at {} did not accept this node within {limit}: {reason}", target.address);
            return Err(Diagnostic::error(host::JOIN_TIMEOUT, message)
                .with_subject(target.address.to_string())
                .with_field("reason", reason)
                .with_remedy());
        }
        if !is_reported && began.elapsed() >= FIRST_WAITING_REPORT_DELAY {
            is_reported = true;
            write_message(&format!("launch: waiting for node 0 at {}: {reason}\n", target.address));
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
    }
}

/// Runs the agent of this node, and passes messages between the agent and node 0 until the run
/// ends. Returns the exit code of the run, or the error that ended the node.
async fn run_agent(
    joined: JoinedNode,
    target: &JoinTarget,
    signals: &mut NodeSignals,
) -> io::Result<diagnostic::Result<u8>> {
    let (rank, address) = (joined.node_rank, &target.address);
    write_message(&format!("launch: node {rank} joined node 0 at {address}\n"));
    let end = NodeRelay::start(joined)?.relay_until_agent_end(signals).await;
    let lost = |message: String| {
        Err(Diagnostic::error(host::JOIN_NODE_LOST, message).with_subject(address.to_string()).with_remedy())
    };
    Ok(match end {
        NodeEndReason::RunEnded(code) => {
            let outcome =
                if code == exit::DONE { "done".to_owned() } else { format!("ended with exit code {code}") };
            write_message(&format!("launch: {outcome}; node 0 shows the result\n"));
            Ok(code)
        }
        NodeEndReason::Released => {
            write_message("launch: the run continues without this node\n");
            Ok(exit::DONE)
        }
        NodeEndReason::Signalled(code) => Ok(code),
        NodeEndReason::ControllerLost => {
            lost(format!("lost the connection to node 0 at {address}; the workers of node {rank} were ended"))
        }
        NodeEndReason::AgentFailed(error) => {
            Err(Diagnostic::error(host::JOIN_NODE_LOST, format!("the agent of node {rank} failed"))
                .with_cause(&error))
        }
        NodeEndReason::AgentEnded(how) => lost(format!("the agent of node {rank} {how}")),
    })
}

/// Kills and reaps the processes that the agent of this node has left behind, except for `earlier`,
/// the children that this process had before the agent started.
fn kill_processes_left_by_agent(earlier: &[u32]) {
    let began = Instant::now();
    while began.elapsed() < SWEEP_TIMEOUT {
        let is_any_left = reap_children(|_| false, |_, _| ());
        if !is_any_left || kill_descendants(earlier).is_empty() {
            return;
        }
        std::thread::sleep(SWEEP_INTERVAL);
    }
}
