//! Finds GPU errors (Xid) in the kernel log, where NVIDIA's driver reports them, in some cases with
//! the pid of the affected process.
use super::kernel_log::KernelLog;
use protocol::failure::GpuFault;
use std::{collections::VecDeque, time::Duration};

/// The largest number of GPU errors from the kernel log that are remembered. A new fault replaces
/// the oldest one.
const MAX_FAULTS: usize = 1000;
/// How long after a GPU error without a pid in the kernel log the end of a process may still be
/// explained by that error. A process fails at its next CUDA call, but may compute on the CPU or
/// wait for data before that.
const ATTRIBUTION_WINDOW: Duration = Duration::from_secs(120);

/// The Xid (error number) that the driver logs when it cleans up after a process that has ended.
/// This Xid follows other faults and is ignored.
const XID_CLEANUP: u32 = 45;

/// The most common Xids with descriptions from NVIDIA's list of Xid errors.
const XID_DESCRIPTIONS: [(u32, &str); 5] = [
    (31, "GPU memory page fault"),
    (43, "the GPU stopped processing"),
    (48, "uncorrectable memory error (double-bit ECC)"),
    (63, "a row of memory is to be remapped"),
    (79, "the GPU fell off the bus"),
];

/// A GPU error (Xid) that the kernel log reports.
#[derive(Debug, PartialEq)]
struct LoggedFault {
    /// The address of the GPU on the PCI bus.
    pci_address: String,
    xid: u32,
    /// The pid of the affected process. If the driver does not report it, the pid of the process
    /// whose end was attributed to the fault, or `None` before that.
    pid: Option<u32>,
    /// The time of the fault since the boot of the host, from the record or, if the record has no
    /// time, the time at which the record was read.
    logged_at: Duration,
}

/// Collects the GPU errors (Xids) that the kernel log reports after this value was created.
#[derive(Debug)]
pub(super) struct GpuFaultWatch {
    log: Option<KernelLog>,
    /// The newest [`MAX_FAULTS`] faults, in the order of the kernel log.
    faults: VecDeque<LoggedFault>,
}

impl GpuFaultWatch {
    /// Starts to collect GPU errors (Xids) from the kernel log, except for those that the log
    /// already contains. If this process may not read the kernel log, the watch finds no faults.
    pub(super) fn start() -> Self {
        GpuFaultWatch { log: KernelLog::open(), faults: VecDeque::new() }
    }

    /// Reads the new records of the kernel log, and returns the GPU error that explains why the
    /// process with the pid `pid` has ended.
    ///
    /// Returns the first fault with this pid. Without such a fault, returns the first fault of the
    /// last [`ATTRIBUTION_WINDOW`] without a pid, and attributes the fault to this process only.
    pub(super) fn find_fault(&mut self, pid: u32) -> Option<GpuFault> {
        let now = self.read_log();
        self.attribute_fault(pid, now)
    }

    /// Reads the new records of the kernel log, and returns the GPU errors that the driver has
    /// logged with the pid of one of the processes `pids`.
    pub(super) fn list_faults_of(&mut self, pids: &[i32]) -> Vec<GpuFault> {
        self.read_log();
        let is_of_process = |pid: u32| pids.iter().any(|member| u32::try_from(*member) == Ok(pid));
        let faults = self.faults.iter().filter(|fault| fault.pid.is_some_and(is_of_process));
        faults.map(LoggedFault::to_gpu_fault).collect()
    }

    /// Lists the GPU errors from the last period `within` that the driver has logged without a pid
    /// and that explain the end of no process yet. Reads the new records of the kernel log before.
    pub(super) fn list_unattributed_faults(&mut self, within: Duration) -> Vec<GpuFault> {
        let now = self.read_log();
        let is_recent = |fault: &&LoggedFault| now.saturating_sub(fault.logged_at) <= within;
        let faults = self.faults.iter().filter(|fault| fault.pid.is_none()).filter(is_recent);
        faults.map(LoggedFault::to_gpu_fault).collect()
    }

    /// Reads the new records of the kernel log, and keeps the GPU errors (Xids) that they report.
    /// Returns the time since the boot of the host.
    fn read_log(&mut self) -> Duration {
        let now = read_monotonic_time();
        if let Some(mut log) = self.log.take() {
            log.read_new_records(|record| self.record_fault(record, now));
            self.log = Some(log);
        }
        now
    }

    /// Remembers the GPU error that `record`, one record of the kernel log, reports; does nothing
    /// if the record reports no GPU error. `now` is the time since the boot of the host.
    fn record_fault(&mut self, record: &str, now: Duration) {
        let Some(fault) = parse_fault(record, now).filter(|fault| fault.xid != XID_CLEANUP) else { return };
        if self.faults.len() == MAX_FAULTS {
            self.faults.pop_front();
        }
        self.faults.push_back(fault);
    }

    /// Finds the GPU error in the kernel log that explains the end of the process `pid`: one with
    /// this pid, or a recent one without a pid. A fault without a pid gets this pid, so that no
    /// other process is matched.
    fn attribute_fault(&mut self, pid: u32, now: Duration) -> Option<GpuFault> {
        let is_recent = |fault: &LoggedFault| now.saturating_sub(fault.logged_at) <= ATTRIBUTION_WINDOW;
        let of_process = self.faults.iter().position(|fault| fault.pid == Some(pid));
        let without_pid = || self.faults.iter().position(|fault| fault.pid.is_none() && is_recent(fault));
        let index = of_process.or_else(without_pid)?;
        let fault = &mut self.faults[index];
        fault.pid = Some(pid);
        Some(fault.to_gpu_fault())
    }
}

impl LoggedFault {
    /// Converts a GPU error from the kernel log to the form in which the agent reports it to the
    /// controller, with a description of the Xid.
    fn to_gpu_fault(&self) -> GpuFault {
        let description = XID_DESCRIPTIONS.iter().find(|(xid, _)| *xid == self.xid);
        let description = description.map(|(_, description)| (*description).to_owned());
        GpuFault { xid: self.xid, pci_address: self.pci_address.clone(), description }
    }
}

/// Parses a GPU error (Xid) from a record of the kernel log. An example of a record is
/// `4,1,8000000,-;NVRM: Xid (PCI:0000:17:00): 31, pid=4242, name=python, …`. `now` replaces the
/// time of a record without one. Returns `None` if the record does not report a GPU error.
fn parse_fault(record: &str, now: Duration) -> Option<LoggedFault> {
    let (prefix, rest) = record.split_once("NVRM: Xid (PCI:")?;
    let (pci_address, rest) = rest.split_once("):")?;
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    let pid = rest.split_once("pid=").and_then(|(_, pid)| digits(pid.trim_start_matches('\'')));
    // The third field of the prefix is the time since the boot in microseconds.
    let micros = prefix.split(',').nth(2).and_then(|micros| micros.parse().ok());
    let logged_at = micros.map_or(now, Duration::from_micros);
    Some(LoggedFault { pci_address: pci_address.to_owned(), xid: digits(rest.trim_start())?, pid, logged_at })
}

/// Reads the monotonic clock, which counts from the boot of the host like the times in the kernel
/// log.
fn read_monotonic_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes. The clock exists on every Linux, so the call succeeds.
    _ = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel log record of a GPU error without a pid, 8 s after the boot.
    const WITHOUT_PID: &str = "3,1,8000000,-;NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>";

    /// Creates a watch that has read the kernel log records `records`, 10 s after the boot.
    fn make_watch(records: &[&str]) -> GpuFaultWatch {
        let mut watch = GpuFaultWatch { log: None, faults: VecDeque::new() };
        records.iter().for_each(|record| watch.record_fault(record, Duration::from_secs(10)));
        watch
    }

    /// Returns the Xid of the fault that explains the end of the process `pid` `seconds` after the
    /// boot.
    fn attribute_xid(watch: &mut GpuFaultWatch, pid: u32, seconds: u64) -> Option<u32> {
        watch.attribute_fault(pid, Duration::from_secs(seconds)).map(|fault| fault.xid)
    }

    #[test]
    fn xid_records_are_parsed() {
        let parse_now = |record: &str| parse_fault(record, Duration::from_secs(10));
        let fault_of = |record: &str| parse_now(record).map(|f| (f.pci_address, f.xid, f.pid));
        let memory =
            "4,12,34,-;NVRM: Xid (PCI:0000:17:00): 31, pid=4242, name=python, Ch 00000008, MMU Fault";
        assert_eq!(fault_of(memory), Some(("0000:17:00".into(), 31, Some(4242))));
        let lost =
            "NVRM: Xid (PCI:0000:23:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";
        assert_eq!(fault_of(lost), Some(("0000:23:00".into(), 79, None)));
        assert_eq!(fault_of("NVRM: Xid (PCI:0000:01:00): 48"), Some(("0000:01:00".into(), 48, None)));
        for other in
            ["", "NVRM: loading", "NVRM: Xid (PCI:0000:01:00", "NVRM: Xid (PCI:0): x", "Xid (PCI:0): 3"]
        {
            assert_eq!(parse_now(other), None, "{other}");
        }
        let time_of = |record: &str| parse_now(record).map(|fault| fault.logged_at);
        assert_eq!(time_of(WITHOUT_PID), Some(Duration::from_secs(8)));
        assert_eq!(time_of(lost), Some(Duration::from_secs(10)), "the time of the reading");
    }

    #[test]
    fn a_fault_of_the_process_takes_precedence_over_one_without_a_pid() {
        let of_other_process = "NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=a";
        let of_process = "NVRM: Xid (PCI:0000:03:00): 7777, pid=9, name=b";
        let find = |records: &[&str]| make_watch(records).attribute_fault(9, Duration::from_secs(10));
        assert_eq!(find(&[of_other_process]), None);
        let fault = |xid, pci_address: &str, description: Option<&str>| GpuFault {
            xid,
            pci_address: pci_address.into(),
            description: description.map(str::to_owned),
        };
        let off_the_bus = fault(79, "0000:02:00", Some("the GPU fell off the bus"));
        assert_eq!(find(&[of_other_process, WITHOUT_PID]), Some(off_the_bus));
        assert_eq!(find(&[of_other_process, WITHOUT_PID, of_process]), Some(fault(7777, "0000:03:00", None)));
    }

    #[test]
    fn a_fault_without_a_pid_explains_the_end_of_one_process() {
        let mut watch = make_watch(&[WITHOUT_PID]);
        assert_eq!(attribute_xid(&mut watch, 9, 20), Some(79));
        assert_eq!(attribute_xid(&mut watch, 10, 20), None, "the fault belongs to process 9");
        // The final report of a worker and its exit ask for the same process.
        assert_eq!(attribute_xid(&mut watch, 9, 21), Some(79));
    }

    #[test]
    fn faults_are_listed_by_their_processes() {
        let of_process = "NVRM: Xid (PCI:0000:03:00): 31, pid=9, name=b";
        let mut watch = make_watch(&[WITHOUT_PID, of_process]);
        let xids = |faults: Vec<GpuFault>| faults.into_iter().map(|fault| fault.xid).collect::<Vec<_>>();
        assert_eq!(xids(watch.list_faults_of(&[8, 9])), [31]);
        assert_eq!(xids(watch.list_faults_of(&[8])), [0; 0]);
        assert_eq!(xids(watch.list_unattributed_faults(Duration::MAX)), [79]);
        assert_eq!(attribute_xid(&mut watch, 10, 20), Some(79));
        assert_eq!(xids(watch.list_unattributed_faults(Duration::MAX)), [0; 0], "it is of process 10");
    }

    #[test]
    fn a_fault_without_a_pid_explains_no_end_after_the_window() {
        assert_eq!(attribute_xid(&mut make_watch(&[WITHOUT_PID]), 9, 8 + 120), Some(79));
        assert_eq!(attribute_xid(&mut make_watch(&[WITHOUT_PID]), 9, 8 + 121), None);
        // The clock of the kernel log may be ahead of the monotonic clock.
        assert_eq!(attribute_xid(&mut make_watch(&[WITHOUT_PID]), 9, 7), Some(79));
    }

    #[test]
    fn the_newest_faults_are_kept() {
        let mut watch = make_watch(&["NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=a"; MAX_FAULTS]);
        watch.record_fault("NVRM: Xid (PCI:0000:03:00): 48, pid=9, name=b", Duration::from_secs(10));
        assert_eq!((watch.faults.len(), attribute_xid(&mut watch, 9, 10)), (MAX_FAULTS, Some(48)));
    }
}
