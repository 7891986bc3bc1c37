//! Finds processes of this machine by their environment.
use std::fs;

/// Returns the process ids of all processes of this machine.
pub(crate) fn list_processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns whether the process `pid` began with an environment variable that fits. A variable is
/// the name, `=` and the value. Returns false for a process that has ended.
pub(crate) fn has_variable(pid: i32, fits: impl Fn(&[u8]) -> bool) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(fits)
}

/// Returns the process ids of the processes that began with the environment variable `variable`,
/// which is a name, `=` and a value.
pub(crate) fn find_processes_with_variable(variable: &str) -> Vec<i32> {
    list_processes().filter(|pid| has_variable(*pid, |found| found == variable.as_bytes())).collect()
}

/// Returns the command line of a process with spaces between the arguments, or an empty text if the
/// process has ended.
pub(crate) fn read_command_line(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}
