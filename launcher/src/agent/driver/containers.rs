//! Removes the containers of workers and of `launch exec` commands whose container runtime process
//! ended abnormally.
use super::AgentDriver;
use crate::agent::core::AgentInput;
use protocol::control::ExitStatus;

impl AgentDriver {
    /// Starts the command that removes the container of the process with the pid `pid`, if `status`
    /// shows that the process has ended with an error or signal. Docker's containers continue if
    /// their client is killed.
    pub(super) fn remove_container_of_failed_process(&mut self, pid: u32, status: ExitStatus) {
        let Some(words) = self.container_removals.remove(&pid) else { return };
        if status != ExitStatus::Code(0) {
            self.running_removals += 1;
            self.spawner.begin_container_removal(words);
        }
    }

    /// Records that a command which removes the container of a failed worker has ended. The search
    /// for processes that the workers left begins once no such command is left.
    pub(super) fn on_container_removed(&mut self) -> AgentInput {
        self.running_removals = self.running_removals.saturating_sub(1);
        if self.sweep_started_at.is_some() {
            self.sweep_started_at = Some(self.clock.now());
        }
        AgentInput::Tick
    }
}
