//! Simulated hosts: the cores of their agents, and the workers that these start, signal and
//! supervise.
use super::{HostIndex, SimEvent, World};
use crate::agent::simulated::{Action, Core as AgentCore, GroupSignal, Input as AgentInput};
use contract::{
    control::{ExitStatus, HostPlan},
    ids::Rank,
};
use diagnostic::{Diagnostic, codes::run};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// A simulated process of an agent.
pub(super) struct Agent {
    pub(super) number: u32,
    pub(super) core: AgentCore,
    pub(super) plan: Option<HostPlan>,
    /// Whether the control connection is open.
    pub(super) linked: bool,
    /// Whether messages in both directions are lost while neither end notices.
    pub(super) silent: bool,
    pub(super) tick_at: Duration,
}

/// A simulated machine.
#[derive(Default)]
pub(super) struct SimHost {
    pub(super) agents: Vec<Agent>,
    /// Running workers by attempt and rank, with the number of the agent that started each.
    pub(super) workers: BTreeMap<(u32, Rank), u32>,
    pub(super) dead: bool,
    pub(super) disconnected: bool,
    pub(super) frozen: bool,
    /// Events that wait until the host is no longer frozen.
    pub(super) delayed: VecDeque<SimEvent>,
}

impl World {
    pub(super) fn agent(&mut self, host: HostIndex, number: u32) -> Option<&mut Agent> {
        self.hosts[host].agents.iter_mut().find(|a| a.number == number)
    }

    pub(super) fn feed(&mut self, host: HostIndex, number: u32, input: AgentInput) -> Result<(), String> {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let now = self.now;
            let Some(agent) = self.agent(host, number) else { return Ok(()) };
            for action in agent.core.handle(now, input) {
                inputs.extend(self.execute(host, number, action)?);
            }
        }
        let Some(agent) = self.agent(host, number) else { return Ok(()) };
        let due = agent.core.deadline();
        if due < agent.tick_at {
            agent.tick_at = due;
            self.schedule(due, SimEvent::AgentTick(host, number));
        }
        Ok(())
    }

    fn execute(
        &mut self,
        host: HostIndex,
        number: u32,
        action: Action,
    ) -> Result<Option<AgentInput>, String> {
        Ok(match action {
            Action::Send(message) => {
                let is_open = self.agent(host, number).is_some_and(|a| a.linked && !a.silent);
                if is_open && !self.hosts[host].disconnected {
                    let at = self.now + self.latency(host);
                    self.schedule(at, SimEvent::ToController(host, number, message));
                }
                None
            }
            Action::PrepareWorkers(plan) => {
                // As in the driver, no worker of another agent may run on this host.
                let has_older = self.hosts[host].workers.values().any(|owner| *owner != number);
                if let Some(agent) = self.agent(host, number) {
                    agent.plan = (!has_older).then(|| (*plan).clone());
                }
                let rank = plan.workers.first().map_or(0, |w| w.rank);
                has_older.then(|| AgentInput::SpawnFailed {
                    rank,
                    diagnostic: Diagnostic::error(run::WORKER_START_FAILED, "an earlier agent is alive"),
                })
            }
            Action::Spawn(index) => self.spawn(host, number, index)?,
            Action::SendToWorker(rank, message) => {
                use contract::control::ToWorker;
                let status = match message {
                    ToWorker::Abort { .. } => Some(76),
                    ToWorker::Stop => Some(75),
                    _ => None,
                };
                if let Some(code) = status {
                    let at = self.now + self.rng.ms(1, 60);
                    self.end_rank(host, rank, at, ExitStatus::Code(code));
                }
                None
            }
            Action::Signal(rank, ending) => {
                let (number, at) = match ending {
                    GroupSignal::Kill => (9, self.now + self.rng.ms(0, 3)),
                    // Some programs ignore SIGTERM.
                    GroupSignal::Terminate if self.rng.one_in(4) => return Ok(None),
                    GroupSignal::Terminate => (15, self.now + self.rng.ms(1, 100)),
                };
                self.end_rank(host, rank, at, ExitStatus::Signal(number, false));
                None
            }
            Action::DrainOutput(rank) => {
                Some(AgentInput::Drained { rank, tail: vec!["last".into()], error: None })
            }
            Action::ShowOutput(_) => None,
            Action::Sweep => {
                let at = self.now + self.rng.ms(0, 10);
                self.schedule(at, SimEvent::Feed(host, number, AgentInput::Swept { left: Vec::new() }));
                None
            }
            Action::Bind(bind) => Some(AgentInput::Bound { attempt: bind.attempt, port: Ok(4000) }),
            Action::WriteStacks(_) => Some(AgentInput::StacksWritten),
            Action::MeasureActivity | Action::RequestSave(..) => None,
            Action::Exit(_) => {
                self.agent_ends(host, number);
                None
            }
        })
    }

    fn spawn(&mut self, host: HostIndex, number: u32, index: usize) -> Result<Option<AgentInput>, String> {
        let now = self.now;
        let Some(plan) = self.agent(host, number).and_then(|a| a.plan.clone()) else { return Ok(None) };
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
        let done = now + self.scenario.work + self.rng.ms(0, 20);
        let attempt = plan.attempt;
        self.schedule(done, SimEvent::WorkerEnds { host, attempt, rank, status: ExitStatus::Code(0) });
        if self.scenario.builtin {
            let hello = contract::control::FromWorker::Hello { version: contract::control::VERSION, pid };
            let at = now + self.rng.ms(1, 50);
            self.schedule(at, SimEvent::Feed(host, number, AgentInput::Worker { rank, message: hello }));
            // Heartbeats, as rare as the lease allows.
            for after in (10..).step_by(10).map(Duration::from_secs).take_while(|after| now + *after < done) {
                let phase = contract::event::Phase::Training;
                let message = contract::control::FromWorker::Progress { phase, step: after.as_secs() };
                self.schedule(
                    now + after,
                    SimEvent::Feed(host, number, AgentInput::Worker { rank, message }),
                );
            }
        }
        Ok(Some(AgentInput::Spawned { rank, pid }))
    }

    fn end_rank(&mut self, host: HostIndex, rank: Rank, at: Duration, status: ExitStatus) {
        let attempts: Vec<u32> =
            self.hosts[host].workers.keys().filter(|(_, r)| *r == rank).map(|(e, _)| *e).collect();
        for attempt in attempts {
            self.schedule(at, SimEvent::WorkerEnds { host, attempt, rank, status });
        }
    }

    pub(super) fn worker_ends(
        &mut self,
        host: HostIndex,
        attempt: u32,
        rank: Rank,
        status: ExitStatus,
    ) -> Result<(), String> {
        let Some(number) = self.hosts[host].workers.remove(&(attempt, rank)) else { return Ok(()) };
        let of_plan =
            self.agent(host, number).and_then(|a| a.plan.as_ref().map(|p| p.attempt)) == Some(attempt);
        if !of_plan {
            return Ok(());
        }
        if self.scenario.builtin {
            self.feed(host, number, AgentInput::WorkerConnectionEnded { rank, error: None })?;
        }
        self.feed(host, number, AgentInput::WorkerExited { rank, status, oom: false, gpu: None })
    }

    /// Ends the process of an agent and the workers that the agent started.
    pub(super) fn agent_ends(&mut self, host: HostIndex, number: u32) {
        let linked =
            self.agent(host, number).is_some_and(|a| a.linked && !a.silent) && !self.hosts[host].disconnected;
        let state = &mut self.hosts[host];
        state.agents.retain(|a| a.number != number);
        state.workers.retain(|_, owner| *owner != number);
        if linked {
            let at = self.now + self.latency(host);
            self.schedule(at, SimEvent::ControllerSeesEnd(host, number));
        }
    }
}
