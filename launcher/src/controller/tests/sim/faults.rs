//! [`InjectedFault`]: what fails in a simulated job.
use super::{HostIndex, HostSetup, Input, SimEvent, SimHost, StopRequest, World};
use contract::{control::ExitStatus, ids::Rank};
use std::time::Duration;

/// A fault that the simulator injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller::tests) enum InjectedFault {
    WorkerExits(Rank, u8),
    WorkerKilled(Rank),
    /// kill -9 of the agent.
    AgentKilled(HostIndex),
    /// The connection breaks, and both ends see that.
    LinkBreaks(HostIndex),
    /// The network of the host is disconnected, and no end sees that.
    Silence(HostIndex),
    /// The host is gone without a message.
    HostDies(HostIndex),
    /// Every process on the host freezes for this long, milliseconds.
    HostFreezes(HostIndex, u64),
    /// kill -9 of the controller.
    ControllerKilled,
    Interrupt,
    /// A host is added to the list.
    HostAdded,
    /// A host is removed from the list.
    HostUnlisted(HostIndex),
    /// A removed host is listed again.
    HostListed(HostIndex),
}

impl World {
    pub(super) fn inject(&mut self, fault: InjectedFault) -> Result<(), String> {
        if self.outcome.is_some() {
            return Ok(());
        }
        let has_effect = match fault {
            InjectedFault::WorkerExits(rank, code) => self.end_worker(rank, ExitStatus::Code(code))?,
            InjectedFault::WorkerKilled(rank) => self.end_worker(rank, ExitStatus::Signal(9, false))?,
            InjectedFault::AgentKilled(host) => {
                let number =
                    self.hosts[host].agents.last().map(|a| a.number).filter(|_| !self.hosts[host].dead);
                number.map(|number| self.agent_ends(host, number)).is_some()
            }
            InjectedFault::LinkBreaks(host) => {
                self.break_link(host);
                true
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
                self.schedule(at, SimEvent::Unfreeze(host));
                true
            }
            InjectedFault::ControllerKilled => {
                self.controller_alive = false;
                self.ended_at = self.now;
                (0..self.hosts.len()).for_each(|host| self.break_link(host));
                true
            }
            InjectedFault::Interrupt => {
                self.input_to_controller(Input::Stop(StopRequest::Interrupt));
                true
            }
            InjectedFault::HostAdded => {
                self.hosts.push(SimHost::default());
                let added =
                    vec![HostSetup { name: format!("h{}", self.listed.len()), remote: self.scenario.remote }];
                let listed = self.listed.clone();
                self.listed.push(true);
                self.input_to_controller(Input::Hosts { added, listed });
                true
            }
            InjectedFault::HostUnlisted(host) => self.list(host, false),
            InjectedFault::HostListed(host) => self.list(host, true),
        };
        if has_effect {
            self.injected.push(fault);
        }
        Ok(())
    }

    /// Lists or unlists a host; returns whether that is a change.
    fn list(&mut self, host: HostIndex, listed: bool) -> bool {
        let changes = std::mem::replace(&mut self.listed[host], listed) != listed;
        if changes {
            self.input_to_controller(Input::Hosts { added: Vec::new(), listed: self.listed.clone() });
        }
        changes
    }

    /// Ends a worker of the newest attempt; returns whether it was running.
    fn end_worker(&mut self, rank: Rank, status: ExitStatus) -> Result<bool, String> {
        let newest = self
            .running_workers()
            .into_iter()
            .filter(|(_, _, r)| *r == rank)
            .max_by_key(|(_, attempt, _)| *attempt);
        let Some((host, attempt, _)) = newest.filter(|(host, ..)| !self.hosts[*host].frozen) else {
            return Ok(false);
        };
        self.worker_ends(host, attempt, rank, status).map(|()| true)
    }
}
