//! [`raise_open_file_limit`]: raises the number of files that this process may open.
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The soft and the hard limit of open files of a process.
pub(crate) type OpenFileLimits = (u64, u64);

/// Raises this process's soft limit of open files to the hard limit, and returns the previous
/// limits. Processes that are started afterwards inherit the raised limit.
pub(crate) fn raise_open_file_limit() -> nix::Result<OpenFileLimits> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok((soft, hard))
}
