//! Compares the memory that a built-in training is estimated to need on this machine with the
//! memory that the machine and its GPUs have.
use diagnostic::{Diagnostic, codes::host, quantity::format_bytes};
use jobspec::{JobSpec, ids::Rank};
use protocol::preflight::MemoryEstimate;

/// The memory of this machine, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MachineMemory {
    /// The memory of the CPUs; 0 if it is unknown.
    pub(super) host: u64,
    /// The memory of the smallest GPU; `None` if it is unknown.
    pub(super) smallest_gpu: Option<u64>,
}

/// Returns a warning if the workers on this machine are estimated to need more memory than the
/// machine or, in a training on GPUs, its smallest GPU has. `local_ranks` are the ranks of these
/// workers, and `estimates` the estimates of all ranks. Returns `None` if the memory suffices or is
/// unknown, or if no worker runs on this machine.
pub(super) fn check_machine_memory(
    job: &JobSpec,
    local_ranks: &[Rank],
    machine: MachineMemory,
    estimates: &[MemoryEstimate],
) -> Option<Diagnostic> {
    let is_local = |estimate: &&MemoryEstimate| local_ranks.contains(&estimate.rank);
    let needs: Vec<u64> = estimates.iter().filter(is_local).map(|estimate| estimate.total).collect();
    let trains_on_gpus = job.cluster.trains_on_gpus();
    let (required, available) = if trains_on_gpus {
        let largest = needs.iter().max().copied().unwrap_or(0);
        let sharing = needs.len().min(job.cluster.workers_per_gpu as usize).max(1) as u64;
        (largest.saturating_mul(sharing), machine.smallest_gpu?)
    } else {
        (needs.iter().sum(), machine.host)
    };
    if available == 0 || required <= available {
        return None;
    }
    let (needed, installed) = (format_bytes(required), format_bytes(available));
    let message = if trains_on_gpus {
        format!("training needs about {needed} of memory on each GPU; the smallest GPU has {installed}")
    } else {
        format!("the workers on this machine need about {needed} of memory; the machine has {installed}")
    };
    let warning = Diagnostic::warning(host::MEMORY_INSUFFICIENT, message)
        .with_subject("train")
        .with_field("memory", if trains_on_gpus { "gpu" } else { "host" })
        .with_field("required_bytes", required)
        .with_field("available_bytes", available)
        .with_help(
            "use a smaller `batch.micro`, `recompute: block`, a higher `zero.stage` or `zero.offload`",
        );
    Some(warning)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the memory of a job with four ranks, each of which needs 3 GiB, and of which the
    /// first two run on this machine. Returns the required and the available bytes of the warning.
    fn check(cluster: &str, machine: MachineMemory) -> Option<(u64, u64)> {
        let text = format!("cluster: {{{cluster}}}\ntrain: {{data: {{files: [a.txt]}}}}\n");
        let source = jobspec::JobSource::Text { name: "demo.yaml".to_owned(), text };
        let (job, _, _) = jobspec::load_job(source, &[]).expect("a job");
        let estimate = |rank| MemoryEstimate { rank, parts: Vec::new(), total: 3 << 30 };
        let estimates: Vec<MemoryEstimate> = (0..4).map(estimate).collect();
        let warning = check_machine_memory(&job, &[0, 1], machine, &estimates)?;
        assert_eq!(warning.code(), host::MEMORY_INSUFFICIENT);
        let fields = warning.to_json();
        let number = |name: &str| fields["fields"][name].as_u64().expect("a number");
        Some((number("required_bytes"), number("available_bytes")))
    }

    #[test]
    fn the_workers_on_this_machine_must_fit_into_its_memory() {
        let of_host = |host| MachineMemory { host, smallest_gpu: None };
        assert_eq!(check("devices: cpu", of_host(6 << 30)), None);
        assert_eq!(check("devices: cpu", of_host(5 << 30)), Some((6 << 30, 5 << 30)));
        assert_eq!(check("devices: cpu", of_host(0)), None, "unknown");
    }

    #[test]
    fn the_workers_that_share_a_gpu_must_fit_into_its_memory() {
        let of_gpu = |smallest_gpu| MachineMemory { host: 1 << 30, smallest_gpu };
        let shared = "devices: cuda, workers_per_gpu: 2";
        assert_eq!(check(shared, of_gpu(Some(6 << 30))), None);
        assert_eq!(check(shared, of_gpu(Some(5 << 30))), Some((6 << 30, 5 << 30)));
        assert_eq!(check("devices: cuda", of_gpu(Some(5 << 30))), None);
        assert_eq!(check("devices: cuda", of_gpu(Some(2 << 30))), Some((3 << 30, 2 << 30)));
        assert_eq!(check(shared, of_gpu(None)), None, "unknown");
    }
}
