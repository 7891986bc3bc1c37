//! Tests that another user of the machine cannot affect a running job. The other user is the uid
//! 65534, so the tests need root.
mod served_page;

use crate::support::{
    FinishedRun, JobDirectory, environment::clean_command, output_to_text, poll_pauses::PollPauses,
    report_skip,
};
use std::{
    collections::BTreeSet,
    fs,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// The uid and gid of the other user, as whom these tests attack a job.
const OTHER_USER: u32 = 65_534;
/// How long a test waits for a condition. After that, the test fails.
const WAIT_LIMIT: Duration = Duration::from_secs(40);

/// A Python program that attacks the sockets of a job, as the other user. The arguments are
/// addresses: `PORT`, or `@NAME` for a socket in the abstract namespace. The program connects to
/// them again and again until it is killed. It sends a set request of the store, the begin of a
/// handshake of an agent, or random bytes, and leaves some connections open. It prints each answer.
const ATTACK_SOCKETS: &str = "\
import os, socket, struct, sys, time
text = lambda t: struct.pack('<Q', len(t)) + t
store = b'\\0' + struct.pack('<I', 0x3C85F7CE) + b'\\1' + text(b'/key') + text(b'stolen')
payloads = [store, b'launchJ2\\x30\\0' + os.urandom(48), os.urandom(64), b'']
held = []
print('attacking', flush=True)
while True:
    for target in sys.argv[1:]:
        for payload in payloads:
            try:
                if target.startswith('@'):
                    s = socket.socket(socket.AF_UNIX)
                    s.settimeout(0.1)
                    s.connect('\\0' + target[1:])
                else:
                    s = socket.create_connection(('127.0.0.1', int(target)), 0.1)
                s.settimeout(0.05)
                s.sendall(payload)
                held = (held + [s])[-200:]
                answer = s.recv(100)
                if answer:
                    print('answer of', target, answer, flush=True)
            except OSError:
                pass
            time.sleep(0.005)  # leaves the CPU to the job
";

/// Returns whether this process can start programs as the other user. If not, the test is skipped.
fn can_become_other_user(test: &str) -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        report_skip(test, "needs root, to become another user");
    }
    is_root
}

/// Builds a command that runs as the other user.
fn command_of_other_user(program: &str, args: &[&str]) -> Command {
    let mut command = clean_command(program);
    command.args(args).uid(OTHER_USER).gid(OTHER_USER).current_dir("/").env("PATH", "/usr/bin:/bin");
    command
}

/// Runs a shell command as the other user.
fn run_as_other_user(script: &str) -> Output {
    command_of_other_user("sh", &["-c", script]).output().unwrap()
}

/// Calls `look` until it returns a value. Panics after [`WAIT_LIMIT`].
#[track_caller]
fn wait_for<T>(name: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    let mut pauses = PollPauses::new();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < WAIT_LIMIT, "timeout: {name}");
        pauses.pause();
    }
}

/// Returns the pids of a process and of its descendants.
fn list_process_tree(root: u32) -> Vec<u32> {
    let mut pids = vec![root];
    let mut next = 0;
    while let Some(pid) = pids.get(next).copied() {
        next += 1;
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    pids
}

/// Lists the open files of processes. Returns the target of each, such as `socket:[77]`, and its
/// path below `/proc`.
fn list_open_files(pids: &[u32]) -> Vec<(String, String)> {
    let files = |pid: &u32| fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let target = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?.display().to_string();
        Some((target, entry.path().display().to_string()))
    };
    pids.iter().flat_map(files).filter_map(target).collect()
}

/// Returns the addresses at which processes listen, as [`ATTACK_SOCKETS`] expects them.
fn list_listeners(pids: &[u32]) -> BTreeSet<String> {
    let inode = |target: String| target.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned);
    let inodes: BTreeSet<String> =
        list_open_files(pids).into_iter().filter_map(|(target, _)| inode(target)).collect();
    let mut found = BTreeSet::new();
    for table in ["tcp", "tcp6"] {
        for line in fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default().lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            // the state 0A is LISTEN
            if let [_, local, _, "0A", .., _] = words[..]
                && words.get(9).is_some_and(|inode| inodes.contains(*inode))
            {
                let port = local.rsplit_once(':').unwrap().1;
                found.insert(u16::from_str_radix(port, 16).unwrap().to_string());
            }
        }
    }
    for line in fs::read_to_string("/proc/net/unix").unwrap().lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.len() == 8 && words[7].starts_with('@') && inodes.contains(words[6]) {
            found.insert(words[7].to_owned());
        }
    }
    found
}

/// A program of the other user, which is killed at the end of the test.
struct Attack(Child);

impl Attack {
    /// Starts [`ATTACK_SOCKETS`] as the other user, with the addresses `listeners`.
    fn start(listeners: &BTreeSet<String>) -> Attack {
        let args: Vec<&str> =
            ["-c", ATTACK_SOCKETS].into_iter().chain(listeners.iter().map(String::as_str)).collect();
        let child = command_of_other_user("python3", &args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Attack(child)
    }

    /// Ends the attack, and returns what it printed.
    fn stop(mut self) -> String {
        self.0.kill().unwrap();
        let (mut stdout, mut stderr) = (self.0.stdout.take().unwrap(), self.0.stderr.take().unwrap());
        let mut text = std::io::read_to_string(&mut stdout).unwrap();
        text.push_str(&std::io::read_to_string(&mut stderr).unwrap());
        text
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Makes the directory of a job, and the directories of the test, accessible to other users.
fn open_to_all_users(job_dir: &JobDirectory) {
    fs::set_permissions(job_dir.path(""), fs::Permissions::from_mode(0o777)).unwrap();
}

#[test]
fn another_user_changes_nothing_in_a_training_on_two_hosts() {
    if !can_become_other_user("another_user_changes_nothing_in_a_training_on_two_hosts") {
        return;
    }
    let run = |name: &str, attack: bool| -> FinishedRun {
        let job_dir = JobDirectory::new();
        open_to_all_users(&job_dir);
        let steps = format!("name={name}");
        let args = ["job.yaml", "--json", "--set", &steps, "--set", "train.steps=400"];
        let mut command = job_dir.launch_command(&args);
        command.env("LAUNCH_LOCAL_AGENTS", "2").stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        if !attack {
            return FinishedRun::from_output(&child.wait_with_output().unwrap()).expect_success();
        }
        // Two agents, each with two workers, which have their shared memory.
        let is_shared_memory = |target: &str| target.starts_with("/memfd:launch");
        let pids = wait_for("the shared memory", || {
            let pids = list_process_tree(child.id());
            let files = list_open_files(&pids);
            (files.iter().filter(|(target, _)| is_shared_memory(target)).count() >= 6).then_some(pids)
        });
        let listeners = list_listeners(&pids);
        assert!(listeners.iter().any(|name| name.starts_with('@')), "sockets of agents: {listeners:?}");
        let attack = Attack::start(&listeners);
        let mut attempts = 0;
        for (target, path) in list_open_files(&pids) {
            if is_shared_memory(&target) {
                let truncated = run_as_other_user(&format!("truncate -s 0 {path} || : > {path}"));
                assert!(!truncated.status.success(), "{}", output_to_text(&truncated));
                attempts += 1;
            }
        }
        assert!(attempts >= 6);
        let runs = job_dir.path("runs").join(name);
        let read =
            run_as_other_user(&format!("cat {0}/*/run.json {0}/*/*.jsonl {0}/*/*.log", runs.display()));
        assert!(read.stdout.is_empty() && !read.status.success(), "{}", output_to_text(&read));
        for pid in &pids {
            let read = run_as_other_user(&format!("cat /proc/{pid}/environ /proc/{pid}/maps"));
            assert!(read.stdout.is_empty(), "{}", output_to_text(&read));
        }
        sleep(Duration::from_secs(2));
        assert!(Path::new(&format!("/proc/{}", child.id())).exists());
        let output = child.wait_with_output().unwrap();
        let printed = attack.stop();
        assert!(printed.starts_with("attacking"), "{printed}");
        assert!(!printed.contains("answer of"), "{printed}");
        FinishedRun::from_output(&output).expect_success()
    };
    let (undisturbed, attacked) = (run("undisturbed", false), run("attacked", true));
    assert_eq!(attacked.collect_losses(), undisturbed.collect_losses());
    assert!(attacked.events_named("failure").is_empty());
}

#[test]
fn another_user_cannot_write_to_the_store_of_a_program() {
    if !can_become_other_user("another_user_cannot_write_to_the_store_of_a_program") {
        return;
    }
    let job_dir = JobDirectory::new();
    // Sets a key, waits for the attack, and reads the key again.
    let client = "\
import os, socket, struct, time
text = lambda t: struct.pack('<Q', len(t)) + t
s = socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))
s.sendall(b'\\0' + struct.pack('<I', 0x3C85F7CE) + b'\\1' + text(b'/key') + text(b'mine'))
open('started', 'w').close()
while not os.path.exists('attacked'):
    time.sleep(0.05)
s.sendall(b'\\3' + text(b'/key'))
length, = struct.unpack('<Q', s.recv(8, socket.MSG_WAITALL))
open('value', 'wb').write(s.recv(length, socket.MSG_WAITALL))
";
    fs::write(job_dir.path("client.py"), client).unwrap();
    let job = "name: store\nrun: {command: [python3, client.py]}\ncluster: {workers_per_host: 1}\n";
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let child = job_dir.start(&[]);
    wait_for("the program runs", || job_dir.path("started").exists().then_some(()));
    let listeners = list_listeners(&list_process_tree(child.id()));
    assert!(listeners.iter().any(|name| !name.starts_with('@')), "the store listens: {listeners:?}");
    let attack = Attack::start(&listeners);
    sleep(Duration::from_secs(2));
    let printed = attack.stop();
    fs::write(job_dir.path("attacked"), "").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = output_to_text(&output);
    FinishedRun::from_output(&output).expect_success();
    assert_eq!(fs::read_to_string(job_dir.path("value")).unwrap(), "mine", "{text}");
    assert!(printed.starts_with("attacking") && !printed.contains("answer of"), "{printed}");
    let warnings = text.matches("its process belongs to another user (uid 65534)").count();
    assert_eq!(warnings, 1, "one warning for each address and minute: {text}");
}

/// Checks that a new agent takes another name for its socket if another user takes the name of the
/// ended agent's socket.
#[test]
fn another_user_cannot_keep_agents_from_their_socket() {
    if !can_become_other_user("another_user_cannot_keep_agents_from_their_socket") {
        return;
    }
    let job_dir = JobDirectory::new();
    let job = "\
name: squat
run:
  command: [sh, -c, ': > started; while [ ! -e done ]; do sleep 0.05; done']
  restarts: 3
";
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let child = job_dir.start(&[]);
    wait_for("the program runs", || job_dir.path("started").exists().then_some(()));
    // The first process is the controller, which has a socket for `launch exec`.
    let find_sockets = || -> BTreeSet<String> {
        list_listeners(&list_process_tree(child.id())[1..])
            .into_iter()
            .filter(|name| name.starts_with('@'))
            .collect()
    };
    let sockets = find_sockets();
    assert_eq!(sockets.len(), 1, "{sockets:?}");
    // Waits for the name, and then listens at it without accepting connections.
    let squat = "\
import socket, sys, time
s = socket.socket(socket.AF_UNIX)
while True:
    try:
        s.bind('\\0' + sys.argv[1][1:])
        break
    except OSError:
        time.sleep(0.0005)
s.listen(1)
print('squatting', flush=True)
time.sleep(1000)
";
    let name = sockets.first().unwrap().clone();
    let mut squatter = command_of_other_user("python3", &["-c", squat, &name]);
    let squatter = Attack(squatter.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    fs::remove_file(job_dir.path("started")).unwrap();
    let agent = list_process_tree(child.id())[1];
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(agent as i32), nix::sys::signal::Signal::SIGKILL)
        .unwrap();
    wait_for("the program runs again", || job_dir.path("started").exists().then_some(()));
    let later = find_sockets();
    assert!(later.len() == 1 && later != sockets, "the agent took another name: {later:?}");
    fs::write(job_dir.path("done"), "").unwrap();
    let output = child.wait_with_output().unwrap();
    let printed = squatter.stop();
    assert!(printed.starts_with("squatting"), "{printed}{}", output_to_text(&output));
    FinishedRun::from_output(&output).expect_success();
}

/// Checks that a `run.json` of another user, in a directory that users share, is not treated as a
/// run.
#[test]
fn a_planted_run_of_another_user_is_ignored() {
    if !can_become_other_user("a_planted_run_of_another_user_is_ignored") {
        return;
    }
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("job.yaml"), "name: real\nrun: {command: ['true']}\n").unwrap();
    assert!(job_dir.run_launch(&["job.yaml"]).status.success());
    let real = fs::read_dir(job_dir.path("runs/real")).unwrap().next().unwrap().unwrap().path();
    let planted = job_dir.path("runs/real/planted");
    fs::create_dir(&planted).unwrap();
    for file in fs::read_dir(&real).unwrap().flatten().filter(|file| file.path().is_file()) {
        let text = fs::read_to_string(file.path()).unwrap_or_default();
        let name = real.file_name().unwrap().to_str().unwrap();
        let copy = planted.join(file.file_name());
        fs::write(&copy, text.replace(name, "planted")).unwrap();
        chown(&copy, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    }
    let listed = output_to_text(&job_dir.run_launch(&["ps"]));
    assert!(listed.contains("real") && !listed.contains("planted"), "{listed}");
    for command in ["stop", "logs", "events"] {
        let output = job_dir.run_launch(&[command, "planted"]);
        assert!(!output.status.success(), "{command}: {}", output_to_text(&output));
    }
}
