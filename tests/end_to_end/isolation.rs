//! Tests what a run hides from other users of the machine and from the terminal, with the real
//! executable: secrets, private files, planted run records and unprintable characters.
use crate::support::{JobDirectory, environment::clean_command, list_files_below, output_to_text};
use serde_json::json;
use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// The longest wait for a condition.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// The secrets of the test job. The job gets each of them in a different way.
const SECRETS: [&str; 6] = [
    "sesame-in-file-71",
    "sesame-of-job-72",
    "sesame-env-73",
    "sesame-passed-74",
    "sesame-set-75",
    "sesame-map-76",
];

/// A job that gets secrets from its own text, a file, an environment variable, and a pattern of
/// variable names (`run.pass_env`).
const JOB: &str = "\
name: secrets
run:
  command: [sh, -c, 'env > got; : > started; while [ ! -e done ]; do sleep 0.05; done; exit 3', x, --key-token, sesame-argument-77]
  pass_env: ['PASSED_*']
  env: {LITERAL_TOKEN: sesame-of-job-72, A: {from_file: token.txt}, B: {from_env: LAUNCH_TEST_KEY}}
";

/// A secret that the user gives to the program as an argument. Lists of processes show it in the
/// arguments of the workers.
const SECRET_ARGUMENT: &str = "sesame-argument-77";

/// The files of the user that contain the secrets.
const FILES_WITH_SECRETS: [&str; 3] = ["got", "job.yaml", "token.txt"];

/// Waits until `condition` returns true. Panics after [`WAIT_LIMIT`].
#[track_caller]
fn wait_until(name: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < WAIT_LIMIT, "timeout: {name}");
        sleep(Duration::from_millis(10));
    }
}

/// Panics if `text` contains a secret.
#[track_caller]
fn assert_no_secret(place: &str, text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    for secret in SECRETS.into_iter().chain([SECRET_ARGUMENT]) {
        assert!(!text.contains(secret), "{place} contains {secret}: {text}");
    }
}

/// Panics if a list of processes shows a secret.
#[track_caller]
fn assert_no_secret_in_processes() {
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        // A process may end meanwhile.
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        // The user gave two of the secrets to launch in its environment. Workers have all of them.
        let environment = String::from_utf8_lossy(&read("environ")).into_owned();
        if environment.split('\0').any(|variable| variable.starts_with("RANK=")) {
            let command_line = String::from_utf8_lossy(&read("cmdline")).replace(SECRET_ARGUMENT, "");
            assert_no_secret(&entry.path().display().to_string(), command_line.as_bytes());
        } else {
            assert_no_secret(&entry.path().display().to_string(), &read("cmdline"));
            for secret in [SECRETS[0], SECRETS[1], SECRETS[4], SECRETS[5]] {
                assert!(!environment.contains(secret), "{}: {environment}", entry.path().display());
            }
        }
    }
}

#[test]
fn secrets_that_are_given_in_seven_ways_appear_nowhere_else() {
    for detached in [false, true] {
        let job_dir = JobDirectory::new();
        fs::write(job_dir.path("job.yaml"), JOB).unwrap();
        fs::write(job_dir.path("token.txt"), SECRETS[0]).unwrap();
        let overrides =
            [format!("run.env.HF_TOKEN={}", SECRETS[4]), format!("run.env.db_password={}", SECRETS[5])];
        let launch = |args: &[&str]| {
            let mut command = job_dir.launch_command(args);
            let variables =
                [("LAUNCH_TEST_KEY", SECRETS[2]), ("PASSED_A", SECRETS[3]), ("LAUNCH_LOG", "trace")];
            command.envs(variables);
            command
        };
        let mut args = vec!["run", "--json", "--set", &overrides[0], "--set", &overrides[1]];
        args.extend(detached.then_some("--detach"));
        args.push("job.yaml");
        let child = launch(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the program runs", || job_dir.path("started").exists());
        assert_no_secret_in_processes();
        fs::write(job_dir.path("done"), "").unwrap();
        let output = child.wait_with_output().unwrap();
        let end = |file: &String| file.ends_with("events.jsonl");
        let journal = || list_files_below(&job_dir.path("runs")).into_iter().find(end).unwrap();
        wait_until("the run ends", || {
            fs::read_to_string(job_dir.path("runs").join(journal())).unwrap().contains("\"done\"")
        });
        assert_no_secret("the output", output_to_text(&output).as_bytes());
        let got = fs::read_to_string(job_dir.path("got")).unwrap();
        assert!(SECRETS.iter().all(|secret| got.contains(secret)), "{got}");
        for args in [
            &["ps", "--json"][..],
            &["events", "--json"],
            &["events"],
            &["logs"],
            &["plan", "job.yaml", "--set", &overrides[0], "--json"],
            &["plan", "job.yaml", "--set", &overrides[0]],
            &["plan", "job.yaml", "--set", &overrides[0], "--set", "run.env.HF_TOKEN.x=1"],
            &["run", "--dry-run", "job.yaml", "--set", &overrides[0]],
        ] {
            assert_no_secret(
                &format!("{args:?}"),
                output_to_text(&launch(args).output().unwrap()).as_bytes(),
            );
        }
        for file in list_files_below(&job_dir.path("")) {
            if !FILES_WITH_SECRETS.contains(&file.as_str()) {
                assert_no_secret(&file, &fs::read(job_dir.path(&file)).unwrap());
            }
        }
        assert_private(&find_run_dir(&job_dir));
    }
}

/// Checks that a secret argument of a program is visible neither in the process list nor in any
/// file of the run, and that launch warns about it.
#[test]
fn a_secret_argument_of_a_program_is_stored_nowhere() {
    for detached in [false, true] {
        let job_dir = JobDirectory::new();
        let program = ": > started; while [ ! -e done ]; do sleep 0.05; done";
        let mut args = vec!["run", "--json"];
        args.extend(detached.then_some("--detach"));
        args.extend(["--", "sh", "-c", program, "x", "--key-token", SECRET_ARGUMENT]);
        let mut command = job_dir.launch_command(&args);
        command.env("LAUNCH_LOG", "trace").stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        wait_until("the program runs", || job_dir.path("started").exists());
        assert_no_secret_in_processes();
        fs::write(job_dir.path("done"), "").unwrap();
        let text = output_to_text(&child.wait_with_output().unwrap());
        assert!(text.contains("job-secret-in-file"), "{text}");
        assert_no_secret("the output", text.as_bytes());
        wait_until("the run ends", || {
            let text = |file: &String| fs::read_to_string(job_dir.path(file)).unwrap_or_default();
            let files = list_files_below(&job_dir.path(""));
            files.iter().any(|file| file.ends_with("events.jsonl") && text(file).contains("\"done\""))
        });
        for file in list_files_below(&job_dir.path("")) {
            assert_no_secret(&file, &fs::read(job_dir.path(&file)).unwrap());
        }
        assert_no_secret("ps", output_to_text(&job_dir.run_launch(&["ps", "--json"])).as_bytes());
    }
}

/// Returns the only run directory of the job `secrets`.
fn find_run_dir(job_dir: &JobDirectory) -> std::path::PathBuf {
    fs::read_dir(job_dir.path("runs/secrets")).unwrap().next().unwrap().unwrap().path()
}

/// Panics if other users can list the directory, or read a file below it.
#[track_caller]
fn assert_private(directory: &Path) {
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(directory), 0o700);
    for file in list_files_below(directory) {
        assert_eq!(mode(&directory.join(&file)), 0o600, "{file}");
    }
}

/// Checks that `launch stop` signals no process because of a `run.json` below the current
/// directory. Such a file may come from an archive, and name any process.
#[test]
fn stop_signals_no_process_that_a_planted_record_names() {
    let job_dir = JobDirectory::new();
    let mut victim = clean_command("sleep").arg("1000").spawn().unwrap();
    let stat = fs::read_to_string(format!("/proc/{}/stat", victim.id())).unwrap();
    let started: u64 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    let read = |path: &str| fs::read_to_string(path).unwrap().trim().to_owned();
    let run_dir = job_dir.path("runs/job/planted");
    fs::create_dir_all(&run_dir).unwrap();
    let record = json!({
        "version": 1, "run": "planted", "name": "job", "run_dir": run_dir, "world": 1, "began_ms": 1, "command": [],
        "by": {
            "host": read("/proc/sys/kernel/hostname"), "boot": read("/proc/sys/kernel/random/boot_id"),
            "pid": victim.id(), "started": started,
        },
    });
    fs::write(run_dir.join("run.json"), record.to_string()).unwrap();
    fs::write(run_dir.join("events.jsonl"), "").unwrap();
    let listed = output_to_text(&job_dir.run_launch(&["ps"]));
    assert!(listed.contains("planted"), "{listed}");
    for args in [&["stop", "planted"][..], &["stop", "--now", "planted"], &["stop"]] {
        let output = job_dir.run_launch(args);
        let text = output_to_text(&output);
        assert!(
            !output.status.success() && text.contains("not the controller of this run"),
            "{args:?}: {text}"
        );
    }
    assert_eq!(victim.try_wait().unwrap(), None, "the process runs");
    victim.kill().unwrap();
    victim.wait().unwrap();
}

/// Checks that `launch ps` and other commands soon end and print no control characters if a run
/// record has the largest possible values, and its journal and log contain control characters.
#[test]
fn records_and_logs_with_extreme_values_are_listed_in_time() {
    let job_dir = JobDirectory::new();
    let make_run = |run: &str, name: &str, world: u64| {
        let run_dir = job_dir.path("runs/job").join(run);
        fs::create_dir_all(run_dir.join("logs")).unwrap();
        let record = json!({
            "version": 1, "run": run, "name": name, "run_dir": run_dir, "world": world, "began_ms": u64::MAX,
            "command": ["\u{1b}]0;t\u{7}"], "controller_timeout_ms": u64::MAX,
            "by": {"host": "another", "boot": "b", "pid": u32::MAX, "started": u64::MAX},
        });
        fs::write(run_dir.join("run.json"), record.to_string()).unwrap();
        let journal = json!({"event": "done", "exit_code": 0, "seconds": 1e308, "time": -1e308, "schema": 2});
        fs::write(run_dir.join("events.jsonl"), format!("{journal}\n\u{9b}2J\u{202e}\n")).unwrap();
        fs::write(run_dir.join("logs/rank-0.log"), "\u{1b}[31mred\u{1b}]0;t\u{7}\u{9b}2J\u{202e}\n").unwrap();
    };
    make_run("extreme", "job", 1 << 20);
    make_run("too-many", "job", u64::from(u32::MAX));
    make_run("long-name", &"n".repeat(70_000), 1);
    make_run("unprintable\u{1b}", "job", 1);
    let began = Instant::now();
    let listed = output_to_text(&job_dir.run_launch(&["ps"]));
    assert!(listed.contains("extreme"), "{listed}");
    for rejected in ["too-many", "long-name", "unprintable"] {
        assert!(!listed.contains(rejected), "{listed}");
    }
    for args in [&["ps", "--json"][..], &["logs"], &["events"], &["events", "--json"], &["stop"]] {
        let text = output_to_text(&job_dir.run_launch(args));
        let is_color = |rest: &str| rest.starts_with("[31m") || rest.starts_with("[0m");
        let is_clean = text.split('\u{1b}').skip(1).all(is_color);
        assert!(is_clean && !text.contains(['\u{7}', '\u{9b}', '\u{202e}']), "{args:?}: {text:?}");
    }
    assert!(began.elapsed() < WAIT_LIMIT, "{:?}", began.elapsed());
    let raw = job_dir.run_launch(&["logs", "--raw"]).stdout;
    assert!(String::from_utf8_lossy(&raw).contains("\u{1b}]0;t\u{7}"), "the bytes of the log");
}

/// Checks that `launch ps` needs little memory for many records with long command lines, which may
/// come from an archive. With all command lines in memory, these records need more than 1 GiB.
#[test]
fn many_long_records_are_listed_with_little_memory() {
    const RUNS: usize = 300;
    const MEMORY_LIMIT: u64 = 128 << 20;
    let job_dir = JobDirectory::new();
    let word_count = 60_000;
    for number in 0..RUNS {
        let run = format!("r{number}");
        let run_dir = job_dir.path("runs/job").join(&run);
        fs::create_dir_all(&run_dir).unwrap();
        let record = json!({
            "version": 1, "run": run, "name": "job", "run_dir": run_dir, "world": 1, "began_ms": number,
            "command": vec!["x"; word_count], "by": {"host": "another", "boot": "b", "pid": 1, "started": 1},
        });
        fs::write(run_dir.join("run.json"), record.to_string()).unwrap();
    }
    let list_runs = |args: &[&str]| {
        let mut command = job_dir.launch_command(args);
        // SAFETY: setrlimit(2) is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                Ok(nix::sys::resource::setrlimit(
                    nix::sys::resource::Resource::RLIMIT_DATA,
                    MEMORY_LIMIT,
                    MEMORY_LIMIT,
                )?)
            })
        };
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let table = list_runs(&["ps", "--all"]);
    assert_eq!(table.lines().count(), RUNS + 1);
    let listed: Vec<serde_json::Value> = serde_json::from_str(&list_runs(&["ps", "--json"])).unwrap();
    // Without `--all`, only the newest 20 past runs are listed.
    assert_eq!((listed.len(), &listed[0]["run"]), (20, &json!("r299")));
    assert!(listed.iter().all(|run| run["command"].as_array().unwrap().len() == word_count));
}

/// Checks that a pipe in place of a file that launch reads does not block a command.
#[test]
fn pipes_in_place_of_files_do_not_block() {
    let job_dir = JobDirectory::new();
    let make_pipe = |name: &str| {
        let path = job_dir.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    };
    for name in ["pipe.yaml", "hosts", "model/config.json", "c.json"] {
        make_pipe(name);
    }
    fs::write(job_dir.path("a.txt"), "a b c").unwrap();
    let hosts = "name: a\nrun: {command: ['true']}\ncluster: {hosts: {file: hosts}}\n";
    fs::write(job_dir.path("hosts.yaml"), hosts).unwrap();
    let model = "name: a\ntrain: {model: {from: model}, data: {files: [a.txt], tokenizer: bytes, seq_len: 2}, \
                 batch: {global: 1, micro: 1}, optimizer: {lr: 1}, steps: 1}\n";
    fs::write(job_dir.path("model.yaml"), model).unwrap();
    for (args, code) in [
        (&["plan", "pipe.yaml"][..], "job-file-unreadable"),
        (&["plan", "hosts.yaml"], "hostfile-unreadable"),
        (&["plan", "model.yaml"], "model-config-unreadable"),
        (&["import", "deepspeed", "c.json"], "job-file-unreadable"),
    ] {
        let began = Instant::now();
        let text = output_to_text(&job_dir.run_launch(args));
        assert!(text.contains(code), "{args:?}: {text}");
        assert!(began.elapsed() < WAIT_LIMIT, "{args:?}: {:?}", began.elapsed());
    }
}

#[test]
fn names_of_files_and_jobs_do_not_control_the_terminal() {
    let job_dir = JobDirectory::new();
    let name = "a\u{1b}]0;t\u{7}\u{202e}\u{9b}2J";
    let (job, directory) = (format!("{name}.yaml"), job_dir.path(name));
    fs::write(job_dir.path(&job), format!("run: {{command: [true]}}\n'{name}': 1\n")).unwrap();
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("pytorch_model.bin"), "x").unwrap();
    fs::write(job_dir.path("colors.json"), "{\"\\u001b[31mkey\": 1}").unwrap();
    let assert_printable = |args: &[&str], output: &Output| {
        let text = output_to_text(output);
        let found = text.chars().find(|c| matches!(c, '\u{1b}' | '\u{7}' | '\u{202e}' | '\u{9b}'));
        assert_eq!(found, None, "{args:?}: {text:?}");
        assert!(!text.is_empty(), "{args:?}");
    };
    for args in [
        &["plan", &job][..],
        &["plan", "--json", &job],
        &["run", &job],
        &["run", "--json", &job],
        &["plan", name],
        &["stop", name],
        &["logs", name],
        &["ckpt", "inspect", name],
        &["ckpt", "verify", name],
        &["ckpt", "verify", "--json", name],
        &["ckpt", "inspect", "--json", name],
        &["import", "accelerate", name],
        &["import", "deepspeed", "colors.json"],
        &["import", "deepspeed", "colors.json", "--json"],
        &["run", "--json", "--", name],
        &["run", "--", "sh", "-c", &format!("exit 3 # {name}")],
        &["ps"],
        &["ps", "--json"],
    ] {
        assert_printable(args, &job_dir.run_launch(args));
    }
}
