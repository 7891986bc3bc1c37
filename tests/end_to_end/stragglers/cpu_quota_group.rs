//! [`CpuQuotaGroup`]: a cgroup that limits the CPU time of a process.
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

/// The directories of the CPU controller of cgroups, for version 2 and for version 1.
const CPU_GROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu"];

/// The files with the weight of a cgroup among others that want the same CPUs, for version 2 and
/// for version 1, and the largest weight.
const CPU_WEIGHTS: [(&str, &str); 2] = [("cpu.weight", "10000"), ("cpu.shares", "262144")];

/// A cgroup with a CPU quota, which is removed at the end of the test.
pub(super) struct CpuQuotaGroup(PathBuf);

impl CpuQuotaGroup {
    /// Creates a cgroup without a quota. Returns `None` if a quota is not possible.
    pub(super) fn create() -> Option<CpuQuotaGroup> {
        static GROUPS: AtomicU32 = AtomicU32::new(0);
        let number = GROUPS.fetch_add(1, Ordering::Relaxed);
        let name = format!("launch-test-{}-{number}", std::process::id());
        CPU_GROUPS.iter().find_map(|mount| {
            let group = CpuQuotaGroup(Path::new(mount).join(&name));
            fs::create_dir(&group.0).ok()?;
            // With version 1, the directory above the controllers is not a control group.
            let is_group = group.0.join("cgroup.procs").exists();
            (is_group && group.write_quota(None)).then_some(group)
        })
    }

    /// Gives the processes of the group precedence over processes outside of it, so that other load
    /// hardly slows them down.
    pub(super) fn set_largest_weight(&self) {
        let is_set = CPU_WEIGHTS.iter().any(|(name, weight)| {
            let file = self.0.join(name);
            file.exists() && fs::write(file, weight).is_ok()
        });
        assert!(is_set, "the weight can be changed");
    }

    /// Limits the CPU time of the processes to `quota_us` µs in each period of 100 ms.
    pub(super) fn set_quota(&self, quota_us: u64) {
        assert!(self.write_quota(Some(quota_us)), "the quota can be changed");
    }

    /// Writes the quota in the format of both versions of cgroups. Returns whether one of them is
    /// supported.
    fn write_quota(&self, quota_us: Option<u64>) -> bool {
        let quota = |unlimited: &str| quota_us.map_or_else(|| unlimited.to_owned(), |us| us.to_string());
        fs::write(self.0.join("cpu.max"), format!("{} 100000", quota("max"))).is_ok()
            && self.0.join("cpu.stat").exists()
            || fs::write(self.0.join("cpu.cfs_quota_us"), quota("-1")).is_ok()
    }

    /// Moves a process to the group.
    pub(super) fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("the process joins the group");
    }
}

impl Drop for CpuQuotaGroup {
    fn drop(&mut self) {
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
