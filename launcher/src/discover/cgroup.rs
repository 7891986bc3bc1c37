//! [`limits`]: the limits of the control groups of this process (version 2, and the controllers cpu
//! and memory of version 1).
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Limits of control groups.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Limits {
    /// CPU time, in CPUs; `None`: no limit.
    pub(super) cpus: Option<f64>,
    /// Memory, in bytes; `None`: no limit.
    pub(super) memory: Option<u64>,
}

/// Reads the tightest limits of this process's control groups and their parents. A limit that
/// cannot be read does not count.
pub(super) fn limits(root: &Path) -> Limits {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut limits = Limits::default();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let has = |name: &str| controllers.split(',').any(|c| c == name);
        let mount = root.join("sys/fs/cgroup");
        if controllers.is_empty() {
            for directory in group_and_parents(&mount, group) {
                limits.lower_limits(quota_v2(&directory), number(&directory.join("memory.max")));
            }
        } else if has("cpu") {
            // Inside a container the path of the group may be invisible; the root of the mount is
            // the group.
            for directory in group_and_parents(&mount.join("cpu"), group) {
                limits.lower_limits(quota_v1(&directory), None);
            }
        } else if has("memory") {
            for directory in group_and_parents(&mount.join("memory"), group) {
                limits.lower_limits(None, number(&directory.join("memory.limit_in_bytes")));
            }
        }
    }
    limits
}

/// Reads how many processes of this process's control group the kernel has killed for lack of
/// memory; `None` if the count cannot be read.
pub(crate) fn oom_kills(root: &Path) -> Option<u64> {
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
        // Inside a container the path of the group may be invisible; the nearest visible parent
        // counts.
        group_and_parents(&mount, group).iter().find_map(|directory| {
            let text = fs::read_to_string(directory.join(file)).ok()?;
            text.lines().find_map(|l| l.strip_prefix("oom_kill ")).and_then(|n| n.trim().parse().ok())
        })
    };
    groups.lines().find_map(of_line)
}

impl Limits {
    fn lower_limits(&mut self, cpus: Option<f64>, memory: Option<u64>) {
        self.cpus = [self.cpus, cpus].into_iter().flatten().reduce(f64::min);
        // Version 1 writes "no limit" as a number near 2^63.
        let memory = memory.filter(|&m| m < 1 << 60);
        self.memory = [self.memory, memory].into_iter().flatten().min();
    }
}

/// The directory of a control group and those of its parents, up to the mount point.
fn group_and_parents(mount: &Path, group: &str) -> Vec<PathBuf> {
    let relative = Path::new(group.trim_start_matches('/'));
    // `..` appears when the group is outside of the namespace of this process.
    let is_inside = relative.components().all(|c| matches!(c, std::path::Component::Normal(_)));
    let directory = if is_inside { mount.join(relative) } else { mount.to_owned() };
    directory.ancestors().take_while(|d| d.starts_with(mount)).map(Path::to_owned).collect()
}

/// Parses `cpu.max`: "QUOTA PERIOD" or "max PERIOD", in microseconds.
fn quota_v2(directory: &Path) -> Option<f64> {
    let text = fs::read_to_string(directory.join("cpu.max")).ok()?;
    let (quota, period) = text.trim().split_once(' ')?;
    cpu_share(quota.parse().ok()?, period.parse().ok()?)
}

fn quota_v1(directory: &Path) -> Option<f64> {
    let quota = number(&directory.join("cpu.cfs_quota_us"))?;
    let period = number(&directory.join("cpu.cfs_period_us"))?;
    cpu_share(quota as f64, period as f64)
}

fn cpu_share(quota: f64, period: f64) -> Option<f64> {
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

/// Reads the number in a file; `None` for `max`, `-1` and unreadable files.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
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
        assert_eq!(limits(tree(&[]).path()), Limits::default());
    }

    #[test]
    fn oom_kills_are_counted_in_both_versions() {
        let v2 = tree(&[
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0\n"),
            ("sys/fs/cgroup/a/memory.events", "oom_kill 9\n"),
        ]);
        let v1 = tree(&[
            ("proc/self/cgroup", "7:cpu:/x\n4:memory:/docker/x\n"),
            ("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ]);
        assert_eq!((oom_kills(v2.path()), oom_kills(v1.path())), (Some(3), Some(2)));
        assert_eq!(oom_kills(tree(&[("proc/self/cgroup", "0::/a\n")]).path()), None);
    }

    #[test]
    fn limits_of_version_1_are_read() {
        let root = tree(&[
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000"),
            ("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "1048576"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
        ]);
        assert_eq!(limits(root.path()), Limits { cpus: Some(1.5), memory: Some(1 << 20) });
    }

    #[test]
    fn a_path_outside_of_the_namespace_is_the_mount() {
        let root = tree(&[
            ("proc/self/cgroup", "0::/../../other\n"),
            ("sys/fs/cgroup/cpu.max", "50000 100000"),
            ("sys/other/cpu.max", "1 100000"),
        ]);
        assert_eq!(limits(root.path()).cpus, Some(0.5));
    }
}
