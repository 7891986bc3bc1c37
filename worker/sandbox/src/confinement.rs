//! Restricts what a sandbox process can do, with resource limits, Landlock and seccomp.
use crate::{
    limits::{ARENA_BYTES, RequestLimits, STACK_BYTES, SandboxSettings, TOTAL_SERVICE_STACK_BYTES},
    system_calls::build_seccomp_filters,
};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use nix::sys::resource::{Resource, UsageWho, getrusage, setrlimit};
use std::io;

/// Maximum number of open files of a sandbox process, which needs only its socket and the files
/// that it receives.
const MAX_OPEN_FILES: u64 = 64;

/// Which kernel facilities (Landlock, seccomp) confine a sandbox process, in addition to resource
/// limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// True if Landlock denies access to every path and to the network.
    pub landlock: bool,
    /// True if seccomp denies every system call that is not needed.
    pub seccomp: bool,
}

impl Confinement {
    /// Returns the names of the facilities, among `Landlock` and `seccomp`, that the kernel does
    /// not support.
    pub fn missing_facilities(self) -> Vec<&'static str> {
        let facilities = [(self.landlock, "Landlock"), (self.seccomp, "seccomp")];
        facilities.into_iter().filter(|(present, _)| !present).map(|(_, name)| name).collect()
    }

    /// Returns a byte with one bit for Landlock and one for seccomp, by which the sandbox process
    /// reports to its caller whether each is active.
    pub(crate) fn to_byte(self) -> u8 {
        u8::from(self.landlock) | u8::from(self.seccomp) << 1
    }

    /// Decodes which kernel facilities confine a sandbox process from the byte that it reported.
    /// Ignores unknown bits.
    pub(crate) fn from_byte(byte: u8) -> Self {
        Confinement { landlock: byte & 1 != 0, seccomp: byte & 2 != 0 }
    }
}

/// Sets the resource limits of this process, and gives up all access and system calls that a
/// sandbox process does not need. Returns the kernel facilities in use, and the object that limits
/// single requests. Fails if a resource limit cannot be set.
///
/// Landlock and seccomp confine this thread and the threads that it starts later, so the process
/// must not have other threads that interpret untrusted input.
pub(crate) fn confine(settings: &SandboxSettings) -> io::Result<(Confinement, RequestLimiter)> {
    let limiter = limit_resources(settings)?;
    // Another process of this user must not read the memory through /proc.
    nix::sys::prctl::set_dumpable(false)?;
    nix::sys::prctl::set_no_new_privs()?;
    let landlock = deny_paths_and_network();
    let seccomp = deny_system_calls();
    Ok((Confinement { landlock, seccomp }, limiter))
}

/// Sets the limits of memory, open files and stacks that apply to this sandbox process until it
/// ends. Returns the object that limits single requests.
fn limit_resources(settings: &SandboxSettings) -> io::Result<RequestLimiter> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let threads = u64::from(settings.threads);
    let stacks = threads.saturating_mul(STACK_BYTES as u64) + TOTAL_SERVICE_STACK_BYTES;
    let arenas = threads.saturating_mul(ARENA_BYTES);
    let idle_bytes = parse_proc_status_bytes(&status, "VmData:")?.saturating_add(stacks);
    let address_space = parse_proc_status_bytes(&status, "VmSize:")?
        .saturating_add(settings.memory_bytes)
        .saturating_add(stacks)
        .saturating_add(arenas);
    let memory_bytes = settings.memory_bytes.saturating_add(idle_bytes);
    for (resource, limit) in [
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_NOFILE, MAX_OPEN_FILES),
        (Resource::RLIMIT_STACK, STACK_BYTES as u64),
        (Resource::RLIMIT_AS, address_space),
        (Resource::RLIMIT_DATA, memory_bytes),
    ] {
        setrlimit(resource, limit, limit)?;
    }
    Ok(RequestLimiter { idle_bytes, memory_bytes })
}

/// Returns the value in bytes of the line that begins with `field` in `status`, the content of
/// /proc/self/status.
fn parse_proc_status_bytes(status: &str, field: &str) -> io::Result<u64> {
    let size = status.lines().find_map(|line| line.strip_prefix(field)?.strip_suffix("kB"));
    let kibibytes = size.and_then(|size| size.trim().parse::<u64>().ok());
    kibibytes.map(|kibibytes| kibibytes << 10).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Sets the limits of memory and CPU time of the sandbox process before each request that it
/// handles.
pub(crate) struct RequestLimiter {
    /// Memory that the process needs without a request, stacks included, in bytes.
    idle_bytes: u64,
    /// Limit on the memory of the process, in bytes.
    memory_bytes: u64,
}

impl RequestLimiter {
    /// Sets the limits of memory and CPU time of this process for the request that it handles next.
    pub(crate) fn limit_request(&self, limits: &RequestLimits) -> io::Result<()> {
        let memory = limits.memory_bytes.saturating_add(self.idle_bytes).min(self.memory_bytes);
        setrlimit(Resource::RLIMIT_DATA, memory, self.memory_bytes)?;
        let usage = getrusage(UsageWho::RUSAGE_SELF)?;
        let used = usage.user_time().tv_sec() as u64 + usage.system_time().tv_sec() as u64;
        // The kernel compares whole seconds of the time used, of which a part may have passed.
        setrlimit(Resource::RLIMIT_CPU, used + limits.cpu_seconds() + 1, libc::RLIM_INFINITY)?;
        Ok(())
    }
}

/// Denies this process access to every path, to TCP ports and to other processes, by Landlock.
/// Returns false if the kernel has no Landlock.
fn deny_paths_and_network() -> bool {
    let restrict = || -> Result<RulesetStatus, landlock::RulesetError> {
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(ABI::V6))?
            .handle_access(AccessNet::from_all(ABI::V6))?
            .scope(Scope::from_all(ABI::V6))?;
        Ok(ruleset.create()?.restrict_self()?.ruleset)
    };
    matches!(restrict(), Ok(RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced))
}

/// Denies this process the system calls that a sandbox process does not need, by seccomp. Returns
/// false if the kernel has no seccomp.
fn deny_system_calls() -> bool {
    build_seccomp_filters()
        .is_ok_and(|filters| filters.iter().all(|filter| seccompiler::apply_filter(filter).is_ok()))
}
