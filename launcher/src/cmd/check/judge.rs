//! What the answers mean: each thing that was looked at, how bad it is, and the next thing to do.
use super::{Check, Checked, HostChecked, Level, ask::Asked, gpus};
use crate::{cmd::plan::bytes, discover::hosts::ClusterHost, transport::ssh::Stage};
use contract::{JobSpec, probe::NodeLook};
use std::collections::BTreeSet;

/// Clocks further apart than this make logs and timeouts hard to read, seconds.
const MOST_SKEW: f64 = 1.0;
/// Open files that a job's processes need, with room.
const LEAST_FILES: u64 = 4096;
/// Processes and threads, the same.
const LEAST_PROCESSES: u64 = 4096;
/// Of /dev/shm and of a disk, bytes.
const LEAST_SHM: u64 = 1 << 30;
const LEAST_DISK: u64 = 1 << 30;

/// The stages of getting an agent, as the table names them.
const STAGES: [(Stage, &str); 7] = [
    (Stage::Config, "config"),
    (Stage::Name, "dns"),
    (Stage::Tcp, "tcp"),
    (Stage::HostKey, "host key"),
    (Stage::Authentication, "authentication"),
    (Stage::Exec, "exec"),
    (Stage::Agent, "agent"),
];

/// Judges all hosts.
pub(super) fn judge(job: &JobSpec, hosts: Option<&[ClusterHost]>, asked: Vec<Asked>) -> Checked {
    let checks = together(job, &asked);
    let first = asked.iter().find_map(|a| a.look.clone());
    let slots = |index: usize| hosts.and_then(|h| h.get(index)).and_then(|h| h.slots.count());
    let own = asked.into_iter().enumerate().map(|(index, a)| {
        let mut checks = way(&a, hosts.is_some());
        if let Some(look) = &a.look {
            checks.extend(node(job, look, first.as_ref(), slots(index)));
            checks.extend(clock(&a));
            checks.extend(peers(&a));
        }
        HostChecked { name: a.name, look: a.look, skew: a.skew, checks }
    });
    Checked { name: job.name.clone(), hosts: own.collect(), checks }
}

pub(super) fn ok(what: &'static str, found: impl Into<String>) -> Check {
    Check { what, level: Level::Ok, found: found.into(), hint: None }
}

pub(super) fn bad(
    level: Level,
    what: &'static str,
    found: impl Into<String>,
    hint: impl Into<String>,
) -> Check {
    Check { what, level, found: found.into(), hint: Some(hint.into()) }
}

/// How far the way to the host led.
fn way(asked: &Asked, remote: bool) -> Vec<Check> {
    let reached = if asked.look.is_some() { Stage::Agent } else { asked.stage };
    let mut checks = Vec::new();
    for (stage, what) in STAGES.into_iter().filter(|(stage, _)| remote || *stage == Stage::Agent) {
        checks.push(match &asked.refusal {
            Some(refusal) if stage == reached => {
                Check { what, level: Level::Fail, found: refusal.message.clone(), hint: refusal.hint.clone() }
            }
            _ if stage > reached => Check { what, level: Level::Skipped, found: String::new(), hint: None },
            _ => ok(what, ""),
        });
    }
    if !asked.noise.is_empty() {
        let lines = asked.noise.lines().count();
        let hint = "it does no harm here; other programs (scp, rsync) may stumble over it";
        checks.push(bad(Level::Warn, "login shell", format!("prints {lines} lines on its own"), hint));
    }
    checks
}

/// One node by itself, and beside the first.
fn node(job: &JobSpec, look: &NodeLook, first: Option<&NodeLook>, slots: Option<u32>) -> Vec<Check> {
    let mut checks = Vec::new();
    for (what, (dir, writable)) in ["home", "cache"].into_iter().zip(&look.writable) {
        checks.push(match writable {
            Ok(()) => ok(what, dir.display().to_string()),
            Err(e) => bad(
                Level::Warn,
                what,
                format!("{} can't be written: {e}", dir.display()),
                "many programs keep caches there",
            ),
        });
    }
    let first = first.unwrap_or(look);
    let same = look.arch == first.arch;
    checks.push(match same {
        true => ok("architecture", look.arch.clone()),
        false => bad(
            Level::Fail,
            "architecture",
            format!("{} here, {} on {}", look.arch, first.arch, first.hostname),
            "hosts of one job have the same architecture",
        ),
    });
    checks.push(match same && look.executable != first.executable {
        false => ok("version", look.version.clone()),
        true => bad(
            Level::Fail,
            "version",
            format!("another executable than on {}", first.hostname),
            "remove ~/.cache/launch/bin there; it is copied again",
        ),
    });
    checks.extend(directories(job, look));
    checks.extend(gpus::judge(look, first, slots));
    checks.extend(limits(look));
    checks
}

fn directories(job: &JobSpec, look: &NodeLook) -> Vec<Check> {
    let mut checks = Vec::new();
    let names = ["workdir", "logs", "checkpoints"];
    for (index, (what, dir)) in names.into_iter().zip(&look.dirs).enumerate() {
        let at = dir.at.display();
        let missing = index == 0 && dir.at != job.run.workdir;
        checks.push(match &dir.writable {
            _ if missing => bad(
                Level::Fail,
                what,
                format!("{} doesn't exist there", job.run.workdir.display()),
                "make it on the host, or name a directory that all hosts have as `run.workdir`",
            ),
            Err(e) if index > 0 => bad(
                Level::Fail,
                what,
                format!("{at} can't be written: {e}"),
                "make it writable for the user on this host",
            ),
            _ if dir.free < LEAST_DISK => {
                let found = format!("{} free in {at} ({})", bytes(dir.free), dir.filesystem);
                bad(Level::Warn, what, found, "free some space: checkpoints and logs need it")
            }
            _ => ok(what, format!("{} free in {at} ({})", bytes(dir.free), dir.filesystem)),
        });
    }
    checks
}

fn limits(look: &NodeLook) -> Vec<Check> {
    let mut checks = Vec::new();
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
    if let Some(limit) = look.limits.get("nofile") {
        checks.push(match limit.is_some_and(|n| n < LEAST_FILES) {
            true => {
                bad(Level::Warn, "open files", shown(*limit), "raise `nofile` in /etc/security/limits.conf")
            }
            false => ok("open files", shown(*limit)),
        });
    }
    if let Some(limit) = look.limits.get("nproc") {
        checks.push(match limit.is_some_and(|n| n < LEAST_PROCESSES) {
            true => {
                bad(Level::Warn, "processes", shown(*limit), "raise `nproc` in /etc/security/limits.conf")
            }
            false => ok("processes", shown(*limit)),
        });
    }
    if let Some(limit) = look.limits.get("memlock") {
        let shown = limit.map_or("unlimited".to_owned(), bytes);
        checks.push(match limit.is_some() && !look.gpus.gpus.is_empty() {
            true => bad(
                Level::Warn,
                "locked memory",
                shown,
                "GPUs and InfiniBand pin memory: set `memlock unlimited` in /etc/security/limits.conf",
            ),
            false => ok("locked memory", shown),
        });
    }
    checks.push(match look.shm {
        Some((size, _)) if size < LEAST_SHM => bad(
            Level::Warn,
            "/dev/shm",
            bytes(size),
            "data loaders and NCCL need more: mount it larger (docker: --shm-size)",
        ),
        Some((size, free)) => ok("/dev/shm", format!("{} free of {}", bytes(free), bytes(size))),
        None => bad(Level::Warn, "/dev/shm", "not there", "mount a tmpfs at /dev/shm"),
    });
    checks
}

fn clock(asked: &Asked) -> Option<Check> {
    let (skew, about) = asked.skew?;
    let found = format!("{skew:+.3} s (± {about:.3} s)");
    Some(match skew.abs() - about > MOST_SKEW {
        true => bad(Level::Warn, "clock", found, "set the clocks by NTP: times in logs can't be compared"),
        false => ok("clock", found),
    })
}

fn peers(asked: &Asked) -> Vec<Check> {
    if asked.peers.is_empty() {
        return Vec::new();
    }
    let failed = asked.peers.iter().filter_map(|(name, result)| Some((name, result.as_ref().err()?)));
    let mut checks: Vec<Check> = failed
        .map(|(name, why)| {
            let hint = "ranks talk to each other over TCP: open the ports between the hosts (firewall), or fix the route";
            bad(Level::Fail, "ports", format!("{name} can't be connected to: {why}"), hint)
        })
        .collect();
    if checks.is_empty() {
        let slowest =
            asked.peers.iter().filter_map(|(_, r)| r.as_ref().ok()).fold(0.0, |a: f64, b| a.max(*b));
        checks.push(ok("ports", format!("{} peers, slowest {slowest:.1} ms", asked.peers.len())));
    }
    checks
}

/// What concerns all hosts together: is the directory of the checkpoints one?
fn together(job: &JobSpec, asked: &[Asked]) -> Vec<Check> {
    let answered: Vec<&Asked> = asked.iter().filter(|a| !a.nonces.is_empty()).collect();
    if answered.len() < 2 {
        return Vec::new();
    }
    let own: BTreeSet<&String> = answered.iter().map(|a| &a.nonce).collect();
    let shared = |dir: usize| {
        answered.iter().all(|a| a.nonces.get(dir).is_some_and(|seen| own.iter().all(|n| seen.contains(n))))
    };
    let place = |dir: usize| {
        asked
            .iter()
            .find_map(|a| a.look.as_ref()?.dirs.get(dir))
            .map_or_else(String::new, |d| d.at.display().to_string())
    };
    let mut checks = Vec::new();
    if job.train.is_some() {
        checks.push(match shared(2) {
            true => ok("shared storage", format!("{} is one directory on all hosts", place(2))),
            false => bad(Level::Warn, "shared storage", format!("{} is not one directory on all hosts", place(2)), "name a directory on shared storage as `checkpoint.dir`: a resume needs the parts of all hosts"),
        });
    }
    let found = if shared(0) { "one directory on all hosts" } else { "each host has its own" };
    checks.push(ok("workdir", format!("{}: {found}", place(0))));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::probe::{DirLook, Gpu};

    fn look() -> NodeLook {
        let dir = |path: &str| DirLook {
            at: path.into(),
            filesystem: "ext4".into(),
            free: 1 << 40,
            writable: Ok(()),
        };
        NodeLook {
            hostname: "n1".into(),
            arch: "x86_64".into(),
            executable: "h".into(),
            dirs: vec![dir("/"), dir("/")],
            limits: [("nofile".to_owned(), Some(1 << 20)), ("memlock".to_owned(), None)].into(),
            shm: Some((1 << 34, 1 << 34)),
            ..NodeLook::default()
        }
    }

    fn asked(look: Option<NodeLook>) -> Asked {
        Asked {
            name: "n1".into(),
            stage: Stage::Agent,
            refusal: None,
            look,
            skew: Some((0.0, 0.001)),
            peers: Vec::new(),
            nonces: Vec::new(),
            nonce: String::new(),
            noise: String::new(),
        }
    }

    fn told(changed: impl FnOnce(&mut Asked)) -> Vec<(&'static str, Level)> {
        let job = crate::testing::job();
        let mut second = asked(Some(look()));
        changed(&mut second);
        let checked = judge(&job, Some(&[]), vec![asked(Some(look())), second]);
        let host = checked.hosts.last().expect("two hosts");
        host.checks.iter().filter(|c| c.level != Level::Ok).map(|c| (c.what, c.level)).collect()
    }

    #[test]
    fn a_good_host_has_no_complaints() {
        assert_eq!(told(|_| ()), []);
    }

    #[test]
    fn each_trouble_is_told() {
        use Level::{Fail, Skipped, Warn};
        type Change = fn(&mut Asked);
        let with: Vec<(Change, Vec<(&str, Level)>)> = vec![
            (|a| a.skew = Some((-3.0, 0.1)), vec![("clock", Warn)]),
            (
                |a| a.peers = vec![("x".into(), Err("no".into())), ("y".into(), Ok(1.0))],
                vec![("ports", Fail)],
            ),
            (|a| a.noise = "hello".into(), vec![("login shell", Warn)]),
            (|a| a.look.as_mut().expect("look").shm = Some((64 << 20, 1)), vec![("/dev/shm", Warn)]),
            (|a| a.look.as_mut().expect("look").executable = "other".into(), vec![("version", Fail)]),
            (|a| a.look.as_mut().expect("look").arch = "aarch64".into(), vec![("architecture", Fail)]),
            (
                |a| {
                    let look = a.look.as_mut().expect("look");
                    look.limits.extend([("nofile".to_owned(), Some(1024)), ("nproc".to_owned(), Some(64))]);
                },
                vec![("open files", Warn), ("processes", Warn)],
            ),
            (
                |a| {
                    let writable = |dir: &str| (dir.into(), Err("read-only".into()));
                    a.look.as_mut().expect("look").writable = vec![writable("/root"), writable("/cache")];
                },
                vec![("home", Warn), ("cache", Warn)],
            ),
            (|a| a.look.as_mut().expect("look").dirs[0].at = "/tmp".into(), vec![("logs", Fail)]),
            (|a| a.look.as_mut().expect("look").dirs[1].writable = Err("no".into()), vec![("logs", Fail)]),
            (
                |a| {
                    a.look.as_mut().expect("look").gpus.gpus =
                        vec![Gpu { memory: 9, memory_free: 3, processes: vec![(7, 6)], ..Gpu::default() }];
                },
                vec![("gpus", Warn), ("gpu memory", Warn)],
            ),
            (
                |a| {
                    let gpu = Gpu {
                        ecc_errors: Some(2),
                        rows: (true, true),
                        slowed: vec!["too hot".into()],
                        exclusive: true,
                        instances: true,
                        ..Gpu::default()
                    };
                    a.look.as_mut().expect("look").gpus.gpus = vec![gpu];
                },
                [vec![("gpus", Warn)], vec![("gpu health", Warn); 6]].concat(),
            ),
            (
                |a| {
                    let far = |other| Gpu { unreachable: vec![(other, "far".into())], ..Gpu::default() };
                    a.look.as_mut().expect("look").gpus.gpus = vec![far(1), far(0)];
                },
                vec![("gpus", Warn), ("gpu links", Warn)],
            ),
            (
                |a| {
                    let linked = |nvlinks| Gpu { nvlinks, ..Gpu::default() };
                    a.look.as_mut().expect("look").gpus.gpus = vec![linked(18), linked(17)];
                },
                vec![("gpus", Warn), ("gpu links", Warn)],
            ),
            (
                |a| {
                    (a.look, a.stage) = (None, Stage::Authentication);
                    a.refusal = Some(crate::transport::Refusal { message: "no".into(), hint: None });
                },
                vec![("authentication", Fail), ("exec", Skipped), ("agent", Skipped)],
            ),
        ];
        for (index, (change, mut expected)) in with.into_iter().enumerate() {
            if expected == [("logs", Fail)] && index == 8 {
                expected = vec![("workdir", Fail)];
            }
            assert_eq!(told(change), expected, "case {index}");
        }
    }
}
