//! [`raise_descriptor_limit`]: raises the limit of open files of the controller, if the hosts of a
//! job need more.
use diagnostic::{
    Diagnostic,
    codes::run::{CONTROLLER_SETUP_FAILED, DESCRIPTORS_TOO_FEW},
    quantity::format_count,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The number of file descriptors that the controller needs independently of the number of hosts.
const BASE_DESCRIPTORS: u64 = 96;

/// Returns how many file descriptors a controller needs in total, if the connections to agents on
/// other hosts need `connections` descriptors.
pub(crate) fn count_controller_descriptors(connections: u64) -> u64 {
    BASE_DESCRIPTORS + connections
}

/// Raises this process's soft limit of open files to the hard limit if a job on `hosts` hosts needs
/// more descriptors.
pub(super) fn raise_descriptor_limit(hosts: usize, connections: u64) -> diagnostic::Result<()> {
    let failed = |message: &str, error: nix::Error| {
        Diagnostic::error(CONTROLLER_SETUP_FAILED, message.to_owned()).with_cause(&error)
    };
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)
        .map_err(|error| failed("cannot read the limit of open files", error))?;
    let needed = count_controller_descriptors(connections);
    if needed <= soft {
        return Ok(());
    }
    check_descriptor_limit(hosts, needed, hard)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
        .map_err(|error| failed("cannot raise the limit of open files", error))
}

/// Fails if the limit of open files `limit` is below the `needed` descriptors of a controller for a
/// job on `hosts` hosts.
fn check_descriptor_limit(hosts: usize, needed: u64, limit: u64) -> diagnostic::Result<()> {
    if needed <= limit {
        return Ok(());
    }
    let hosts = format_count(hosts, "host");
    let message = format!(
        "the controller needs {needed} file descriptors for {hosts}, and this process may open {limit}"
    );
    Err(Diagnostic::error(DESCRIPTORS_TOO_FEW, message)
        .with_field("needed", needed)
        .with_field("available", limit)
        .with_help(format!(
            "raise the hard limit (`ulimit -Hn {needed}` as root, `nofile` in /etc/security/limits.conf, or \
             `LimitNOFILE` of a service), or use fewer hosts"
        )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_rejected_only_if_the_hosts_need_more() {
        assert!(check_descriptor_limit(150, 996, 1024).is_ok());
        let error = check_descriptor_limit(256, 1632, 1024).expect_err("too few");
        assert_eq!(error.code(), DESCRIPTORS_TOO_FEW);
        assert_eq!(
            error.to_string(),
            "the controller needs 1632 file descriptors for 256 hosts, and this process may open 1024"
        );
    }
}
