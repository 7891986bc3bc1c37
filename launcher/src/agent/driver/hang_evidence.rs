//! Measures the activity of the workers, collects evidence about workers that hang, and writes
//! their stacks.
use super::AgentDriver;
use crate::agent::{
    activity,
    core::AgentInput,
    hang::{self, EvidenceRequest, HangingWorker},
    progress::CollectiveActivity,
    stacks::{self, StackTarget},
};
use jobspec::ids::Rank;
use protocol::{
    control::{HostPlan, WorkerPlan},
    hang::RankEvidence,
};
use std::{
    sync::mpsc::sync_channel,
    thread,
    time::{Duration, Instant},
};

/// How long the agent waits, after it has begun to collect evidence about hanging workers, for
/// their stacks and their last collectives. The stacks are left out if the kernel takes longer to
/// describe the processes.
const COLLECTION_TIMEOUT: Duration = Duration::from_secs(7);
/// The longest time between a GPU error that was logged without a pid and a later hang of a worker
/// that the error may explain.
const MAX_GPU_FAULT_AGE: Duration = Duration::from_secs(120);

impl AgentDriver {
    /// Measures the CPU time of each worker and how many collectives it has entered and completed,
    /// and reports the values to the agent's state machine.
    pub(super) fn measure_activity(&mut self) {
        let living: Vec<(u32, Rank)> = self.leaders.iter().map(|(pid, rank)| (*pid, *rank)).collect();
        let pids: Vec<u32> = living.iter().map(|(pid, _)| *pid).collect();
        for ((_, rank), measured) in living.into_iter().zip(activity::measure_activity(&pids)) {
            self.handle_input(AgentInput::Activity {
                rank,
                ticks: measured.ticks,
                stopped: measured.stopped,
                collectives: self.read_collective_activity(rank),
            });
        }
    }

    /// Returns how many collectives the worker with this rank has entered plus how many it has
    /// completed, and whether the worker waits in a collective. Returns `None` if the worker has
    /// reported no collectives.
    fn read_collective_activity(&self, rank: Rank) -> Option<CollectiveActivity> {
        let plan = self.plan.as_ref()?;
        let worker = plan.workers.iter().find(|worker| worker.rank == rank)?;
        if worker.command.is_some() {
            return self.hang_hook.as_ref()?.read_collective_activity(rank);
        }
        let status = self.status_memory.as_ref()?.read(worker.local_rank, plan.attempt)?;
        let completed = status.completed.unwrap_or(0);
        let is_waiting = status.completed.is_some_and(|completed| status.entered > completed);
        Some(CollectiveActivity { count: status.entered.wrapping_add(completed), is_waiting })
    }

    /// Starts a thread that collects evidence about the hanging workers `ranks`, and writes their
    /// stacks to their logs. Does not block.
    pub(super) fn start_evidence_collection(&mut self, ranks: &[Rank]) {
        let Some(plan) = self.plan.clone() else { return };
        let workers: Vec<(&WorkerPlan, u32)> = ranks
            .iter()
            .filter_map(|rank| {
                let worker = plan.workers.iter().find(|w| w.rank == *rank)?;
                Some((worker, self.find_unreaped_pid(*rank)?))
            })
            .collect();
        let targets: Vec<StackTarget> =
            workers.iter().map(|(worker, pid)| StackTarget { pid: *pid, log: worker.log.clone() }).collect();
        let request = self.build_evidence_request(&plan, &workers);
        let (written, attempt) = (self.stacks_written.0.clone(), plan.attempt);
        let work = move || {
            let begin = Instant::now();
            let (done, stacks_done) = sync_channel(1);
            let write = move || {
                // An error means that the other thread has stopped waiting.
                _ = done.send(stacks::write_stacks(&targets));
            };
            // Without the thread, the stacks are left out.
            _ = thread::Builder::new().name("stacks".into()).spawn(write);
            let mut evidence = hang::collect_evidence(request);
            // A stalled disk of the logs, or a description of a process, may block the thread.
            let stacks = stacks_done.recv_timeout(COLLECTION_TIMEOUT.saturating_sub(begin.elapsed()));
            for (evidence, stack) in evidence.iter_mut().zip(stacks.unwrap_or_default()) {
                // The stack of the hook is that of the process that uses torch.
                if evidence.stack.is_empty() {
                    evidence.stack = stack;
                }
            }
            // An error means that the driver has stopped waiting.
            _ = written.blocking_send((attempt, evidence));
        };
        // If the thread cannot be started, the core stops waiting after a timeout.
        _ = thread::Builder::new().name("hang-evidence".into()).spawn(work);
    }

    /// Builds the request to collect evidence about hanging workers, with each worker's processes
    /// and the GPU errors that may explain the hang.
    fn build_evidence_request(&mut self, plan: &HostPlan, workers: &[(&WorkerPlan, u32)]) -> EvidenceRequest {
        let timeout_ms = plan.hang_detection.map_or(0, |detection| detection.timeout_ms);
        let window = Duration::from_millis(timeout_ms) + MAX_GPU_FAULT_AGE;
        let pids: Vec<u32> = workers.iter().map(|(_, pid)| *pid).collect();
        let trees = activity::list_process_trees(&pids);
        let mut host_gpu_faults = self.gpu_faults.list_unattributed_faults(window);
        let workers = workers.iter().zip(trees).map(|((worker, pid), tree)| HangingWorker {
            rank: worker.rank,
            pid: *pid,
            local_rank: worker.local_rank,
            is_builtin: worker.command.is_none(),
            gpu_faults: self.gpu_faults.list_faults_of(&tree),
            host_gpu_faults: std::mem::take(&mut host_gpu_faults),
            timeout_evidence: self.workers.get(&worker.rank).and_then(|w| w.timeout_evidence.clone()),
            tree,
        });
        EvidenceRequest {
            workers: workers.collect(),
            hook_directory: self.hang_hook.as_ref().map(|hook| hook.path().to_owned()),
            status: self.status_memory.clone(),
            attempt: plan.attempt,
            world: plan.world,
        }
    }

    /// Converts the evidence about hanging workers, whose stacks are in their logs now, to an input
    /// of the agent's state machine. For an earlier attempt, the input is a tick.
    pub(super) fn on_stacks_written(&self, (attempt, evidence): (u32, Vec<RankEvidence>)) -> AgentInput {
        let now = self.plan.as_ref().map(|plan| plan.attempt);
        if now == Some(attempt) { AgentInput::StacksWritten { evidence } } else { AgentInput::Tick }
    }
}
