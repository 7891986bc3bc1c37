//! [`LogEvidence`]: what the log of a rank that hangs contains about collectives: the warnings of
//! NCCL, which NCCL writes with `NCCL_DEBUG=WARN` or a higher level, and the collectives that
//! torch's watchdog of NCCL has reported as timed out.
use crate::private_files::open_own_file_without_links;
use jobspec::ids::Rank;
use protocol::hang::{CollectiveTimeout, RankEvidence};
use std::{
    io::{Read, Seek, SeekFrom},
    path::Path,
};

/// How many bytes at the end of a rank's log are searched.
const SEARCHED_LOG_BYTES: u64 = 64 << 10;
/// The largest number of NCCL warnings, and of collectives that have timed out, that are kept of
/// one rank.
const MAX_ITEMS: usize = 4;
/// The longest NCCL warning that is kept, in bytes.
const MAX_WARNING_BYTES: usize = 300;
/// The longest name of a collective that is kept, in bytes.
const MAX_OPERATION_BYTES: usize = 64;
/// The text that precedes each warning which NCCL prints to a rank's output.
const WARNING_MARKER: &str = " NCCL WARN ";
/// The text that precedes the description of a collective for which torch's watchdog has waited too
/// long.
const TIMEOUT_MARKER: &str = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=";

/// What the log of a rank contains about collectives that failed or timed out.
#[derive(Debug, Default)]
pub(in crate::agent) struct LogEvidence {
    /// The newest warnings of NCCL, oldest first.
    nccl_warnings: Vec<String>,
    /// The first collectives that torch has reported as timed out, without duplicates.
    timeouts: Vec<CollectiveTimeout>,
}

impl LogEvidence {
    /// Searches the end of the log file `log` of the rank `rank`. Finds nothing if the log cannot
    /// be read.
    pub(in crate::agent) fn read(rank: Rank, log: &Path) -> LogEvidence {
        let read = || {
            let mut file = open_own_file_without_links(log)?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(SEARCHED_LOG_BYTES)))?;
            let mut bytes = Vec::new();
            file.take(SEARCHED_LOG_BYTES).read_to_end(&mut bytes)?;
            std::io::Result::Ok(bytes)
        };
        let find = |bytes: Vec<u8>| LogEvidence::find(rank, &String::from_utf8_lossy(&bytes));
        read().map_or_else(|_| LogEvidence::default(), find)
    }

    /// Searches `text`, the last part of the log of the rank `rank`.
    fn find(rank: Rank, text: &str) -> LogEvidence {
        let warnings = text.lines().rev().filter_map(find_warning);
        let mut nccl_warnings: Vec<String> = warnings.take(MAX_ITEMS).collect();
        nccl_warnings.reverse();
        let mut timeouts = Vec::new();
        for timeout in text.lines().filter_map(|line| find_timeout(rank, line)) {
            if timeouts.len() < MAX_ITEMS && !timeouts.contains(&timeout) {
                timeouts.push(timeout);
            }
        }
        LogEvidence { nccl_warnings, timeouts }
    }

    /// Adds what was found in the log to the other evidence about the rank.
    pub(in crate::agent) fn add_to(self, evidence: &mut RankEvidence) {
        evidence.nccl_warnings = self.nccl_warnings;
        evidence.collective_timeouts = self.timeouts;
    }
}

/// Returns the warning of NCCL that a line of a log contains.
fn find_warning(line: &str) -> Option<String> {
    let (_, warning) = line.split_once(WARNING_MARKER)?;
    let printable: String = warning.trim().chars().filter(|c| !c.is_control()).collect();
    Some(printable[..printable.floor_char_boundary(MAX_WARNING_BYTES)].to_owned())
}

/// Returns the collective that, according to a line of the log of the rank `rank`, has timed out.
/// The rank in the line itself may be a rank within a process group.
fn find_timeout(rank: Rank, line: &str) -> Option<CollectiveTimeout> {
    let (_, description) = line.split_once(TIMEOUT_MARKER)?;
    let (seq, rest) = description.split_once(", OpType=")?;
    let (operation, _) = rest.split_once([',', ')'])?;
    let is_name = operation.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    (is_name && operation.len() <= MAX_OPERATION_BYTES).then_some(())?;
    Some(CollectiveTimeout { rank, seq: seq.parse().ok()?, operation: operation.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_warnings_of_a_log_are_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("rank-0.log");
        let read = || LogEvidence::read(0, &log).nccl_warnings;
        assert_eq!(read(), [""; 0], "there is no log");
        let mut text = "n1:77:90 [0] NCCL INFO Bootstrap : Using eth0\n".repeat(2000);
        for number in 0..6 {
            text += &format!("\nn1:77:90 [0] socket.cc:{number} NCCL WARN too early\n");
        }
        text += "n1:77:95 [0] net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.7 with \
                 status=12 opcode=0 len=0 vendor err 129\u{1b}[0m\nloss 3.2\n";
        std::fs::write(&log, text).expect("written");
        let warnings = read();
        assert_eq!(warnings.len(), MAX_ITEMS);
        assert!(warnings[3].starts_with("NET/IB : Got completion from peer 10.0.0.7 with status=12"));
        assert!(!warnings[3].contains('\u{1b}'), "{warnings:?}");
        let long = find_warning(&format!("a NCCL WARN {}", "ä".repeat(500))).expect("a warning");
        assert_eq!(long.len(), MAX_WARNING_BYTES);
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
        let found = |text: &str| LogEvidence::find(5, text).timeouts;
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
