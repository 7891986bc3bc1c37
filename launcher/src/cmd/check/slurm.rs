//! Agents on the nodes of a Slurm allocation, which one step starts.
use super::StartedAgent;
use crate::{
    agent,
    transport::{SlurmTransport, Transport},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{cell::RefCell, rc::Rc, time::Duration};
use tokio::{
    task::{JoinHandle, spawn_local},
    time::{Instant, sleep},
};

/// Time between two scans for ended processes of the step.
const REAP_INTERVAL: Duration = Duration::from_millis(20);
/// How long the step may take to end after its agents, before it is killed.
const STEP_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The step that runs the agents.
pub(super) struct AgentStep {
    transport: Rc<RefCell<SlurmTransport>>,
    reaper: JoinHandle<()>,
}

/// Starts an agent on each of these nodes. Must run in a `LocalSet`.
pub(super) fn start(mut transport: SlurmTransport, nodes: &[String]) -> (Vec<StartedAgent>, AgentStep) {
    let agents = transport.start_agents(nodes);
    let started = nodes.iter().zip(agents);
    let started =
        started.map(|(name, agent)| StartedAgent { name: name.clone(), agent, progress: None }).collect();
    let transport = Rc::new(RefCell::new(transport));
    let reaped = transport.clone();
    // The exit status of srun explains why an agent does not connect.
    let reaper = spawn_local(async move {
        loop {
            reap_step(&reaped);
            sleep(REAP_INTERVAL).await;
        }
    });
    (started, AgentStep { transport, reaper })
}

impl AgentStep {
    /// Waits for the step, which ends when its agents have ended.
    pub(super) async fn end(self) {
        self.reaper.abort();
        let limit = Instant::now() + STEP_EXIT_TIMEOUT;
        loop {
            reap_step(&self.transport);
            let running = self.transport.borrow().helper_pids();
            if running.is_empty() {
                return;
            }
            if Instant::now() > limit {
                // The processes are not reaped yet, so their pids are not reused.
                running.iter().for_each(|pid| _ = kill(Pid::from_raw(*pid as i32), Signal::SIGKILL));
            }
            sleep(REAP_INTERVAL).await;
        }
    }
}

fn reap_step(transport: &RefCell<SlurmTransport>) {
    agent::reap_children(|_| false, |pid, status| transport.borrow_mut().on_child_exit(pid, status));
}
