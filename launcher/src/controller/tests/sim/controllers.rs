//! Simulates controllers: their state machines are real, and the work of their drivers is
//! simulated.
use super::{
    AgentCore, ConnectionId, ControllerAction, ControllerCore, ControllerInput, FIRST_TOKEN, HostIndex,
    SimEvent, SimRequest, Simulation, ToAgent, hosts::SimAgent, journals::JournalItem,
};
use crate::controller::{
    controller_events::ControllerEvents,
    core::{AttachFailure, PlannedWorker, RunMemo, StoredMemo},
    report_id::CONTROLLER_REPORT_STREAM,
};
use jobspec::ids::Rank;
use protocol::{
    control::{
        AttachPurpose, ControllerToken, FromAgent, HostInventory, HostPlan, JobSecretKey, PROTOCOL_VERSION,
        RendezvousRequest, SupervisionTerms, WorkerPlan,
    },
    event::Event,
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// The longest time by which the clock of a controller advances while the controller is suspended.
const MAX_CLOCK_STEP: Duration = Duration::from_secs(2);

/// How long a controller waits after a pause for the message that another controller has replaced
/// it.
const TAKEOVER_NEWS_TIMEOUT: Duration = Duration::from_secs(1);

/// The index of a controller.
pub(super) type ControllerIndex = usize;

/// Whether a simulated controller runs, is suspended or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControllerState {
    Alive,
    /// The process is stopped since this time.
    Suspended {
        since: Duration,
    },
    Ended,
}

/// A simulated controller.
pub(super) struct SimController {
    pub(super) core: ControllerCore,
    pub(super) token: ControllerToken,
    pub(super) state: ControllerState,
    /// The time for which the clock of the controller stood still.
    lag: Duration,
    /// Events that wait until the controller is no longer suspended.
    pub(super) delayed: VecDeque<SimEvent>,
    /// The connection to the agent of each host.
    pub(super) connections: BTreeMap<HostIndex, ConnectionId>,
    /// The number of agents that this controller knows to be started, which is the number of the
    /// newest agent.
    agents_started: u64,
    /// The time of the scheduled tick; [`Duration::MAX`] if none is scheduled.
    pub(super) tick_at: Duration,
    /// The plans of the hosts of the current attempt; empty after the workers were started.
    plans: Vec<(HostIndex, HostPlan)>,
    /// The attempt that is being planned: its number, the restarts so far, and its hosts.
    preparing: Option<(u32, u32, Vec<HostIndex>)>,
    pub(super) events: ControllerEvents,
    /// The index of the journal to which this controller writes.
    pub(super) journal: usize,
    pub(super) unwritten: Vec<JournalItem>,
    pub(super) taken_memo: Option<StoredMemo>,
}

impl SimController {
    fn new(core: ControllerCore, token: ControllerToken) -> SimController {
        SimController {
            core,
            token,
            state: ControllerState::Alive,
            lag: Duration::ZERO,
            delayed: VecDeque::new(),
            connections: BTreeMap::new(),
            agents_started: 0,
            tick_at: Duration::MAX,
            plans: Vec::new(),
            preparing: None,
            events: ControllerEvents::default(),
            journal: 0,
            unwritten: Vec::new(),
            taken_memo: None,
        }
    }
}

impl Simulation {
    /// Starts the first controller of the run, and its agents.
    pub(super) fn start_first_controller(&mut self) {
        let core = ControllerCore::new(self.scenario.build_setup(FIRST_TOKEN, self.scenario.hosts));
        self.controllers.push(SimController::new(core, FIRST_TOKEN));
        for host in 0..self.scenario.hosts {
            self.start_agent(0, host);
        }
        let actions = self.controllers[0].core.send_hellos(Duration::ZERO);
        let start = Event::Start { run: "r".into(), run_dir: "/r".into(), world: 1 };
        self.execute_actions(0, vec![ControllerAction::Event(start)]);
        self.execute_actions(0, actions);
    }

    /// Returns whether a controller runs or is suspended.
    pub(super) fn has_live_controller(&self) -> bool {
        self.controllers.iter().any(|controller| controller.state != ControllerState::Ended)
    }

    /// Starts a controller that takes over the run, unless another controller is running or the run
    /// has ended. A suspended controller does not count.
    pub(super) fn start_takeover_controller(&mut self) {
        let is_controlled = self.controllers.iter().any(|c| c.state == ControllerState::Alive);
        if self.outcome.is_some() || is_controlled {
            return;
        }
        let token = ControllerToken { epoch: self.controllers.len() as u64 + 1, id: self.rng.next_u64() };
        let setup = self.scenario.build_setup(token, self.hosts.len());
        let placement = self.journal_lines().iter().rev().find_map(|(event, _)| match event {
            Event::Placement { attempt, hosts, .. } => Some((*attempt, hosts.clone())),
            _ => None,
        });
        let core = ControllerCore::new_for_takeover(setup, placement, false);
        let index = self.controllers.len();
        self.controllers.push(SimController::new(core, token));
        let now = self.now;
        self.controllers[index].lag = now;
        let actions = self.controllers[index].core.send_attach_requests(Duration::ZERO);
        self.execute_actions(index, actions);
    }

    /// Ends or suspends a controller. The connections of a controller that has ended break.
    pub(super) fn end_controller(&mut self, index: ControllerIndex, state: ControllerState) {
        if self.controllers[index].state == ControllerState::Ended {
            return;
        }
        self.controllers[index].state = state;
        self.ended_at = self.now;
        if state == ControllerState::Ended {
            let connections: Vec<ConnectionId> =
                self.controllers[index].connections.values().copied().collect();
            connections.into_iter().for_each(|id| self.break_connection(id));
            self.controllers[index].unwritten.clear();
        }
        if let Some(within) = self.scenario.attach_within {
            let delay = self.rng.pick_delay(0, within.as_millis() as u64);
            self.schedule_event(self.now + delay, SimEvent::Attach);
        }
    }

    /// Continues a suspended controller. The controller first sends heartbeats, and then waits for
    /// the message that another controller has replaced it.
    pub(super) fn resume_controller(&mut self, index: ControllerIndex) -> Result<(), String> {
        let ControllerState::Suspended { since } = self.controllers[index].state else { return Ok(()) };
        let pause = self.now - since;
        if pause <= MAX_CLOCK_STEP {
            return self.process_delayed_events(index);
        }
        self.controllers[index].lag += pause + TAKEOVER_NEWS_TIMEOUT;
        let heartbeats = self.controllers[index].core.build_heartbeats();
        self.execute_actions(index, heartbeats);
        self.schedule_event(self.now + TAKEOVER_NEWS_TIMEOUT, SimEvent::ControlConfirmed(index));
        Ok(())
    }

    /// Returns whether another controller has replaced the journal that this controller has open.
    fn is_journal_replaced(&self, index: ControllerIndex) -> bool {
        let journal = self.controllers[index].journal;
        let is_open = index == 0 || journal > 0;
        is_open && journal + 1 < self.journals.len()
    }

    /// Lets a controller process the events that happened while it was suspended. Ends the
    /// controller if one of these events, or the journal, shows that it was replaced.
    pub(super) fn process_delayed_events(&mut self, index: ControllerIndex) -> Result<(), String> {
        let is_replaced = self.is_journal_replaced(index);
        let controller = &mut self.controllers[index];
        if !matches!(controller.state, ControllerState::Suspended { .. }) {
            return Ok(());
        }
        controller.state = ControllerState::Alive;
        let delayed: Vec<SimEvent> = controller.delayed.drain(..).collect();
        let is_release = |event: &SimEvent| {
            matches!(event, SimEvent::ToController(id, FromAgent::Released { .. })
            if controller.connections.values().any(|open| open == id))
        };
        if delayed.iter().any(is_release) || is_replaced {
            self.end_controller(index, ControllerState::Ended);
            return Ok(());
        }
        delayed.into_iter().try_for_each(|event| self.process_event(event))
    }

    /// Starts an agent on a host. Does nothing if the host is dead or disconnected.
    fn start_agent(&mut self, index: ControllerIndex, host: HostIndex) {
        self.agents_started += 1;
        self.controllers[index].agents_started += 1;
        let number = self.agents_started;
        let is_reachable = !self.hosts[host].dead && !self.hosts[host].disconnected;
        let id = self.open_connection(index, host, is_reachable.then_some(number));
        if !is_reachable {
            return; // No process on the host answers.
        }
        let inventory = HostInventory { host: format!("h{host}"), cpus: vec![0], ..HostInventory::default() };
        let core = AgentCore::new(number, u64::from(number), inventory);
        self.hosts[host].agents.push(SimAgent {
            number,
            core,
            plan: None,
            connection: Some(id),
            waiting: None,
            tick_at: Duration::MAX,
        });
    }

    /// Passes an input to the state machine of a controller and executes the actions that it
    /// requests. Does nothing once the run or the controller has ended.
    pub(super) fn feed_controller(&mut self, index: ControllerIndex, input: ControllerInput) {
        if self.controllers[index].state != ControllerState::Alive || self.outcome.is_some() {
            return;
        }
        self.messages += 1;
        let now = self.now - self.controllers[index].lag;
        if let Some(recorded) = self.recorded.as_mut().filter(|_| index == 0) {
            recorded.push((now, input.clone()));
        }
        let actions = self.controllers[index].core.handle_input(now, input);
        self.execute_actions(index, actions);
    }

    /// Executes the actions that the state machine of a controller has requested.
    fn execute_actions(&mut self, index: ControllerIndex, actions: Vec<ControllerAction>) {
        for action in actions {
            self.execute_controller_action(index, action);
        }
        let controller = &self.controllers[index];
        let (lag, tick_at) = (controller.lag, controller.tick_at);
        if controller.state != ControllerState::Ended
            && self.outcome.is_none()
            && let Some(due) = controller.core.find_next_deadline().map(|due| due + lag)
            && due < tick_at
        {
            self.controllers[index].tick_at = due;
            self.schedule_event(due, SimEvent::ControllerTick(index));
        }
    }

    /// Executes an action that the state machine of a controller has requested.
    fn execute_controller_action(&mut self, index: ControllerIndex, action: ControllerAction) {
        match action {
            ControllerAction::Send(host, message) => self.send_to_agent(index, host, message),
            ControllerAction::SendHello(host) => self.send_hello(index, host),
            ControllerAction::SendAttach(host) => self.send_request(index, host, AttachPurpose::Adopt),
            ControllerAction::EvictAgent(host) => {
                let below = self.controllers[index].agents_started + 1;
                self.send_request(index, host, AttachPurpose::Evict { below });
            }
            ControllerAction::SendMemo { hosts, memo } => self.send_memo(index, &hosts, *memo),
            ControllerAction::RecordAgentNumber(number) => {
                let controller = &mut self.controllers[index];
                controller.agents_started = controller.agents_started.max(number);
            }
            ControllerAction::TakeOverJournal(memo) => {
                self.controllers[index].taken_memo = Some(*memo);
                let at = self.now + self.rng.pick_delay(1, 300);
                self.schedule_event(at, SimEvent::TakeOverJournal(index));
            }
            ControllerAction::RestoreEvent(event) => {
                let line = (event.event, (CONTROLLER_REPORT_STREAM, event.number));
                self.queue_journal_item(index, JournalItem::Append(line));
            }
            ControllerAction::ReportTakeover { unattended } => {
                let unattended_s = unattended.as_secs_f64();
                self.record_event(index, Event::Takeover { host: "c".into(), pid: 1, unattended_s });
            }
            ControllerAction::AbandonTakeover(failure) => self.abandon_takeover(index, failure),
            ControllerAction::Prepare { attempt, restarts, hosts, .. } => {
                self.controllers[index].preparing = Some((attempt, restarts, hosts));
                let at = self.now + self.rng.pick_delay(0, 20);
                self.schedule_event(at, SimEvent::Planned(index, attempt));
            }
            ControllerAction::StartWorkers { .. } => {
                self.check_controller_order(index);
                for (host, plan) in std::mem::take(&mut self.controllers[index].plans) {
                    self.send_to_agent(index, host, ToAgent::Start(Box::new(plan)));
                }
            }
            ControllerAction::StartAgent(host) => self.start_agent(index, host),
            ControllerAction::ReleaseAgent(host) => {
                self.send_to_agent(index, host, ToAgent::End { exit_code: None });
                self.close_connection(index, host);
            }
            ControllerAction::KillAgent(host) => self.close_connection(index, host),
            ControllerAction::Event(event) => {
                self.check_placement(&event);
                self.record_event(index, event);
            }
            ControllerAction::WorkerEvent { report, event, .. } => {
                let order = match event {
                    Some(event) => JournalItem::Append((event, report)),
                    None => JournalItem::Skip(report),
                };
                self.queue_journal_item(index, order);
            }
            ControllerAction::End(outcome) => self.end_run(index, outcome),
            // Workers of the simulation have no collectives.
            ControllerAction::SendPeers { .. }
            | ControllerAction::AdoptPlan(_)
            | ControllerAction::RecordInventory(..)
            | ControllerAction::Line { .. }
            | ControllerAction::Progress { .. }
            | ControllerAction::WriteHangFile { .. }
            | ControllerAction::StepTimes(_)
            | ControllerAction::Usage { .. } => {}
        }
    }

    /// Ends a controller that could not take over the run.
    fn abandon_takeover(&mut self, index: ControllerIndex, failure: AttachFailure) {
        if failure == AttachFailure::NotStarted {
            (0..self.hosts.len())
                .for_each(|host| self.send_to_agent(index, host, ToAgent::End { exit_code: None }));
        }
        self.attach_failure = Some(failure);
        self.end_controller(index, ControllerState::Ended);
    }

    /// Ends the run: the controller lets its agents end, and completes the journal.
    fn end_run(&mut self, index: ControllerIndex, outcome: crate::controller::core::RunOutcome) {
        let (exit_code, step) = (outcome.exit_code, outcome.step);
        self.record_event(index, Event::Done { exit_code, step, seconds: 0.0 });
        self.write_queued_items(index);
        for host in 0..self.hosts.len() {
            self.send_to_agent(index, host, ToAgent::End { exit_code: None });
            self.close_connection(index, host);
        }
        self.outcome = Some(outcome);
        self.ended_at = self.now;
    }

    /// Reports an event of a controller and passes it to the journal.
    fn record_event(&mut self, index: ControllerIndex, event: Event) {
        let time = self.now.as_secs_f64();
        let report = self.controllers[index].events.add(&event, time);
        self.queue_journal_item(index, JournalItem::Append((event.clone(), report)));
        self.reported.push(event);
    }

    /// Sends a memo to the agents of these hosts.
    fn send_memo(&mut self, index: ControllerIndex, hosts: &[HostIndex], memo: RunMemo) {
        let events = &self.controllers[index].events;
        let stored = StoredMemo {
            memo,
            newest_event: events.newest_event_number(),
            unstored: events.collect_unstored(),
            job_file: None,
            directory: "/".into(),
        };
        let text = serde_json::to_string(&stored).expect("JSON");
        for host in hosts {
            self.send_to_agent(index, *host, ToAgent::Memo(text.clone()));
        }
    }

    /// Sends the hello to the newest agent of a host.
    fn send_hello(&mut self, index: ControllerIndex, host: HostIndex) {
        let terms = SupervisionTerms {
            run: "r".into(),
            host: format!("h{host}"),
            key: JobSecretKey([0; 32]),
            token: self.controllers[index].token,
            number: self.controllers[index].agents_started,
            host_lease_ms: super::HOST_LEASE.as_millis() as u64,
            controller_lease_ms: super::CONTROLLER_LEASE.as_millis() as u64,
            on_controller_loss: self.scenario.loss_action(),
            controller_timeout_ms: super::CONTROLLER_TIMEOUT.as_millis() as u64,
        };
        let hello = ToAgent::Hello { version: PROTOCOL_VERSION, terms: Some(Box::new(terms)) };
        self.send_to_agent(index, host, hello);
    }

    /// Sends a request to the agent that is alive on a host, through a new process there. Does
    /// nothing if the host is dead or disconnected.
    fn send_request(&mut self, index: ControllerIndex, host: HostIndex, purpose: AttachPurpose) {
        let token = self.controllers[index].token;
        let is_adoption = purpose == AttachPurpose::Adopt;
        let connection = is_adoption.then(|| self.open_connection(index, host, None));
        if self.hosts[host].dead || self.hosts[host].disconnected {
            return;
        }
        let at = self.now + self.rng.pick_delay(20, 500);
        let request = SimRequest { controller: index, host, token, purpose, connection, new_agent: None };
        self.schedule_event(at, SimEvent::RequestArrives(request));
    }

    /// Records a violation if a controller starts workers although another controller has replaced
    /// it.
    fn check_controller_order(&mut self, index: ControllerIndex) {
        let token = self.controllers[index].token;
        let newer = self.controllers.iter().position(|c| c.token > token && c.has_taken_over());
        if let Some(newer) = newer {
            let now = self.now;
            self.violation =
                Some(format!("controller {index} starts workers at {now:?}, after controller {newer}"));
        }
    }

    /// Records a violation if an attempt uses an unlisted host although it has more hosts than
    /// `min_hosts` requires. Ignores events other than the placement of an attempt.
    fn check_placement(&mut self, event: &Event) {
        let Event::Placement { hosts, .. } = event else { return };
        let unlisted = |name: &String| name[1..].parse::<usize>().is_ok_and(|host| !self.listed[host]);
        if hosts.len() > self.scenario.min_hosts && hosts.iter().any(unlisted) {
            self.violation =
                Some(format!("placed on {hosts:?} at {:?}, listed are {:?}", self.now, self.listed));
        }
    }

    /// Builds the plan of the attempt that is being prepared, and reports to the controller's state
    /// machine that the plan is ready. Does nothing if another attempt is being prepared.
    pub(super) fn finish_plan(&mut self, index: ControllerIndex, attempt: u32) {
        let preparing = self.controllers[index].preparing.take();
        let Some((number, restarts, hosts)) = preparing.filter(|(number, ..)| *number == attempt) else {
            return;
        };
        let (local, world) = (self.scenario.local, hosts.len() as u32 * self.scenario.local);
        let builtin = self.scenario.builtin;
        let worker = |rank: Rank| WorkerPlan {
            rank,
            local_rank: rank % local,
            local_world: local,
            command: (!builtin).then(|| vec!["true".into()]),
            wrapper: Vec::new(),
            env: vec![(jobspec::env::TORCHELASTIC_RESTART_COUNT.into(), restarts.to_string())],
            workdir: "/".into(),
            cpus: Vec::new(),
            threads: 1,
            log: "/log".into(),
        };
        let plan = |(at, host): (u32, &HostIndex)| {
            let workers = (at * local..(at + 1) * local).map(worker).collect();
            let plan = HostPlan {
                job: crate::testing::sample_job(),
                run: "r".into(),
                host: String::new(),
                run_dir: "/r".into(),
                attempt: number,
                batch_job: None,
                continues_batch_job: false,
                world,
                workers,
                hang_detection: None,
                debug_filter: String::new(),
            };
            (*host, plan)
        };
        let plans: Vec<(HostIndex, HostPlan)> = (0..).zip(&hosts).map(plan).collect();
        let planned = |(_, plan): &(HostIndex, HostPlan)| {
            plan.workers.iter().map(|w| PlannedWorker { log: w.log.clone() }).collect()
        };
        let workers = plans.iter().map(planned).collect();
        self.controllers[index].plans = plans;
        let bind = RendezvousRequest {
            attempt,
            address: std::net::Ipv4Addr::LOCALHOST.into(),
            port: 0,
            store: false,
            clients: world,
            allowed: Vec::new(),
            coordinator: false,
            ports: jobspec::PortSelection::Any,
        };
        self.feed_controller(index, ControllerInput::Planned { attempt, workers, bind });
    }
}

impl SimController {
    /// Returns whether the controller has taken over the run, or has started it.
    fn has_taken_over(&self) -> bool {
        self.token == FIRST_TOKEN || self.journal > 0
    }
}
