//! [`parse_cpu_list`]: parses the lists of CPU numbers in files of /proc and /sys, such as `0-3,8`.

/// The upper limit, exclusive, on CPU numbers in a list; a list with this or a larger number is
/// rejected.
const CPU_NUMBER_LIMIT: u32 = 65_536;

/// Parses a list such as `0-3,8,10-11` into CPU numbers in ascending order. Returns `None` if the
/// list is empty or malformed.
pub(super) fn parse_cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        if first > last || last >= CPU_NUMBER_LIMIT {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    (!cpus.is_empty()).then_some(cpus)
}
