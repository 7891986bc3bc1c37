//! Keeps the newest resource usage and step times of a run, and writes them to a status file for
//! `launch serve` and `launch top`.
use super::ControllerDriver;
use crate::{
    clock::read_unix_time,
    controller::{core::HostIndex, run_status::RankPlacement},
};
use jobspec::{env::CUDA_VISIBLE_DEVICES, ids::Rank};
use protocol::{control::HostUsage, event::Event};

impl ControllerDriver {
    /// Adds the newest usage of a host (CPU, memory, GPUs) and of its workers to the measurements
    /// for the run's status file. Reports slow ranks of a program, and those whose reports were
    /// held back until this usage.
    pub(super) fn record_host_usage(&mut self, host: HostIndex, hosts: usize, usage: HostUsage) {
        let name = self.hosts.get(host).map_or_else(String::new, |host| host.name.clone());
        let events = self.status.add_host_usage((host, &name), hosts, usage, read_unix_time());
        events.into_iter().for_each(|event| self.emit_event(event));
    }

    /// Adds to an event about a slow rank (straggler) the host of the rank, the likely reason and
    /// the message for the user.
    pub(super) fn complete_straggler_event(&mut self, event: &mut Event) {
        let plans = &self.plan.host_plans;
        let find_placement = |rank: Rank| {
            let workers = plans.iter().flat_map(|plan| plan.workers.iter().map(move |worker| (plan, worker)));
            let (plan, worker) = workers.into_iter().find(|(_, worker)| worker.rank == rank)?;
            Some(RankPlacement {
                host: plan.host.clone(),
                gpu: find_worker_gpu(&worker.env, worker.local_rank),
            })
        };
        self.status.complete_straggler_event(event, find_placement);
    }

    /// Adds the host, the likely reason and the message to an event about a slow rank, and returns
    /// the event unless it is held back because the reason is unknown. Returns `None` if it is held
    /// back until the next measurement of a host.
    pub(super) fn complete_or_hold_event(&mut self, mut event: Event) -> Option<Event> {
        let earlier = self.status.take_held_events_before(&event);
        earlier.into_iter().for_each(|event| self.emit_event(event));
        self.complete_straggler_event(&mut event);
        let is_held = self.status.hold_straggler_event(&event, read_unix_time());
        (!is_held).then_some(event)
    }

    /// Reports in the journal and to the user that each rank which counted as slow is no longer
    /// slow, because the attempt (one start of all workers) has ended.
    pub(super) fn report_end_of_stragglers(&mut self) {
        let held = self.status.take_held_events();
        held.into_iter().for_each(|event| self.emit_event(event));
        let events = self.status.list_straggler_end_events();
        events.into_iter().for_each(|event| self.emit_event(event));
    }

    /// Writes the newest usage and step times of the run to its status file and, for a user's
    /// program, to TensorBoard's event file, but at most once per write interval. Only the
    /// controller that writes the journal writes the files.
    pub(super) fn write_status(&mut self) {
        if self.is_adopting || !self.status_file.is_due() {
            return;
        }
        let Some(journal) = &mut self.journal else { return };
        let time = read_unix_time();
        let status = self.status.to_status(time);
        self.status_file.write(self.plan.run_dir.clone(), &status);
        // The event file of a training has its steps. A resumed training hides later steps, and
        // these measurements belong to no step.
        if self.job.train.is_none()
            && let Some(values) = self.tensorboard_usage.list_due_metrics(&status)
        {
            journal.append_scalars(values, time, (self.earlier + self.clock.now()).as_secs());
        }
    }
}

/// Returns the number of the GPU that a worker uses, as counted on the worker's host, from the
/// variable `CUDA_VISIBLE_DEVICES` in `env`. Returns `None` if the number is not known, because
/// launch selects no GPUs or selects them by other names.
fn find_worker_gpu(env: &[(String, String)], local_rank: u32) -> Option<u32> {
    let (_, visible) = env.iter().rfind(|(name, _)| name == CUDA_VISIBLE_DEVICES)?;
    let gpus: Vec<&str> = visible.split(',').map(str::trim).collect();
    let index = if gpus.len() == 1 { 0 } else { local_rank as usize };
    gpus.get(index)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpu_of_a_worker_is_that_of_its_variable() {
        assert_eq!(find_worker_gpu(&[], 1), None);
        for (visible, gpu) in
            [("3", Some(3)), ("4,6", Some(6)), ("4, 6", Some(6)), ("GPU-1f,GPU-2", None), ("", None)]
        {
            let env = [(CUDA_VISIBLE_DEVICES.to_owned(), visible.to_owned())];
            assert_eq!(find_worker_gpu(&env, 1), gpu, "{visible}");
        }
    }
}
