//! Ends: agents that are gone, what they left, and the last that goes.
use super::{Agent, Driver};
use crate::{
    agent::{self, descendants::kill_descendants},
    controller::{
        cause::describe,
        core::{Input, HostIndex},
    },
    transport::Carrier,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// For an agent whose stream has ended to exit, before it is killed.
const AGENT_EXIT: Duration = Duration::from_secs(1);
/// For a process that held agents elsewhere to end once they are gone, before it is asked to, and once more before it is
/// killed.
const HELPER_EXIT: Duration = Duration::from_secs(2);
/// For killed processes to go, before the controller gives up on them.
const SWEEP_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks for them.
const SWEEP_PAUSE: Duration = Duration::from_millis(2);

impl Driver {
    /// The stream of an agent has ended: makes sure that nothing of its node is left, then tells the core.
    pub(super) async fn bury(&mut self, node: HostIndex, error: Option<String>) {
        if let Some(agent) = self.agents.get_mut(&node) {
            agent.outbox = None;
        }
        let limit = self.clock.now() + AGENT_EXIT;
        while self.agents.get(&node).is_some_and(|a| a.living_child().is_some()) {
            self.reap();
            if self.clock.now() > limit {
                self.kill_agent(node);
            }
            sleep(SWEEP_PAUSE).await;
        }
        self.sweep().await;
        let ended = self.agents.get(&node).and_then(|a| a.ended);
        let connection = self.agents.get(&node).and_then(|a| match &a.carrier {
            Carrier::Connection(connection) => Some(connection),
            Carrier::Child(_) => None,
        });
        let ended = ended.or_else(|| connection.and_then(|c| c.status()));
        let how = match (connection.and_then(|c| c.why()), error, ended) {
            (Some(why), _, _) => match why.hint {
                Some(hint) => format!("is lost: {} ({hint})", why.message),
                None => format!("is lost: {}", why.message),
            },
            (None, Some(error), _) => error,
            (None, None, _) if connection.is_some() => {
                let ended = ended.map(|status| format!(" (its agent ended: {})", describe(status, false)));
                format!("is lost: the connection to it has ended{}", ended.unwrap_or_default())
            }
            (None, None, Some(status)) => format!("ended: {}", describe(status, false)),
            (None, None, None) => "never ran".into(),
        };
        self.handle(Input::AgentGone { node, how });
    }

    /// Reaps what has ended: agents, and what reparented to us when an agent died.
    pub(super) fn reap(&mut self) -> bool {
        let (agents, transport) = (&mut self.agents, &mut self.transport);
        agent::reap(
            |_| false,
            |pid, status| match agents.values_mut().find(|a| a.living_child() == Some(pid)) {
                Some(agent) => agent.ended = Some(status),
                None => transport.child_ended(pid, status),
            },
        )
    }

    /// Kills every process of this job that no living agent looks after.
    pub(super) async fn sweep(&mut self) {
        let limit = self.clock.now() + SWEEP_LIMIT;
        // One look may miss a process that is born while it is taken.
        let mut empty_looks = 0;
        while self.reap() && empty_looks < 2 {
            let living = self.agents.values().filter_map(Agent::living_child);
            let spare = living.chain(self.foreign.iter().copied()).chain(self.transport.helpers());
            let spare: Vec<u32> = spare.collect();
            empty_looks = if kill_descendants(&spare).is_empty() { empty_looks + 1 } else { 0 };
            if self.clock.now() > limit {
                self.report
                    .talk("launch: some processes do not die of SIGKILL: they hang in the kernel".into());
                return;
            }
            sleep(SWEEP_PAUSE).await;
        }
    }

    pub(super) fn kill_agent(&mut self, node: HostIndex) {
        let Some(agent) = self.agents.get(&node) else { return };
        match &agent.carrier {
            Carrier::Connection(connection) => connection.break_off(),
            Carrier::Child(_) => {
                if let Some(pid) = agent.living_child() {
                    // Not reaped yet: the pid is still its own.
                    _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
                }
            }
        }
    }

    /// Agents leave when their streams close; then nothing may be left.
    pub(super) async fn close(&mut self) {
        self.agents.values_mut().for_each(|a| a.outbox = None);
        let limit = self.clock.now() + AGENT_EXIT;
        while self.reap() && self.agents.values().any(|a| a.living_child().is_some()) {
            if self.clock.now() > limit {
                (0..self.hosts.len()).for_each(|node| self.kill_agent(node));
            }
            _ = timeout(SWEEP_PAUSE, self.messages.1.recv()).await;
        }
        self.end_helpers().await;
        self.sweep().await;
    }

    /// What holds agents elsewhere ends with the last of them; if not, it is ended.
    pub(super) async fn end_helpers(&mut self) {
        let limit = self.clock.now() + HELPER_EXIT;
        while self.reap() && !self.transport.helpers().is_empty() {
            let now = self.clock.now();
            if now > limit {
                let signal = if now > limit + HELPER_EXIT { Signal::SIGKILL } else { Signal::SIGTERM };
                for pid in self.transport.helpers() {
                    // Not reaped yet: the pid is still its own.
                    _ = kill(Pid::from_raw(pid as i32), signal);
                }
            }
            while let Ok(text) = self.talk.1.try_recv() {
                self.report.talk(text);
            }
            _ = timeout(SWEEP_PAUSE, self.messages.1.recv()).await;
        }
    }
}
