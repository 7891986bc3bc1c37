//! Reads the newest measurements of a run (step times, usage of hosts, slow ranks) from its status
//! file, within limits.
use crate::{journal_line::truncate_text, run_source::RunSource};
use protocol::run_measurements::{RunMeasurements, STATUS_FILE, STATUS_VERSION};
use std::{
    io::Read,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// The largest size of a run's status file that is read, in bytes. A longer file is not shown.
const MAX_STATUS_BYTES: u64 = 8 << 20;
/// The largest number of hosts whose measurements are shown.
const MAX_HOSTS: usize = 4096;
/// The largest number of slow ranks that are shown.
const MAX_STRAGGLERS: usize = 64;
/// The longest text from a status file that is shown, in bytes.
const MAX_TEXT_BYTES: usize = 1024;
/// The age in seconds above which the measurements in a status file are not shown, although the run
/// is active.
const MAX_STATUS_AGE_S: f64 = 60.0;

/// Reads the newest measurements of a run from the status file in its run directory. Returns `None`
/// if the file is missing, too long or damaged.
pub(crate) fn read_run_measurements(source: &dyn RunSource, run_dir: &Path) -> Option<RunMeasurements> {
    let mut bytes = Vec::new();
    let file = source.open_file(&run_dir.join(STATUS_FILE)).ok()?;
    file.take(MAX_STATUS_BYTES + 1).read_to_end(&mut bytes).ok()?;
    if bytes.len() as u64 > MAX_STATUS_BYTES {
        return None;
    }
    parse_run_measurements(&bytes)
}

/// Parses the content of a run's status file, which contains its newest measurements. Shortens its
/// lists and texts. Returns `None` for another version or damaged content.
pub(crate) fn parse_run_measurements(bytes: &[u8]) -> Option<RunMeasurements> {
    let mut status: RunMeasurements = serde_json::from_slice(bytes).ok()?;
    if status.version != STATUS_VERSION {
        return None;
    }
    status.hosts.truncate(MAX_HOSTS);
    status.stragglers.truncate(MAX_STRAGGLERS);
    let shorten = |text: &mut String| *text = truncate_text(std::mem::take(text), MAX_TEXT_BYTES);
    for host in &mut status.hosts {
        shorten(&mut host.host);
        host.usage.gpus.iter_mut().for_each(|gpu| gpu.clock_reasons.iter_mut().for_each(shorten));
    }
    for report in &mut status.stragglers {
        shorten(&mut report.host);
        shorten(&mut report.message);
    }
    Some(status)
}

/// Returns whether the controller wrote the measurements `status` less than a minute before or
/// after the present time.
pub(crate) fn is_recent(status: &RunMeasurements) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    (now - status.time).abs() < MAX_STATUS_AGE_S
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::AnyFileSource;

    #[test]
    fn a_damaged_or_long_status_is_not_shown() {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |text: &str| std::fs::write(directory.path().join(STATUS_FILE), text).expect("written");
        let read = || read_run_measurements(&AnyFileSource, directory.path());
        assert_eq!(read(), None);
        for text in ["", "[]", "{", r#"{"hosts":7}"#, "\0"] {
            write(text);
            assert_eq!(read(), None, "{text}");
        }
        write(&format!(r#"{{"version":1,"a":"{}"}}"#, "x".repeat(9 << 20)));
        assert_eq!(read(), None);
        let host = format!(r#"{{"host":"{}"}}"#, "h".repeat(5000));
        write(&format!(r#"{{"version":1,"time":5.0,"hosts":[{}]}}"#, vec![host; 1000].join(",")));
        let status = read().expect("a status");
        assert_eq!((status.hosts.len(), status.time), (1000, 5.0));
        assert!(status.hosts[0].host.len() <= MAX_TEXT_BYTES + 3 && !is_recent(&status));
    }
}
