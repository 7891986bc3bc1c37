//! Applies changes of the job file and of the hostfile while the job runs.
use super::ControllerDriver;
use crate::controller::{
    core::{ControllerInput, HostSetup},
    file_watch::WatchedFileContent,
    hostfile::HostfileWatch,
    job_file::JobFileWatch,
};

impl ControllerDriver {
    /// Applies a change of the job file: reports it, sends new values of reloadable keys to the
    /// workers, and uses them when workers are restarted.
    pub(super) fn apply_job_file_change(&mut self, watch: &mut JobFileWatch, content: WatchedFileContent) {
        let change = watch.evaluate_change(&self.job, content);
        change.notices.into_iter().for_each(|message| self.emit_notice(message));
        let Some(values) = change.values else { return };
        // Later attempts begin with the new values.
        values.apply_to(&mut self.job);
        let prepared = self.preparation.iter_mut().flat_map(|p| &mut p.plan.host_plans);
        prepared.for_each(|plan| values.apply_to(&mut plan.job));
        self.handle_input(ControllerInput::Reload(values));
    }

    /// Applies a change of the hostfile: reports the change, and updates the hosts in the
    /// controller's state machine and in the transport.
    pub(super) fn apply_hostfile_change(&mut self, watch: &mut HostfileWatch, content: WatchedFileContent) {
        let change = watch.evaluate_change(&mut self.hosts, content);
        change.notices.into_iter().for_each(|message| self.emit_notice(message));
        let Some(hosts) = change.hosts else { return };
        self.transport.update_hosts(&hosts.addresses);
        self.addresses = hosts.addresses;
        let added =
            hosts.added.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local }).collect();
        self.hosts.extend(hosts.added);
        self.write_control_file();
        self.handle_input(ControllerInput::Hosts { added, listed: hosts.listed });
    }
}
