//! [`StartedAgent`]: an agent that `launch check` has started on a host.
use crate::{
    cluster::{AgentHandle, AgentProcess, RemoteAgentConnection, Transport},
    processes::{lock_children, reap_group_leader},
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

/// The pause between two calls that reap the ended child processes, such as `ssh`, through which
/// `launch check` has started agents.
const REAP_INTERVAL: Duration = Duration::from_millis(20);
/// How long the child processes that started or reached the agents, such as `ssh`, may take to exit
/// after the agents have ended. A process that still runs after this time is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A host of `launch check` with the agent that was started there, or with the error because of
/// which the agent could not be started. If the agent is a child process, dropping this value kills
/// and reaps the agent.
pub(super) struct StartedAgent {
    pub(super) name: String,
    pub(super) agent: diagnostic::Result<AgentProcess>,
}

impl StartedAgent {
    /// Returns the handle of the connection, such as an SSH session, to an agent on a remote host.
    /// Returns `None` if the agent is a child process or could not be started.
    pub(super) fn remote_connection(&self) -> Option<&dyn RemoteAgentConnection> {
        match self.agent.as_ref().ok().map(|agent| &agent.handle) {
            Some(AgentHandle::Connection(connection)) => Some(connection.as_ref()),
            Some(AgentHandle::Child(_)) | None => None,
        }
    }
}

impl Drop for StartedAgent {
    fn drop(&mut self) {
        if let Ok(agent) = &self.agent
            && let AgentHandle::Child(pid) = agent.handle
        {
            // An agent exits when its control connection is closed, but a blocked agent does not.
            let pid = Pid::from_raw(pid as i32);
            _ = kill(pid, Signal::SIGKILL);
            _ = nix::sys::wait::waitpid(pid, None);
        }
    }
}

/// Starts an agent on each of the hosts and returns the agents in the order of the hosts. A failed
/// start is part of the result. Starts a task that reaps the child processes of the transport, so
/// the caller must run in a [`tokio::task::LocalSet`].
pub(super) fn start_agents(
    mut transport: Box<dyn Transport>,
    hosts: Vec<String>,
) -> (Vec<StartedAgent>, TransportReaper) {
    let agents = transport.start_agents(&hosts);
    let started = hosts.into_iter().zip(agents).map(|(name, agent)| StartedAgent { name, agent }).collect();
    let transport = Rc::new(RefCell::new(transport));
    let reaped = transport.clone();
    // The exit status of such a process explains why an agent does not connect.
    let task = spawn_local(async move {
        loop {
            reap_child_processes(&reaped);
            sleep(REAP_INTERVAL).await;
        }
    });
    (started, TransportReaper { transport, task })
}

/// The transport (such as SSH) through which `launch check` started its agents, together with the
/// task that reaps the transport's child processes.
pub(super) struct TransportReaper {
    transport: Rc<RefCell<Box<dyn Transport>>>,
    task: JoinHandle<()>,
}

impl TransportReaper {
    /// Waits until all child processes through which the agents were started, such as `ssh`, have
    /// ended. Kills the processes that still run after [`EXIT_TIMEOUT`], and continues to wait for
    /// their end.
    pub(super) async fn end_child_processes(self) {
        self.task.abort();
        let limit = Instant::now() + EXIT_TIMEOUT;
        loop {
            reap_child_processes(&self.transport);
            let running = self.transport.borrow().child_processes();
            if running.is_empty() {
                return;
            }
            if Instant::now() > limit {
                let _lock = lock_children();
                let running = self.transport.borrow().child_processes();
                // The processes are not reaped yet, so their pids are not reused.
                running.iter().for_each(|pid| _ = kill(Pid::from_raw(*pid as i32), Signal::SIGKILL));
            }
            sleep(REAP_INTERVAL).await;
        }
    }
}

/// Reaps the ended child processes of the transport, such as `ssh` or `srun`, and passes their exit
/// statuses to the transport.
fn reap_child_processes(transport: &RefCell<Box<dyn Transport>>) {
    let mut transport = transport.borrow_mut();
    let _lock = lock_children();
    for pid in transport.child_processes() {
        if let Some(status) = reap_group_leader(pid) {
            transport.record_child_exit(pid, status);
        }
    }
}
