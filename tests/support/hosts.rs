//! Several hosts on this machine, each with a real sshd: tests/hosts/hosts.sh, taken down when it is dropped.
#![allow(dead_code)] // each test file uses a part of it

use super::skip;
use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// Sets of hosts that may be up at once on this machine.
const MOST: u32 = 200;

/// Hosts `h0`, `h1`, …
pub(crate) struct Hosts {
    id: String,
    net: String,
    dir: PathBuf,
    /// A directory that all hosts and this machine share under one path.
    bind: PathBuf,
    /// Locked while the number is in use.
    _number: File,
}

impl Hosts {
    /// `count` hosts; `None` (the test is skipped by name) where there can't be any.
    pub(crate) fn up(test: &str, count: u32) -> Option<Hosts> {
        Hosts::sharing(test, count, Path::new(""))
    }

    /// The same; all hosts see `bind`, a directory of this machine, under its own path.
    pub(crate) fn sharing(test: &str, count: u32, bind: &Path) -> Option<Hosts> {
        if let Some(missing) = missing() {
            skip(test, &missing);
            return None;
        }
        let root = env::temp_dir().join("launch-test-hosts");
        fs::create_dir_all(&root).expect("a directory for hosts");
        let (number, lock) = (0..MOST)
            .find_map(|n| {
                let lock = File::create(root.join(format!("{n}.lock"))).ok()?;
                lock.try_lock().ok().map(|()| (n, lock))
            })
            .expect("a free number");
        let hosts = Hosts {
            id: format!("lt{number}"),
            net: format!("10.88.{number}"),
            dir: root.join(format!("lt{number}")),
            bind: bind.to_path_buf(),
            _number: lock,
        };
        let up = hosts.script(&["up", &count.to_string()]);
        assert!(up.status.success(), "hosts don't come up: {}", String::from_utf8_lossy(&up.stderr));
        Some(hosts)
    }

    fn script(&self, args: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/hosts.sh");
        let mut command = Command::new(script);
        command.args(args).env("HOSTS_ID", &self.id).env("HOSTS_NET", &self.net).env("HOSTS_DIR", &self.dir);
        command.env("HOSTS_BIND", &self.bind);
        command.stdin(Stdio::null()).output().expect("hosts.sh starts")
    }

    /// One of the script's commands.
    #[track_caller]
    pub(crate) fn do_(&self, args: &[&str]) {
        let output = self.script(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// A shell command in a host, without SSH; its output.
    #[track_caller]
    pub(crate) fn shell(&self, host: &str, command: &str) -> String {
        let output = self.script(&["exec", host, "sh", "-c", command]);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The SSH configuration that knows the hosts.
    pub(crate) fn config(&self) -> PathBuf {
        self.dir.join("ssh_config")
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The processes of a host but its init and the sshd that listens: pid on this machine, and command line. None of a host
    /// that is down.
    pub(crate) fn processes(&self, host: &str) -> Vec<(i32, String)> {
        let first = fs::read_to_string(self.dir.join(host).join("pid1")).unwrap_or_default();
        let Ok(space) = fs::read_link(format!("/proc/{}/ns/pid", first.trim())) else { return Vec::new() };
        let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let own = pids.filter(|pid| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|s| s == space));
        let lines = own.filter_map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            Some((pid, String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned()))
        });
        let furniture = ["hostinit", "/usr/sbin/sshd -f", "sshd: /usr/sbin/sshd", "sleep 86400"];
        lines.filter(|(_, line)| !line.is_empty() && !furniture.iter().any(|f| line.contains(f))).collect()
    }

    /// An address in the hosts' network.
    pub(crate) fn address(&self, last: u8) -> String {
        format!("{}.{last}", self.net)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        _ = self.script(&["down"]);
        _ = fs::remove_dir_all(&self.dir);
    }
}

/// What hosts need and this machine lacks.
fn missing() -> Option<String> {
    if !nix::unistd::Uid::effective().is_root() {
        return Some("hosts in namespaces need root".to_owned());
    }
    let there = |program: &str| {
        ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].iter().any(|dir| Path::new(dir).join(program).exists())
    };
    let lacks: Vec<&str> =
        ["sshd", "ssh-keygen", "ip", "iptables", "nsenter"].into_iter().filter(|p| !there(p)).collect();
    (!lacks.is_empty()).then(|| format!("{} missing; scripts/setup-tests installs them", lacks.join(", ")))
}
