//! The agents of a Slurm allocation's nodes: started by one step, which is looked after while they are asked.
use super::Started;
use crate::{
    agent,
    transport::{Slurm, Transport},
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

/// Between two looks for processes of the step that have ended.
const LOOK: Duration = Duration::from_millis(20);
/// For the step to end once its agents have, before it is killed.
const STEP_EXIT: Duration = Duration::from_secs(5);

/// A step that holds agents.
pub(super) struct Step {
    transport: Rc<RefCell<Slurm>>,
    reaper: JoinHandle<()>,
}

/// Starts an agent on each of these nodes. Within a `LocalSet`.
pub(super) fn start(mut transport: Slurm, nodes: &[String]) -> (Vec<Started>, Step) {
    let agents = transport.start(nodes);
    let started = nodes.iter().zip(agents);
    let started =
        started.map(|(name, agent)| Started { name: name.clone(), agent, progress: None }).collect();
    let transport = Rc::new(RefCell::new(transport));
    let watched = transport.clone();
    // How srun ended is why its agents didn't come.
    let reaper = spawn_local(async move {
        loop {
            reap(&watched);
            sleep(LOOK).await;
        }
    });
    (started, Step { transport, reaper })
}

impl Step {
    /// Waits for its end, which follows that of the agents.
    pub(super) async fn end(self) {
        self.reaper.abort();
        let limit = Instant::now() + STEP_EXIT;
        loop {
            reap(&self.transport);
            let left = self.transport.borrow().helpers();
            if left.is_empty() {
                return;
            }
            if Instant::now() > limit {
                // Not reaped yet: the pids are still their own.
                left.iter().for_each(|pid| _ = kill(Pid::from_raw(*pid as i32), Signal::SIGKILL));
            }
            sleep(LOOK).await;
        }
    }
}

fn reap(transport: &RefCell<Slurm>) {
    agent::reap(|_| false, |pid, status| transport.borrow_mut().child_ended(pid, status));
}
