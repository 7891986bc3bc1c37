//! Simulates several hosts in namespaces of this machine, each with a real sshd
//! (tests/hosts/hosts.sh).

use super::{
    environment::{LAUNCH_EXECUTABLE, SIMULATION_ROOT, clean_command},
    process_list, report_skip,
};
use std::{
    fs::{self, DirBuilder, File},
    net::UdpSocket,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::SystemTime,
};

/// The largest number of sets of simulated hosts that exist at the same time.
const MAX_HOST_SETS: u32 = 200;

/// The hosts `h0`, `h1`, … in namespaces of this machine. Dropping the value removes the hosts.
pub(crate) struct SimulatedHosts {
    id: String,
    network_prefix: String,
    directory: PathBuf,
    /// A directory that every host and this machine see under the same path.
    shared_directory: PathBuf,
    /// The beginning of the names of the hosts.
    name_prefix: String,
    /// Whether each host has an sshd.
    has_sshd: bool,
    /// The cache of launch's executables that the hosts share; `None` if each has its own.
    executable_cache: Option<PathBuf>,
    /// A file lock that reserves the number of this set of hosts. Other sets that exist at the same
    /// time have other numbers.
    _number_lock: File,
}

impl SimulatedHosts {
    /// Starts `count` hosts. Returns `None` if this machine cannot create hosts; the test is then
    /// skipped.
    pub(crate) fn start(test: &str, count: u32) -> Option<SimulatedHosts> {
        SimulatedHosts::start_with_shared_directory(test, count, Path::new(""))
    }

    /// Starts `count` hosts without sshd, called `PREFIX0`, `PREFIX1` and so on, that see the
    /// directory `shared_directory`. Returns `None` if this machine cannot create hosts.
    pub(crate) fn start_without_sshd(
        test: &str,
        (name_prefix, count): (&str, u32),
        shared_directory: &Path,
    ) -> Option<SimulatedHosts> {
        SimulatedHosts::start_host_set(test, (name_prefix, count), shared_directory, (false, None))
    }

    /// Starts `count` hosts that see the directory `shared_directory` of this machine under the
    /// same path. Returns `None` if this machine cannot create hosts; the test is then skipped.
    pub(crate) fn start_with_shared_directory(
        test: &str,
        count: u32,
        shared_directory: &Path,
    ) -> Option<SimulatedHosts> {
        SimulatedHosts::start_host_set(test, ("h", count), shared_directory, (true, None))
    }

    /// Starts hosts as [`start_with_shared_directory`](Self::start_with_shared_directory) does, and
    /// gives them one cache that contains launch's executable, as hosts with a shared home
    /// directory have. This saves the time to copy the executable to each host.
    pub(crate) fn start_with_executable(
        test: &str,
        count: u32,
        shared_directory: &Path,
    ) -> Option<SimulatedHosts> {
        let cache = create_executable_cache();
        SimulatedHosts::start_host_set(test, ("h", count), shared_directory, (true, Some(cache)))
    }

    /// Starts `count` hosts whose names begin with `name_prefix`.
    fn start_host_set(
        test: &str,
        (name_prefix, count): (&str, u32),
        shared_directory: &Path,
        (has_sshd, executable_cache): (bool, Option<PathBuf>),
    ) -> Option<SimulatedHosts> {
        if let Some(missing) = find_missing_requirement() {
            report_skip(test, &missing);
            return None;
        }
        let root = Path::new(SIMULATION_ROOT).join("launch-test-hosts");
        fs::create_dir_all(&root).expect("a directory for hosts");
        let (number, lock) = (0..MAX_HOST_SETS)
            .filter(|n| !is_network_in_use(*n))
            .find_map(|n| {
                let lock = File::create(root.join(format!("{n}.lock"))).ok()?;
                lock.try_lock().ok().map(|()| (n, lock))
            })
            .expect("a free number");
        let hosts = SimulatedHosts {
            id: format!("lt{number}"),
            network_prefix: format_network_prefix(number),
            directory: root.join(format!("lt{number}")),
            shared_directory: shared_directory.to_path_buf(),
            name_prefix: name_prefix.to_owned(),
            has_sshd,
            executable_cache,
            _number_lock: lock,
        };
        let up = hosts.run_hosts_script(&["up", &count.to_string()]);
        assert!(up.status.success(), "hosts.sh failed: {}", String::from_utf8_lossy(&up.stderr));
        Some(hosts)
    }

    /// Runs tests/hosts/hosts.sh for this set of hosts and returns its output.
    fn run_hosts_script(&self, args: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/hosts.sh");
        let mut command = clean_command(script);
        command
            .args(args)
            .env("HOSTS_ID", &self.id)
            .env("HOSTS_NET", &self.network_prefix)
            .env("HOSTS_DIR", &self.directory);
        command.env("HOSTS_BIND", &self.shared_directory).env("HOSTS_PREFIX", &self.name_prefix);
        command.env("HOSTS_SSHD", if self.has_sshd { "yes" } else { "no" });
        if let Some(cache) = &self.executable_cache {
            command.env("HOSTS_EXECUTABLES", cache);
        }
        command.output().expect("hosts.sh starts")
    }

    /// Runs hosts.sh with these arguments. Panics if the script fails.
    #[track_caller]
    pub(crate) fn run_hosts_command(&self, args: &[&str]) {
        let output = self.run_hosts_script(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Runs a shell command on a host, without the use of SSH, and returns its stdout. Panics if
    /// the command fails.
    #[track_caller]
    pub(crate) fn run_shell(&self, host: &str, command: &str) -> String {
        let output = self.run_hosts_script(&["exec", host, "sh", "-c", command]);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Creates a command that runs `program` on a host, without the use of SSH. The environment is
    /// empty except for the search path of programs. Dropping the process does not end the program.
    pub(crate) fn create_command(&self, host: &str, program: &[&str]) -> Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/hosts.sh");
        let mut command = clean_command(script);
        command.args(["exec", host]).args(program);
        command.env("HOSTS_ID", &self.id).env("HOSTS_NET", &self.network_prefix);
        command.env("HOSTS_DIR", &self.directory).env("HOSTS_PREFIX", &self.name_prefix);
        command
    }

    /// Returns the path of an SSH configuration with the hosts.
    pub(crate) fn ssh_config_path(&self) -> PathBuf {
        self.directory.join("ssh_config")
    }

    /// Returns a path in the directory of this set of hosts.
    pub(crate) fn file_path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Lists the pid on this machine and the command line of each process of a host, except its
    /// init and its sshd. The list is empty for a host that is down.
    pub(crate) fn list_processes(&self, host: &str) -> Vec<(i32, String)> {
        list_processes_of_host(&self.host_directory(host))
    }

    /// Returns the directory of a host, for [`list_processes_of_host`].
    pub(crate) fn host_directory(&self, host: &str) -> PathBuf {
        self.directory.join(host)
    }

    /// Returns the IP address with the last byte `last` in the network of the hosts.
    pub(crate) fn format_address(&self, last: u8) -> String {
        format!("{}.{last}", self.network_prefix)
    }
}

impl Drop for SimulatedHosts {
    fn drop(&mut self) {
        _ = self.run_hosts_script(&["down"]);
        _ = fs::remove_dir_all(&self.directory);
    }
}

/// Returns a directory that contains only the executable under test, named as the launcher names it
/// in the cache of a host. The tests of one build share the directory.
fn create_executable_cache() -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("executables");
    fs::create_dir_all(&root).expect("a directory for executables");
    let lock = File::create(root.join("lock")).expect("a lock file");
    lock.lock().expect("the lock");
    let built = fs::metadata(LAUNCH_EXECUTABLE).and_then(|file| file.modified()).expect("a built executable");
    let built = built.duration_since(SystemTime::UNIX_EPOCH).expect("a time after 1970").as_nanos();
    let cache = root.join(built.to_string());
    if !cache.exists() {
        // Removes the executables of earlier builds.
        let entries = fs::read_dir(&root).expect("the directory").flatten();
        for entry in entries.filter(|entry| entry.file_name() != "lock") {
            fs::remove_dir_all(entry.path()).expect("a removed directory");
        }
        let new = root.join("new");
        DirBuilder::new().mode(0o700).create(&new).expect("a new directory");
        let hash = clean_command(LAUNCH_EXECUTABLE).args(["agent", "--own-hash"]).output().expect("a hash");
        let hash = String::from_utf8(hash.stdout).expect("a hash");
        fs::copy(LAUNCH_EXECUTABLE, new.join(hash.trim())).expect("a copy of the executable");
        fs::rename(&new, &cache).expect("the directory under its final name");
    }
    cache
}

/// Returns the first three bytes of the IP addresses of a set of hosts.
fn format_network_prefix(number: u32) -> String {
    format!("10.88.{number}")
}

/// Returns whether another program has given this machine an address in the network of a set of
/// hosts, as Podman does. The address with the last byte 254 is that of the bridge of the hosts.
fn is_network_in_use(number: u32) -> bool {
    let network = format_network_prefix(number);
    // Only an address of this machine can be bound.
    (1..254).any(|last| UdpSocket::bind((format!("{network}.{last}"), 0)).is_ok())
}

/// Lists the processes of the host with this directory, as [`SimulatedHosts::list_processes`] does.
pub(crate) fn list_processes_of_host(host_directory: &Path) -> Vec<(i32, String)> {
    let first = fs::read_to_string(host_directory.join("pid1")).unwrap_or_default();
    let Ok(pid_namespace) = fs::read_link(format!("/proc/{}/ns/pid", first.trim())) else {
        return Vec::new();
    };
    let is_on_host = |pid: &i32| {
        fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|namespace| namespace == pid_namespace)
    };
    let on_host = process_list::list_processes().filter(is_on_host);
    let lines = on_host.map(|pid| (pid, process_list::read_command_line(pid).trim().to_owned()));
    let infrastructure = ["hostinit", "/usr/sbin/sshd -f", "sshd: /usr/sbin/sshd", "sleep 86400"];
    lines.filter(|(_, line)| !line.is_empty() && !infrastructure.iter().any(|f| line.contains(f))).collect()
}

/// Returns a description of what this machine lacks to create hosts, or `None` if nothing is
/// missing.
fn find_missing_requirement() -> Option<String> {
    if !nix::unistd::Uid::effective().is_root() {
        return Some("hosts in namespaces need root".to_owned());
    }
    let is_installed = |program: &str| {
        ["/usr/sbin", "/usr/bin", "/sbin", "/bin"]
            .iter()
            .any(|directory| Path::new(directory).join(program).exists())
    };
    let absent: Vec<&str> = ["sshd", "ssh-keygen", "ip", "iptables", "nsenter"]
        .into_iter()
        .filter(|p| !is_installed(p))
        .collect();
    (!absent.is_empty()).then(|| format!("{} not installed; run scripts/setup-tests", absent.join(", ")))
}
