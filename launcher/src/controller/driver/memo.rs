//! Sends the present state of the run (the memo) to the agents, which keep it for a later
//! controller.
use super::ControllerDriver;
use crate::controller::{
    core::{HostIndex, RunMemo, StoredMemo},
    job_file::JobFile,
};
use protocol::control::ToAgent;

impl ControllerDriver {
    /// Sends the run's present state (the memo) and the unstored events to the agents of `hosts`,
    /// which keep them for a later controller.
    pub(super) fn send_memo(&mut self, hosts: &[HostIndex], memo: RunMemo) {
        let stored = StoredMemo {
            memo,
            newest_event: self.events.newest_event_number(),
            unstored: self.events.collect_unstored(),
            job_file: self.watched_job_file.clone().map(JobFile::with_absolute_path),
            directory: std::env::current_dir().unwrap_or_default(),
        };
        // A memo has no value that JSON cannot represent.
        let Ok(text) = serde_json::to_string(&stored) else { return };
        for host in hosts {
            self.send_to_agent(*host, ToAgent::Memo(text.clone()));
        }
    }
}
