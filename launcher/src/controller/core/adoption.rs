//! Takes over a run from a lost controller: adopts its agents, restores the run's state, and
//! processes reports that agents send again.
//!
//! Until the journal is taken over, no order is given. So a takeover that is abandoned changes
//! nothing.
use super::{
    AgentEnd, AttemptState, ControllerAction, ControllerCore, ControllerInput, HostIndex, HostSetup,
    adoption_state::{AdoptedRun, Adoption, HostAnswer, ReplayedReport, subtract_age},
    attach_failure::AttachFailure,
    host_state::{AgentConnectionState, HostState},
    taken_over_journal::TakenOverJournal,
};
use crate::leases::HEARTBEAT_INTERVAL;
use protocol::control::{AttachRejection, FromAgent, ToAgent};
use std::time::Duration;

impl ControllerCore {
    /// Begins to take over a run: returns the actions that ask the agent of each host to obey this
    /// controller. The caller must have started the relays to the agents just before.
    pub(crate) fn send_attach_requests(&mut self, now: Duration) -> Vec<ControllerAction> {
        self.next_heartbeat = now + HEARTBEAT_INTERVAL;
        for id in 0..self.hosts.len() {
            let host = &mut self.hosts[id];
            (host.agent, host.last_heard) = (AgentConnectionState::Starting, now);
            host.start_step = None;
            self.schedule_lease_check(id);
            self.actions.push(ControllerAction::SendAttach(id));
        }
        std::mem::take(&mut self.actions)
    }

    /// Handles an input of the state machine, such as a message of an agent, during the time in
    /// which the controller takes over a run.
    pub(super) fn handle_adoption_input(&mut self, now: Duration, input: ControllerInput) {
        match input {
            ControllerInput::Agent(id, message)
                if self.hosts.get(id).is_some_and(HostState::is_starting_or_joined) =>
            {
                self.hosts[id].last_heard = now;
                self.handle_adoption_message(now, id, message);
            }
            ControllerInput::AgentGone { host, end } => self.mark_host_not_adoptable(host, end),
            ControllerInput::StartStep(host, step) => self.handle_agent_start_step(now, host, step),
            ControllerInput::JournalTaken(journal) => self.finish_adoption(now, *journal),
            ControllerInput::Stop(_) | ControllerInput::Kill => {
                self.abandon_takeover(AttachFailure::Interrupted);
            }
            // The agents accept no other orders before the run is taken over.
            _ => {}
        }
        self.try_take_over_journal();
    }

    /// Stores an agent's answer to a controller that takes over the run, or a report that the agent
    /// sends again.
    fn handle_adoption_message(&mut self, now: Duration, id: HostIndex, message: FromAgent) {
        let Some(adoption) = &mut self.adoption else { return };
        match message {
            FromAgent::Adopted(agent) if matches!(adoption.hosts[id], HostAnswer::Awaited) => {
                let is_complete = agent.last_report == 0;
                let host = &mut self.hosts[id];
                (host.agent, host.pid, host.stream) = (AgentConnectionState::Joined, agent.pid, agent.stream);
                host.is_adopted = true;
                (host.memory, host.hostname) = (agent.inventory.memory, agent.inventory.host.clone());
                self.streams.insert(agent.stream, id);
                self.actions.push(ControllerAction::RecordInventory(id, agent.inventory.clone()));
                self.actions.push(ControllerAction::RecordAgentNumber(agent.number));
                let memo_at = subtract_age(now, agent.memo_age_ms);
                adoption.hosts[id] = HostAnswer::Adopted { agent, is_complete, memo_at };
                self.schedule_lease_check(id);
                if self.setup.hosts[id].remote {
                    self.actions.push(ControllerAction::Send(id, ToAgent::Heartbeat));
                }
            }
            FromAgent::Report { seq, age_ms, message } => {
                let at = subtract_age(now, age_ms);
                adoption.reports.push(ReplayedReport { at, host: id, seq, message });
                if let HostAnswer::Adopted { agent, is_complete, .. } = &mut adoption.hosts[id] {
                    *is_complete |= seq >= agent.last_report;
                }
            }
            FromAgent::NotAdopted(AttachRejection::Controlled { silent_ms, .. }) => {
                self.abandon_takeover(AttachFailure::Controlled { host: id, silent_ms });
            }
            FromAgent::NotAdopted(AttachRejection::Stale { token }) => {
                self.abandon_takeover(AttachFailure::Stale { token });
            }
            FromAgent::NotAdopted(AttachRejection::NoAgent) => {
                adoption.hosts[id] = HostAnswer::NoAgent;
                self.hosts[id].agent = AgentConnectionState::NotStarted;
            }
            FromAgent::NotAdopted(AttachRejection::Failed(error)) => {
                self.mark_host_not_adoptable(id, AgentEnd::Failed(error));
            }
            FromAgent::Line { rank, stderr, text } => {
                self.actions.push(ControllerAction::Line { rank, stderr, text });
            }
            FromAgent::Failed { diagnostic, .. } => {
                self.mark_host_not_adoptable(id, AgentEnd::Failed(diagnostic))
            }
            // The other messages only prove that the agent is alive, or are not expected.
            _ => {}
        }
    }

    /// Records that this controller cannot begin to control the agent of a host, because the agent
    /// has ended or cannot be reached.
    pub(super) fn mark_host_not_adoptable(&mut self, id: HostIndex, end: AgentEnd) {
        let Some(adoption) = &mut self.adoption else { return };
        if !matches!(adoption.hosts[id], HostAnswer::NoAgent | HostAnswer::Unreachable(_)) {
            adoption.hosts[id] = HostAnswer::Unreachable(end);
            self.hosts[id].agent = AgentConnectionState::Lost;
        }
    }

    /// Gives up taking over a run from a lost controller, and leaves the agents and their workers
    /// unchanged.
    fn abandon_takeover(&mut self, failure: AttachFailure) {
        if self.state == AttemptState::Adopting {
            self.state = AttemptState::Finished;
            self.actions.push(ControllerAction::AbandonTakeover(failure));
        }
    }

    /// Requests to take over the lost controller's journal (the run's file of events) once all
    /// agents have answered, or gives up if this is impossible. Abandons the takeover if the run
    /// cannot be taken over.
    fn try_take_over_journal(&mut self) {
        let Some(adoption) = self.adoption.as_mut().filter(|_| self.state == AttemptState::Adopting) else {
            return;
        };
        if adoption.memo.is_some() || !adoption.have_all_hosts_answered() {
            return;
        }
        let failure = match (find_attach_failure(adoption, &self.setup.hosts), adoption.find_newest_memo()) {
            (Some(failure), _) => failure,
            (None, None) => AttachFailure::NotStarted,
            (None, Some(newest)) => {
                // The plan of the newest attempt has the job with all changes.
                let plans = adoption.adopted_agents().filter_map(|(_, agent)| agent.plan.as_deref());
                if let Some(plan) = plans.max_by_key(|plan| plan.attempt) {
                    self.actions.push(ControllerAction::AdoptPlan(Box::new(plan.clone())));
                    self.actions.push(ControllerAction::TakeOverJournal(Box::new(newest.stored.clone())));
                    adoption.memo = Some(newest);
                    return;
                }
                AttachFailure::NotStarted
            }
        };
        self.abandon_takeover(failure);
    }

    /// Restores the state of a run from the agents' answers and the journal that was taken over,
    /// and continues the run.
    fn finish_adoption(&mut self, now: Duration, journal: TakenOverJournal) {
        let Some(Adoption { hosts, reports, placement, memo: Some(newest), .. }) = self.adoption.take()
        else {
            return;
        };
        let phase = newest.stored.memo.phase;
        self.restore_memo(now, newest, &journal.summary);
        let (mut plans, mut lost, mut unattended) = (Vec::new(), Vec::new(), Duration::ZERO);
        let mut peers = None;
        for (id, answer) in hosts.into_iter().enumerate() {
            match answer {
                HostAnswer::Adopted { agent, .. } => {
                    unattended = unattended.max(Duration::from_millis(agent.unattended_ms));
                    peers = peers.or(agent.peers.map(|peers| (id, peers)));
                    plans.extend(agent.plan.map(|plan| (id, *plan)));
                }
                HostAnswer::NoAgent => lost.push((id, AgentEnd::EndedUnattended)),
                HostAnswer::Unreachable(end) => lost.push((id, end)),
                HostAnswer::Awaited => {}
            }
        }
        let placement = journal.summary.placement.clone().or(placement);
        let run = AdoptedRun { phase, plans, peers, placement, reports, lost, unattended };
        self.continue_adopted_run(now, run, journal);
    }
}

/// Returns the reason why this controller cannot take over the run, derived from the agents'
/// answers, or `None` if the takeover is possible.
fn find_attach_failure(adoption: &Adoption, hosts: &[HostSetup]) -> Option<AttachFailure> {
    let is_unreachable = |id: &HostIndex| matches!(adoption.hosts[*id], HostAnswer::Unreachable(_));
    let adopted = adoption.adopted_agents().count();
    if adopted == 0 {
        let unreachable = (0..hosts.len()).filter(is_unreachable).count();
        return Some(AttachFailure::NoAgents { unreachable });
    }
    let members: Vec<HostIndex> = match &adoption.placement {
        Some((_, names)) => (0..hosts.len()).filter(|id| names.contains(&hosts[*id].name)).collect(),
        None => (0..hosts.len()).collect(),
    };
    let unreachable: Vec<HostIndex> = members.iter().copied().filter(is_unreachable).collect();
    let is_adopted = |id: &HostIndex| matches!(adoption.hosts[*id], HostAnswer::Adopted { .. });
    let adopted_members = members.iter().filter(|id| is_adopted(id)).count();
    let has_first = members.first().is_some_and(is_adopted);
    let is_majority =
        adopted_members > unreachable.len() || (adopted_members == unreachable.len() && has_first);
    let is_allowed = unreachable.is_empty() || is_majority || adoption.is_forced;
    (!is_allowed).then_some(AttachFailure::TooFewAnswers { adopted: adopted_members, unreachable })
}
