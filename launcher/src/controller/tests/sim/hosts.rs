//! Simulates hosts. The state machines of the agents are real, and the workers that they start and
//! supervise are simulated.
use super::{ConnectionId, HostIndex, SimEvent, SimRequest, Simulation};
use crate::agent::simulated::{AgentAction, AgentCore, AgentInput, ProcessGroupSignal};
use diagnostic::{Diagnostic, codes::run};
use jobspec::ids::Rank;
use protocol::{
    control::{AttachRejection, ExitStatus, FromWorker, HostPlan, PROTOCOL_VERSION, ToWorker},
    event::{Event, WorkerPhase},
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// The interval at which the first rank of a built-in job reports a step.
const STEP_INTERVAL: Duration = Duration::from_millis(700);

/// A message of a built-in worker to its agent.
#[derive(Debug)]
pub(super) struct WorkerMessage {
    pub(super) host: HostIndex,
    number: u32,
    attempt: u32,
    rank: Rank,
    message: FromWorker,
}

/// A simulated agent: the real state machine of an agent, with a simulated control connection.
pub(super) struct SimAgent {
    pub(super) number: u32,
    pub(super) core: AgentCore,
    pub(super) plan: Option<HostPlan>,
    /// The connection to the controller that the agent obeys.
    pub(super) connection: Option<ConnectionId>,
    /// Inputs that wait until the agent has become the only agent of its host; `None` if it has, or
    /// if it only answers probes.
    pub(super) waiting: Option<VecDeque<AgentInput>>,
    /// The time of the agent's scheduled tick; [`Duration::MAX`] if none is scheduled.
    pub(super) tick_at: Duration,
}

/// A simulated machine with its agents and workers.
#[derive(Default)]
pub(super) struct SimHost {
    /// The agents that are alive, oldest first.
    pub(super) agents: Vec<SimAgent>,
    /// The request that the agent decides on.
    pub(super) request: Option<SimRequest>,
    /// The requests to end that wait for the end of the agent.
    evicting: Vec<SimRequest>,
    /// Running workers by attempt and rank, with the number of the agent that started each.
    pub(super) workers: BTreeMap<(u32, Rank), u32>,
    /// The workers that have left the attempt with this number and wait for the next one, by rank,
    /// with the number of the agent that started each.
    pub(super) waiting: BTreeMap<Rank, (u32, u32)>,
    pub(super) dead: bool,
    pub(super) disconnected: bool,
    pub(super) frozen: bool,
    /// Events that wait until the host is no longer frozen.
    pub(super) delayed: VecDeque<SimEvent>,
}

impl Simulation {
    /// Returns the agent with this number on a host, or `None` if that agent has ended.
    pub(super) fn find_agent(&mut self, host: HostIndex, number: u32) -> Option<&mut SimAgent> {
        self.hosts[host].agents.iter_mut().find(|a| a.number == number)
    }

    /// Passes an input to the state machine of an agent, and executes the actions that it requests.
    /// Does nothing if the agent has ended. Fails if an invariant is violated.
    pub(super) fn feed_agent(
        &mut self,
        host: HostIndex,
        number: u32,
        input: AgentInput,
    ) -> Result<(), String> {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let now = self.now;
            let Some(agent) = self.find_agent(host, number) else { return Ok(()) };
            for action in agent.core.handle_input(now, input) {
                inputs.extend(self.execute_action(host, number, action)?);
            }
        }
        self.send_reports(host, number);
        let Some(agent) = self.find_agent(host, number) else { return Ok(()) };
        let due = agent.core.next_deadline();
        if due < agent.tick_at {
            agent.tick_at = due;
            self.schedule_event(due, SimEvent::AgentTick(host, number));
        }
        Ok(())
    }

    /// Sends the reports of an agent to the controller.
    fn send_reports(&mut self, host: HostIndex, number: u32) {
        let now = self.now;
        while let Some(report) =
            self.find_agent(host, number).and_then(|agent| agent.core.take_next_report(now))
        {
            self.send_to_controller(host, number, report);
        }
    }

    /// Executes an action that the state machine of an agent has requested. Returns the input that
    /// the state machine receives immediately as a result, or `None` if there is none. Fails if an
    /// invariant is violated.
    fn execute_action(
        &mut self,
        host: HostIndex,
        number: u32,
        action: AgentAction,
    ) -> Result<Option<AgentInput>, String> {
        Ok(match action {
            AgentAction::Send(message) => {
                self.send_to_controller(host, number, message);
                None
            }
            AgentAction::Disconnect => {
                let connection = self.find_agent(host, number).and_then(|agent| agent.connection.take());
                connection.into_iter().for_each(|id| self.break_connection(id));
                None
            }
            AgentAction::AcceptController => {
                let request = self.hosts[host].request.take();
                let connection = request.and_then(|request| request.connection);
                if let (Some(id), Some(agent)) = (connection, self.find_agent(host, number)) {
                    agent.connection = Some(id);
                    self.connections[id].agent = Some(number);
                    if !self.connections[id].is_open {
                        // The controller has ended before its request has arrived.
                        let at = self.now + self.compute_latency(host);
                        self.schedule_event(at, SimEvent::AgentSeesEnd(id));
                    }
                }
                None
            }
            AgentAction::AcceptEviction => {
                let request = self.hosts[host].request.take();
                self.hosts[host].evicting.extend(request);
                None
            }
            AgentAction::RejectRequest(rejection) => {
                if let Some(request) = self.hosts[host].request.take() {
                    self.reject_request(request, rejection);
                }
                None
            }
            AgentAction::PrepareWorkers { plan, .. } => Some(self.prepare_workers(host, number, &plan)),
            AgentAction::Spawn(index) => self.spawn_worker(host, number, index, false)?,
            AgentAction::Rejoin(index) => self.rejoin_worker(host, number, index)?,
            AgentAction::SendToWorker(rank, message) => {
                self.send_to_worker(host, number, rank, &message);
                None
            }
            AgentAction::Signal(rank, ending) => {
                let (number, at) = match ending {
                    ProcessGroupSignal::Kill => (9, self.now + self.rng.pick_delay(0, 3)),
                    // Some programs ignore SIGTERM.
                    ProcessGroupSignal::Terminate if self.rng.pick_one_in(4) => return Ok(None),
                    ProcessGroupSignal::Terminate => (15, self.now + self.rng.pick_delay(1, 100)),
                };
                self.schedule_rank_end(host, rank, at, ExitStatus::Signal(number, false));
                None
            }
            AgentAction::RequestStop(rank, _) => Some(AgentInput::StopSignalUnhandled { rank }),
            AgentAction::DrainOutput(rank) => {
                Some(AgentInput::Drained { rank, tail: vec!["last".into()], error: None, timeout: None })
            }
            AgentAction::ShowOutput(_) => None,
            AgentAction::Sweep { .. } => {
                let at = self.now + self.rng.pick_delay(0, 10);
                self.schedule_event(at, SimEvent::Feed(host, number, AgentInput::Swept { left: Vec::new() }));
                None
            }
            AgentAction::Bind(bind) => Some(AgentInput::Bound { attempt: bind.attempt, port: Ok(4000) }),
            AgentAction::WriteStacks(_) => Some(AgentInput::StacksWritten { evidence: Vec::new() }),
            AgentAction::MeasureActivity | AgentAction::RequestSave(..) => None,
            AgentAction::Exit(_) => {
                self.send_reports(host, number);
                self.end_agent(host, number);
                None
            }
        })
    }

    /// Lets an agent prepare the workers of `plan`. Returns the agent's next input.
    fn prepare_workers(&mut self, host: HostIndex, number: u32, plan: &HostPlan) -> AgentInput {
        // The agent's driver, too, prepares workers only if no other agent's workers run.
        let has_older = self.hosts[host].workers.values().any(|owner| *owner != number);
        if let Some(agent) = self.find_agent(host, number) {
            agent.plan = (!has_older).then(|| plan.clone());
        }
        if !has_older {
            return AgentInput::Prepared { attempt: plan.attempt };
        }
        let rank = plan.workers.first().map_or(0, |w| w.rank);
        let diagnostic = Diagnostic::error(run::WORKER_START_FAILED, "an earlier agent is alive");
        AgentInput::SpawnFailed { rank, diagnostic }
    }

    /// Lets a worker receive a message of its agent: an order to abort or to stop ends the worker
    /// soon, or lets it leave the attempt and keep its process.
    fn send_to_worker(&mut self, host: HostIndex, number: u32, rank: Rank, message: &ToWorker) {
        if matches!(message, ToWorker::Abort { keep: true, .. }) && !self.rng.pick_one_in(4) {
            return self.schedule_leave(host, number, rank);
        }
        let code = match message {
            ToWorker::Abort { .. } => 76,
            ToWorker::Stop => 75,
            _ => return,
        };
        let at = self.now + self.rng.pick_delay(1, 60);
        self.schedule_rank_end(host, rank, at, ExitStatus::Code(code));
    }

    /// Schedules the messages by which the workers of this rank report that they have left their
    /// attempt.
    fn schedule_leave(&mut self, host: HostIndex, number: u32, rank: Rank) {
        let at = self.now + self.rng.pick_delay(1, 60);
        let ranks = self.hosts[host].workers.keys().filter(|(_, r)| *r == rank);
        for attempt in ranks.map(|(attempt, _)| *attempt).collect::<Vec<_>>() {
            let message = FromWorker::Left { attempt };
            let message = WorkerMessage { host, number, attempt, rank, message };
            self.schedule_event(at, SimEvent::WorkerSends(message));
        }
    }

    /// Lets a waiting worker take part in the attempt of the agent's plan. Some workers cannot be
    /// reached. Fails if no worker of the rank waits.
    fn rejoin_worker(
        &mut self,
        host: HostIndex,
        number: u32,
        index: usize,
    ) -> Result<Option<AgentInput>, String> {
        let plan = self.find_agent(host, number).and_then(|a| a.plan.as_ref());
        let Some(rank) = plan.and_then(|plan| plan.workers.get(index)).map(|w| w.rank) else {
            return Ok(None);
        };
        if self.hosts[host].waiting.remove(&rank).is_none_or(|(_, owner)| owner != number) {
            return Err(format!("at {:?} no worker of rank {rank} waits on h{host}", self.now));
        }
        if self.rng.pick_one_in(16) {
            let diagnostic = Diagnostic::error(run::WORKER_START_FAILED, "the worker has ended");
            return Ok(Some(AgentInput::SpawnFailed { rank, diagnostic }));
        }
        self.spawn_worker(host, number, index, true)
    }

    /// Starts the worker at position `index` of the agent's plan, or lets it take part in another
    /// attempt (`rejoins`). Schedules the worker's messages and its end. Returns the input that
    /// reports the start to the agent. Fails if a worker of another attempt still runs on the host.
    fn spawn_worker(
        &mut self,
        host: HostIndex,
        number: u32,
        index: usize,
        rejoins: bool,
    ) -> Result<Option<AgentInput>, String> {
        let now = self.now;
        let Some(plan) = self.find_agent(host, number).and_then(|a| a.plan.clone()) else { return Ok(None) };
        let Some(rank) = plan.workers.get(index).map(|w| w.rank) else { return Ok(None) };
        if let Some(((attempt, old), _)) =
            self.hosts[host].workers.iter().find(|((e, _), _)| *e != plan.attempt)
        {
            return Err(format!(
                "at {now:?} rank {rank} of attempt {} starts on h{host} while rank {old} of attempt {attempt} lives there",
                plan.attempt
            ));
        }
        self.max_pid += 1;
        let pid = self.max_pid;
        self.hosts[host].workers.insert((plan.attempt, rank), number);
        let done = now + self.scenario.work + self.rng.pick_delay(0, 20);
        let attempt = plan.attempt;
        self.schedule_event(done, SimEvent::WorkerEnds { host, attempt, rank, status: ExitStatus::Code(0) });
        if self.scenario.builtin {
            self.schedule_worker_messages((host, number), (attempt, rank, pid), done);
        }
        Ok(Some(match rejoins {
            true => AgentInput::Rejoined { rank, pid },
            false => AgentInput::Spawned { rank, pid },
        }))
    }

    /// Schedules the messages that a built-in worker sends until the simulated time `done`, when it
    /// finishes.
    fn schedule_worker_messages(
        &mut self,
        (host, number): (HostIndex, u32),
        (attempt, rank, pid): (u32, Rank, u32),
        done: Duration,
    ) {
        let now = self.now;
        let send = |world: &mut Simulation, at: Duration, message: FromWorker| {
            let message = WorkerMessage { host, number, attempt, rank, message };
            world.schedule_event(at, SimEvent::WorkerSends(message));
        };
        let hello_at = now + self.rng.pick_delay(1, 50);
        send(self, hello_at, FromWorker::Hello { version: PROTOCOL_VERSION, pid });
        // The worker reports progress as rarely as its lease allows.
        for after in (10..).step_by(10).map(Duration::from_secs).take_while(|after| now + *after < done) {
            let phase = WorkerPhase::Training;
            send(self, now + after, FromWorker::Progress { phase, step: after.as_secs() });
        }
        let times = (1..).map(|step: u32| (u64::from(step), hello_at + STEP_INTERVAL * step));
        for (step, at) in times.take_while(|(_, at)| rank == 0 && *at < done) {
            send(self, at, FromWorker::Event(build_step_event(step)));
        }
    }

    /// Delivers a message of a worker to its agent, if both are alive.
    pub(super) fn deliver_worker_message(&mut self, message: WorkerMessage) -> Result<(), String> {
        let WorkerMessage { host, number, attempt, rank, message } = message;
        if self.hosts[host].workers.get(&(attempt, rank)) != Some(&number) {
            return Ok(());
        }
        if let FromWorker::Event(Event::Step { step, .. }) = &message {
            self.steps.insert(attempt, (*step, host));
        }
        if matches!(message, FromWorker::Left { .. }) {
            self.hosts[host].workers.remove(&(attempt, rank));
            self.hosts[host].waiting.insert(rank, (attempt, number));
        }
        self.feed_agent(host, number, AgentInput::Worker { rank, message })
    }

    /// Schedules the end of all workers of this rank on the host, whatever their attempt, at the
    /// time `at` and with the exit status `status`.
    fn schedule_rank_end(&mut self, host: HostIndex, rank: Rank, at: Duration, status: ExitStatus) {
        let attempts: Vec<u32> =
            self.hosts[host].workers.keys().filter(|(_, r)| *r == rank).map(|(e, _)| *e).collect();
        let waiting = self.hosts[host].waiting.get(&rank).map(|(attempt, _)| *attempt);
        for attempt in attempts.into_iter().chain(waiting) {
            self.schedule_event(at, SimEvent::WorkerEnds { host, attempt, rank, status });
        }
    }

    /// Ends a worker and informs the agent that started the worker. Does nothing if the worker does
    /// not run.
    pub(super) fn end_worker(
        &mut self,
        host: HostIndex,
        attempt: u32,
        rank: Rank,
        status: ExitStatus,
    ) -> Result<(), String> {
        let state = &mut self.hosts[host];
        let has_left = state.waiting.get(&rank).is_some_and(|(left, _)| *left == attempt);
        let waiting = has_left.then(|| state.waiting.remove(&rank).map(|(_, owner)| owner)).flatten();
        let Some(number) = state.workers.remove(&(attempt, rank)).or(waiting) else { return Ok(()) };
        let of_plan =
            self.find_agent(host, number).and_then(|a| a.plan.as_ref().map(|p| p.attempt)) == Some(attempt);
        if !of_plan {
            return Ok(());
        }
        if self.scenario.builtin {
            self.feed_agent(host, number, AgentInput::WorkerConnectionEnded { rank, error: None })?;
        }
        self.feed_agent(host, number, AgentInput::WorkerExited { rank, status, oom: false, gpu: None })
    }

    /// Ends the process of an agent and the workers that the agent started. The controller sees the
    /// end if the host is not disconnected.
    pub(super) fn end_agent(&mut self, host: HostIndex, number: u32) {
        let connection = self.find_agent(host, number).and_then(|agent| agent.connection);
        let state = &mut self.hosts[host];
        state.agents.retain(|a| a.number != number);
        state.workers.retain(|_, owner| *owner != number);
        state.waiting.retain(|_, (_, owner)| *owner != number);
        let evicting = std::mem::take(&mut state.evicting);
        if let Some(id) = connection.filter(|id| self.connections[*id].is_open)
            && !self.hosts[host].disconnected
        {
            self.connections[id].is_open = false;
            let at = self.now + self.compute_latency(host);
            self.schedule_event(at, SimEvent::ControllerSeesEnd(id));
        }
        for request in evicting {
            self.reject_request(request, AttachRejection::NoAgent);
        }
    }
}

/// Builds the event of a training step.
fn build_step_event(step: u64) -> Event {
    Event::Step {
        step,
        loss: 1.0,
        grad_norm: 1.0,
        lr: 1e-3,
        tokens: step,
        tokens_per_s: 1.0,
        peak_rss: 1,
        exposed_comm_s: 0.0,
    }
}
