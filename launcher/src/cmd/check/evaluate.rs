//! [`evaluate_probes`]: derives the check results of `launch check` from what the agents of the
//! hosts have found.
use super::{
    accelerators,
    check_report::{CheckLevel, CheckReport, CheckResult, HostReport},
    gpus,
    probe::ProbeResult,
};
use crate::cluster::{ClusterCheckSettings, ConnectionStage, HostTarget};
use diagnostic::{
    codes::{host as codes, training},
    quantity::{format_bytes, format_count},
};
use jobspec::JobSpec;
use protocol::probe::HostInspection;
use std::collections::BTreeSet;

/// The largest difference between the clocks of a host and of this machine for which `launch check`
/// does not warn, in seconds. With a larger skew, the times in the logs of several hosts are hard
/// to compare.
const MAX_CLOCK_SKEW_S: f64 = 1.0;
/// `launch check` warns if the limit of open files of a host is below this number.
const MIN_OPEN_FILES: u64 = 4096;
/// `launch check` warns if the limit of processes and threads of a host is below this number.
const MIN_PROCESSES: u64 = 4096;
/// The size of /dev/shm below which `launch check` warns, in bytes. Data loaders and NCCL store
/// data there.
const MIN_SHM_BYTES: u64 = 1 << 30;
/// The free space of a file system below which `launch check` warns, in bytes. Checkpoints and logs
/// need disk space.
const MIN_FREE_DISK_BYTES: u64 = 1 << 30;

/// Builds the report of `launch check` from what the agents of all hosts have found, or from the
/// errors of hosts without an answer. `hosts` are the hosts of the job, in the order of `probes`,
/// and `preflight` states how the provider of the hosts is checked.
pub(super) fn evaluate_probes(
    job: &JobSpec,
    hosts: &[HostTarget],
    preflight: ClusterCheckSettings,
    probes: Vec<ProbeResult>,
) -> CheckReport {
    let checks = check_shared_directories(job, &probes);
    let first = probes.iter().find_map(|probe| probe.inspection.clone());
    let slots = |index: usize| hosts.get(index).filter(|_| preflight.declares_slots).and_then(|h| h.slots);
    let reports = probes.into_iter().enumerate().map(|(index, probe)| {
        let mut checks = check_connection(&probe, preflight.stages);
        if let Some(inspection) = &probe.inspection {
            checks.extend(check_host(job, inspection, first.as_ref(), slots(index)));
            checks.extend(check_clock(&probe));
            checks.extend(check_peer_connections(&probe));
        }
        let ProbeResult { name, inspection, clock_skew_s, .. } = probe;
        HostReport { name, inspection, clock_skew_s, checks }
    });
    CheckReport { name: job.name.clone(), hosts: reports.collect(), checks, network: None }
}

/// Returns a check result for each stage of the connection to a host (such as name resolution), and
/// a warning if the login shell printed text. The stages after a failed stage count as skipped.
fn check_connection(probe: &ProbeResult, stages: &[(ConnectionStage, &'static str)]) -> Vec<CheckResult> {
    let reached = if probe.inspection.is_some() { ConnectionStage::Agent } else { probe.stage };
    let mut checks = Vec::new();
    for &(stage, name) in stages {
        checks.push(match &probe.error {
            Some(error) if stage == reached => CheckResult {
                name,
                level: CheckLevel::Fail,
                found: error.to_string(),
                code: Some(error.code()),
                help: error.help().first().cloned(),
                fields: error.fields().clone(),
                names_host: error.subject() == Some(probe.name.as_str()),
            },
            _ if stage > reached => CheckResult::skipped(name),
            _ => CheckResult::ok(name, ""),
        });
    }
    if let Some(client) = &probe.client {
        checks.push(CheckResult::ok("ssh client", client.as_str()));
    }
    if !probe.shell_output.is_empty() {
        let lines = probe.shell_output.lines().count();
        let found = format!("prints {}", format_count(lines, "line"));
        let help = "print only in interactive shells; launch ignores the text, but scp and rsync may fail";
        let warning = CheckResult::warn("login shell", codes::LOGIN_SHELL_PRINTS, found, help);
        checks.push(warning.with_field("lines", lines));
    }
    checks
}

/// Checks what the agent of one host has reported about this host: its directories, architecture,
/// launch version, GPUs and limits.
///
/// Architecture, version and GPUs are compared with those of `first`, the first host that answered.
/// `slots` is the number of slots that the hostfile declares for the host.
fn check_host(
    job: &JobSpec,
    host: &HostInspection,
    first: Option<&HostInspection>,
    slots: Option<u32>,
) -> Vec<CheckResult> {
    let mut checks = Vec::new();
    for (name, (dir, writable)) in ["home", "cache"].into_iter().zip(&host.writable) {
        let dir = dir.display();
        checks.push(match writable {
            Ok(()) => CheckResult::ok(name, dir.to_string()),
            Err(error) => {
                let found = format!("{dir} is not writable: {error}");
                CheckResult::warn(
                    name,
                    error.code(),
                    found,
                    "make it writable; many programs keep caches there",
                )
            }
        });
    }
    let first = first.unwrap_or(host);
    let is_same_arch = host.arch == first.arch;
    checks.push(match is_same_arch {
        true => CheckResult::ok("architecture", host.arch.clone()),
        false => CheckResult::failed(
            "architecture",
            codes::ARCHITECTURE_DIFFERS,
            format!("{}, {} has {}", host.arch, first.hostname, first.arch),
            "use hosts of one architecture",
        ),
    });
    checks.push(match is_same_arch && host.executable != first.executable {
        false => CheckResult::ok("version", host.version.clone()),
        true => CheckResult::failed(
            "version",
            codes::VERSION_DIFFERS,
            format!("the executable differs from that on {}", first.hostname),
            "remove ~/.cache/launch/bin on the host; launch copies itself again",
        ),
    });
    checks.extend(check_directories(job, host));
    checks.extend(accelerators::check_accelerators(job, host, first, slots));
    checks.extend(gpus::check_gpus(host, first, slots));
    checks.extend(check_limits(host));
    checks
}

/// Checks whether the working, log and checkpoint directories of a host exist, are writable and
/// have enough free space. Returns one result for each directory.
///
/// A missing working directory is a failure. A log or checkpoint directory that is not writable is
/// also a failure. Less free space than [`MIN_FREE_DISK_BYTES`] is a warning.
fn check_directories(job: &JobSpec, host: &HostInspection) -> Vec<CheckResult> {
    let mut checks = Vec::new();
    let names = ["workdir", "logs", "checkpoints"];
    for (index, (name, dir)) in names.into_iter().zip(&host.dirs).enumerate() {
        let path = dir.path.display();
        let free = format!("{} free in {path} ({})", format_bytes(dir.free), dir.filesystem);
        let is_missing = index == 0 && dir.path != job.run.workdir;
        checks.push(match &dir.writable {
            _ if is_missing => CheckResult::failed(
                name,
                codes::WORKDIR_MISSING,
                format!("{} does not exist", job.run.workdir.display()),
                "create it on the host, or set `run.workdir` to a directory that all hosts have",
            ),
            Err(error) if index > 0 => CheckResult::failed(
                name,
                error.code(),
                format!("{path} is not writable: {error}"),
                "make it writable for the user on this host",
            ),
            _ if dir.free < MIN_FREE_DISK_BYTES => {
                let help = "free disk space; checkpoints and logs need it";
                CheckResult::warn(name, codes::DISK_NEARLY_FULL, free, help)
            }
            _ => CheckResult::ok(name, free),
        });
    }
    checks
}

/// Checks a host's limits of open files, processes and locked memory, and the size of /dev/shm. All
/// problems are warnings.
fn check_limits(host: &HostInspection) -> Vec<CheckResult> {
    let mut checks = Vec::new();
    let number = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
    for (name, resource, min) in
        [("open files", "nofile", MIN_OPEN_FILES), ("processes", "nproc", MIN_PROCESSES)]
    {
        let Some(limit) = host.limits.get(resource) else { continue };
        checks.push(match limit.is_some_and(|n| n < min) {
            true => {
                let help = format!("raise `{resource}` in /etc/security/limits.conf");
                CheckResult::warn(name, codes::LIMIT_TOO_LOW, number(*limit), help)
            }
            false => CheckResult::ok(name, number(*limit)),
        });
    }
    if let Some(limit) = host.limits.get("memlock") {
        let found = limit.map_or("unlimited".to_owned(), format_bytes);
        checks.push(match limit.is_some() && !host.gpus.gpus.is_empty() {
            true => CheckResult::warn(
                "locked memory",
                codes::LIMIT_TOO_LOW,
                found,
                "set `memlock unlimited` in /etc/security/limits.conf; GPUs and InfiniBand pin memory",
            ),
            false => CheckResult::ok("locked memory", found),
        });
    }
    /// The name of the check of /dev/shm in the report of `launch check`.
    const SHM_CHECK_NAME: &str = "/dev/shm";
    checks.push(match host.shm_size_and_free {
        Some((size, _)) if size < MIN_SHM_BYTES => CheckResult::warn(
            SHM_CHECK_NAME,
            codes::SHARED_MEMORY_SMALL,
            format_bytes(size),
            "mount a larger tmpfs (docker: --shm-size); data loaders and NCCL need it",
        ),
        Some((size, free)) => {
            CheckResult::ok(SHM_CHECK_NAME, format!("{} free of {}", format_bytes(free), format_bytes(size)))
        }
        None => CheckResult::warn(
            SHM_CHECK_NAME,
            codes::SHARED_MEMORY_SMALL,
            "missing",
            "mount a tmpfs at /dev/shm",
        ),
    });
    checks
}

/// Warns if the clocks of a host and this machine differ by more than [`MAX_CLOCK_SKEW_S`], even
/// with the measurement uncertainty subtracted. Returns `None` if the skew was not measured.
fn check_clock(probe: &ProbeResult) -> Option<CheckResult> {
    let (skew, uncertainty) = probe.clock_skew_s?;
    let found = format!("{skew:+.3} s (± {uncertainty:.3} s)");
    Some(match skew.abs() - uncertainty > MAX_CLOCK_SKEW_S {
        true => {
            let help = "synchronize the clocks with NTP, so that times in logs can be compared";
            CheckResult::warn("clock", codes::CLOCK_SKEWED, found, help)
        }
        false => CheckResult::ok("clock", found),
    })
}

/// Converts the results of a host's test connections over TCP to other hosts into checks, one
/// failed check for each host that could not be reached. Returns one failed check for each
/// unreachable peer, one passed check if the host reached all peers, and no check without peers.
fn check_peer_connections(probe: &ProbeResult) -> Vec<CheckResult> {
    if probe.peers.is_empty() {
        return Vec::new();
    }
    let failed = probe.peers.iter().filter_map(|(name, result)| Some((name, result.as_ref().err()?)));
    let mut checks: Vec<CheckResult> = failed
        .map(|(peer, error)| {
            let help = "open the TCP ports between the hosts (firewall), or correct the route";
            CheckResult::failed("ports", error.code(), format!("cannot connect to {peer}: {error}"), help)
        })
        .collect();
    if checks.is_empty() {
        let times = probe.peers.iter().filter_map(|(_, result)| result.as_ref().ok());
        let slowest = times.fold(0.0, |a: f64, b| a.max(*b));
        let peers = probe.peers.len();
        let found = format!("{peers} peers, slowest {slowest:.1} ms");
        checks.push(CheckResult::ok("ports", found).with_field("peers", peers));
    }
    checks
}

/// Checks whether all hosts share the checkpoint and working directory, by comparing which test
/// files of other hosts each host has found there.
///
/// Hosts share a directory if each host sees the nonce files of all hosts in the directory. Returns
/// no checks if fewer than two hosts answered.
fn check_shared_directories(job: &JobSpec, probes: &[ProbeResult]) -> Vec<CheckResult> {
    let answered: Vec<&ProbeResult> = probes.iter().filter(|probe| !probe.nonces.is_empty()).collect();
    if answered.len() < 2 {
        return Vec::new();
    }
    let nonces: BTreeSet<&String> = answered.iter().map(|probe| &probe.nonce).collect();
    let is_shared = |dir: usize| {
        let sees_all = |seen: &Vec<String>| nonces.iter().all(|nonce| seen.contains(nonce));
        answered.iter().all(|probe| probe.nonces.get(dir).is_some_and(sees_all))
    };
    let path = |dir: usize| {
        let report = probes.iter().find_map(|probe| probe.inspection.as_ref()?.dirs.get(dir));
        report.map_or_else(String::new, |report| report.path.display().to_string())
    };
    let mut checks = Vec::new();
    if job.train.is_some() {
        let path = path(2);
        checks.push(match is_shared(2) {
            true => CheckResult::ok("shared storage", format!("{path} is one directory on all hosts")),
            false => CheckResult::warn(
                "shared storage",
                training::STORAGE_NOT_SHARED,
                format!("{path} is not one directory on all hosts"),
                "set `checkpoint.dir` to shared storage; resuming needs the shards of all hosts",
            ),
        });
    }
    let found = if is_shared(0) { "one directory on all hosts" } else { "a separate directory on each host" };
    checks.push(CheckResult::ok("workdir", format!("{}: {found}", path(0))));
    checks
}

#[cfg(test)]
mod tests {
    use super::{
        CheckLevel::{Fail, Skipped, Warn},
        *,
    };
    use diagnostic::{
        Diagnostic,
        codes::{host, ssh},
    };
    use protocol::probe::{DirectoryInspection, GpuStatus};

    /// Returns the inspection of a host for which all checks pass.
    fn make_inspection() -> HostInspection {
        let dir = |path: &str| DirectoryInspection {
            path: path.into(),
            filesystem: "ext4".into(),
            free: 1 << 40,
            writable: Ok(()),
        };
        HostInspection {
            hostname: "n1".into(),
            arch: "x86_64".into(),
            executable: "h".into(),
            dirs: vec![dir("/"), dir("/")],
            limits: [("nofile".to_owned(), Some(1 << 20)), ("memlock".to_owned(), None)].into(),
            shm_size_and_free: Some((1 << 34, 1 << 34)),
            ..HostInspection::default()
        }
    }

    /// Returns the probe result of a reachable host with this inspection.
    fn make_probe_result(inspection: Option<HostInspection>) -> ProbeResult {
        ProbeResult {
            name: "n1".into(),
            stage: ConnectionStage::Agent,
            error: None,
            inspection,
            clock_skew_s: Some((0.0, 0.001)),
            peers: Vec::new(),
            nonces: Vec::new(),
            nonce: String::new(),
            shell_output: String::new(),
            client: None,
        }
    }

    /// Applies `change` to the second of two healthy hosts and evaluates both. Returns the name and
    /// level of each check of the second host that did not pass.
    fn evaluate_changed_host(change: impl FnOnce(&mut ProbeResult)) -> Vec<(&'static str, CheckLevel)> {
        let mut job = crate::testing::sample_job();
        job.cluster.hosts = jobspec::HostSelection::List(vec!["n[1-2]".into()]);
        let preflight = crate::cluster::find_host_provider(&job).expect("named hosts").check_settings();
        let mut second = make_probe_result(Some(make_inspection()));
        change(&mut second);
        let probes = vec![make_probe_result(Some(make_inspection())), second];
        let report = evaluate_probes(&job, &[], preflight, probes);
        let host = report.hosts.last().expect("two hosts");
        host.checks.iter().filter(|c| c.level != CheckLevel::Ok).map(|c| (c.name, c.level)).collect()
    }

    #[test]
    fn a_healthy_host_passes_all_checks() {
        assert_eq!(evaluate_changed_host(|_| ()), []);
    }

    /// Applies `change` to the inspection of the second of two healthy hosts and evaluates both.
    /// Returns the name and level of each check of the second host that did not pass.
    fn evaluate_changed_inspection(
        change: impl FnOnce(&mut HostInspection),
    ) -> Vec<(&'static str, CheckLevel)> {
        evaluate_changed_host(|probe| change(probe.inspection.as_mut().expect("an inspection")))
    }

    /// Evaluates two hosts: a healthy host without problems, and a host with the GPUs `gpus`.
    /// Returns the name and level of each check of the second host that did not pass.
    fn evaluate_gpus(gpus: Vec<GpuStatus>) -> Vec<(&'static str, CheckLevel)> {
        evaluate_changed_inspection(|host| host.gpus.gpus = gpus)
    }

    /// Creates an error about a directory that is not writable, for tests.
    fn make_directory_error() -> Diagnostic {
        Diagnostic::error(host::DIRECTORY_UNWRITABLE, "read-only")
    }

    #[test]
    fn each_problem_of_a_connection_fails_or_warns_in_its_check() {
        let skewed = |a: &mut ProbeResult| a.clock_skew_s = Some((-3.0, 0.1));
        assert_eq!(evaluate_changed_host(skewed), [("clock", Warn)]);
        let unreachable_peer = |a: &mut ProbeResult| {
            a.peers = vec![("x".into(), Err(make_directory_error())), ("y".into(), Ok(1.0))];
        };
        assert_eq!(evaluate_changed_host(unreachable_peer), [("ports", Fail)]);
        let printing_shell = |a: &mut ProbeResult| a.shell_output = "hello".into();
        assert_eq!(evaluate_changed_host(printing_shell), [("login shell", Warn)]);
        let rejected_login = |a: &mut ProbeResult| {
            (a.inspection, a.stage) = (None, ConnectionStage::Authentication);
            a.error = Some(Diagnostic::error(ssh::SSH_LOGIN_FAILED, "no"));
        };
        assert_eq!(
            evaluate_changed_host(rejected_login),
            [("authentication", Fail), ("exec", Skipped), ("agent", Skipped)]
        );
    }

    #[test]
    fn each_problem_of_a_host_fails_or_warns_in_its_check() {
        type Change = fn(&mut HostInspection);
        let cases: [(Change, &[(&str, CheckLevel)]); 7] = [
            (|host| host.shm_size_and_free = Some((64 << 20, 1)), &[("/dev/shm", Warn)]),
            (|host| host.executable = "other".into(), &[("version", Fail)]),
            (|host| host.arch = "aarch64".into(), &[("architecture", Fail)]),
            (
                |host| {
                    let low = [("nofile".to_owned(), Some(1024)), ("nproc".to_owned(), Some(64))];
                    host.limits.extend(low);
                },
                &[("open files", Warn), ("processes", Warn)],
            ),
            (
                |host| {
                    let writable = |dir: &str| (dir.into(), Err(make_directory_error()));
                    host.writable = vec![writable("/root"), writable("/cache")];
                },
                &[("home", Warn), ("cache", Warn)],
            ),
            (|host| host.dirs[0].path = "/tmp".into(), &[("workdir", Fail)]),
            (|host| host.dirs[1].writable = Err(make_directory_error()), &[("logs", Fail)]),
        ];
        for (index, (change, expected)) in cases.into_iter().enumerate() {
            assert_eq!(evaluate_changed_inspection(change), expected, "case {index}");
        }
    }

    #[test]
    fn each_problem_of_gpus_warns_in_its_check() {
        let used = GpuStatus { memory: 9, memory_free: 3, processes: vec![(7, 6)], ..GpuStatus::default() };
        assert_eq!(evaluate_gpus(vec![used]), [("gpus", Warn), ("gpu memory", Warn)]);
        let unhealthy = GpuStatus {
            uncorrected_ecc_errors: Some(2),
            remapped_rows: (true, true),
            throttle_reasons: vec!["too hot".into()],
            exclusive_compute: true,
            mig_enabled: true,
            ..GpuStatus::default()
        };
        let expected = [vec![("gpus", Warn)], vec![("gpu health", Warn); 6]].concat();
        assert_eq!(evaluate_gpus(vec![unhealthy]), expected);
        let without_access =
            |other| GpuStatus { no_peer_access: vec![(other, "far".into())], ..GpuStatus::default() };
        let expected = [("gpus", Warn), ("gpu links", Warn)];
        assert_eq!(evaluate_gpus(vec![without_access(1), without_access(0)]), expected);
        let linked = |nvlinks| GpuStatus { nvlinks, ..GpuStatus::default() };
        assert_eq!(evaluate_gpus(vec![linked(18), linked(17)]), expected);
    }
}
