//! What goes wrong in a simulated job, and how.
use super::{Host, HostSetup, Input, HostIndex, Stop, What, World};
use contract::{control::ExitStatus, ids::Rank};
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller::tests) enum Fault {
    WorkerExits(Rank, u8),
    WorkerKilled(Rank),
    /// kill -9 of the agent.
    AgentKilled(HostIndex),
    /// The link breaks: both ends see its end.
    LinkBreaks(HostIndex),
    /// The cable is cut: nobody sees anything.
    Silence(HostIndex),
    /// The host is gone, and nobody says so.
    HostDies(HostIndex),
    /// Everything on the host stands still, this long (milliseconds).
    HostFreezes(HostIndex, u64),
    /// kill -9 of the controller.
    ControllerKilled,
    Interrupt,
    /// A host is added to the list.
    HostAdded,
    /// A host is taken from the list.
    HostUnlisted(HostIndex),
    /// One that was taken from it is in it again.
    HostListed(HostIndex),
}

impl World {
    pub(super) fn fault(&mut self, fault: Fault) -> Result<(), String> {
        if self.outcome.is_some() {
            return Ok(());
        }
        let happened = match fault {
            Fault::WorkerExits(rank, code) => self.hit(rank, ExitStatus::Code(code))?,
            Fault::WorkerKilled(rank) => self.hit(rank, ExitStatus::Signal(9, false))?,
            Fault::AgentKilled(node) => {
                let number =
                    self.hosts[node].agents.last().map(|a| a.number).filter(|_| !self.hosts[node].dead);
                number.map(|number| self.agent_ends(node, number)).is_some()
            }
            Fault::LinkBreaks(node) => {
                self.break_link(node);
                true
            }
            Fault::Silence(node) => {
                self.hosts[node].cut = true;
                true
            }
            Fault::HostDies(node) => {
                let host = &mut self.hosts[node];
                (host.dead, host.cut) = (true, true);
                true
            }
            Fault::HostFreezes(node, ms) => {
                self.hosts[node].frozen = true;
                let at = self.now + Duration::from_millis(ms);
                self.at(at, What::Thaw(node));
                true
            }
            Fault::ControllerKilled => {
                self.controller_alive = false;
                self.ended_at = self.now;
                (0..self.hosts.len()).for_each(|node| self.break_link(node));
                true
            }
            Fault::Interrupt => {
                self.tell_controller(Input::Stop(Stop::Interrupt));
                true
            }
            Fault::HostAdded => {
                self.hosts.push(Host::default());
                let added =
                    vec![HostSetup { name: format!("h{}", self.listed.len()), remote: self.scene.remote }];
                let listed = self.listed.clone();
                self.listed.push(true);
                self.tell_controller(Input::Hosts { added, listed });
                true
            }
            Fault::HostUnlisted(node) => self.list(node, false),
            Fault::HostListed(node) => self.list(node, true),
        };
        if happened {
            self.injected.push(fault);
        }
        Ok(())
    }

    /// `false`: that was so before.
    fn list(&mut self, node: HostIndex, listed: bool) -> bool {
        let changes = std::mem::replace(&mut self.listed[node], listed) != listed;
        if changes {
            self.tell_controller(Input::Hosts { added: Vec::new(), listed: self.listed.clone() });
        }
        changes
    }

    /// A worker of the newest epoch ends by itself; `false`: it doesn't live.
    fn hit(&mut self, rank: Rank, status: ExitStatus) -> Result<bool, String> {
        let newest =
            self.living().into_iter().filter(|(_, _, r)| *r == rank).max_by_key(|(_, epoch, _)| *epoch);
        let Some((node, epoch, _)) = newest.filter(|(node, ..)| !self.hosts[*node].frozen) else {
            return Ok(false);
        };
        self.worker_ends(node, epoch, rank, status).map(|()| true)
    }
}
