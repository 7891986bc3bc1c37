//! Writes the inputs and actions of the controller's core to the debug log, without secrets.
use crate::controller::core::{ControllerAction, ControllerInput};
use debuglog::variant_name;
use protocol::control::FromAgent;
use tracing::{debug, info, trace, warn};

/// Logs an input of the core.
pub(super) fn log_input(input: &ControllerInput) {
    match input {
        ControllerInput::Agent(
            host,
            FromAgent::Line { .. } | FromAgent::Progress { .. } | FromAgent::Heartbeat,
        ) => {
            trace!(target: "controller::message", host, "received output, progress or heartbeat");
        }
        ControllerInput::Agent(host, message) => {
            debug!(target: "controller::message", host, message = variant_name(message), "received");
        }
        ControllerInput::AgentGone { host, end } => {
            warn!(target: "controller::lease", host, end = variant_name(end), "agent gone");
        }
        ControllerInput::Ready { attempt, .. } => {
            info!(target: "controller::rendezvous", attempt, "planned attempt and bound rendezvous");
        }
        ControllerInput::Rejected { attempt, diagnostic } => {
            warn!(target: "controller::attempt", attempt, code = diagnostic.code().name(), "rejected attempt");
        }
        ControllerInput::Stop(request) => info!(target: "controller::signal", ?request, "stop requested"),
        ControllerInput::Kill => info!(target: "controller::signal", "kill requested"),
        ControllerInput::Save(signal) => info!(target: "controller::signal", signal, "save requested"),
        ControllerInput::Reload(_) => info!(target: "controller::reload", "reloading changed keys"),
        ControllerInput::Hosts { added, listed } => {
            let removed = listed.iter().filter(|is_listed| !**is_listed).count();
            info!(target: "controller::reload", added = added.len(), removed, "list of hosts changed");
        }
        ControllerInput::Tick => trace!(target: "controller", "tick"),
    }
}

/// Logs an action that the core has decided on.
pub(super) fn log_action(action: &ControllerAction) {
    match action {
        ControllerAction::Send(host, message) => {
            debug!(target: "controller::message", host, message = variant_name(message), "sending");
        }
        ControllerAction::RecordInventory(host, _) => {
            info!(target: "controller::handshake", host, "agent answered with its inventory");
        }
        ControllerAction::Prepare { attempt, restarts, hosts, resume } => {
            info!(target: "controller::attempt", attempt, restarts, ?hosts, ?resume, "preparing attempt");
        }
        ControllerAction::StartWorkers => info!(target: "controller::attempt", "starting workers"),
        ControllerAction::StartAgent(host) => info!(target: "controller::transport", host, "starting agent"),
        ControllerAction::ReleaseAgent(host) => {
            info!(target: "controller::transport", host, "releasing agent");
        }
        ControllerAction::SendPeers { attempt, members } => {
            info!(target: "controller::rendezvous", attempt, members = members.len(), "sending peers");
        }
        ControllerAction::Event(event) => {
            info!(target: "controller::event", event = variant_name(event), "reporting");
        }
        ControllerAction::Line { .. } | ControllerAction::Progress { .. } => {}
        ControllerAction::KillAgent(host) => warn!(target: "controller::lease", host, "killing agent"),
        ControllerAction::End(outcome) => {
            let (exit_code, stopped, killed) = (outcome.exit_code, outcome.stopped, outcome.killed);
            info!(target: "controller", exit_code, stopped, killed, step = outcome.step, "run ended");
        }
    }
}
