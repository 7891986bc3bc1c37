//! Starts the agents of `launch check` on the nodes of a Slurm allocation, with one Slurm step.
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

/// The time between two attempts to reap the processes of the Slurm step.
const REAP_INTERVAL: Duration = Duration::from_millis(20);
/// The time that the Slurm step has to end after its agents have ended. If the step still runs
/// after this time, launch kills it.
const STEP_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The Slurm step that runs the agents of `launch check`, and the task that reaps the local
/// processes of the step.
pub(super) struct SlurmAgentStep {
    transport: Rc<RefCell<SlurmTransport>>,
    reaper: JoinHandle<()>,
}

/// Starts an agent on each of the nodes and returns the agents in the order of the nodes. Starts a
/// task that reaps the step's processes, so the caller must run in a [`tokio::task::LocalSet`].
pub(super) fn start_agents(
    mut transport: SlurmTransport,
    nodes: &[String],
) -> (Vec<StartedAgent>, SlurmAgentStep) {
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
    (started, SlurmAgentStep { transport, reaper })
}

impl SlurmAgentStep {
    /// Waits until all processes of the step on this machine have ended. Kills the processes that
    /// still run after [`STEP_EXIT_TIMEOUT`], and continues to wait for their end.
    pub(super) async fn wait_or_kill(self) {
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

/// Reaps the ended child processes of this process and passes their exit statuses to the transport.
fn reap_step(transport: &RefCell<SlurmTransport>) {
    agent::reap_children(|_| false, |pid, status| transport.borrow_mut().record_child_exit(pid, status));
}
