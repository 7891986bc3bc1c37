//! [`InjectedFault`]: the faults that the simulator injects into a job.
use super::{
    ControllerIndex, ControllerInput, ControllerState, HostIndex, HostSetup, SimEvent, SimHost, Simulation,
    StopRequest,
};
use jobspec::ids::Rank;
use protocol::control::ExitStatus;
use std::time::Duration;

/// A fault that the simulator injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller::tests) enum InjectedFault {
    /// The newest worker of this rank exits with this exit code.
    WorkerExits(Rank, u8),
    /// The newest worker of this rank is killed by SIGKILL.
    WorkerKilled(Rank),
    /// The agent of this host is killed by SIGKILL.
    AgentKilled(HostIndex),
    /// The control connection to the agent of this host breaks, and both ends notice.
    ConnectionBreaks(HostIndex),
    /// The network of this host is disconnected. Neither the controller nor the agent notices.
    Silence(HostIndex),
    /// This host and all its processes are gone. The controller gets no message about the loss.
    HostDies(HostIndex),
    /// Every process on this host freezes for this many milliseconds.
    HostFreezes(HostIndex, u64),
    /// The controller is killed by SIGKILL.
    ControllerKilled,
    /// The controller is suspended for this many milliseconds.
    ControllerSuspended(u64),
    /// The user presses Ctrl-C.
    Interrupt,
    /// A new host is added to the list of hosts.
    HostAdded,
    /// This host is removed from the list of hosts.
    HostUnlisted(HostIndex),
    /// This host, which was removed from the list of hosts, is listed again.
    HostListed(HostIndex),
}

impl Simulation {
    /// Injects a fault, and adds the fault to `injected` if it has an effect. Does nothing once the
    /// run has ended. Fails if an invariant is violated.
    pub(super) fn inject_fault(&mut self, fault: InjectedFault) -> Result<(), String> {
        if self.outcome.is_some() {
            return Ok(());
        }
        let has_effect = match fault {
            InjectedFault::WorkerExits(rank, code) => self.end_newest_worker(rank, ExitStatus::Code(code))?,
            InjectedFault::WorkerKilled(rank) => {
                self.end_newest_worker(rank, ExitStatus::Signal(9, false))?
            }
            InjectedFault::AgentKilled(host) => {
                let number =
                    self.hosts[host].agents.last().map(|a| a.number).filter(|_| !self.hosts[host].dead);
                number.map(|number| self.end_agent(host, number)).is_some()
            }
            InjectedFault::ConnectionBreaks(host) => {
                let connection = self.hosts[host].agents.last().and_then(|agent| agent.connection);
                connection.map(|id| self.break_connection(id)).is_some()
            }
            InjectedFault::Silence(host) => {
                self.hosts[host].disconnected = true;
                true
            }
            InjectedFault::HostDies(host) => {
                let host = &mut self.hosts[host];
                (host.dead, host.disconnected) = (true, true);
                true
            }
            InjectedFault::HostFreezes(host, ms) => {
                self.hosts[host].frozen = true;
                let at = self.now + Duration::from_millis(ms);
                self.schedule_event(at, SimEvent::Unfreeze(host));
                true
            }
            InjectedFault::ControllerKilled => {
                let controller = self.find_live_controller();
                controller.map(|index| self.end_controller(index, ControllerState::Ended)).is_some()
            }
            InjectedFault::ControllerSuspended(ms) => {
                let controller = self.find_live_controller();
                if let Some(index) = controller {
                    self.end_controller(index, ControllerState::Suspended { since: self.now });
                    let at = self.now + Duration::from_millis(ms);
                    self.schedule_event(at, SimEvent::ResumeController(index));
                }
                controller.is_some()
            }
            InjectedFault::Interrupt => {
                let controller = self.find_live_controller();
                let stop = ControllerInput::Stop(StopRequest::Interrupt);
                controller.map(|index| self.feed_controller(index, stop)).is_some()
            }
            InjectedFault::HostAdded => {
                self.hosts.push(SimHost::default());
                let added =
                    vec![HostSetup { name: format!("h{}", self.listed.len()), remote: self.scenario.remote }];
                let listed = self.listed.clone();
                self.listed.push(true);
                if let Some(index) = self.find_live_controller() {
                    self.feed_controller(index, ControllerInput::Hosts { added, listed });
                }
                true
            }
            InjectedFault::HostUnlisted(host) => self.set_host_listed(host, false),
            InjectedFault::HostListed(host) => self.set_host_listed(host, true),
        };
        if has_effect {
            self.injected.push(fault);
        }
        Ok(())
    }

    /// Returns the most recently started controller that still runs.
    fn find_live_controller(&self) -> Option<ControllerIndex> {
        self.controllers.iter().rposition(|controller| controller.state == ControllerState::Alive)
    }

    /// Adds a host to the list of hosts or removes the host from the list, and informs the
    /// controller of a change. Returns whether the list has changed.
    fn set_host_listed(&mut self, host: HostIndex, listed: bool) -> bool {
        let changes = std::mem::replace(&mut self.listed[host], listed) != listed;
        if let Some(index) = self.find_live_controller().filter(|_| changes) {
            let listed = self.listed.clone();
            self.feed_controller(index, ControllerInput::Hosts { added: Vec::new(), listed });
        }
        changes
    }

    /// Ends the worker of the rank `rank` in the most recent attempt that still has a worker of
    /// this rank. Returns `false` if no worker of the rank runs, or if its host is frozen.
    fn end_newest_worker(&mut self, rank: Rank, status: ExitStatus) -> Result<bool, String> {
        let newest = self
            .list_running_workers()
            .into_iter()
            .filter(|(_, _, r)| *r == rank)
            .max_by_key(|(_, attempt, _)| *attempt);
        let Some((host, attempt, _)) = newest.filter(|(host, ..)| !self.hosts[*host].frozen) else {
            return Ok(false);
        };
        self.end_worker(host, attempt, rank, status).map(|()| true)
    }
}
