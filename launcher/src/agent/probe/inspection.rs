//! Inspects this host for `launch check`: hardware, directories, limits and network addresses.
use super::gpu;
use crate::{discover::local_host::discover_local_host, executable::hash_executable};
use diagnostic::{Diagnostic, codes::host};
use nix::sys::{
    resource::{RLIM_INFINITY, Resource, getrlimit},
    statvfs::statvfs,
};
use protocol::{
    host_name::read_host_name,
    probe::{DirectoryInspection, HostInspection},
};
use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// Returns what `launch check` reports about this host: its hardware, resource limits, network
/// addresses and clock, and the state of the directories `dirs`. Leaves values empty or 0 that are
/// not available.
pub(super) fn inspect_host(dirs: &[PathBuf]) -> HostInspection {
    let text = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let meminfo = text("/proc/meminfo");
    let inventory = discover_local_host().ok();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let mut report = HostInspection {
        hostname: read_host_name(),
        arch: std::env::consts::ARCH.to_owned(),
        kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        executable: hash_executable().unwrap_or_default(),
        cpus: inventory.as_ref().map_or(0, |i| i.cpus.len() as u32),
        memory: inventory.as_ref().map_or(0, |i| i.memory),
        memory_available: parse_meminfo_bytes(&meminfo, "MemAvailable:"),
        unix_time_ns: 0,
        writable: check_home_directories(),
        dirs: dirs.iter().map(|dir| inspect_directory(dir)).collect(),
        gpus: gpu::inspect_gpus(),
        denied_accelerators: inventory.as_ref().map_or(0, |i| i.denied_accelerators),
        accelerators: inventory.map(|i| i.accelerators).unwrap_or_default(),
        limits: read_resource_limits(),
        shm_size_and_free: read_size_and_free_bytes(Path::new("/dev/shm")),
        interfaces: list_reachable_addresses(),
        port: None,
        greeting: String::new(),
    };
    // The clock is read last, because the check takes this time as the time of the answer.
    report.unix_time_ns = i64::try_from(now()).unwrap_or(i64::MAX);
    report
}

/// Finds the value called `name`, such as `MemTotal:`, in the content of `/proc/meminfo`, and
/// returns it in bytes, or 0 if it is missing.
fn parse_meminfo_bytes(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(name));
    let number = line.and_then(|l| l.trim().strip_suffix("kB")).and_then(|n| n.trim().parse::<u64>().ok());
    number.unwrap_or(0).saturating_mul(1024)
}

/// Tests whether the home directory is writable and, if this executable runs from launch's cache
/// directory, whether the cache directory is writable. Returns each directory with the result.
fn check_home_directories() -> Vec<(PathBuf, diagnostic::Result<()>)> {
    let Some(home) = std::env::home_dir() else { return Vec::new() };
    let cache = fs::read_link("/proc/self/exe").ok().and_then(|exe| exe.parent().map(Path::to_owned));
    let cache = cache.filter(|dir| dir.ends_with("launch/bin"));
    std::iter::once(home).chain(cache).map(|dir| (dir.clone(), check_writable(&dir))).collect()
}

/// Tests whether a directory is writable, by creating, writing and removing a temporary file in it.
/// Fails if the file cannot be created or written.
fn check_writable(dir: &Path) -> diagnostic::Result<()> {
    let file = dir.join(format!(".launch-write-{}", std::process::id()));
    let created = fs::OpenOptions::new().write(true).create_new(true).open(&file);
    let written = created.and_then(|mut f| io::Write::write_all(&mut f, &[0; 4096]));
    _ = fs::remove_file(&file);
    written.map_err(|error| {
        let dir = dir.display().to_string();
        Diagnostic::error(host::DIRECTORY_UNWRITABLE, error.to_string()).with_subject(dir)
    })
}

/// Returns the file system, the free space and the writability of a directory or, if it does not
/// exist, of its nearest existing parent. Determines the file system, the free space, and whether
/// the directory is writable.
fn inspect_directory(dir: &Path) -> DirectoryInspection {
    let path = dir.ancestors().find(|a| a.is_dir()).unwrap_or(Path::new("/")).to_owned();
    DirectoryInspection {
        filesystem: find_filesystem_type(&path),
        free: read_size_and_free_bytes(&path).map_or(0, |(_, free)| free),
        writable: check_writable(&path),
        path,
    }
}

/// Returns the size and the free space of the file system that contains a path, in bytes. Returns
/// `None` if they cannot be read.
fn read_size_and_free_bytes(path: &Path) -> Option<(u64, u64)> {
    let stat = statvfs(path).ok()?;
    let unit = stat.fragment_size();
    Some((stat.blocks().saturating_mul(unit), stat.blocks_available().saturating_mul(unit)))
}

/// Returns the type of the file system that contains a path, such as `ext4`. Returns an empty text
/// if the type is unknown.
fn find_filesystem_type(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mount = |line: &str| {
        let mut words = line.split(' ').skip(1);
        // The kernel writes a space in a path as the octal escape `\040`.
        Some((PathBuf::from(words.next()?.replace("\\040", " ")), words.next()?.to_owned()))
    };
    let candidates = mounts.lines().filter_map(mount).filter(|(at, _)| path.starts_with(at));
    // If two file systems are mounted on one directory, the later mount is the visible one.
    candidates.max_by_key(|(at, _)| at.components().count()).map_or_else(String::new, |(_, kind)| kind)
}

/// Returns the agent's soft limits of open files (`nofile`), processes (`nproc`) and locked memory
/// in bytes (`memlock`). `None` means unlimited.
fn read_resource_limits() -> BTreeMap<String, Option<u64>> {
    let limit = |resource| getrlimit(resource).ok().map(|(soft, _)| (soft != RLIM_INFINITY).then_some(soft));
    let resources = [
        ("nofile", Resource::RLIMIT_NOFILE),
        ("nproc", Resource::RLIMIT_NPROC),
        ("memlock", Resource::RLIMIT_MEMLOCK),
    ];
    resources.into_iter().filter_map(|(name, resource)| Some((name.to_owned(), limit(resource)?))).collect()
}

/// Returns the IP addresses of this host that other hosts may reach, each with the name of the
/// network interface. Omits loopback and link-local addresses.
fn list_reachable_addresses() -> Vec<(String, IpAddr)> {
    let mut addresses = Vec::new();
    for interface in nix::ifaddrs::getifaddrs().into_iter().flatten() {
        let Some(address) = interface.address else { continue };
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let v6 = address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip()));
        let is_local = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
        };
        addresses
            .extend(v4.or(v6).filter(|ip| !is_local(ip)).map(|ip| (interface.interface_name.clone(), ip)));
    }
    addresses
}
