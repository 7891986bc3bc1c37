//! Writes the debug log of the agent, with the inputs and actions of the agent's state machine.
use super::core::{AgentAction, AgentInput};
use debuglog::{Filter, variant_name};
use protocol::control::{FromAgent, HostPlan, ToAgent};
use std::io;
use tracing::{debug, info, trace, warn};

/// Starts the agent's debug log in a file in the run directory, with the filter for messages that
/// the controller has sent in `plan`. Does nothing for later attempts.
pub(super) fn start_debug_log(plan: &HostPlan) -> io::Result<()> {
    let Ok(filter) = Filter::from_directives_or_verbosity(Some(&plan.debug_filter), 0) else { return Ok(()) };
    debuglog::start(&filter, None);
    let host = plan.host.replace('/', "_");
    debuglog::open_log_file(&plan.run_dir.join("logs").join(format!("agent-{host}.debug.log")))?;
    let (attempt, workers) = (plan.attempt, plan.workers.len());
    info!(target: "agent", host = plan.host, attempt, workers, "received plan");
    Ok(())
}

/// Writes an input of the agent's state machine, such as a message or a process exit, to the debug
/// log, without secrets.
pub(super) fn log_input(input: &AgentInput) {
    match input {
        AgentInput::Controller(ToAgent::Heartbeat) => {}
        AgentInput::Controller(message) => {
            debug!(target: "agent::message", message = variant_name(message), "received from controller");
        }
        AgentInput::Terminated => warn!(target: "agent::signal", "received SIGTERM"),
        AgentInput::ControllerLost => warn!(target: "agent::lease", "lost controller"),
        AgentInput::Spawned { rank, pid } => info!(target: "agent::process", rank, pid, "started worker"),
        AgentInput::Rejoined { rank, pid } => info!(target: "agent::process", rank, pid, "kept worker"),
        AgentInput::SpawnFailed { rank, diagnostic } => {
            warn!(target: "agent::process", rank, code = diagnostic.code().name(), "worker did not start");
        }
        AgentInput::WorkerExited { rank, status, oom, .. } => {
            info!(target: "agent::process", rank, ?status, oom, "worker ended");
        }
        AgentInput::WorkerFatal { rank, diagnostic, .. } => {
            warn!(target: "agent::process", rank, code = diagnostic.code().name(), "worker reported failure");
        }
        AgentInput::Bound { attempt, port } => {
            info!(target: "agent::rendezvous", attempt, port = port.as_ref().ok(), "bound rendezvous");
        }
        other => trace!(target: "agent", input = variant_name(other), "input"),
    }
}

/// Writes an action that the agent's state machine requests, such as starting a worker, to the
/// debug log, without secrets.
pub(super) fn log_action(action: &AgentAction) {
    match action {
        AgentAction::Send(FromAgent::Line { .. }) => {}
        AgentAction::Send(message) if message.is_transient() => {}
        AgentAction::Send(message) => {
            debug!(target: "agent::message", message = variant_name(message), "sending to controller");
        }
        AgentAction::SendToWorker(rank, message) => {
            debug!(target: "agent::message", rank, message = variant_name(message), "sending to worker");
        }
        AgentAction::Signal(rank, signal) => {
            info!(target: "agent::signal", rank, ?signal, "ending process group");
        }
        AgentAction::RequestStop(rank, signal) => {
            info!(target: "agent::signal", rank, signal = signal.name(), "requesting stop");
        }
        AgentAction::RequestSave(rank, signal) => {
            info!(target: "agent::signal", rank, signal, "requesting save");
        }
        AgentAction::Sweep { .. } => info!(target: "agent::process", "killing remaining processes"),
        AgentAction::Exit(code) => info!(target: "agent", code, "ending"),
        other => trace!(target: "agent", action = variant_name(other), "action"),
    }
}
