//! Disables core dumps of the processes that control a run (the controller, and the agent on each
//! host), because their memory contains secrets. Their memory contains the job's key and the values
//! of secret variables, which everyone who collects core files could read.
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use std::{io, os::unix::process::CommandExt, process::Command, sync::OnceLock};

/// The core size limit, in bytes, that makes the kernel write no core file and start no program
/// that collects core dumps. At the limit 0 it starts such a program.
const NO_CORE_DUMP_LIMIT_BYTES: rlim_t = 1;

/// The limits on the size of core files that this process had when it started, before
/// [`disable_core_dumps`] changed them.
static INHERITED_LIMITS: OnceLock<(rlim_t, rlim_t)> = OnceLock::new();

/// Prevents core dumps of this process. Processes that it starts inherit the setting, unless they
/// are started with [`restore_core_dumps_in_child`].
pub(crate) fn disable_core_dumps() -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_CORE)?;
    INHERITED_LIMITS.get_or_init(|| (soft, hard));
    Ok(setrlimit(Resource::RLIMIT_CORE, NO_CORE_DUMP_LIMIT_BYTES.min(hard), hard)?)
}

/// Gives the child process that `command` starts the original core dump limits of this process, so
/// that user programs can dump core. The function is called for workers, and for agents, which pass
/// the limit on to their workers.
pub(crate) fn restore_core_dumps_in_child(command: &mut Command) {
    let Some((soft, hard)) = INHERITED_LIMITS.get().copied() else { return };
    // SAFETY: the closure makes one system call, which is allowed between fork and exec.
    unsafe { command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_CORE, soft, hard)?)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that [`restore_core_dumps_in_child`] gives a child process the limit that this
    /// process had at its start. The test changes the limits of this process, so no other test may
    /// check them.
    #[test]
    fn a_child_has_the_limits_that_this_process_had() {
        let limit_of_child = |restore: bool| {
            let mut command = Command::new("sh");
            command.args(["-c", "ulimit -c"]);
            if restore {
                restore_core_dumps_in_child(&mut command);
            }
            String::from_utf8(command.output().expect("sh runs").stdout).expect("text").trim().to_owned()
        };
        let before = limit_of_child(false);
        disable_core_dumps().expect("disabled");
        disable_core_dumps().expect("disabled again");
        assert_eq!(
            getrlimit(Resource::RLIMIT_CORE).expect("limits").0,
            NO_CORE_DUMP_LIMIT_BYTES.min(getrlimit(Resource::RLIMIT_CORE).expect("limits").1)
        );
        assert_eq!(limit_of_child(true), before);
    }
}
