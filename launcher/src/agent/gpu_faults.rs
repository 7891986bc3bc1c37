//! Did a GPU fail under a process? NVIDIA's driver writes such errors (Xid) into the kernel's log, with the pid where it knows it.
use super::kernel_log::KernelLog;

/// Most faults that are kept.
const MOST_FAULTS: usize = 1000;

/// Tells of other faults: what the driver tidied up after a process that had ended.
const CLEANED_UP: u32 = 45;

/// What some common numbers mean. Of others the number is told: NVIDIA's list of Xid errors has them all.
const MEANINGS: [(u32, &str); 5] = [
    (31, "a fault of the GPU's memory management"),
    (43, "the GPU stopped processing"),
    (48, "an error of memory that ECC couldn't correct"),
    (63, "a row of memory is to be replaced"),
    (79, "the GPU fell off the bus"),
];

/// An error as the driver wrote it.
#[derive(Debug, PartialEq)]
struct Fault {
    /// The GPU, on the PCI bus.
    bus: String,
    xid: u32,
    /// `None`: the driver doesn't know.
    pid: Option<u32>,
}

/// The faults since it was made.
#[derive(Debug)]
pub(super) struct GpuFaults {
    log: Option<KernelLog>,
    faults: Vec<Fault>,
}

impl GpuFaults {
    pub(super) fn start() -> Self {
        GpuFaults { log: KernelLog::open(), faults: Vec::new() }
    }

    /// The first one of this process, or else one that the driver has no pid for.
    pub(super) fn of(&mut self, pid: u32) -> Option<String> {
        if let Some(log) = &mut self.log {
            log.read(|record| {
                self.faults.extend(fault(record).filter(|fault| fault.xid != CLEANED_UP));
            });
            self.faults.truncate(MOST_FAULTS);
        }
        let own = self.faults.iter().find(|fault| fault.pid == Some(pid));
        let fault = own.or_else(|| self.faults.iter().find(|fault| fault.pid.is_none()))?;
        let meaning = MEANINGS.iter().find(|(xid, _)| *xid == fault.xid);
        let meaning = meaning.map_or_else(String::new, |(_, meaning)| format!(" ({meaning})"));
        Some(format!("NVIDIA's driver reports Xid {}{meaning} of the GPU at {}", fault.xid, fault.bus))
    }
}

/// The fault in `…NVRM: Xid (PCI:0000:17:00): 31, pid=4242, name=python, …`.
fn fault(record: &str) -> Option<Fault> {
    let (_, said) = record.split_once("NVRM: Xid (PCI:")?;
    let (bus, said) = said.split_once("):")?;
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    let pid = said.split_once("pid=").and_then(|(_, pid)| digits(pid.trim_start_matches('\'')));
    Some(Fault { bus: bus.to_owned(), xid: digits(said.trim_start())?, pid })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(records: &[&str]) -> GpuFaults {
        GpuFaults { log: None, faults: records.iter().filter_map(|record| fault(record)).collect() }
    }

    #[test]
    fn the_drivers_words_are_understood() {
        let fault_of = |record: &str| fault(record).map(|f| (f.bus, f.xid, f.pid));
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
            assert_eq!(fault(other), None, "{other}");
        }
    }

    #[test]
    fn a_process_has_its_own_fault_or_one_that_is_nobodys() {
        let others = "NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=a";
        let nobodys = "NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>";
        let own = "NVRM: Xid (PCI:0000:03:00): 7777, pid=9, name=b";
        assert_eq!(read(&[others]).of(9), None);
        let said = |records: &[&str]| read(records).of(9).unwrap_or_default();
        assert!(
            said(&[others, nobodys]).ends_with("Xid 79 (the GPU fell off the bus) of the GPU at 0000:02:00")
        );
        assert!(said(&[others, nobodys, own]).ends_with("Xid 7777 of the GPU at 0000:03:00"));
    }
}
