//! [`classify_copy_failure`]: determines why the executable of launch could not be copied to a
//! host.
use diagnostic::{Code, codes::host};

/// The end of a help text about an unusable cache directory, which advises the user to set
/// `XDG_CACHE_HOME` on the host.
const OTHER_CACHE_DIR_HELP: &str = "or set XDG_CACHE_HOME on the host to another directory";

/// The reason why the executable of launch could not be copied to a host, as the code, the message
/// and the help of an error.
#[derive(Debug)]
pub(super) struct ExecutableCopyFailure {
    pub(super) code: Code,
    pub(super) message: String,
    pub(super) help: Option<String>,
}

impl ExecutableCopyFailure {
    /// Creates the reason why launch's executable could not be copied to a host, with `help` as the
    /// advice for the user.
    fn new(code: Code, message: &str, help: &str) -> Self {
        ExecutableCopyFailure { code, message: message.to_owned(), help: Some(help.to_owned()) }
    }
}

/// Determines why launch's script could not store the executable on a host, from the script's
/// answer `fail STEP CODE` and its stderr. The reason is recognized in the messages that the host's
/// programs printed to stderr, in the C locale.
pub(super) fn classify_copy_failure(answer: &str, stderr: &str) -> ExecutableCopyFailure {
    let mut words = answer.split(' ');
    let (step, exit_code) = match words.next() {
        Some("fail") => (words.next().unwrap_or(""), words.next().unwrap_or("")),
        _ => ("", ""),
    };
    let stderr = stderr.to_lowercase();
    if let Some(failure) = find_full_disk_failure(&stderr) {
        return failure;
    }
    match step {
        "directory" | "write" | "place" => classify_write_failure(step, &stderr),
        "size" => ExecutableCopyFailure::new(
            host::EXECUTABLE_COPY_DAMAGED,
            "the copy of the executable is incomplete",
            "run the command again; if the error persists, check the disk of the host",
        ),
        "hash" => ExecutableCopyFailure::new(
            host::EXECUTABLE_COPY_DAMAGED,
            "the copy of the executable differs from the original",
            "run the command again; if the error persists, check the disk and the memory of the host",
        ),
        "run" => classify_run_failure(exit_code, &stderr),
        _ => ExecutableCopyFailure {
            code: host::EXECUTABLE_COPY_FAILED,
            message: format!(
                "unexpected answer while the executable was copied: `{}`",
                make_printable_excerpt(answer)
            ),
            help: None,
        },
    }
}

/// Returns the error for a full disk or an exceeded quota if `stderr`, the output of the failed
/// copy on the host, reports one. `stderr` is in lower case. Returns `None` for other reasons.
fn find_full_disk_failure(stderr: &str) -> Option<ExecutableCopyFailure> {
    let has = |part: &str| stderr.contains(part);
    let (code, message) = if has("no space left") {
        (host::EXECUTABLE_DISK_FULL, "the disk is full, so the executable cannot be copied")
    } else if has("quota exceeded") {
        (
            host::EXECUTABLE_QUOTA_EXCEEDED,
            "the disk quota of the user is exceeded, so the executable cannot be copied",
        )
    } else {
        return None;
    };
    let help = format!("free some space in the home directory, {OTHER_CACHE_DIR_HELP}");
    Some(ExecutableCopyFailure::new(code, message, &help))
}

/// Returns the error for a failure of launch's copy script to write the executable to the cache
/// directory on the host. `stderr` is in lower case.
fn classify_write_failure(step: &str, stderr: &str) -> ExecutableCopyFailure {
    let has = |part: &str| stderr.contains(part);
    let (message, remedy) = match step {
        "directory" | "write" if has("read-only file system") => {
            ("the cache directory is on a read-only file system", "make ~/.cache writable")
        }
        "directory" | "write" if has("permission denied") => {
            ("no permission to write to the cache directory", "make the user the owner of ~/.cache")
        }
        _ => ("the executable cannot be written to the cache directory", "make ~/.cache/launch writable"),
    };
    let help = format!("{remedy}, {OTHER_CACHE_DIR_HELP}");
    ExecutableCopyFailure::new(host::EXECUTABLE_CACHE_UNWRITABLE, message, &help)
}

/// Determines why the copied executable could not be run on the host, where the copy script runs it
/// once as a test. `stderr` is in lower case.
fn classify_run_failure(exit_code: &str, stderr: &str) -> ExecutableCopyFailure {
    let has = |part: &str| stderr.contains(part);
    match exit_code {
        "126" if has("exec format error") => ExecutableCopyFailure::new(
            host::EXECUTABLE_ARCHITECTURE_MISMATCH,
            "the executable is for another kind of machine",
            "all hosts of a job must have the same architecture",
        ),
        "126" => ExecutableCopyFailure::new(
            host::EXECUTABLE_NOT_ALLOWED,
            "programs may not run from the cache directory: its file system is mounted with noexec, \
             or a policy forbids it",
            &format!("mount it with exec, {OTHER_CACHE_DIR_HELP}"),
        ),
        _ if has("glibc_") => ExecutableCopyFailure::new(
            host::EXECUTABLE_LIBC_TOO_OLD,
            "the C library of the host is older than launch requires",
            "build launch on, or for, the oldest system of the cluster",
        ),
        _ => ExecutableCopyFailure::new(
            host::EXECUTABLE_NOT_RUNNABLE,
            &format!("the executable does not run (exit code {exit_code})"),
            "copy the executable to the host by hand, and run it there",
        ),
    }
}

/// Returns the first 300 characters of a text from a host for an error message, with each control
/// character replaced by U+FFFD.
pub(super) fn make_printable_excerpt(text: &str) -> String {
    text.chars().take(300).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_the_copy_script_are_classified() {
        for (answer, stderr, code) in [
            ("fail write 1", "cat: write error: No space left on device", host::EXECUTABLE_DISK_FULL),
            ("fail write 1", "cat: write error: Disk quota exceeded", host::EXECUTABLE_QUOTA_EXCEEDED),
            (
                "fail directory 1",
                "mkdir: cannot create directory: Permission denied",
                host::EXECUTABLE_CACHE_UNWRITABLE,
            ),
            (
                "fail directory 1",
                "mkdir: cannot create directory: Read-only file system",
                host::EXECUTABLE_CACHE_UNWRITABLE,
            ),
            ("fail run 126", "sh: 1: x: Permission denied", host::EXECUTABLE_NOT_ALLOWED),
            ("fail run 126", "sh: 1: x: Exec format error", host::EXECUTABLE_ARCHITECTURE_MISMATCH),
            (
                "fail run 1",
                "x: /lib/libc.so.6: version `GLIBC_2.38' not found",
                host::EXECUTABLE_LIBC_TOO_OLD,
            ),
            ("fail run 1", "", host::EXECUTABLE_NOT_RUNNABLE),
            ("fail hash 1", "", host::EXECUTABLE_COPY_DAMAGED),
            ("hello", "", host::EXECUTABLE_COPY_FAILED),
        ] {
            assert_eq!(classify_copy_failure(answer, stderr).code, code, "{answer}: {stderr}");
        }
    }
}
