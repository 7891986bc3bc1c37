//! Executes the actions that the controller's state machine requests.
use super::{ControllerDriver, EventLoopEnd, debug_log};
use crate::{
    clock::read_unix_time,
    cluster::AgentHandle,
    connection::MessagePriority,
    controller::{
        core::{ControllerAction, HostIndex, UnstoredEvent},
        report_id::{CONTROLLER_REPORT_STREAM, ReportId},
    },
};
use protocol::{
    control::{PROTOCOL_VERSION, ToAgent},
    event::Event,
};
use std::time::Duration;

impl ControllerDriver {
    /// Executes one action that the controller's state machine has requested, such as to send a
    /// message to an agent or to write an event. Some actions add an input to `pending_inputs`.
    pub(super) fn execute_action(&mut self, action: ControllerAction) {
        debug_log::log_action(&action);
        match action {
            ControllerAction::Send(host, message) => self.send_to_agent(host, message),
            ControllerAction::SendHello(host) => self.send_hello(host),
            ControllerAction::SendAttach(host) => self.send_attach_request(host),
            ControllerAction::SendMemo { hosts, memo } => self.send_memo(&hosts, *memo),
            ControllerAction::RecordAgentNumber(number) => {
                self.agents_started = self.agents_started.max(number);
            }
            ControllerAction::AdoptPlan(plan) => self.adopt_job_and_secrets_of_plan(*plan),
            ControllerAction::TakeOverJournal(memo) => self.take_over_journal(*memo),
            ControllerAction::RestoreEvent(event) => self.append_event_of_earlier_controller(&event),
            ControllerAction::ReportTakeover { unattended } => self.report_takeover(unattended),
            ControllerAction::AbandonTakeover(failure) => self.abandon_takeover(failure),
            ControllerAction::EvictAgent(host) => self.evict_agent(host),
            ControllerAction::RecordInventory(host, inventory) => {
                self.inventories.insert_inventory(host, inventory)
            }
            ControllerAction::Prepare { attempt, restarts, hosts, resume } => {
                self.prepare_attempt(attempt, restarts, &hosts, resume);
            }
            ControllerAction::StartWorkers { port } => self.start_workers(port),
            ControllerAction::StartAgent(host) => self.start_agent(host),
            ControllerAction::ReleaseAgent(host) => self.release_agent(host, None),
            ControllerAction::SendPeers { attempt, members } => self.send_peers_and_key(attempt, members),
            ControllerAction::Event(event) => self.emit_event(event),
            ControllerAction::WorkerEvent { report, age, event } => {
                self.record_worker_event(report, age, event);
            }
            ControllerAction::Line { rank, stderr, text } => {
                self.streamed_logs.append_line(rank, &text);
                self.report.show_line(rank, stderr, text);
            }
            ControllerAction::WriteHangFile { attempt, file } => {
                self.journal.iter().for_each(|journal| journal.write_hang_file(attempt, &file));
            }
            ControllerAction::Progress { rank, phase } => self.report.show_phase(rank, phase),
            ControllerAction::StepTimes(times) => self.status.set_step_times(times),
            ControllerAction::Usage { host, hosts, usage } => self.record_host_usage(host, hosts, *usage),
            ControllerAction::KillAgent(host) => self.kill_agent(host),
            ControllerAction::End(outcome) => self.end = Some(EventLoopEnd::Ended(outcome)),
        }
    }

    /// Queues a message to the agent of a host. Drops the message if the host has no agent or its
    /// control stream is closed.
    pub(super) fn send_to_agent(&mut self, host: HostIndex, message: ToAgent) {
        if let Some(outbox) = self.agents.get_mut(&host).and_then(|a| a.outbox.as_mut()) {
            outbox.send_message(MessagePriority::Critical, message);
            if outbox.has_overflow() {
                self.backlogged.insert(host);
            }
        }
    }

    /// Sends the first message (hello) to the agent of a host, with the keys and time limits by
    /// which the agent recognizes this controller.
    fn send_hello(&mut self, host: HostIndex) {
        let (Some(target), Some(agent)) = (self.hosts.get(host), self.agents.get(&host)) else { return };
        let terms = self.identity.build_supervision_terms(&target.name, agent.number);
        self.send_to_agent(host, ToAgent::Hello { version: PROTOCOL_VERSION, terms: Some(Box::new(terms)) });
    }

    /// Sends the agent of a host the order to end, and closes the control connection to the agent.
    /// `exit_code` is the exit code of the run; `None` if the run continues without the agent.
    pub(super) fn release_agent(&mut self, host: HostIndex, exit_code: Option<u8>) {
        self.send_to_agent(host, ToAgent::End { exit_code });
        if let Some(agent) = self.agents.get_mut(&host)
            && agent.outbox.take().is_some()
            && matches!(agent.handle, AgentHandle::Connection(_))
        {
            self.released.insert((host, agent.number));
        }
    }

    /// Writes a notice to the journal (the file of the run's events) and shows the notice to the
    /// user.
    pub(super) fn emit_notice(&mut self, message: String) {
        self.emit_event(Event::new_notice(None, message));
    }

    /// Writes an event of the controller to the journal (the file of the run's events) and reports
    /// the event to the user.
    pub(super) fn emit_event(&mut self, mut event: Event) {
        self.complete_straggler_event(&mut event);
        let time = read_unix_time();
        let report = self.events.add(&event, time);
        if let Some(journal) = &mut self.journal {
            journal.append_event(&event, time, Some(report));
        }
        self.report.show_event(event);
    }

    /// Appends an event to the journal (the run's file of events) that an earlier controller of the
    /// run could not store there.
    fn append_event_of_earlier_controller(&mut self, event: &UnstoredEvent) {
        if let Some(journal) = &mut self.journal {
            journal.append_event(&event.event, event.time, Some((CONTROLLER_REPORT_STREAM, event.number)));
        }
    }

    /// Writes an event of a worker to the journal (the file of the run's events) and reports the
    /// event to the user. Without an event, the report only counts as stored. An event that is held
    /// back becomes an event of the controller.
    fn record_worker_event(&mut self, report: ReportId, age: Duration, event: Option<Event>) {
        if self.journal.is_none() {
            return;
        }
        let event = event.and_then(|event| self.complete_or_hold_event(event));
        let Some(journal) = &mut self.journal else { return };
        let Some(event) = event else { return journal.mark_report_stored(report) };
        journal.append_event(&event, read_unix_time() - age.as_secs_f64(), Some(report));
        self.report.show_event(event);
    }
}
