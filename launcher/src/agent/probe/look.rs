//! What is on this node.
use super::{super::executable::own_hash, gpu};
use contract::probe::{DirLook, NodeLook};
use nix::sys::{
    resource::{RLIM_INFINITY, Resource, getrlimit},
    statvfs::statvfs,
};
use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// Looks at everything; what can't be found out stays empty.
pub(super) fn look(dirs: &[PathBuf]) -> NodeLook {
    let text = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let meminfo = text("/proc/meminfo");
    let facts = crate::discover::local::facts().ok();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let mut found = NodeLook {
        hostname: text("/proc/sys/kernel/hostname").trim().to_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        executable: own_hash().unwrap_or_default(),
        cpus: facts.as_ref().map_or(0, |f| f.cpus.len() as u32),
        memory: facts.as_ref().map_or(0, |f| f.memory),
        memory_available: kilobytes(&meminfo, "MemAvailable:"),
        unix_ns: 0,
        writable: homes(),
        dirs: dirs.iter().map(|dir| directory(dir)).collect(),
        gpus: gpu::look(),
        limits: limits(),
        shm: space(Path::new("/dev/shm")),
        interfaces: interfaces(),
        port: None,
        greeting: String::new(),
    };
    // last: the check takes it as the time of the answer
    found.unix_ns = i64::try_from(now()).unwrap_or(i64::MAX);
    found
}

fn kilobytes(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|l| l.strip_prefix(name));
    let number = line.and_then(|l| l.trim().strip_suffix("kB")).and_then(|n| n.trim().parse::<u64>().ok());
    number.unwrap_or(0).saturating_mul(1024)
}

/// The home directory and the cache in it.
fn homes() -> Vec<(PathBuf, Result<(), String>)> {
    let Some(home) = std::env::home_dir() else { return Vec::new() };
    let cache = fs::read_link("/proc/self/exe").ok().and_then(|exe| exe.parent().map(Path::to_owned));
    let cache = cache.filter(|dir| dir.ends_with("launch/bin"));
    std::iter::once(home).chain(cache).map(|dir| (dir.clone(), writable(&dir))).collect()
}

/// Whether a file can be made there.
fn writable(dir: &Path) -> Result<(), String> {
    let file = dir.join(format!(".launch-write-{}", std::process::id()));
    let made = fs::OpenOptions::new().write(true).create_new(true).open(&file);
    let made = made.and_then(|mut f| io::Write::write_all(&mut f, &[0; 4096]));
    _ = fs::remove_file(&file);
    made.map_err(|e| e.to_string())
}

/// The directory, or its nearest parent that exists.
fn directory(dir: &Path) -> DirLook {
    let at = dir.ancestors().find(|a| a.is_dir()).unwrap_or(Path::new("/")).to_owned();
    DirLook {
        filesystem: filesystem(&at),
        free: space(&at).map_or(0, |(_, free)| free),
        writable: writable(&at),
        at,
    }
}

/// Size and free, bytes.
fn space(path: &Path) -> Option<(u64, u64)> {
    let stat = statvfs(path).ok()?;
    let unit = stat.fragment_size();
    Some((stat.blocks().saturating_mul(unit), stat.blocks_available().saturating_mul(unit)))
}

/// The type of the file system that a path is on.
fn filesystem(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mount = |line: &str| {
        let mut words = line.split(' ').skip(1);
        // spaces in a path are written as octal
        Some((PathBuf::from(words.next()?.replace("\\040", " ")), words.next()?.to_owned()))
    };
    let over = mounts.lines().filter_map(mount).filter(|(at, _)| path.starts_with(at));
    // the later of two mounts on one directory covers the earlier
    over.max_by_key(|(at, _)| at.components().count()).map_or_else(String::new, |(_, kind)| kind)
}

fn limits() -> BTreeMap<String, Option<u64>> {
    let limit = |resource| getrlimit(resource).ok().map(|(soft, _)| (soft != RLIM_INFINITY).then_some(soft));
    let all = [
        ("nofile", Resource::RLIMIT_NOFILE),
        ("nproc", Resource::RLIMIT_NPROC),
        ("memlock", Resource::RLIMIT_MEMLOCK),
    ];
    all.into_iter().filter_map(|(name, resource)| Some((name.to_owned(), limit(resource)?))).collect()
}

/// Addresses that others may reach.
fn interfaces() -> Vec<(String, IpAddr)> {
    let mut found = Vec::new();
    for interface in nix::ifaddrs::getifaddrs().into_iter().flatten() {
        let Some(address) = interface.address else { continue };
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let v6 = address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip()));
        let local = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
        };
        found.extend(v4.or(v6).filter(|ip| !local(ip)).map(|ip| (interface.interface_name.clone(), ip)));
    }
    found
}
