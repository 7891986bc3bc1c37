//! Finds GPU errors (Xid) in the kernel log, where NVIDIA's driver reports them, in some cases with
//! the pid of the affected process.
use super::kernel_log::KernelLog;
use contract::failure::GpuFault;

/// The largest number of faults that a [`GpuFaultWatch`] keeps. Later faults are dropped.
const MAX_FAULTS: usize = 1000;

/// The Xid of the cleanup after a process has ended. This Xid follows other faults and is ignored.
const XID_CLEANUP: u32 = 45;

/// The most common Xids with descriptions from NVIDIA's list of Xid errors.
const XID_DESCRIPTIONS: [(u32, &str); 5] = [
    (31, "GPU memory page fault"),
    (43, "the GPU stopped processing"),
    (48, "uncorrectable memory error (double-bit ECC)"),
    (63, "a row of memory is to be remapped"),
    (79, "the GPU fell off the bus"),
];

/// A GPU error that the kernel log reports.
#[derive(Debug, PartialEq)]
struct LoggedFault {
    /// The address of the GPU on the PCI bus.
    pci_address: String,
    xid: u32,
    /// The pid of the affected process; `None` if the driver does not report it.
    pid: Option<u32>,
}

/// Collects the GPU errors that the kernel log reports after the start of the watch.
#[derive(Debug)]
pub(super) struct GpuFaultWatch {
    log: Option<KernelLog>,
    faults: Vec<LoggedFault>,
}

impl GpuFaultWatch {
    /// Starts the watch: opens the kernel log at its end. If this process may not read the kernel
    /// log, the watch finds no faults.
    pub(super) fn start() -> Self {
        GpuFaultWatch { log: KernelLog::open(), faults: Vec::new() }
    }

    /// Reads the new records of the kernel log, and finds the GPU error that explains the end of
    /// the process `pid`.
    ///
    /// Returns the first fault with this pid, else the first fault without a pid, else `None`.
    pub(super) fn find_fault(&mut self, pid: u32) -> Option<GpuFault> {
        if let Some(log) = &mut self.log {
            log.read_new_records(|record| {
                self.faults.extend(parse_fault(record).filter(|fault| fault.xid != XID_CLEANUP));
            });
            self.faults.truncate(MAX_FAULTS);
        }
        let exact = self.faults.iter().find(|fault| fault.pid == Some(pid));
        let fault = exact.or_else(|| self.faults.iter().find(|fault| fault.pid.is_none()))?;
        let description = XID_DESCRIPTIONS.iter().find(|(xid, _)| *xid == fault.xid);
        let description = description.map(|(_, description)| (*description).to_owned());
        Some(GpuFault { xid: fault.xid, pci_address: fault.pci_address.clone(), description })
    }
}

/// Parses a record of the kernel log such as
/// `…NVRM: Xid (PCI:0000:17:00): 31, pid=4242, name=python, …`. Returns `None` if the record does
/// not report a GPU error.
fn parse_fault(record: &str) -> Option<LoggedFault> {
    let (_, rest) = record.split_once("NVRM: Xid (PCI:")?;
    let (pci_address, rest) = rest.split_once("):")?;
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    let pid = rest.split_once("pid=").and_then(|(_, pid)| digits(pid.trim_start_matches('\'')));
    Some(LoggedFault { pci_address: pci_address.to_owned(), xid: digits(rest.trim_start())?, pid })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_watch(records: &[&str]) -> GpuFaultWatch {
        GpuFaultWatch { log: None, faults: records.iter().filter_map(|record| parse_fault(record)).collect() }
    }

    #[test]
    fn xid_records_are_parsed() {
        let fault_of = |record: &str| parse_fault(record).map(|f| (f.pci_address, f.xid, f.pid));
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
            assert_eq!(parse_fault(other), None, "{other}");
        }
    }

    #[test]
    fn a_fault_of_the_process_takes_precedence_over_one_without_a_pid() {
        let of_other_process = "NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=a";
        let without_pid = "NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>";
        let of_process = "NVRM: Xid (PCI:0000:03:00): 7777, pid=9, name=b";
        assert_eq!(make_watch(&[of_other_process]).find_fault(9), None);
        let fault = |xid, pci_address: &str, description: Option<&str>| GpuFault {
            xid,
            pci_address: pci_address.into(),
            description: description.map(str::to_owned),
        };
        let off_the_bus = fault(79, "0000:02:00", Some("the GPU fell off the bus"));
        assert_eq!(make_watch(&[of_other_process, without_pid]).find_fault(9), Some(off_the_bus));
        assert_eq!(
            make_watch(&[of_other_process, without_pid, of_process]).find_fault(9),
            Some(fault(7777, "0000:03:00", None))
        );
    }
}
