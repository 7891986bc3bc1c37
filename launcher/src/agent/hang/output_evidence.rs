//! [`OutputEvidence`]: finds in the output of a rank the warnings of NCCL and the collectives that
//! torch has reported as timed out.
use jobspec::ids::Rank;
use protocol::hang::{CollectiveTimeout, RankEvidence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The largest number of NCCL warnings, and of collectives that have timed out, that are kept of
/// one rank.
const MAX_ITEMS: usize = 4;
/// The longest NCCL warning that is kept, in bytes.
const MAX_WARNING_BYTES: usize = 300;
/// The longest name of a collective that is kept, in bytes.
const MAX_OPERATION_BYTES: usize = 64;
/// The text that precedes each warning which NCCL prints to a rank's output.
const WARNING_MARKER: &str = "NCCL WARN ";
/// The text that precedes the description of a collective for which torch's watchdog has waited too
/// long.
const TIMEOUT_MARKER: &str = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=";

/// Collects what the output of a rank contains about collectives that failed or timed out. The
/// thread that copies the output adds the lines, and the agent reads the result. Clones share the
/// result.
#[derive(Clone, Debug)]
pub(in crate::agent) struct OutputEvidence {
    rank: Rank,
    found: Arc<Mutex<FoundLines>>,
}

/// The NCCL warnings and the timed-out collectives that [`OutputEvidence`] has found in the output
/// of a rank.
#[derive(Debug, Default)]
struct FoundLines {
    /// The newest warnings of NCCL, oldest first.
    nccl_warnings: Vec<String>,
    /// The first collectives that torch has reported as timed out, without duplicates.
    timeouts: Vec<CollectiveTimeout>,
}

impl OutputEvidence {
    /// Creates an empty collection for the NCCL warnings and timed-out collectives in the output of
    /// the rank `rank`.
    pub(in crate::agent) fn new(rank: Rank) -> OutputEvidence {
        OutputEvidence { rank, found: Arc::default() }
    }

    /// Searches `bytes`, complete lines of the rank's output, for warnings of NCCL and for
    /// collectives that torch has reported as timed out.
    pub(in crate::agent) fn add_output(&self, bytes: &[u8]) {
        // Almost no output has a marker, so one pass searches for the first letter of both.
        let candidates = bytes.iter().enumerate().filter(|(_, byte)| matches!(byte, b'N' | b'W'));
        for (at, first) in candidates {
            let rest = &bytes[at..];
            let marker = if *first == b'N' { WARNING_MARKER } else { TIMEOUT_MARKER };
            if let Some(rest) = rest.strip_prefix(marker.as_bytes()) {
                let line = rest.split(|byte| *byte == b'\n').next().unwrap_or_default();
                let text = String::from_utf8_lossy(&line[..line.len().min(4 * MAX_WARNING_BYTES)]);
                let mut found = self.lock();
                match first {
                    b'N' => found.add_warning(&text),
                    _ => found.add_timeout(self.rank, &text),
                }
            }
        }
    }

    /// Returns whether torch's watchdog has reported that a collective has timed out.
    pub(in crate::agent) fn has_timeout(&self) -> bool {
        !self.lock().timeouts.is_empty()
    }

    /// Adds the NCCL warnings and timed-out collectives that were found in the rank's output to the
    /// evidence about the rank.
    pub(in crate::agent) fn add_to(&self, evidence: &mut RankEvidence) {
        let found = self.lock();
        evidence.nccl_warnings.clone_from(&found.nccl_warnings);
        evidence.collective_timeouts.extend(found.timeouts.iter().cloned());
    }

    fn lock(&self) -> MutexGuard<'_, FoundLines> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FoundLines {
    /// Adds a warning of NCCL, and drops the oldest one if there are too many.
    fn add_warning(&mut self, warning: &str) {
        let printable: String = warning.trim().chars().filter(|c| !c.is_control()).collect();
        self.nccl_warnings.push(printable[..printable.floor_char_boundary(MAX_WARNING_BYTES)].to_owned());
        if self.nccl_warnings.len() > MAX_ITEMS {
            self.nccl_warnings.remove(0);
        }
    }

    /// Records the timed-out collective that `description` names, a text which torch prints after
    /// [`TIMEOUT_MARKER`]. The rank in the line itself may be a rank within a process group.
    fn add_timeout(&mut self, rank: Rank, description: &str) {
        let timeout = parse_timeout(rank, description);
        if let Some(timeout) = timeout.filter(|timeout| !self.timeouts.contains(timeout))
            && self.timeouts.len() < MAX_ITEMS
        {
            self.timeouts.push(timeout);
        }
    }
}

/// Parses the sequence number and the name of a timed-out collective from `description`, a text
/// that torch prints.
fn parse_timeout(rank: Rank, description: &str) -> Option<CollectiveTimeout> {
    let (seq, rest) = description.split_once(", OpType=")?;
    let (operation, _) = rest.split_once([',', ')'])?;
    let is_name = operation.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    (is_name && operation.len() <= MAX_OPERATION_BYTES).then_some(())?;
    Some(CollectiveTimeout { rank, seq: seq.parse().ok()?, operation: operation.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is found in `text`, the output of rank 5.
    fn find(text: &str) -> RankEvidence {
        let (output, mut evidence) = (OutputEvidence::new(5), RankEvidence::default());
        output.add_output(text.as_bytes());
        output.add_to(&mut evidence);
        assert_eq!(output.has_timeout(), !evidence.collective_timeouts.is_empty());
        evidence
    }

    #[test]
    fn the_newest_warnings_of_the_output_are_found() {
        assert_eq!(find("").nccl_warnings, [""; 0]);
        let mut text = "n1:77:90 [0] NCCL INFO Bootstrap : Using eth0\n".repeat(2000);
        for number in 0..6 {
            text += &format!("\nn1:77:90 [0] socket.cc:{number} NCCL WARN too early\n");
        }
        text += "n1:77:95 [0] net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.7 with \
                 status=12 opcode=0 len=0 vendor err 129\u{1b}[0m\nloss 3.2\n";
        let warnings = find(&text).nccl_warnings;
        assert_eq!(warnings.len(), MAX_ITEMS);
        assert!(warnings[3].starts_with("NET/IB : Got completion from peer 10.0.0.7 with status=12"));
        assert!(!warnings[3].contains('\u{1b}') && !warnings[3].contains("loss"), "{warnings:?}");
        let long = find(&format!("a NCCL WARN {}", "ä".repeat(5000))).nccl_warnings;
        assert_eq!(long[0].len(), MAX_WARNING_BYTES);
    }

    /// Lines of torch 1.12, 2.1, 2.5 and 2.7, each about another collective, and the exception in
    /// which torch repeats the last one.
    const WATCHDOG_LINES: &str = "\
[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.
[rank0]:[E1206 18:44:12.715298746 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, NumelIn=544997376, NumelOut=68124672, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.
[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
[rank1]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 0 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
";

    #[test]
    fn collectives_that_torch_reports_as_timed_out_are_found() {
        let found = |text: &str| find(text).collective_timeouts;
        let timeout = |seq, operation: &str| CollectiveTimeout { rank: 5, seq, operation: operation.into() };
        let expected =
            [timeout(469_508, "ALLREDUCE"), timeout(7753, "_REDUCE_SCATTER_BASE"), timeout(808, "ALLREDUCE")];
        assert_eq!(found(WATCHDOG_LINES), expected);
        for cut in (0..WATCHDOG_LINES.len()).filter(|cut| WATCHDOG_LINES.is_char_boundary(*cut)) {
            assert!(found(&WATCHDOG_LINES[..cut]).len() <= expected.len());
        }
        assert_eq!(found(&format!("{TIMEOUT_MARKER}1, OpType=A\u{1b}[0m, x)")), []);
        assert_eq!(found(&format!("{TIMEOUT_MARKER}x, OpType=ALLREDUCE)")), []);
        let many: String = (0..9).map(|n| format!("{TIMEOUT_MARKER}{n}, OpType=SEND)\n")).collect();
        assert_eq!(found(&many).len(), MAX_ITEMS);
    }
}
