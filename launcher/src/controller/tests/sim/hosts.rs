//! Simulated hosts: the cores of their agents, and the workers that these agents start, signal and
//! supervise.
use super::{HostIndex, SimEvent, Simulation};
use crate::agent::simulated::{AgentAction, AgentCore, AgentInput, GroupSignal};
use diagnostic::{Diagnostic, codes::run};
use jobspec::ids::Rank;
use protocol::control::{ExitStatus, HostPlan};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// A simulated agent: the real core of an agent, with a simulated control connection.
pub(super) struct SimAgent {
    pub(super) number: u32,
    pub(super) core: AgentCore,
    pub(super) plan: Option<HostPlan>,
    /// Whether the control connection is open.
    pub(super) is_connected: bool,
    /// Whether messages in both directions are lost while neither end notices.
    pub(super) silent: bool,
    /// The time of the agent's scheduled tick; [`Duration::MAX`] if none is scheduled.
    pub(super) tick_at: Duration,
}

/// A simulated machine.
#[derive(Default)]
pub(super) struct SimHost {
    pub(super) agents: Vec<SimAgent>,
    /// Running workers by attempt and rank, with the number of the agent that started each.
    pub(super) workers: BTreeMap<(u32, Rank), u32>,
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

    /// Gives the core of an agent an input and executes the resulting actions. Does nothing if the
    /// agent has ended. Fails if an invariant is violated.
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
        let Some(agent) = self.find_agent(host, number) else { return Ok(()) };
        let due = agent.core.next_deadline();
        if due < agent.tick_at {
            agent.tick_at = due;
            self.schedule_event(due, SimEvent::AgentTick(host, number));
        }
        Ok(())
    }

    /// Executes an action of an agent's core. Returns the input that the core receives immediately
    /// as a result, or `None` if there is none. Fails if an invariant is violated.
    fn execute_action(
        &mut self,
        host: HostIndex,
        number: u32,
        action: AgentAction,
    ) -> Result<Option<AgentInput>, String> {
        Ok(match action {
            AgentAction::Send(message) => {
                let is_open = self.find_agent(host, number).is_some_and(|a| a.is_connected && !a.silent);
                if is_open && !self.hosts[host].disconnected {
                    let at = self.now + self.compute_latency(host);
                    self.schedule_event(at, SimEvent::ToController(host, number, message));
                }
                None
            }
            AgentAction::PrepareWorkers(plan) => {
                // The agent's driver, too, prepares workers only if no other agent's workers run.
                let has_older = self.hosts[host].workers.values().any(|owner| *owner != number);
                if let Some(agent) = self.find_agent(host, number) {
                    agent.plan = (!has_older).then(|| (*plan).clone());
                }
                let rank = plan.workers.first().map_or(0, |w| w.rank);
                has_older.then(|| AgentInput::SpawnFailed {
                    rank,
                    diagnostic: Diagnostic::error(run::WORKER_START_FAILED, "an earlier agent is alive"),
                })
            }
            AgentAction::Spawn(index) => self.spawn_worker(host, number, index)?,
            AgentAction::SendToWorker(rank, message) => {
                use protocol::control::ToWorker;
                let status = match message {
                    ToWorker::Abort { .. } => Some(76),
                    ToWorker::Stop => Some(75),
                    _ => None,
                };
                if let Some(code) = status {
                    let at = self.now + self.rng.pick_delay(1, 60);
                    self.schedule_rank_end(host, rank, at, ExitStatus::Code(code));
                }
                None
            }
            AgentAction::Signal(rank, ending) => {
                let (number, at) = match ending {
                    GroupSignal::Kill => (9, self.now + self.rng.pick_delay(0, 3)),
                    // Some programs ignore SIGTERM.
                    GroupSignal::Terminate if self.rng.pick_one_in(4) => return Ok(None),
                    GroupSignal::Terminate => (15, self.now + self.rng.pick_delay(1, 100)),
                };
                self.schedule_rank_end(host, rank, at, ExitStatus::Signal(number, false));
                None
            }
            AgentAction::DrainOutput(rank) => {
                Some(AgentInput::Drained { rank, tail: vec!["last".into()], error: None })
            }
            AgentAction::ShowOutput(_) => None,
            AgentAction::Sweep => {
                let at = self.now + self.rng.pick_delay(0, 10);
                self.schedule_event(at, SimEvent::Feed(host, number, AgentInput::Swept { left: Vec::new() }));
                None
            }
            AgentAction::Bind(bind) => Some(AgentInput::Bound { attempt: bind.attempt, port: Ok(4000) }),
            AgentAction::WriteStacks(_) => Some(AgentInput::StacksWritten),
            AgentAction::MeasureActivity | AgentAction::RequestSave(..) => None,
            AgentAction::Exit(_) => {
                self.end_agent(host, number);
                None
            }
        })
    }

    /// Starts the worker at position `index` of the agent's plan, and schedules the worker's
    /// messages and its end. Returns the input that reports the start to the agent. Fails if a
    /// worker of another attempt still runs on the host.
    fn spawn_worker(
        &mut self,
        host: HostIndex,
        number: u32,
        index: usize,
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
            let hello =
                protocol::control::FromWorker::Hello { version: protocol::control::PROTOCOL_VERSION, pid };
            let at = now + self.rng.pick_delay(1, 50);
            self.schedule_event(
                at,
                SimEvent::Feed(host, number, AgentInput::Worker { rank, message: hello }),
            );
            // The worker reports progress as rarely as its lease allows.
            for after in (10..).step_by(10).map(Duration::from_secs).take_while(|after| now + *after < done) {
                let phase = protocol::event::WorkerPhase::Training;
                let message = protocol::control::FromWorker::Progress { phase, step: after.as_secs() };
                self.schedule_event(
                    now + after,
                    SimEvent::Feed(host, number, AgentInput::Worker { rank, message }),
                );
            }
        }
        Ok(Some(AgentInput::Spawned { rank, pid }))
    }

    /// Schedules the end of all workers of this rank on the host, whatever their attempt, at the
    /// time `at` and with the exit status `status`.
    fn schedule_rank_end(&mut self, host: HostIndex, rank: Rank, at: Duration, status: ExitStatus) {
        let attempts: Vec<u32> =
            self.hosts[host].workers.keys().filter(|(_, r)| *r == rank).map(|(e, _)| *e).collect();
        for attempt in attempts {
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
        let Some(number) = self.hosts[host].workers.remove(&(attempt, rank)) else { return Ok(()) };
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
    /// end if the control connection is open and not silent.
    pub(super) fn end_agent(&mut self, host: HostIndex, number: u32) {
        let linked = self.find_agent(host, number).is_some_and(|a| a.is_connected && !a.silent)
            && !self.hosts[host].disconnected;
        let state = &mut self.hosts[host];
        state.agents.retain(|a| a.number != number);
        state.workers.retain(|_, owner| *owner != number);
        if linked {
            let at = self.now + self.compute_latency(host);
            self.schedule_event(at, SimEvent::ControllerSeesEnd(host, number));
        }
    }
}
