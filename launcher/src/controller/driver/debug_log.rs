//! Writes the inputs and actions of the controller's state machine to the debug log, without
//! secrets.
use crate::controller::core::{ControllerAction, ControllerInput};
use debuglog::variant_name;
use protocol::control::FromAgent;
use tracing::{debug, info, trace, warn};

/// Logs an input of the controller's state machine, without secrets.
pub(super) fn log_input(input: &ControllerInput) {
    match input {
        ControllerInput::Agent(host, FromAgent::Line { .. }) => {
            trace!(target: "controller::message", host, "received output");
        }
        ControllerInput::Agent(host, message) if message.is_transient() => {
            trace!(target: "controller::message", host, message = variant_name(message), "received");
        }
        ControllerInput::Agent(host, FromAgent::Report { seq, message, .. }) => {
            debug!(target: "controller::message", host, seq, message = variant_name(&**message), "received");
        }
        ControllerInput::Agent(host, message) => {
            debug!(target: "controller::message", host, message = variant_name(message), "received");
        }
        ControllerInput::AgentGone { host, end } => {
            warn!(target: "controller::lease", host, end = variant_name(end), "agent gone");
        }
        ControllerInput::StartStep(host, step) => {
            debug!(target: "controller::transport", host, ?step, "starting agent");
        }
        ControllerInput::Planned { attempt, .. } => {
            info!(target: "controller::rendezvous", attempt, "planned attempt");
        }
        ControllerInput::Stored(reports) => {
            trace!(target: "controller::journal", ?reports, "stored reports");
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
        ControllerInput::JournalTaken(_) => info!(target: "controller::journal", "took over journal"),
        ControllerInput::Evicted(host) => info!(target: "controller::lease", host, "lost agent has ended"),
        ControllerInput::InnerHosts(changes) => {
            debug!(target: "controller::lease", ?changes, "ways through the tree of agents changed");
        }
        ControllerInput::Tick => trace!(target: "controller", "tick"),
    }
}

/// Logs an action that the controller's state machine requests, without secrets.
pub(super) fn log_action(action: &ControllerAction) {
    match action {
        ControllerAction::Send(host, message) => {
            debug!(target: "controller::message", host, message = variant_name(message), "sending");
        }
        ControllerAction::SendHello(host) => {
            debug!(target: "controller::handshake", host, "sending hello");
        }
        ControllerAction::SendAttach(host) => {
            info!(target: "controller::handshake", host, "asking agent to obey this controller");
        }
        ControllerAction::SendMemo { hosts, memo } => {
            let hosts = hosts.len();
            debug!(target: "controller::message", hosts, number = memo.number, "sending memo");
        }
        ControllerAction::RecordAgentNumber(_) | ControllerAction::AdoptPlan(_) => {}
        ControllerAction::TakeOverJournal(memo) => {
            let (attempt, phase) = (memo.memo.attempt, memo.memo.phase);
            info!(target: "controller::journal", attempt, ?phase, "taking over journal");
        }
        ControllerAction::RestoreEvent(event) => {
            debug!(target: "controller::journal", number = event.number, "restoring event");
        }
        ControllerAction::ReportTakeover { unattended } => {
            info!(target: "controller", ?unattended, "took over run");
        }
        ControllerAction::AbandonTakeover(failure) => {
            warn!(target: "controller", ?failure, "abandoned takeover");
        }
        ControllerAction::EvictAgent(host) => {
            info!(target: "controller::transport", host, "asking lost agent to end");
        }
        ControllerAction::RecordInventory(host, _) => {
            info!(target: "controller::handshake", host, "agent answered with its inventory");
        }
        ControllerAction::Prepare { attempt, restarts, hosts, resume } => {
            info!(target: "controller::attempt", attempt, restarts, ?hosts, ?resume, "preparing attempt");
        }
        ControllerAction::StartWorkers { port } => {
            info!(target: "controller::attempt", port, "starting workers");
        }
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
        ControllerAction::WorkerEvent { event, .. } => {
            let event = event.as_ref().map(variant_name);
            debug!(target: "controller::event", event, "recording event of a worker");
        }
        ControllerAction::Line { .. }
        | ControllerAction::Progress { .. }
        | ControllerAction::WriteHangFile { .. }
        | ControllerAction::StepTimes(_)
        | ControllerAction::Usage { .. } => {}
        ControllerAction::KillAgent(host) => warn!(target: "controller::lease", host, "killing agent"),
        ControllerAction::End(outcome) => {
            let (exit_code, stopped, killed) = (outcome.exit_code, outcome.stopped, outcome.killed);
            info!(target: "controller", exit_code, stopped, killed, step = outcome.step, "run ended");
        }
    }
}
