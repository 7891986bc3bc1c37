//! Simulated hosts: agents' cores, and the workers that they start, signal and see end.
use super::{HostIndex, What, World};
use crate::agent::simulated::{Command, Core as AgentCore, Ending, Input as AgentInput};
use contract::{
    control::{ExitStatus, HostPlan},
    ids::Rank,
};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// An agent's process.
pub(super) struct Agent {
    pub(super) number: u32,
    pub(super) core: AgentCore,
    pub(super) plan: Option<HostPlan>,
    /// Bytes get through.
    pub(super) linked: bool,
    /// Bytes are lost without a word.
    pub(super) silent: bool,
    pub(super) tick_at: Duration,
}

#[derive(Default)]
pub(super) struct Host {
    pub(super) agents: Vec<Agent>,
    /// Workers that live: by epoch and rank, with the agent that started them.
    pub(super) workers: BTreeMap<(u32, Rank), u32>,
    pub(super) dead: bool,
    pub(super) cut: bool,
    pub(super) frozen: bool,
    /// What waits for the thaw.
    pub(super) held: VecDeque<What>,
}

impl World {
    pub(super) fn agent(&mut self, node: HostIndex, number: u32) -> Option<&mut Agent> {
        self.hosts[node].agents.iter_mut().find(|a| a.number == number)
    }

    pub(super) fn feed(&mut self, node: HostIndex, number: u32, input: AgentInput) -> Result<(), String> {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let now = self.now;
            let Some(agent) = self.agent(node, number) else { return Ok(()) };
            for command in agent.core.handle(now, input) {
                inputs.extend(self.execute(node, number, command)?);
            }
        }
        let Some(agent) = self.agent(node, number) else { return Ok(()) };
        let due = agent.core.deadline();
        if due < agent.tick_at {
            agent.tick_at = due;
            self.at(due, What::AgentTick(node, number));
        }
        Ok(())
    }

    fn execute(&mut self, node: HostIndex, number: u32, command: Command) -> Result<Option<AgentInput>, String> {
        Ok(match command {
            Command::Send(message) => {
                let passes = self.agent(node, number).is_some_and(|a| a.linked && !a.silent);
                if passes && !self.hosts[node].cut {
                    let at = self.now + self.latency(node);
                    self.at(at, What::ToController(node, number, message));
                }
                None
            }
            Command::Begin(plan) => {
                // As the driver does: nobody of an earlier start may live on this host under another agent.
                let older = self.hosts[node].workers.values().any(|owner| *owner != number);
                if let Some(agent) = self.agent(node, number) {
                    agent.plan = (!older).then(|| (*plan).clone());
                }
                let rank = plan.workers.first().map_or(0, |w| w.rank);
                older.then(|| AgentInput::SpawnFailed {
                    rank,
                    message: "an earlier start still lives here".into(),
                })
            }
            Command::Spawn(index) => self.spawn(node, number, index)?,
            Command::Tell(rank, message) => {
                use contract::control::ToWorker;
                let status = match message {
                    ToWorker::Abort { .. } => Some(76),
                    ToWorker::Stop => Some(75),
                    _ => None,
                };
                if let Some(code) = status {
                    let at = self.now + self.chance.ms(1, 60);
                    self.end_rank(node, rank, at, ExitStatus::Code(code));
                }
                None
            }
            Command::Signal(rank, ending) => {
                let (number, at) = match ending {
                    Ending::Kill => (9, self.now + self.chance.ms(0, 3)),
                    // Some don't listen.
                    Ending::Term if self.chance.one_in(4) => return Ok(None),
                    Ending::Term => (15, self.now + self.chance.ms(1, 100)),
                };
                self.end_rank(node, rank, at, ExitStatus::Signal(number, false));
                None
            }
            Command::Drain(rank) => {
                Some(AgentInput::Drained { rank, tail: vec!["last".into()], error: None })
            }
            Command::Show(_) => None,
            Command::Sweep => {
                let at = self.now + self.chance.ms(0, 10);
                self.at(at, What::Feed(node, number, AgentInput::Swept { left: Vec::new() }));
                None
            }
            Command::Bind(bind) => Some(AgentInput::Bound { epoch: bind.epoch, port: Ok(4000) }),
            Command::Stacks(_) => Some(AgentInput::StacksWritten),
            Command::Watch | Command::Notify(..) => None,
            Command::Exit(_) => {
                self.agent_ends(node, number);
                None
            }
        })
    }

    fn spawn(&mut self, node: HostIndex, number: u32, index: usize) -> Result<Option<AgentInput>, String> {
        let now = self.now;
        let Some(plan) = self.agent(node, number).and_then(|a| a.plan.clone()) else { return Ok(None) };
        let Some(rank) = plan.workers.get(index).map(|w| w.rank) else { return Ok(None) };
        if let Some(((epoch, old), _)) = self.hosts[node].workers.iter().find(|((e, _), _)| *e != plan.epoch)
        {
            return Err(format!(
                "at {now:?} rank {rank} of epoch {} starts on h{node} while rank {old} of epoch {epoch} lives there",
                plan.epoch
            ));
        }
        self.max_pid += 1;
        let pid = self.max_pid;
        self.hosts[node].workers.insert((plan.epoch, rank), number);
        let done = now + self.scene.work + self.chance.ms(0, 20);
        let epoch = plan.epoch;
        self.at(done, What::WorkerEnds { node, epoch, rank, status: ExitStatus::Code(0) });
        if self.scene.builtin {
            let hello = contract::control::FromWorker::Hello { version: contract::control::VERSION, pid };
            let at = now + self.chance.ms(1, 50);
            self.at(at, What::Feed(node, number, AgentInput::Worker { rank, message: hello }));
            // Its heartbeat, as seldom as its lease allows.
            for beat in (10..).step_by(10).map(Duration::from_secs).take_while(|beat| now + *beat < done) {
                let phase = contract::event::Phase::Training;
                let message = contract::control::FromWorker::Progress { phase, step: beat.as_secs() };
                self.at(now + beat, What::Feed(node, number, AgentInput::Worker { rank, message }));
            }
        }
        Ok(Some(AgentInput::Spawned { rank, pid }))
    }

    fn end_rank(&mut self, node: HostIndex, rank: Rank, at: Duration, status: ExitStatus) {
        let epochs: Vec<u32> =
            self.hosts[node].workers.keys().filter(|(_, r)| *r == rank).map(|(e, _)| *e).collect();
        for epoch in epochs {
            self.at(at, What::WorkerEnds { node, epoch, rank, status });
        }
    }

    pub(super) fn worker_ends(
        &mut self,
        node: HostIndex,
        epoch: u32,
        rank: Rank,
        status: ExitStatus,
    ) -> Result<(), String> {
        let Some(number) = self.hosts[node].workers.remove(&(epoch, rank)) else { return Ok(()) };
        let of_plan = self.agent(node, number).and_then(|a| a.plan.as_ref().map(|p| p.epoch)) == Some(epoch);
        if !of_plan {
            return Ok(());
        }
        if self.scene.builtin {
            self.feed(node, number, AgentInput::WorkerLink { rank, error: None })?;
        }
        self.feed(node, number, AgentInput::Ended { rank, status, oom: false, gpu: None })
    }

    /// The agent's process is gone, and its workers with it.
    pub(super) fn agent_ends(&mut self, node: HostIndex, number: u32) {
        let linked = self.agent(node, number).is_some_and(|a| a.linked && !a.silent) && !self.hosts[node].cut;
        let host = &mut self.hosts[node];
        host.agents.retain(|a| a.number != number);
        host.workers.retain(|_, owner| *owner != number);
        if linked {
            let at = self.now + self.latency(node);
            self.at(at, What::ControllerSeesEnd(node, number));
        }
    }
}
