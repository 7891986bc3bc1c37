//! [`read_nccl_warnings`]: the warnings of NCCL in the log of a rank, which NCCL writes with
//! `NCCL_DEBUG=WARN` or a higher level.
use crate::private_files::open_own_file_without_links;
use std::{
    io::{Read, Seek, SeekFrom},
    path::Path,
};

/// How many bytes at the end of a rank's log are searched for warnings of NCCL.
const SEARCHED_LOG_BYTES: u64 = 64 << 10;
/// The largest number of NCCL warnings that are kept of one rank.
const MAX_WARNINGS: usize = 4;
/// The longest NCCL warning that is kept, in bytes.
const MAX_WARNING_BYTES: usize = 300;
/// The text that precedes each warning which NCCL prints to a rank's output.
const WARNING_MARKER: &str = " NCCL WARN ";

/// Returns the newest warnings that NCCL has written near the end of the log file `log` of a rank.
/// Returns no warnings if the log cannot be read.
pub(in crate::agent) fn read_nccl_warnings(log: &Path) -> Vec<String> {
    let read = || {
        let mut file = open_own_file_without_links(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(SEARCHED_LOG_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(SEARCHED_LOG_BYTES).read_to_end(&mut bytes)?;
        std::io::Result::Ok(bytes)
    };
    read().map_or_else(|_| Vec::new(), |bytes| find_warnings(&String::from_utf8_lossy(&bytes)))
}

/// Finds the newest warnings of NCCL in `text`, the last part of a rank's log.
fn find_warnings(text: &str) -> Vec<String> {
    let warning = |line: &str| {
        let (_, warning) = line.split_once(WARNING_MARKER)?;
        let printable: String = warning.trim().chars().filter(|c| !c.is_control()).collect();
        Some(printable[..printable.floor_char_boundary(MAX_WARNING_BYTES)].to_owned())
    };
    let mut warnings: Vec<String> = text.lines().rev().filter_map(warning).take(MAX_WARNINGS).collect();
    warnings.reverse();
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_warnings_of_a_log_are_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("rank-0.log");
        assert_eq!(read_nccl_warnings(&log), [""; 0], "there is no log");
        let mut text = "n1:77:90 [0] NCCL INFO Bootstrap : Using eth0\n".repeat(2000);
        for number in 0..6 {
            text += &format!("\nn1:77:90 [0] socket.cc:{number} NCCL WARN too early\n");
        }
        text += "n1:77:95 [0] net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.7 with \
                 status=12 opcode=0 len=0 vendor err 129\u{1b}[0m\nloss 3.2\n";
        std::fs::write(&log, text).expect("written");
        let warnings = read_nccl_warnings(&log);
        assert_eq!(warnings.len(), MAX_WARNINGS);
        assert!(warnings[3].starts_with("NET/IB : Got completion from peer 10.0.0.7 with status=12"));
        assert!(!warnings[3].contains('\u{1b}'), "{warnings:?}");
        assert_eq!(find_warnings(&format!("a NCCL WARN {}", "ä".repeat(500)))[0].len(), MAX_WARNING_BYTES);
    }
}
