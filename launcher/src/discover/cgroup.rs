//! [`read_cgroup_limits`]: reads the limits on CPU time and memory that Linux control groups impose
//! on this process. Supports version 2, and version 1 with the controllers cpu and memory.
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The memory limit, in bytes, from which on a control group of version 1 counts as unlimited.
/// Version 1 writes a number near 2^63.
const MIN_UNLIMITED_BYTES_V1: u64 = 1 << 60;

/// The limits on CPU time and memory that control groups impose on this process.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CgroupLimits {
    /// The limit on CPU time, as a number of CPUs; `None` for no limit.
    pub(super) cpus: Option<f64>,
    /// The limit on memory, in bytes; `None` for no limit.
    pub(super) memory: Option<u64>,
}

/// Reads the limits on CPU time and memory that this process's control groups and their parents
/// impose on it. The files are read below `root`. A file that cannot be read imposes no limit.
pub(super) fn read_cgroup_limits(root: &Path) -> CgroupLimits {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut limits = CgroupLimits::default();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let has = |name: &str| controllers.split(',').any(|c| c == name);
        let mount = root.join("sys/fs/cgroup");
        if controllers.is_empty() {
            for directory in list_group_and_parents(&mount, group) {
                limits.apply_lower_limits(
                    read_cpu_quota_v2(&directory),
                    read_cgroup_number(&directory.join("memory.max")),
                );
            }
        } else if has("cpu") {
            // Inside a container the path of the group may be invisible. The root of the mount is
            // then the group.
            for directory in list_group_and_parents(&mount.join("cpu"), group) {
                limits.apply_lower_limits(read_cpu_quota_v1(&directory), None);
            }
        } else if has("memory") {
            for directory in list_group_and_parents(&mount.join("memory"), group) {
                limits.apply_lower_limits(None, read_cgroup_number(&directory.join("memory.limit_in_bytes")));
            }
        }
    }
    limits
}

/// Returns how many processes of this process's control group the kernel has killed because memory
/// ran out. Reads the files below `root`. Returns `None` if the count cannot be read.
pub(crate) fn read_oom_kill_count(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mount = root.join("sys/fs/cgroup");
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let (mount, file) = match controllers {
            "" => (mount.clone(), "memory.events"),
            _ if controllers.split(',').any(|c| c == "memory") => {
                (mount.join("memory"), "memory.oom_control")
            }
            _ => return None,
        };
        // Inside a container the path of the group may be invisible. The nearest visible parent is
        // then read.
        list_group_and_parents(&mount, group).iter().find_map(|directory| {
            let text = fs::read_to_string(directory.join(file)).ok()?;
            text.lines().find_map(|l| l.strip_prefix("oom_kill ")).and_then(|n| n.trim().parse().ok())
        })
    };
    groups.lines().find_map(of_line)
}

/// Reads for how long, in microseconds, CPU quotas have stopped the processes in the control groups
/// of the process `pid`. Reads the files below `root`. The largest time of the group and its
/// parents counts. Returns `None` if the time cannot be read.
pub(crate) fn read_throttled_us(root: &Path, pid: u32) -> Option<u64> {
    let groups = fs::read_to_string(root.join(format!("proc/{pid}/cgroup"))).ok()?;
    let mount = root.join("sys/fs/cgroup");
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let (mount, name, per_us) = match controllers {
            "" => (mount.clone(), "throttled_usec ", 1),
            _ if controllers.split(',').any(|c| c == "cpu") => (mount.join("cpu"), "throttled_time ", 1000),
            _ => return None,
        };
        let of_directory = |directory: &PathBuf| {
            let text = fs::read_to_string(directory.join("cpu.stat")).ok()?;
            let number = text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok()?;
            Some(number / per_us)
        };
        list_group_and_parents(&mount, group).iter().filter_map(of_directory).max()
    };
    groups.lines().filter_map(of_line).max()
}

/// Returns the lowest memory limit of this process's control group and its parents, and the memory
/// use of the group that has this limit, both in bytes. Reads the files below `root`. Returns
/// `None` if there is no limit.
pub(crate) fn read_memory_usage(root: &Path) -> Option<(u64, u64)> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mount = root.join("sys/fs/cgroup");
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let (mount, limit, used) = match controllers {
            "" => (mount.clone(), "memory.max", "memory.current"),
            _ if controllers.split(',').any(|c| c == "memory") => {
                (mount.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => return None,
        };
        let of_directory = |directory: &PathBuf| {
            let limit =
                read_cgroup_number(&directory.join(limit)).filter(|bytes| *bytes < MIN_UNLIMITED_BYTES_V1)?;
            Some((limit, read_cgroup_number(&directory.join(used))?))
        };
        list_group_and_parents(&mount, group).iter().filter_map(of_directory).min()
    };
    groups.lines().filter_map(of_line).min()
}

impl CgroupLimits {
    /// Replaces a limit on CPU time or memory by that of another control group if the other group's
    /// limit is lower.
    fn apply_lower_limits(&mut self, cpus: Option<f64>, memory: Option<u64>) {
        self.cpus = [self.cpus, cpus].into_iter().flatten().reduce(f64::min);
        let memory = memory.filter(|&m| m < MIN_UNLIMITED_BYTES_V1);
        self.memory = [self.memory, memory].into_iter().flatten().min();
    }
}

/// Returns the directories of the control group `group` and of its parents below `mount`, innermost
/// first. `mount` is the outermost directory.
fn list_group_and_parents(mount: &Path, group: &str) -> Vec<PathBuf> {
    let relative = Path::new(group.trim_start_matches('/'));
    // `..` appears when the group is outside of the namespace of this process.
    let is_inside = relative.components().all(|c| matches!(c, std::path::Component::Normal(_)));
    let directory = if is_inside { mount.join(relative) } else { mount.to_owned() };
    directory.ancestors().take_while(|d| d.starts_with(mount)).map(Path::to_owned).collect()
}

/// Reads a control group's limit on CPU time, as a number of CPUs, from its file `cpu.max` (version
/// 2 of control groups). The file contains "QUOTA PERIOD" or "max PERIOD", in microseconds. Returns
/// `None` for no limit.
fn read_cpu_quota_v2(directory: &Path) -> Option<f64> {
    let text = fs::read_to_string(directory.join("cpu.max")).ok()?;
    let (quota, period) = text.trim().split_once(' ')?;
    compute_quota_cpus(quota.parse().ok()?, period.parse().ok()?)
}

/// Reads a control group's limit on CPU time, as a number of CPUs, from its quota and period files
/// (version 1 of control groups). Returns `None` for no limit.
fn read_cpu_quota_v1(directory: &Path) -> Option<f64> {
    let quota = read_cgroup_number(&directory.join("cpu.cfs_quota_us"))?;
    let period = read_cgroup_number(&directory.join("cpu.cfs_period_us"))?;
    compute_quota_cpus(quota as f64, period as f64)
}

/// Converts a CPU time quota per period to a number of CPUs (`quota / period`). Returns `None` for
/// no limit.
fn compute_quota_cpus(quota: f64, period: f64) -> Option<f64> {
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

/// Reads the number that a file of a control group contains. Returns `None` for `max`, `-1` and
/// unreadable files.
fn read_cgroup_number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes files, given by path and content, into a temporary directory, which stands for the
    /// root directory of a machine.
    fn write_tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            fs::write(path, text).expect("file");
        }
        root
    }

    #[test]
    fn unreadable_files_are_no_limit() {
        assert_eq!(read_cgroup_limits(write_tree(&[]).path()), CgroupLimits::default());
    }

    #[test]
    fn oom_kills_are_counted_in_both_versions() {
        let v2 = write_tree(&[
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0\n"),
            ("sys/fs/cgroup/a/memory.events", "oom_kill 9\n"),
        ]);
        let v1 = write_tree(&[
            ("proc/self/cgroup", "7:cpu:/x\n4:memory:/docker/x\n"),
            ("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ]);
        assert_eq!((read_oom_kill_count(v2.path()), read_oom_kill_count(v1.path())), (Some(3), Some(2)));
        assert_eq!(read_oom_kill_count(write_tree(&[("proc/self/cgroup", "0::/a\n")]).path()), None);
    }

    #[test]
    fn throttled_time_and_memory_are_read_in_both_versions() {
        let v2 = write_tree(&[
            ("proc/7/cgroup", "0::/a/b\n"),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/cpu.stat", "usage_usec 9\nnr_throttled 3\nthrottled_usec 250\n"),
            ("sys/fs/cgroup/a/cpu.stat", "usage_usec 9\nthrottled_usec 100\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/memory.current", "600\n"),
        ]);
        assert_eq!(read_throttled_us(v2.path(), 7), Some(250));
        assert_eq!(read_memory_usage(v2.path()), Some((1000, 600)));
        let v1 = write_tree(&[
            ("proc/7/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n"),
            ("proc/self/cgroup", "4:memory:/x\n"),
            ("sys/fs/cgroup/cpu/x/cpu.stat", "nr_periods 3\nnr_throttled 1\nthrottled_time 5000000\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!((read_throttled_us(v1.path(), 7), read_memory_usage(v1.path())), (Some(5000), None));
        assert_eq!(read_throttled_us(v1.path(), 8), None);
    }

    #[test]
    fn limits_of_version_1_are_read() {
        let root = write_tree(&[
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000"),
            ("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "1048576"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
        ]);
        assert_eq!(read_cgroup_limits(root.path()), CgroupLimits { cpus: Some(1.5), memory: Some(1 << 20) });
    }

    #[test]
    fn a_path_outside_of_the_namespace_is_the_mount() {
        let root = write_tree(&[
            ("proc/self/cgroup", "0::/../../other\n"),
            ("sys/fs/cgroup/cpu.max", "50000 100000"),
            ("sys/other/cpu.max", "1 100000"),
        ]);
        assert_eq!(read_cgroup_limits(root.path()).cpus, Some(0.5));
    }
}
