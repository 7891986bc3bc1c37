//! Tests hosts that launch reaches through OpenSSH's client (`cluster.ssh.client`).

use super::{
    ALL_HOSTS, SshJob, TRIVIAL_RUN, assert_check_failed, expect_one_failed_check, find_failure_event,
};
use crate::support::{
    environment::{clean_command, launch_command},
    process_list::{list_processes, read_command_line},
    report_skip,
    simulated_hosts::SimulatedHosts,
};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

/// The setting that requires OpenSSH's client.
const OPENSSH: &str = "cluster.ssh.client=openssh";
/// The setting that requires the built-in client.
const BUILTIN: &str = "cluster.ssh.client=builtin";

/// Runs `ssh-keygen` with these arguments. Panics if it fails.
#[track_caller]
fn run_keygen(args: &[&str]) {
    let output = clean_command("ssh-keygen").arg("-q").args(args).output().expect("ssh-keygen starts");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Writes an SSH configuration to the directory of a job: first `lines`, then the usual lines of
/// the hosts without those that begin with a word in `removed`. Returns the setting that selects
/// the file.
fn write_config(job: &SshJob, hosts: &SimulatedHosts, lines: &str, removed: &[&str]) -> String {
    let usual = fs::read_to_string(hosts.ssh_config_path()).expect("a configuration");
    let is_kept = |line: &&str| !removed.iter().any(|word| line.trim_start().starts_with(word));
    let usual: Vec<&str> = usual.lines().filter(is_kept).collect();
    let path = job.path("ssh_config");
    fs::write(&path, format!("{lines}\n{}\n", usual.join("\n"))).expect("a configuration");
    format!("cluster.ssh.config={}", path.display())
}

/// Checks that the hosts of a job pass every check with these settings.
#[track_caller]
fn assert_reachable(job: &SshJob, set: &[&str]) {
    job.expect_passed_check(set);
}

/// Replaces the key of a host.
fn change_host_key(hosts: &SimulatedHosts, host: &str) {
    hosts.run_shell(
        host,
        "rm /etc/ssh/ssh_host_ed25519_key*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; \
         kill -HUP $(cat /run/sshd.pid); sleep 0.2",
    );
}

#[test]
fn hosts_that_accept_only_certificates_are_reached() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::hosts_that_accept_only_certificates", 2) else {
        return;
    };
    let run = "run: {command: [sh, -c, 'echo rank $RANK on $(hostname)'], workdir: /root, logs: {dir: '/tmp/runs/{run}', show: [0, 1, 2, 3]}}";
    let job = SshJob::new(&hosts, "[h0, h1]", run);
    let path = |name: &str| job.path(name).display().to_string();
    for name in ["user_ca", "host_ca", "key"] {
        run_keygen(&["-t", "ed25519", "-N", "", "-f", &path(name)]);
    }
    run_keygen(&["-s", &path("user_ca"), "-I", "me", "-n", "root", &path("key.pub")]);
    for host in ["h0", "h1"] {
        let key = hosts.file_path("keys").join(format!("{host}.pub"));
        fs::copy(&key, job.path("host.pub")).expect("a key");
        run_keygen(&["-s", &path("host_ca"), "-I", host, "-h", "-n", host, &path("host.pub")]);
        let certificate = fs::read_to_string(job.path("host-cert.pub")).expect("a certificate");
        let authority = fs::read_to_string(job.path("user_ca.pub")).expect("a key");
        hosts.run_shell(
            host,
            &format!(
                "rm /root/.ssh/authorized_keys; echo '{authority}' > /etc/ssh/user_ca.pub; \
                 echo '{certificate}' > /etc/ssh/ssh_host_ed25519_key-cert.pub; \
                 printf 'TrustedUserCAKeys /etc/ssh/user_ca.pub\\nHostCertificate /etc/ssh/ssh_host_ed25519_key-cert.pub\\n' \
                 >> /etc/ssh/sshd_config; kill -HUP $(cat /run/sshd.pid); sleep 0.2"
            ),
        );
    }
    let authority = fs::read_to_string(job.path("host_ca.pub")).expect("a key");
    fs::write(job.path("known"), format!("@cert-authority h* {authority}")).expect("known_hosts");
    let lines = format!("Host h*\nIdentityFile {}\nUserKnownHostsFile {}\n", path("key"), path("known"));
    let config = write_config(&job, &hosts, &lines, &[]);
    let (code, found) = job.run_check(&[&config]);
    let client = super::find_check(&found["hosts"][1], "ssh client");
    assert!(code == 0 && client["found"].as_str().is_some_and(|f| f.contains("key-cert.pub")), "{found:#}");
    let output = job.run_launch(&["job.yaml", "--set", &config]);
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    for rank in 0..4 {
        assert!(stdout.contains(&format!("rank {rank} on h{}", rank / 2)), "{stdout}");
    }
    let notices: Vec<&str> = stderr.lines().filter(|l| l.contains("cluster.ssh.client: auto")).collect();
    assert!(notices.len() == 1 && notices[0].contains("key-cert.pub"), "{stderr}");
    let (code, found) = job.run_check(&[&config, BUILTIN]);
    assert_eq!(code, 3);
    assert_check_failed(&found, "h0", "config", "ssh-option-unsupported");
    // without the user's certificate, the certificates of the hosts require OpenSSH's client
    fs::remove_file(job.path("key-cert.pub")).expect("removed");
    let (_, found) = job.run_check(&[&config, BUILTIN]);
    let failed = expect_one_failed_check(&found, "h0");
    assert!(failed["fields"]["option"].as_str().is_some_and(|o| o.contains("@cert-authority")), "{failed}");
    let (_, found) = job.run_check(&[&config]);
    assert_check_failed(&found, "h0", "authentication", "ssh-login-failed");
}

#[test]
fn a_host_is_reached_through_a_proxy_command() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::a_host_is_reached_through_a_proxy_command", 3)
    else {
        return;
    };
    for host in ["h1", "h2"] {
        hosts.run_shell(
            host,
            &format!("iptables -w -A INPUT -p tcp --dport 22 ! -s {} -j DROP", hosts.format_address(1)),
        );
    }
    let job = SshJob::new(&hosts, "[h1, h2]", TRIVIAL_RUN);
    let usual = hosts.ssh_config_path();
    let lines = format!("Host h1 h2\nProxyCommand ssh -o LogLevel=INFO -F {} -W %h:%p h0\n", usual.display());
    let config = write_config(&job, &hosts, &lines, &[]);
    assert_reachable(&job, &[&config]);
    let (code, found) = job.run_check(&[&config, BUILTIN]);
    assert_eq!(code, 3);
    assert_check_failed(&found, "h1", "config", "ssh-proxy-unsupported");
    // the jump host of the job, and that of the configuration
    assert_reachable(&job, &[OPENSSH, "cluster.ssh.jump=h0"]);
    let jump = write_config(&job, &hosts, "Host h1 h2\nProxyJump h0\n", &[]);
    assert_reachable(&job, &[OPENSSH, &jump]);
    hosts.run_hosts_command(&["sshd-stop", "h2"]);
    let config = write_config(&job, &hosts, &lines, &[]);
    let (code, found) = job.run_check(&[&config]);
    assert_eq!(code, 3);
    assert_check_failed(&found, "h2", "tcp", "ssh-proxy-failed");
    let failed = expect_one_failed_check(&found, "h2");
    assert!(failed["found"].as_str().is_some_and(|f| f.contains("Connection refused")), "{failed}");
}

#[test]
fn a_shared_connection_of_the_user_is_used() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::a_shared_connection_of_the_user_is_used", 1)
    else {
        return;
    };
    let job = SshJob::new(&hosts, "[h0]", TRIVIAL_RUN);
    let socket = job.path("m").display().to_string();
    let config = write_config(&job, &hosts, &format!("ControlMaster auto\nControlPath {socket}\n"), &[]);
    let mut master = clean_command("ssh")
        .args(["-F", &job.path("ssh_config").display().to_string(), "-N", "h0"])
        .stderr(Stdio::null())
        .spawn()
        .expect("ssh starts");
    wait_until("the shared connection", || Path::new(&socket).exists());
    // nothing but the shared connection reaches the host any more
    hosts.run_shell("h0", "rm /root/.ssh/authorized_keys");
    assert_reachable(&job, &[&config]);
    assert_reachable(&job, &[&config, OPENSSH]);
    assert!(master.try_wait().expect("a state").is_none(), "the user's connection must survive");
    master.kill().expect("killed");
    master.wait().expect("reaped");
    _ = fs::remove_file(&socket);
    let (_, found) = job.run_check(&[&config]);
    assert_check_failed(&found, "h0", "authentication", "ssh-login-failed");
    hosts.run_shell("h0", "cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys");
    assert_reachable(&job, &[&config]);
    assert!(!Path::new(&socket).exists(), "launch opens no shared connection");
}

/// Waits up to 30 s until `is_true` returns `true`.
#[track_caller]
fn wait_until(what: &str, is_true: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_true() {
        assert!(Instant::now() < end, "{what}: not within 30 s");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn host_keys_are_verified_as_ssh_does() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::host_keys_are_verified_as_ssh_does", 1) else {
        return;
    };
    let job = SshJob::new(&hosts, "[h0]", TRIVIAL_RUN);
    let removed = ["StrictHostKeyChecking", "UserKnownHostsFile"];
    let known = job.path("known");
    let write = |checking: &str, file: &str| {
        let lines = format!("StrictHostKeyChecking {checking}\nUserKnownHostsFile {file}\n");
        write_config(&job, &hosts, &lines, &removed)
    };
    for client in [BUILTIN, OPENSSH] {
        _ = fs::remove_file(&known);
        for checking in ["no", "accept-new"] {
            assert_reachable(&job, &[&write(checking, "/dev/null"), client]);
        }
        let file = known.display().to_string();
        let (_, found) = job.run_check(&[&write("ask", &file), client]);
        assert_check_failed(&found, "h0", "host key", "ssh-host-key-unknown");
        assert_reachable(&job, &[&write("accept-new", &file), client]);
        let stored = fs::read_to_string(&known).expect("a key was stored");
        assert_eq!(stored.lines().count(), 1, "{client}: {stored}");
        assert_reachable(&job, &[&write("yes", &file), client]);
        change_host_key(&hosts, "h0");
        for checking in ["yes", "accept-new"] {
            let (_, found) = job.run_check(&[&write(checking, &file), client]);
            assert_check_failed(&found, "h0", "host key", "ssh-host-key-changed");
        }
        assert_reachable(&job, &[&write("no", &file), client]);
        // the job decides before the configuration
        let config = write("no", &file);
        let (_, found) = job.run_check(&["cluster.ssh.known_hosts=strict", &config, client]);
        assert_check_failed(&found, "h0", "host key", "ssh-host-key-changed");
    }
}

#[test]
fn connection_failures_of_openssh_have_distinct_codes() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::connection_failures", 4) else { return };
    let unused_address = hosts.format_address(200);
    let list = format!("[\"h[0-3]\", {unused_address}, no-such-host.invalid]");
    let job = SshJob::new(&hosts, &list, TRIVIAL_RUN);
    hosts.run_hosts_command(&["sshd-stop", "h0"]);
    hosts.run_hosts_command(&["blackhole", "h1"]);
    change_host_key(&hosts, "h2");
    let known = fs::read_to_string(hosts.file_path("known_hosts")).expect("known_hosts");
    let known: Vec<&str> = known.lines().filter(|l| !l.starts_with("h3")).collect();
    // `ssh` appends to the file, whose last line must end
    fs::write(hosts.file_path("known_hosts"), known.join("\n") + "\n").expect("known_hosts");
    let (code, found) = job.run_check(&[OPENSSH, "cluster.ssh.connect_timeout=2s"]);
    assert_eq!(code, 3);
    assert_check_failed(&found, "h0", "tcp", "ssh-connect-refused");
    assert_check_failed(&found, "h1", "tcp", "ssh-connect-timeout");
    assert_check_failed(&found, "h2", "host key", "ssh-host-key-changed");
    assert_check_failed(&found, "h3", "host key", "ssh-host-key-unknown");
    assert_check_failed(&found, "no-such-host.invalid", "dns", "ssh-name-unresolved");
    let failed = expect_one_failed_check(&found, &unused_address);
    assert!(["ssh-no-route", "ssh-connect-timeout"].iter().any(|c| failed["code"] == *c), "{failed}");
    let key = hosts.run_shell("h3", "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub");
    let fingerprint = key.split_whitespace().nth(1).expect("a fingerprint");
    assert_eq!(expect_one_failed_check(&found, "h3")["fields"]["fingerprint"], fingerprint);
    hosts.run_shell("h3", "echo 'echo bye; exit 3' > /root/.bashrc");
    let (_, found) = job.run_check(&[OPENSSH, "cluster.hosts=[h3]", "cluster.ssh.known_hosts=accept_new"]);
    assert_check_failed(&found, "h3", "exec", "ssh-shell-exited");
    // a full disk, and banners and start-up files that print
    hosts.run_shell(
        "h3",
        "printf 'echo Welcome\\necho oops >&2\\n' > /root/.bashrc; echo 'Authorized use only' > /etc/banner; \
         echo 'Banner /etc/banner' >> /etc/ssh/sshd_config; kill -HUP $(cat /run/sshd.pid); sleep 0.2",
    );
    hosts.run_hosts_command(&["fill", "h3", "/", "20000"]);
    let (_, found) = job.run_check(&[OPENSSH, "cluster.hosts=[h3]"]);
    assert_check_failed(&found, "h3", "exec", "executable-disk-full");
    hosts.run_hosts_command(&["unfill", "h3", "/"]);
    let (_, found) = job.run_check(&[OPENSSH, "cluster.hosts=[h3]"]);
    let warning = super::find_check(&found["hosts"][0], "login shell");
    assert_eq!((&found["ok"], &warning["fields"]["lines"]), (&true.into(), &1.into()), "{found:#}");
}

/// Writes a shell script that is called `ssh` to a new directory of a job. Returns the directory.
fn write_ssh_script(job: &SshJob, name: &str, script: &str) -> PathBuf {
    let directory = job.path(name);
    fs::create_dir(&directory).expect("a directory");
    let file = directory.join("ssh");
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("a script");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a mode");
    directory
}

#[test]
fn a_missing_or_wrong_or_hanging_ssh_is_reported() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::a_missing_or_wrong_or_hanging_ssh", 1) else {
        return;
    };
    let job = SshJob::new(&hosts, "[h0]", TRIVIAL_RUN);
    let empty = job.path("empty");
    fs::create_dir(&empty).expect("a directory");
    let usual = std::env::var("PATH").expect("a path");
    let began = Instant::now();
    for (directory, code, text) in [
        (empty, "ssh-client-missing", "No such file"),
        (
            write_ssh_script(&job, "wrong", "echo 'no such command' >&2; exit 4"),
            "ssh-client-failed",
            "no such command",
        ),
        (write_ssh_script(&job, "silent", "exit 0"), "ssh-client-failed", "exit code 0"),
        (write_ssh_script(&job, "killed", "kill -9 $$"), "ssh-client-failed", "signal 9"),
        (
            write_ssh_script(&job, "hanging", "trap '' TERM HUP INT; sleep 602; sleep 602"),
            "ssh-client-timeout",
            "within 2 s",
        ),
    ] {
        let path = match code {
            "ssh-client-missing" => directory.display().to_string(),
            _ => format!("{}:{usual}", directory.display()),
        };
        let mut command = launch_command(
            job.dir.path(),
            &["check", "job.yaml", "--json", "--set", OPENSSH, "--set", "cluster.ssh.connect_timeout=1s"],
        );
        let output = command.env("PATH", path).env("HOME", &job.home).output().expect("launch starts");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
        let failed = expect_one_failed_check(&found, "h0");
        assert!(
            failed["code"] == code && failed["found"].as_str().is_some_and(|f| f.contains(text)),
            "{code}: {failed}"
        );
    }
    assert!(began.elapsed() < Duration::from_secs(60));
    // A killed process of a busy machine ends a moment later.
    wait_until("no process of a hanging ssh is left", || count_processes("sleep 602") == 0);
}

/// Counts the processes of this machine whose command line is `command`.
fn count_processes(command: &str) -> usize {
    list_processes().filter(|pid| read_command_line(*pid).trim() == command).count()
}

/// Lists the child processes of a process that are called `ssh`.
fn list_ssh_children(parent: u32) -> Vec<i32> {
    let is_child = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        stat.contains("(ssh)") && rest.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    list_processes().filter(is_child).collect()
}

/// Starts `launch ARGS…` in the directory of a job, with its output in the file `name`.
fn spawn_launch(job: &SshJob, args: &[&str], name: &str) -> Child {
    let output = fs::File::create(job.path(name)).expect("a file");
    let mut command = job.launch_command(args);
    command.stderr(output.try_clone().expect("a file")).stdout(output);
    command.spawn().expect("launch starts")
}

/// Counts the processes `sleep SECONDS` on a host.
fn count_sleepers(hosts: &SimulatedHosts, host: &str, seconds: u32) -> usize {
    let processes = hosts.list_processes(host);
    processes.iter().filter(|(_, line)| *line == format!("sleep {seconds}")).count()
}

#[test]
fn a_killed_ssh_is_a_lost_host() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::a_killed_ssh_is_a_lost_host", 2) else { return };
    let run =
        "run: {command: [sleep, '603'], workdir: /root, grace_period: 1s, logs: {dir: '/tmp/runs/{run}'}}";
    let job = SshJob::new(&hosts, "[h0, h1]", run);
    let count = || ["h0", "h1"].iter().map(|h| count_sleepers(&hosts, h, 603)).sum::<usize>();
    let mut launch = spawn_launch(&job, &["job.yaml", "--json", "--set", OPENSSH], "out");
    wait_until("four workers", || count() == 4);
    let children = list_ssh_children(launch.id());
    assert_eq!(children.len(), 2, "one ssh for each host");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(children[0]), nix::sys::signal::Signal::SIGKILL)
        .expect("killed");
    let status = launch.wait().expect("an exit status");
    let events = fs::read_to_string(job.path("out")).expect("events");
    let failure = find_failure_event(&events);
    assert_eq!(status.code(), Some(1), "{events}");
    assert_eq!(failure["reason"]["kind"], "host_lost", "{failure}");
    assert_eq!(failure["diagnostics"][0]["code"], "ssh-connection-lost", "{failure}");
    wait_until("the end of all workers", || count() == 0);
    // a controller that is killed leaves neither ssh nor workers
    let mut launch = spawn_launch(&job, &["job.yaml", "--set", OPENSSH], "out");
    wait_until("four workers", || count() == 4);
    let children = list_ssh_children(launch.id());
    launch.kill().expect("killed");
    launch.wait().expect("reaped");
    wait_until("the end of all workers", || count() == 0);
    wait_until("the end of every ssh", || {
        children.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
}

#[test]
fn a_ctrl_c_ends_the_workers_in_order() {
    use std::os::unix::process::CommandExt;
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::a_ctrl_c_ends_the_workers_in_order", 2) else {
        return;
    };
    let script = "trap 'touch /root/caught-$RANK; exit 0' TERM INT USR1; sleep 604 & wait $!; wait";
    let run = format!(
        "run: {{command: [sh, -c, \"{script}\"], workdir: /root, logs: {{dir: '/tmp/runs/{{run}}', show: [0, 1, 2, 3]}}}}"
    );
    let job = SshJob::new(&hosts, "[h0, h1]", &run);
    let output = fs::File::create(job.path("out")).expect("a file");
    let mut command = job.launch_command(&["job.yaml", "--set", OPENSSH]);
    command.stderr(output.try_clone().expect("a file")).stdout(output).process_group(0);
    let mut launch = command.spawn().expect("launch starts");
    let count = || ["h0", "h1"].iter().map(|h| count_sleepers(&hosts, h, 604)).sum::<usize>();
    wait_until("four workers", || count() == 4);
    // a terminal sends SIGINT to the whole foreground group
    let group = nix::unistd::Pid::from_raw(launch.id() as i32);
    nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGINT).expect("sent");
    let status = launch.wait().expect("an exit status");
    let text = fs::read_to_string(job.path("out")).expect("output");
    assert_eq!(status.code(), Some(130), "{text}");
    for host in ["h0", "h1"] {
        assert_eq!(hosts.run_shell(host, "ls /root/caught-* | wc -l").trim(), "2", "{host}: {text}");
    }
    assert!(!text.contains("lost"), "{text}");
}

#[test]
fn another_controller_takes_over_through_openssh() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::another_controller_takes_over", 3) else { return };
    let script = "while [ ! -e /root/end ]; do sleep 0.2; done; echo done on $(hostname)";
    let run = format!(
        "run: {{command: [sh, -c, \"{script}\"], workdir: /root, on_controller_loss: continue, logs: {{dir: '/tmp/runs/{{run}}', show: [0]}}}}"
    );
    let job = SshJob::new(&hosts, "[\"h[0-2]\"]", &run);
    let args = ["job.yaml", "--set", OPENSSH, "--set", "cluster.workers_per_host=1"];
    let mut launch = spawn_launch(&job, &args, "out");
    let has_worker =
        |host: &str| hosts.list_processes(host).iter().any(|(_, line)| line.contains("/root/end"));
    let count = || ["h0", "h1", "h2"].into_iter().filter(|host| has_worker(host)).count();
    wait_until("three workers", || count() == 3);
    assert_eq!(list_ssh_children(launch.id()).len(), 3, "one ssh for each host");
    launch.kill().expect("killed");
    launch.wait().expect("reaped");
    let attach = spawn_launch(&job, &["attach"], "attached");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(count(), 3, "the workers continue");
    for host in ["h0", "h1", "h2"] {
        hosts.run_shell(host, "touch /root/end");
    }
    let status = attach.wait_with_output().expect("an exit status").status;
    let text = fs::read_to_string(job.path("attached")).expect("output");
    assert!(status.success(), "{text}");
}

#[test]
fn reachable_hosts_pass_every_check_through_openssh() {
    let Some(hosts) = SimulatedHosts::start("ssh::openssh::reachable_hosts_pass_every_check", 4) else {
        return;
    };
    let job = SshJob::new(&hosts, ALL_HOSTS, TRIVIAL_RUN);
    assert_reachable(&job, &[OPENSSH]);
    let left =
        hosts.run_shell("h2", "ls -A /root/.cache/launch/bin | wc -l; stat -c %a /root/.cache/launch/bin");
    assert_eq!(left.split_whitespace().collect::<Vec<_>>(), ["1", "700"]);
    assert_reachable(&job, &[OPENSSH]);
    // with a fanout of 1, the agents form a tree
    let output = job.run_launch(&["job.yaml", "--set", OPENSSH, "--set", "cluster.ssh.fanout=1"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(hosts.run_shell("h2", "ps -e -o args= | grep -c '[l]aunch/bin' || true").trim() == "0");
}

/// A Kerberos server with one user, `me`, and with one host.
struct KerberosServer {
    process: Child,
    /// The variables with which programs find the server and the ticket of the user.
    environment: Vec<(&'static str, String)>,
}

impl KerberosServer {
    /// Starts a server for a user who may log in to host `h0` as root. Returns `None` if the
    /// programs are not installed; the test is then skipped.
    fn start(test: &str, job: &SshJob, hosts: &SimulatedHosts) -> Option<KerberosServer> {
        let has = |program: &str| {
            let found = clean_command("sh").args(["-c", &format!("command -v {program}")]).output();
            found.is_ok_and(|output| output.status.success())
        };
        if !["krb5kdc", "kdb5_util", "kadmin.local", "kinit", "klist"].into_iter().all(has) {
            report_skip(
                test,
                "krb5-kdc, krb5-admin-server or krb5-user not installed; run scripts/setup-tests",
            );
            return None;
        }
        let path = |name: &str| job.path(name).display().to_string();
        let address = format!("{}:7088", hosts.format_address(254));
        let client = format!(
            "[libdefaults]\ndefault_realm = TEST.INVALID\ndns_lookup_kdc = false\ndns_lookup_realm = false\n\
             rdns = false\ndns_canonicalize_hostname = false\nudp_preference_limit = 1\n\
             [realms]\nTEST.INVALID = {{\nkdc = {address}\n}}\n"
        );
        let server = format!(
            "[realms]\nTEST.INVALID = {{\ndatabase_name = {}\nkey_stash_file = {}\nacl_file = {}\n\
             kdc_listen = {address}\nkdc_tcp_listen = {address}\n}}\n",
            path("principal"),
            path("stash"),
            path("acl")
        );
        fs::write(job.path("krb5.conf"), &client).expect("a configuration");
        fs::write(job.path("kdc.conf"), server).expect("a configuration");
        let environment = vec![
            ("KRB5_CONFIG", path("krb5.conf")),
            ("KRB5_KDC_PROFILE", path("kdc.conf")),
            ("KRB5CCNAME", format!("FILE:{}", path("ticket"))),
        ];
        let run = |script: &str| {
            let mut shell = clean_command("sh");
            shell.args(["-ec", script]).envs(environment.iter().map(|(name, value)| (name, value)));
            let output = shell.output().expect("sh starts");
            assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let principal = format!("host/{}", hosts.format_address(1));
        run(&format!(
            "kdb5_util create -s -P secret; kadmin.local -q 'addprinc -pw secret me'; \
             kadmin.local -q 'addprinc -randkey {principal}'; kadmin.local -q 'ktadd -k {} {principal}'",
            path("keytab")
        ));
        let mut command = clean_command("krb5kdc");
        command.arg("-n").envs(environment.iter().map(|(name, value)| (name, value)));
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("krb5kdc starts");
        let server = KerberosServer { process, environment: environment.clone() };
        wait_until("the Kerberos server", || std::net::TcpStream::connect(&address).is_ok());
        run("echo secret | kinit me");
        let keytab = run(&format!("base64 -w0 {}", path("keytab")));
        hosts.run_shell(
            "h0",
            &format!(
                "rm /root/.ssh/authorized_keys; echo {keytab} | base64 -d > /etc/krb5.keytab; \
                 chmod 600 /etc/krb5.keytab; printf '{}' > /etc/krb5.conf; echo me@TEST.INVALID > /root/.k5login; \
                 printf 'GSSAPIAuthentication yes\\nGSSAPIStrictAcceptorCheck no\\n' >> /etc/ssh/sshd_config; \
                 kill -HUP $(cat /run/sshd.pid); sleep 0.2",
                client.replace('\n', "\\n")
            ),
        );
        Some(server)
    }
}

impl Drop for KerberosServer {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

#[test]
fn a_host_is_reached_with_a_kerberos_ticket() {
    let test = "ssh::openssh::a_host_is_reached_with_a_kerberos_ticket";
    let Some(hosts) = SimulatedHosts::start(test, 1) else { return };
    let job = SshJob::new(&hosts, "[h0]", TRIVIAL_RUN);
    let Some(server) = KerberosServer::start(test, &job, &hosts) else { return };
    let config = write_config(&job, &hosts, "GSSAPIAuthentication yes\n", &[]);
    let check = |client: &str, with_ticket: bool| {
        let args = ["check", "job.yaml", "--json", "--set", &config, "--set", client];
        let mut command = job.launch_command(&args);
        command.envs(server.environment.iter().map(|(name, value)| (name, value)));
        if !with_ticket {
            command.env("KRB5CCNAME", job.path("no-ticket"));
        }
        let output = command.output().expect("launch starts");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
        found
    };
    let found = check("cluster.ssh.client=auto", true);
    assert_eq!(found["ok"], true, "{found:#}");
    let found = check(BUILTIN, true);
    assert_check_failed(&found, "h0", "config", "ssh-option-unsupported");
    // without a ticket, only keys are left
    let found = check("cluster.ssh.client=auto", false);
    assert_check_failed(&found, "h0", "authentication", "ssh-login-failed");
}
