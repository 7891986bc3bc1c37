//! Tests jobs and `launch check` on other hosts over real SSH. The hosts are namespaces of this
//! machine, each with an sshd (tests/hosts/hosts.sh).

mod openssh;

use crate::support::{
    environment::{TestDirectory, clean_command, create_test_directory, launch_command},
    poll_pauses::PollPauses,
    simulated_hosts::SimulatedHosts,
};
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

/// A directory with a job that runs on hosts over SSH, and a home directory for launch.
struct SshJob {
    dir: TestDirectory,
    home: PathBuf,
}

impl SshJob {
    /// Creates a directory with a job that runs on the hosts in the YAML list `list`. `run` is its
    /// `run:` section.
    fn new(hosts: &SimulatedHosts, list: &str, run: &str) -> SshJob {
        let dir = create_test_directory();
        let home = dir.path().join("home");
        fs::create_dir(&home).expect("a home");
        // The simulated hosts share the CPUs of this machine with other tests, so that each step of
        // a login may take seconds.
        let text = format!(
            "name: many\ncluster: {{hosts: {list}, workers_per_host: 2, ssh: {{config: {}, connect_timeout: 20s}}}}\n{run}\n",
            hosts.ssh_config_path().display()
        );
        fs::write(dir.path().join("job.yaml"), text).expect("a job");
        SshJob { dir, home }
    }

    /// Returns the path of a file in the directory of the job.
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command `launch ARGS…` in the directory of the job.
    fn launch_command(&self, args: &[&str]) -> Command {
        let mut command = launch_command(self.dir.path(), args);
        command.env("HOME", &self.home);
        command
    }

    /// Runs `launch ARGS…` and waits for its end.
    fn run_launch(&self, args: &[&str]) -> Output {
        self.launch_command(args).output().expect("launch starts")
    }

    /// Runs `launch check --json` with these settings. Returns the exit code and the report.
    fn run_check(&self, set: &[&str]) -> (i32, Value) {
        let settings = set.iter().flat_map(|s| ["--set", s]);
        let args: Vec<&str> = ["check", "job.yaml", "--json"].into_iter().chain(settings).collect();
        let output = self.run_launch(&args);
        let text = String::from_utf8_lossy(&output.stdout);
        let value = serde_json::from_str(&text);
        let value =
            value.unwrap_or_else(|e| panic!("{e}: {text}{}", String::from_utf8_lossy(&output.stderr)));
        (output.status.code().unwrap_or(-1), value)
    }

    /// Runs `launch check --json` with these settings, and returns the report. Panics with the
    /// failed checks if a check fails.
    #[track_caller]
    fn expect_passed_check(&self, set: &[&str]) -> Value {
        let (code, report) = self.run_check(set);
        assert_eq!(code, 0, "{set:?}: failed checks: {:#?}\n{report:#}", list_failed_checks(&report));
        report
    }
}

/// Returns the failed checks in the report of `launch check`, each with the name of its host. A
/// check that concerns several hosts has none.
fn list_failed_checks(report: &Value) -> Vec<String> {
    let failed = |host: &Value, checks: &Value| -> Vec<String> {
        let checks = checks.as_array().into_iter().flatten().filter(|check| check["result"] == "failed");
        checks.map(|check| format!("{host}: {check}")).collect()
    };
    let hosts = report["hosts"].as_array().into_iter().flatten();
    let of_hosts = hosts.flat_map(|host| failed(&host["host"], &host["checks"]));
    of_hosts.chain(failed(&Value::Null, &report["checks"])).collect()
}

/// Returns the only failed check of a host. Panics if another number of checks failed.
#[track_caller]
fn expect_one_failed_check<'r>(report: &'r Value, host: &str) -> &'r Value {
    let hosts = report["hosts"].as_array().expect("hosts");
    let host_report =
        hosts.iter().find(|h| h["host"] == host).unwrap_or_else(|| panic!("no {host} in {report}"));
    let checks = host_report["checks"].as_array().expect("checks");
    let failed: Vec<&Value> = checks.iter().filter(|c| c["result"] == "failed").collect();
    assert_eq!(failed.len(), 1, "one failed check of {host}: {host_report}");
    failed[0]
}

/// Returns the check of this name in the report of a host. Panics if there is no such check.
#[track_caller]
fn find_check<'r>(host_report: &'r Value, name: &str) -> &'r Value {
    let checks = host_report["checks"].as_array().expect("checks");
    checks.iter().find(|c| c["check"] == name).unwrap_or_else(|| panic!("no {name} in {host_report}"))
}

/// The four hosts, as a value of the key `cluster.hosts`.
const ALL_HOSTS: &str = "[\"h[0-3]\"]";
/// The `run:` section of a job whose program does nothing.
const TRIVIAL_RUN: &str = "run: {command: ['true'], workdir: /}";

/// Checks that exactly one check of a host failed: `check`, with the diagnostic code `code`.
#[track_caller]
fn assert_check_failed(report: &Value, host: &str, check: &str, code: &str) {
    let failed = expect_one_failed_check(report, host);
    assert!(failed["check"] == check && failed["code"] == code, "{host}: {failed}");
}

/// The names of the checks that `launch check` runs on every host. Hosts with GPUs have more.
const HOST_CHECKS: [&str; 21] = [
    "dns",
    "tcp",
    "host key",
    "authentication",
    "exec",
    "agent",
    "home",
    "cache",
    "architecture",
    "version",
    "workdir",
    "logs",
    "gpus",
    "nccl",
    "open files",
    "processes",
    "locked memory",
    "/dev/shm",
    "clock",
    "ports",
    "config",
];

#[test]
fn reachable_hosts_pass_every_check() {
    let Some(hosts) = SimulatedHosts::start("ssh::reachable_hosts_pass_every_check", 4) else { return };
    let job = SshJob::new(&hosts, ALL_HOSTS, TRIVIAL_RUN);
    let (code, found) = job.run_check(&[]);
    assert_eq!((code, &found["ok"]), (0, &Value::Bool(true)), "{found:#}");
    for host in found["hosts"].as_array().expect("hosts") {
        assert!(host["clock_skew"].as_f64().expect("a number").abs() < 5.0);
        let checks = host["checks"].as_array().expect("checks");
        let ports = find_check(host, "ports");
        assert_eq!(ports["fields"]["peers"], 3, "{ports}");
        let names: Vec<&str> = checks.iter().filter_map(|c| c["check"].as_str()).collect();
        let missing: Vec<&&str> = HOST_CHECKS.iter().filter(|name| !names.contains(name)).collect();
        assert!(missing.is_empty(), "checks that were not made: {missing:?}");
    }
    // the table also has every check, with the number of hosts that passed or warned
    let table = job.run_launch(&["check", "job.yaml"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    for name in HOST_CHECKS {
        let rows: Vec<&str> = table.lines().filter_map(|l| l.strip_prefix(&format!("{name} "))).collect();
        let first_word = rows.first().and_then(|row| row.split_whitespace().next());
        assert_eq!((rows.len(), first_word), (1, Some("4")), "{name}: {table}");
    }
    // only the executable is cached, under its hash and readable by the user only
    let listing = hosts.run_shell("h2", "cd /root/.cache/launch/bin && stat -c '%a %n' . *; ls -A | wc -l");
    let lines: Vec<&str> = listing.lines().collect();
    assert!(
        lines[0] == "700 ." && lines[1].split(' ').next() == Some("700") && lines[2..3] == ["1"],
        "{listing}"
    );
    // The hosts of all tests share the root directory, where another test may be making a check.
    let list_probes = || hosts.run_shell("h2", "ls -A / | grep launch-check || true");
    let began = Instant::now();
    let probes = list_probes();
    while probes.lines().any(|probe| list_probes().contains(probe)) {
        assert!(began.elapsed() < Duration::from_secs(20), "{probes}");
        std::thread::sleep(Duration::from_millis(100));
    }
    // the name of the copy is its hash, so a second check copies nothing
    let before = hosts.run_shell("h2", "stat -c %i /root/.cache/launch/bin/*");
    assert_eq!(job.run_check(&[]).0, 0);
    assert_eq!(hosts.run_shell("h2", "stat -c %i /root/.cache/launch/bin/*"), before);
    let left = hosts.run_shell("h2", "sleep 0.3; ps -e -o args= | grep -c '[l]aunch/bin' || true");
    assert_eq!(left.trim(), "0", "agents are left");
}

#[test]
fn connection_failures_have_distinct_codes() {
    let Some(hosts) = SimulatedHosts::start("ssh::connection_failures_have_distinct_codes", 4) else {
        return;
    };
    let unused_address = hosts.format_address(200);
    let list = format!("[\"h[0-3]\", {unused_address}, no-such-host.invalid]");
    let job = SshJob::new(&hosts, &list, TRIVIAL_RUN);
    hosts.run_hosts_command(&["sshd-stop", "h0"]);
    hosts.run_hosts_command(&["blackhole", "h1"]);
    // h2 presents another key than the known one, and the key of h3 is unknown
    hosts.run_shell("h2", "rm /etc/ssh/ssh_host_ed25519_key*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; kill -HUP $(cat /run/sshd.pid); sleep 0.2");
    let known = fs::read_to_string(hosts.file_path("known_hosts")).expect("known_hosts");
    let known: Vec<&str> = known.lines().filter(|l| !l.starts_with("h3")).collect();
    fs::write(hosts.file_path("known_hosts"), known.join("\n")).expect("known_hosts");
    let (code, found) = job.run_check(&["cluster.ssh.connect_timeout=4s"]);
    assert_eq!(code, 3);
    assert_check_failed(&found, "h0", "tcp", "ssh-connect-refused");
    assert_check_failed(&found, "h1", "tcp", "ssh-connect-timeout");
    assert_check_failed(&found, "h2", "host key", "ssh-host-key-changed");
    assert_check_failed(&found, "h3", "host key", "ssh-host-key-unknown");
    assert_check_failed(&found, &unused_address, "tcp", "ssh-no-route");
    assert_check_failed(&found, "no-such-host.invalid", "dns", "ssh-name-unresolved");
    // the fingerprint is the one that OpenSSH prints
    let key = hosts.run_shell("h3", "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub");
    let fingerprint = key.split_whitespace().nth(1).expect("a fingerprint");
    assert_eq!(expect_one_failed_check(&found, "h3")["fields"]["fingerprint"], fingerprint);
    let (_, found) = job.run_check(&["cluster.hosts=[h3]", "cluster.ssh.known_hosts=accept_new"]);
    assert_eq!(found["ok"], true, "{found:#}");
    let (_, found) = job.run_check(&["cluster.hosts=[h3]"]);
    assert_eq!(found["ok"], true, "the accepted key was kept");
}

#[test]
fn login_failures_have_distinct_codes() {
    let Some(hosts) = SimulatedHosts::start("ssh::login_failures_have_distinct_codes", 1) else { return };
    let job = SshJob::new(&hosts, "[h0]", TRIVIAL_RUN);
    for (name, passphrase) in [("unauthorized", ""), ("locked", "secret")] {
        let mut keygen = clean_command("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", passphrase, "-f"]).arg(job.path(name));
        assert!(keygen.status().expect("ssh-keygen").success());
    }
    for (key, expected) in
        [("unauthorized", "ssh-login-failed"), ("locked", "ssh-key-locked"), ("missing", "ssh-login-failed")]
    {
        let key = format!("cluster.ssh.key={}", job.path(key).display());
        let (code, found) = job.run_check(&[&key]);
        assert_eq!(code, 3);
        assert_check_failed(&found, "h0", "authentication", expected);
    }
}

#[test]
fn bootstrap_failures_have_distinct_codes() {
    let Some(hosts) = SimulatedHosts::start("ssh::bootstrap_failures_have_distinct_codes", 4) else { return };
    let job = SshJob::new(&hosts, ALL_HOSTS, TRIVIAL_RUN);
    hosts.run_hosts_command(&["fill", "h0", "/", "20000"]);
    hosts.run_shell("h1", "mkdir -p /root/.cache; mount -t tmpfs -o noexec none /root/.cache");
    hosts.run_shell("h2", "mkdir -p /root/.cache; touch /root/.cache/launch");
    hosts.run_shell(
        "h3",
        "printf '#!/bin/sh\\necho aarch64\\n' > /usr/local/sbin/uname; chmod 755 /usr/local/sbin/uname",
    );
    let (code, found) = job.run_check(&[]);
    assert_eq!(code, 3);
    assert_check_failed(&found, "h0", "exec", "executable-disk-full");
    assert_check_failed(&found, "h1", "exec", "executable-not-allowed");
    assert_check_failed(&found, "h2", "exec", "executable-cache-unwritable");
    assert_check_failed(&found, "h3", "exec", "executable-architecture-mismatch");
    let left = hosts.run_shell("h0", "ls -A /root/.cache/launch/bin | wc -l");
    assert_eq!(left.trim(), "0", "a failed copy left files");
    hosts.run_shell("h0", "printf 'echo bye; exit 3\\n' > /root/.bashrc");
    let (_, found) = job.run_check(&["cluster.hosts=[h0]"]);
    assert_check_failed(&found, "h0", "exec", "ssh-shell-exited");
    assert_eq!(expect_one_failed_check(&found, "h0")["fields"]["output"], "bye", "the output of the shell");
}

#[test]
fn a_damaged_executable_on_a_host_is_replaced() {
    let Some(hosts) = SimulatedHosts::start("ssh::a_damaged_executable_on_a_host_is_replaced", 1) else {
        return;
    };
    let job = SshJob::new(&hosts, "[h0]", TRIVIAL_RUN);
    job.expect_passed_check(&[]);
    // One file has the right size and cannot be executed, the other one has another size.
    for damage in ["echo '#!/no/such/program' > $f; truncate -s $s $f", ": > $f"] {
        let script = format!(
            "f=$(ls -d /root/.cache/launch/bin/*); s=$(stat -c %s $f); rm $f; {damage}; chmod 700 $f"
        );
        hosts.run_shell("h0", &script);
        job.expect_passed_check(&[]);
    }
}

#[test]
fn output_of_the_login_shell_is_tolerated() {
    let Some(hosts) = SimulatedHosts::start("ssh::output_of_the_login_shell_is_tolerated", 2) else { return };
    hosts.run_shell(
        "h0",
        "printf 'echo Welcome to h0\\necho oops >&2\\nprintf \"no line end\"\\n' > /root/.bashrc",
    );
    hosts.run_shell(
        "h1",
        "head -c 200000 /dev/zero | tr '\\\\0' x > /root/noise; echo 'cat /root/noise' > /root/.bashrc",
    );
    let job = SshJob::new(&hosts, "[h0, h1]", TRIVIAL_RUN);
    let found = job.expect_passed_check(&[]);
    let warning = find_check(&found["hosts"][0], "login shell");
    assert_eq!((&warning["code"], &warning["fields"]["lines"]), (&"login-shell-prints".into(), &2.into()));
    hosts.run_shell("h1", "echo 'yes' > /root/.bashrc");
    let began = Instant::now();
    let (code, found) = job.run_check(&["cluster.hosts=[h1]"]);
    assert_eq!(code, 3, "{found:#}");
    assert_check_failed(&found, "h1", "exec", "ssh-shell-output-too-long");
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_host_is_reached_through_a_jump_host() {
    let Some(hosts) = SimulatedHosts::start("ssh::a_host_is_reached_through_a_jump_host", 3) else { return };
    // h1 and h2 take connections from h0 only
    for host in ["h1", "h2"] {
        hosts.run_shell(
            host,
            &format!("iptables -w -A INPUT -p tcp --dport 22 ! -s {} -j DROP", hosts.format_address(1)),
        );
    }
    let job = SshJob::new(&hosts, "[h1, h2]", TRIVIAL_RUN);
    let (code, found) = job.run_check(&["cluster.ssh.connect_timeout=1s"]);
    assert_eq!(code, 3);
    assert_check_failed(&found, "h1", "tcp", "ssh-connect-timeout");
    job.expect_passed_check(&["cluster.ssh.jump=h0"]);
    hosts.run_hosts_command(&["sshd-stop", "h2"]);
    let (code, found) = job.run_check(&["cluster.ssh.jump=h0"]);
    assert_eq!(code, 3);
    assert_eq!(expect_one_failed_check(&found, "h2")["code"], "ssh-jump-failed");
}

/// A program that writes variables of its environment to a file and prints its rank and host.
const PRINT_RANK_SCRIPT: &str = "#!/bin/sh\nenv | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|GROUP_WORLD_SIZE|\
ROLE_RANK|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|TORCHELASTIC_RUN_ID|WORD)=' | sort > /scratch/rank-$RANK\necho rank $RANK on $(hostname)\n";

#[test]
fn a_program_runs_on_four_hosts() {
    let Some(hosts) = SimulatedHosts::start("ssh::a_program_runs_on_four_hosts", 4) else { return };
    for host in ["h0", "h1", "h2", "h3"] {
        hosts.run_shell(
            host,
            &format!("cat > /root/rank <<'END'\n{PRINT_RANK_SCRIPT}END\nchmod 755 /root/rank"),
        );
    }
    let run = "run: {command: [/root/rank], workdir: /root, env: {WORD: \"it's $HOME and a `tick`\"}, logs: {dir: '/tmp/runs/{run}', show: [0, 1, 2, 3, 4, 5, 6, 7]}}";
    let job = SshJob::new(&hosts, ALL_HOSTS, run);
    let output = job.run_launch(&["job.yaml"]);
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    let mut master = None;
    for rank in 0..8 {
        let host = format!("h{}", rank / 2);
        assert!(stdout.contains(&format!("rank {rank} on {host}")), "{stdout}");
        let env = hosts.run_shell(&host, &format!("cat /scratch/rank-{rank}"));
        let value = |name: &str| {
            let line = env.lines().find_map(|l| l.strip_prefix(&format!("{name}=")));
            line.unwrap_or_else(|| panic!("{name} is missing:\n{env}")).to_owned()
        };
        for (name, expected) in [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", (rank % 2).to_string()),
            ("WORLD_SIZE", "8".into()),
            ("LOCAL_WORLD_SIZE", "2".into()),
            ("GROUP_RANK", (rank / 2).to_string()),
            ("NODE_RANK", (rank / 2).to_string()),
            ("GROUP_WORLD_SIZE", "4".into()),
            ("ROLE_RANK", rank.to_string()),
            ("ROLE_WORLD_SIZE", "8".into()),
            ("WORD", "it's $HOME and a `tick`".into()),
        ] {
            assert_eq!(value(name), expected, "{name} of rank {rank}");
        }
        let address = (value("MASTER_ADDR"), value("MASTER_PORT"));
        assert_eq!(master.get_or_insert(address.clone()), &address);
        assert!(address.0 != "127.0.0.1" && address.1 != "auto", "{address:?}");
        assert!(value("OMP_NUM_THREADS").parse::<u32>().is_ok_and(|n| n > 0));
        // the hosts share no run directory, so this machine stores the output that it displayed
        let logs = job.run_launch(&["logs", "many", "--rank", &rank.to_string(), "--grep", "rank"]);
        let lines = String::from_utf8_lossy(&logs.stdout);
        assert_eq!(lines, format!("rank {rank} on {host}\n"), "{}", String::from_utf8_lossy(&logs.stderr));
    }
}

/// Returns the first `failure` event in the output of `launch --json`. Panics if there is none.
#[track_caller]
fn find_failure_event(events: &str) -> Value {
    let mut events_json = events.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    events_json.find(|e| e["event"] == "failure").unwrap_or_else(|| panic!("no failure: {events}"))
}

#[test]
fn a_failure_ends_the_workers_of_every_host() {
    let Some(hosts) = SimulatedHosts::start("ssh::a_failure_ends_the_workers_of_every_host", 3) else {
        return;
    };
    let script = "if [ $RANK = 3 ]; then sleep 1; echo broken; exit 7; fi; sleep 600";
    let run = format!(
        "run: {{command: [sh, -c, '{script}'], workdir: /root, grace_period: 2s, logs: {{dir: '/tmp/runs/{{run}}'}}}}"
    );
    let job = SshJob::new(&hosts, "[\"h[0-2]\"]", &run);
    let output = job.run_launch(&["job.yaml", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let events = String::from_utf8_lossy(&output.stdout);
    let failure = find_failure_event(&events);
    assert_eq!((failure["rank"].as_u64(), failure["host"].as_str()), (Some(3), Some("h1")), "{failure}");
    assert_eq!((&failure["reason"]["kind"], &failure["reason"]["code"]), (&"exit".into(), &7.into()));
    for host in ["h0", "h1", "h2"] {
        let left = hosts.run_shell(host, "ps -e -o args= | grep -c '[s]leep 600' || true");
        assert_eq!(left.trim(), "0", "{host}");
    }
}

#[test]
fn the_workers_of_every_host_end_with_the_controller() {
    let Some(hosts) = SimulatedHosts::start("ssh::the_workers_of_every_host_end_with_the_controller", 2)
    else {
        return;
    };
    let run =
        "run: {command: [sleep, '601'], workdir: /root, grace_period: 1s, logs: {dir: '/tmp/runs/{run}'}}";
    let job = SshJob::new(&hosts, "[h0, h1]", run);
    let mut child = job
        .launch_command(&["job.yaml"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("launch");
    let count = |host: &str| {
        hosts.run_shell(host, "ps -e -o args= | grep -c '^[s]leep 601' || true").trim().to_owned()
    };
    let until = |expected: &str, limit: u64| {
        let end = Instant::now() + Duration::from_secs(limit);
        let mut pauses = PollPauses::new();
        while ["h0", "h1"].iter().any(|h| count(h) != expected) {
            assert!(Instant::now() < end, "not {expected} sleepers within {limit} s");
            pauses.pause();
        }
    };
    until("2", 30);
    child.kill().expect("killed");
    child.wait().expect("reaped");
    until("0", 10);
}

#[test]
fn an_unreachable_host_ends_the_run_before_it_starts() {
    let Some(hosts) = SimulatedHosts::start("ssh::an_unreachable_host_ends_the_run_before_it_starts", 2)
    else {
        return;
    };
    let run = "run: {command: [sh, -c, 'echo started'], workdir: /root, logs: {dir: '/tmp/runs/{run}'}}";
    let job = SshJob::new(&hosts, "[h0, h1]", run);
    hosts.run_hosts_command(&["sshd-stop", "h1"]);
    let output = job.run_launch(&["job.yaml", "--json"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    let failure = find_failure_event(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(failure["host"], "h1", "{failure}");
    assert_eq!(failure["diagnostics"][0]["code"], "ssh-connect-refused", "{failure}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("started"), "a rank ran");
}

/// Checks the mode of tests/hosts/hosts.sh, because the other tests are skipped if the script is
/// not executable.
#[test]
fn the_script_of_the_hosts_is_executable() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/hosts.sh");
    assert!(fs::metadata(script).expect("the script").permissions().mode() & 0o111 != 0);
}
