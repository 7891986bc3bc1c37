//! Keeps the newest measurements of the run, and writes them to the status file.
use super::ControllerDriver;
use crate::{clock::read_unix_time, controller::core::HostIndex};
use jobspec::ids::Rank;
use protocol::{control::HostUsage, event::Event};

impl ControllerDriver {
    /// Keeps what a host of the attempt and its workers have used. Reports slow ranks of a program.
    pub(super) fn add_usage(&mut self, host: HostIndex, hosts: usize, usage: HostUsage) {
        let name = self.hosts.get(host).map_or_else(String::new, |host| host.name.clone());
        let events = self.status.add_usage((host, &name), hosts, usage, read_unix_time());
        events.into_iter().for_each(|event| self.emit_event(event));
    }

    /// Completes an event about a slow rank, and changes no other event.
    pub(super) fn complete_event(&mut self, event: &mut Event) {
        let plans = &self.plan.host_plans;
        let find_host = |rank: Rank| {
            let plan = plans.iter().find(|plan| plan.workers.iter().any(|worker| worker.rank == rank))?;
            Some(plan.host.clone())
        };
        self.status.complete_event(event, find_host);
    }

    /// Writes the newest measurements to the status file, if this is due. Only the controller that
    /// writes the journal writes the file.
    pub(super) fn write_status(&mut self) {
        if self.journal.is_some() && !self.is_adopting && self.status_file.is_due() {
            self.status_file.write(self.plan.run_dir.clone(), &self.status.to_status(read_unix_time()));
        }
    }
}
