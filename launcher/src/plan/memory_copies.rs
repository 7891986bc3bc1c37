//! Computes how much memory and network traffic a job needs to keep copies of its training state in
//! the memory of its hosts (`checkpoint.memory`).
use diagnostic::{
    Diagnostic,
    codes::host as codes,
    quantity::{format_bytes, format_count},
};
use jobspec::JobSpec;

/// The number of memory buffers for each in-memory copy of a worker's training state, of which one
/// is valid while the other is written.
const BUFFERS_PER_COPY: u64 = 2;

/// The memory and network traffic, in bytes per host, that in-memory copies of the training state
/// (`checkpoint.memory`) cost a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryCopyCost {
    /// For each host, the bytes of memory for copies of the states of its workers and of workers on
    /// other hosts.
    pub(crate) memory_by_host: Vec<u64>,
    /// For each host, the number of bytes that its workers send to other hosts for each memory
    /// copy.
    pub(crate) sent_by_host: Vec<u64>,
    /// For each rank, the number of bytes that it sends to other hosts for each memory copy.
    pub(crate) sent_by_rank: Vec<u64>,
    /// The number of steps between copies.
    pub(crate) every: u64,
}

impl MemoryCopyCost {
    /// Computes how much memory the in-memory copies of the training state need on each host, and
    /// how much data they make each rank and host send. `state_bytes` contains the size of the
    /// state of each rank, in bytes. Returns `None` if the job keeps no memory copies.
    pub(crate) fn compute(job: &JobSpec, workers: &[usize], state_bytes: &[u64]) -> Option<Self> {
        let spec = job.checkpoint.memory.as_ref().filter(|_| !state_bytes.is_empty())?;
        let mut rest = state_bytes.iter();
        let by_host: Vec<u64> = workers.iter().map(|count| rest.by_ref().take(*count).sum()).collect();
        let hosts = by_host.len();
        let copies = (spec.copies as usize).min(hosts.saturating_sub(1));
        let kept = |host: usize| {
            (0..=copies).map(|distance| by_host[(host + hosts - distance) % hosts]).sum::<u64>()
        };
        Some(MemoryCopyCost {
            memory_by_host: (0..hosts).map(|host| BUFFERS_PER_COPY * kept(host)).collect(),
            sent_by_host: by_host.iter().map(|bytes| bytes * copies as u64).collect(),
            sent_by_rank: state_bytes.iter().map(|bytes| bytes * copies as u64).collect(),
            every: spec.every,
        })
    }

    /// Formats the cost of in-memory copies as one line: the largest memory use of a host and the
    /// largest traffic of a rank and host.
    pub(crate) fn format(&self) -> String {
        let largest = |values: &[u64]| values.iter().copied().max().unwrap_or(0);
        let memory = format_bytes(largest(&self.memory_by_host));
        let sent = largest(&self.sent_by_host);
        let interval = match self.every {
            1 => "after each step".to_owned(),
            every => format!("every {}", format_count(every, "step")),
        };
        let traffic = match sent {
            0 => format!("copied {interval}, not to other hosts"),
            sent => {
                let (rank, host) = (format_bytes(largest(&self.sent_by_rank)), format_bytes(sent));
                format!("each rank sends {rank}, and each host {host}, to other hosts {interval}")
            }
        };
        format!("memory copies: {memory} on a host; {traffic}")
    }
}

/// Returns a warning if the job has too few hosts to keep `checkpoint.memory.copies` copies of each
/// host's training state in the memory of other hosts.
pub(super) fn find_unplaced_copies_warning(job: &JobSpec, hosts: usize) -> Option<Diagnostic> {
    let copies = job.checkpoint.memory.as_ref()?.copies;
    let others = hosts.saturating_sub(1) as u64;
    if u64::from(copies) <= others {
        return None;
    }
    let needed = format_count(copies, "other host");
    let message = match others {
        0 => format!("the job has one host, but {needed} should keep copies of its state in memory"),
        others => format!(
            "the job has only {}, but {needed} should keep copies of each state in memory",
            format_count(others, "other host")
        ),
    };
    let warning = Diagnostic::warning(codes::MEMORY_COPIES_UNPLACED, message)
        .with_subject("checkpoint.memory.copies")
        .with_field("copies", copies)
        .with_field("other_hosts", others)
        .with_help(format!("set `copies: {others}`, or use more hosts"));
    Some(warning)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jobspec::MemoryCopySpec;

    /// Returns a job with this number of copies on other hosts.
    fn make_job(copies: u32, every: u64) -> JobSpec {
        let mut job = crate::testing::sample_job();
        job.checkpoint.memory = Some(MemoryCopySpec { copies, every, keep_workers: true });
        job
    }

    #[test]
    fn each_host_keeps_its_own_states_and_those_of_the_previous_hosts() {
        let cost = |copies, workers: &[usize]| {
            let bytes = [10, 10, 20, 40];
            MemoryCopyCost::compute(&make_job(copies, 1), workers, &bytes)
                .map(|c| (c.memory_by_host, c.sent_by_host, c.sent_by_rank))
        };
        assert_eq!(cost(0, &[2, 1, 1]), Some((vec![40, 40, 80], vec![0, 0, 0], vec![0; 4])));
        let sent = (vec![20, 20, 40], vec![10, 10, 20, 40]);
        assert_eq!(cost(1, &[2, 1, 1]), Some((vec![120, 80, 120], sent.0, sent.1)));
        let sent = (vec![40, 40, 80], vec![20, 20, 40, 80]);
        assert_eq!(cost(8, &[2, 1, 1]), Some((vec![160, 160, 160], sent.0, sent.1)));
        assert_eq!(cost(1, &[4]), Some((vec![160], vec![0], vec![0; 4])));
        assert_eq!(MemoryCopyCost::compute(&crate::testing::sample_job(), &[1], &[5]), None);
    }

    #[test]
    fn the_cost_is_one_line_of_text() {
        let text = |copies, every, workers: &[usize]| {
            let bytes = vec![1 << 20; workers.iter().sum()];
            MemoryCopyCost::compute(&make_job(copies, every), workers, &bytes).expect("copies").format()
        };
        assert_eq!(
            text(1, 1, &[2]),
            "memory copies: 4.0 MiB on a host; copied after each step, not to other hosts"
        );
        let sent = "memory copies: 8.0 MiB on a host; each rank sends 1.0 MiB, and each host 2.0 MiB, to other \
                    hosts every 5 steps";
        assert_eq!(text(1, 5, &[2, 2]), sent);
    }

    #[test]
    fn copies_without_hosts_are_warned_about() {
        let warning = |copies, hosts| {
            find_unplaced_copies_warning(&make_job(copies, 1), hosts).map(|w| w.message().to_owned())
        };
        assert_eq!((warning(0, 1), warning(1, 2), warning(2, 3)), (None, None, None));
        let one = "the job has one host, but 1 other host should keep copies of its state in memory";
        assert_eq!(warning(1, 1).as_deref(), Some(one));
        let two =
            "the job has only 1 other host, but 2 other hosts should keep copies of each state in memory";
        assert_eq!(warning(2, 2).as_deref(), Some(two));
    }
}
