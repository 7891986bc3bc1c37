//! Inside a real Slurm (tests/slurm/cluster): allocations of every kind, time limits, lost nodes, and what is left behind.
//!
//! One cluster at a time: each test waits for the lock, and takes its cluster down whatever happens.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};
use support::{TINY, corpus, skip};

/// Longest wait for anything.
const LIMIT: Duration = Duration::from_secs(100);

struct Cluster {
    dir: PathBuf,
    _alone: Flock<fs::File>,
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm/cluster")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Until `look` finds something.
#[track_caller]
fn await_that<T>(what: &str, context: impl Fn() -> String, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < LIMIT, "{what} didn't happen:\n{}", context());
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Cluster {
    /// `None`: this machine can't have one, which was said.
    fn up(test: &str, nodes: u32) -> Option<Cluster> {
        // SAFETY: asks a number of the kernel.
        let root = unsafe { libc::geteuid() } == 0;
        let installed = ["/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged"];
        if !root {
            skip(test, "needs root, for a Slurm cluster in namespaces");
            return None;
        }
        if !installed.iter().all(|file| Path::new(file).exists()) {
            skip(test, "needs Slurm; scripts/setup-tests installs it");
            return None;
        }
        let lock = fs::File::create(env::temp_dir().join("launch-slurm.lock")).unwrap();
        let alone = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, e)| e).unwrap();
        let pattern = env::temp_dir().join("launch-slurm.*");
        Command::new(script()).arg("sweep").arg(pattern).status().unwrap();
        let dir = env::temp_dir().join(format!("launch-slurm.{}", std::process::id()));
        let cluster = Cluster { dir, _alone: alone };
        let up = cluster.call(&["up", &nodes.to_string()]);
        assert!(up.status.success(), "the cluster didn't come up: {}", text(&up));
        fs::copy(env!("CARGO_BIN_EXE_launch"), cluster.shared("launch")).unwrap();
        fs::write(cluster.shared("corpus.txt"), corpus()).unwrap();
        Some(cluster)
    }

    fn call(&self, args: &[&str]) -> Output {
        Command::new(script()).arg(&self.dir).args(args).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a shell command on a node, in the shared directory.
    fn on(&self, node: &str, command: &str) -> Output {
        let marked = format!("cd /shared && export LAUNCH_TEST_MARKER={} && {command}", self.marker());
        self.call(&["exec", node, "sh", "-c", &marked])
    }

    fn marker(&self) -> String {
        format!("slurm-{}", std::process::id())
    }

    #[track_caller]
    fn ok(&self, node: &str, command: &str) -> String {
        let output = self.on(node, command);
        assert!(output.status.success(), "{command}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn shared(&self, name: &str) -> PathBuf {
        self.dir.join("shared").join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.shared(name)).unwrap_or_default()
    }

    /// A shell script as ranks.
    fn program(&self, slurm: &str, run: &str, script: &str) {
        let command = serde_json::to_string(&["sh", "-c", script]).unwrap();
        let yaml = format!("name: test\nslurm: {slurm}\nrun:\n  command: {command}\n  {run}\n");
        fs::write(self.shared("job.yaml"), yaml).unwrap();
    }

    /// A training job of two workers on each of `nodes`, and the losses of an undisturbed run of it on one machine.
    fn training(&self, nodes: u32, steps: u64) -> BTreeMap<u64, (u64, u64)> {
        let job = TINY
            .replace("steps: 20", &format!("steps: {steps}"))
            .replace("{every: 10, keep: 2}", "{every: 25, keep: 2}");
        let slurm = format!("slurm: {{nodes: {nodes}, signal_time: 10s}}\n");
        fs::write(self.shared("job.yaml"), job + &slurm).unwrap();
        let undisturbed = "./launch job.yaml --set name=undisturbed --set cluster.hosts=local";
        self.ok("h1", undisturbed);
        self.losses("undisturbed")
    }

    /// Step → bits of loss and gradient norm, over all runs of a job; what two runs both did is the same.
    fn losses(&self, job: &str) -> BTreeMap<u64, (u64, u64)> {
        let mut losses = BTreeMap::new();
        for event in self.events(job).iter().filter(|e| e["event"] == "step") {
            let bits = |name: &str| event[name].as_f64().unwrap().to_bits();
            let step = (bits("loss"), bits("grad_norm"));
            let before = losses.insert(event["step"].as_u64().unwrap(), step);
            assert!(before.is_none_or(|before| before == step), "{event}");
        }
        losses
    }

    /// The events of all runs of a job, in their order.
    fn events(&self, job: &str) -> Vec<Value> {
        let entries = fs::read_dir(self.shared("runs").join(job)).into_iter().flatten().flatten();
        let mut runs: Vec<PathBuf> =
            entries.map(|e| e.path().join("events.jsonl")).filter(|f| f.exists()).collect();
        runs.sort();
        let lines = |file: &PathBuf| fs::read_to_string(file).unwrap_or_default();
        let whole =
            |text: String| text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect::<Vec<Value>>();
        runs.iter().flat_map(|file| whole(lines(file))).collect()
    }

    fn last_step(&self, job: &str) -> u64 {
        let events = self.events(job);
        events.iter().rev().find_map(|e| e["step"].as_u64().filter(|_| e["event"] == "step")).unwrap_or(0)
    }

    /// One field of `scontrol show job`.
    fn field(&self, job: &str, name: &str) -> String {
        let shown = self.on("h0", &format!("scontrol -o show job {job}"));
        let of = |word: &str| word.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        String::from_utf8_lossy(&shown.stdout).split_whitespace().find_map(of).unwrap_or_default()
    }

    /// Everything there is to say about a job that went wrong.
    fn told(&self, job: &str) -> String {
        let shown = text(&self.on(
            "h0",
            &format!("scontrol show job {job}; sinfo -N -l; cat runs/*/slurm-{job}.out slurm-{job}.out"),
        ));
        let events: Vec<String> =
            self.events("test").iter().chain(&self.events("tiny")).map(Value::to_string).collect();
        let tail = events.len().saturating_sub(10);
        format!("{shown}\n{}", events[tail..].join("\n"))
    }

    #[track_caller]
    fn ended(&self, job: &str, state: &str) {
        let states = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"];
        let found = await_that(
            &format!("the end of job {job}"),
            || self.told(job),
            || Some(self.field(job, "JobState")).filter(|found| states.contains(&found.as_str())),
        );
        assert_eq!(found, state, "{}", self.told(job));
    }

    #[track_caller]
    fn said(&self, job: &str, part: &str) {
        let log = self.read(&format!("runs/test/slurm-{job}.out"))
            + &self.read(&format!("runs/tiny/slurm-{job}.out"));
        assert!(log.contains(part), "no `{part}` in:\n{log}\n{}", self.told(job));
    }

    /// Nothing of any job is alive on any node.
    #[track_caller]
    fn nothing_left(&self) {
        let marker = format!("LAUNCH_TEST_MARKER={}", self.marker()).into_bytes();
        let marked = |pid: &i32| {
            fs::read(format!("/proc/{pid}/environ")).is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == marker))
        };
        let alive = || -> Vec<String> {
            let pids =
                fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
            let line = |pid: i32| {
                fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().replace('\0', " ")
            };
            pids.filter(marked).map(line).collect()
        };
        await_that("the end of all processes", || alive().join("\n"), || alive().is_empty().then_some(()));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let down = self.call(&["down"]);
        if !down.status.success() {
            eprintln!("the cluster {} wasn't taken down: {}", self.dir.display(), text(&down));
        }
    }
}

#[test]
fn programs_run_in_allocations_of_every_kind() {
    let Some(c) = Cluster::up("programs_run_in_allocations_of_every_kind", 4) else { return };
    let say = "echo $(hostname) $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR $SLURM_STEP_NODELIST $SLURM_ARRAY_TASK_ID > said.$SLURM_JOB_ID.$RANK";
    c.program("{nodes: 4, extra: [\"--array=0-1\"]}", "env: {}\ncluster: {workers_per_host: 2}", say);
    // submitted, as an array of two
    let job = c.ok("h0", "./launch sbatch job.yaml");
    await_that("the array's end", || c.told(&job), || c.ok("h0", "squeue -h").is_empty().then_some(()));
    let members: Vec<String> = fs::read_dir(c.shared(""))
        .unwrap()
        .flatten()
        .map(|e| e.file_name().into_string().unwrap())
        .filter(|n| n.starts_with("said."))
        .collect();
    assert_eq!(members.len(), 16, "{members:?}\n{}", c.told(&job));
    let of = |rank: u32| c.read(&format!("said.{job}.{rank}"));
    let net = fs::read_to_string(c.dir.join("net")).unwrap();
    for rank in 0..8 {
        let (host, local) = (rank / 2 + 1, rank % 2);
        let want = format!("h{host} {local}/2 {}/4 8 {}.2 h[1-4]", host - 1, net.trim());
        assert!(of(rank).starts_with(&want), "{want}: {}", of(rank));
    }
    // salloc: the tasks that were asked for, by node
    c.program("{}", "env: {}", say);
    let alloc = c.on("h0", "salloc -Q -N3 -n4 ./launch job.yaml");
    assert!(alloc.status.success(), "{}", text(&alloc));
    let job = c.ok("h0", "ls said.* | cut -d. -f2 | sort -n | tail -1");
    let hosts: Vec<String> = (0..4).map(|r| c.read(&format!("said.{job}.{r}"))).collect();
    assert!(hosts.iter().all(|said| said.contains("/3 4 ")), "{hosts:?}");
    // two groups
    let het = "#!/bin/bash\n#SBATCH -N1 -n1 -o het.out\n#SBATCH hetjob\n#SBATCH -N2 -n4 --ntasks-per-node=2\nexec ./launch job.yaml\n";
    fs::write(c.shared("het.sh"), het).unwrap();
    let ran = c.on("h0", "sbatch --wait --parsable het.sh");
    assert!(ran.status.success(), "{}{}", text(&ran), c.read("het.out"));
    let job = String::from_utf8_lossy(&ran.stdout).trim().to_owned();
    let said = c.ok("h0", &format!("cat said.{job}.*"));
    assert_eq!(said.lines().count(), 5, "{said}");
    for part in ["h1 0/1 0/3 5", "h2 1/2 1/3 5", "h3 1/2 2/3 5"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // GPUs that were asked for by task, unequal; all of a node's are there
    let gpus = "echo $CUDA_VISIBLE_DEVICES > gpus.$(hostname)";
    c.program("{}", "env: {}\ncluster: {workers_per_host: 1}", gpus);
    let ran = c.on("h0", "salloc -Q -N2 -n5 --gpus-per-task=1 ./launch job.yaml");
    assert!(ran.status.success(), "{}", text(&ran));
    assert_eq!((c.read("gpus.h1").trim(), c.read("gpus.h2").trim()), ("0,1,2,3", "0"));
    c.nothing_left();
}

#[test]
fn what_can_not_run_in_an_allocation_is_refused_with_what_to_do() {
    let Some(c) = Cluster::up("what_can_not_run_in_an_allocation_is_refused_with_what_to_do", 2) else {
        return;
    };
    c.program("{}", "env: {}", "echo ran on $(hostname)");
    // All nodes are checked, by a step that is gone afterwards.
    let checked = c.ok("h0", "salloc -Q -N2 ./launch check job.yaml --json");
    let checked: Value = serde_json::from_str(&checked).unwrap();
    let names: Vec<&str> = checked["hosts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|h| h["node"]["hostname"].as_str().unwrap())
        .collect();
    assert_eq!((names, &checked["ok"]), (vec!["h1", "h2"], &true.into()), "{checked:#}");
    let step = c.on("h0", "srun -N2 -n2 ./launch job.yaml");
    assert!(!step.status.success() && text(&step).contains("without srun"), "{}", text(&step));
    let outside = c.on("h0", "./launch job.yaml --set cluster.hosts=slurm");
    assert_eq!(outside.status.code(), Some(3), "{}", text(&outside));
    assert!(text(&outside).contains("SLURM_JOB_ID"), "{}", text(&outside));
    // the executable lies on one node only
    let own = "mkdir -p /opt/own && cp launch /opt/own/ && cat > own.sh <<'E'\n#!/bin/bash\nexec /opt/own/launch job.yaml $SET\nE\n";
    c.ok("h1", own);
    let absent = c.on("h0", "sbatch --wait -Q -N2 -o absent.out own.sh");
    let log = c.read("absent.out");
    assert!(!absent.status.success() && log.contains("slurm.bcast: true"), "{log}");
    let copied = c.on(
        "h0",
        "SET='--set slurm.bcast=true --set run.logs.show=[0,1]' sbatch --wait -Q -N2 -o copied.out own.sh",
    );
    let log = c.read("copied.out");
    assert!(copied.status.success() && log.contains("ran on h1") && log.contains("ran on h2"), "{log}");
    assert_eq!(c.ok("h2", "ls /tmp"), "", "the copy is gone");
    c.nothing_left();
}

#[test]
fn a_failure_ends_every_node_and_is_named() {
    let Some(c) = Cluster::up("a_failure_ends_every_node_and_is_named", 3) else { return };
    // Each rank leaves a process in a session of its own.
    let script = "setsid sleep 1000 & echo up > up.$RANK; while [ ! -e go ]; do sleep 0.05; done; [ $RANK = 2 ] && exit 9; exec sleep 1000";
    c.program("{nodes: 3, requeues: 0}", "grace_period: 5s", script);
    let begin = |c: &Cluster| {
        for file in ["up.0", "up.1", "up.2", "go"] {
            _ = fs::remove_file(c.shared(file));
        }
        let job = c.ok("h0", "./launch sbatch job.yaml");
        let up = || (0..3).all(|rank| c.shared(&format!("up.{rank}")).exists()).then_some(());
        await_that("the start", || c.told(&job), up);
        job
    };
    let job = begin(&c);
    fs::write(c.shared("go"), "").unwrap();
    c.ended(&job, "FAILED");
    c.said(&job, "exit code 9");
    c.said(&job, "h3");
    c.nothing_left();

    // srun is killed: Slurm ends its tasks
    let job = begin(&c);
    c.ok("h1", "pkill -KILL -o -x srun");
    c.ended(&job, "FAILED");
    c.said(&job, "srun");
    c.nothing_left();

    // scancel: the program gets SIGTERM, and all is gone
    let job = begin(&c);
    c.ok("h0", &format!("scancel {job}"));
    c.ended(&job, "CANCELLED");
    c.nothing_left();
}

#[test]
fn the_time_limit_and_scancel_find_a_saved_job_that_goes_on() {
    let Some(c) = Cluster::up("the_time_limit_and_scancel_find_a_saved_job_that_goes_on", 5) else { return };
    // A program on a node of its own runs into its real time limit, meanwhile.
    let script = "[ -e saved ] && exit 0; trap 'touch saved; exit 0' TERM; while :; do sleep 0.1; done";
    c.program("{nodes: 1, time: 1m, signal_time: 10s}", "grace_period: 8s", script);
    fs::rename(c.shared("job.yaml"), c.shared("limited.yaml")).unwrap();
    let limited = c.ok("h0", "./launch sbatch limited.yaml");
    let want = c.training(4, 400);
    let job = c.ok("h0", "./launch sbatch job.yaml");
    let begun = || (c.last_step("tiny") >= 10).then_some(());
    await_that("the first steps", || c.told(&job), begun);
    // The same signal as before the limit (--signal=B:USR1@…), sooner: to the batch script alone.
    c.ok("h0", &format!("scancel -b -s USR1 {job}"));
    let again = || (c.field(&job, "Restarts") == "1" && c.field(&job, "JobState") == "RUNNING").then_some(());
    await_that("the requeue", || c.told(&job), again);
    let stopped = c.last_step("tiny");
    assert!(stopped < 400, "it was done before it was told to stop");
    c.said(&job, "is put back into the queue");
    await_that("more steps", || c.told(&job), || (c.last_step("tiny") > stopped).then_some(()));
    // scancel signals every process of the job; it saves and is over.
    c.ok("h0", &format!("scancel {job}"));
    c.ended(&job, "CANCELLED");
    c.nothing_left();
    let resumes = |c: &Cluster| c.events("tiny").iter().filter(|e| e["event"] == "resume").count();
    let steps = c.last_step("tiny");
    let saved = c.events("tiny").iter().rev().find(|e| e["event"] == "checkpoint").unwrap()["step"].clone();
    assert_eq!((resumes(&c), saved.as_u64()), (1, Some(steps)), "{}", c.told(&job));
    let job = c.ok("h0", "./launch sbatch job.yaml");
    c.ended(&job, "COMPLETED");
    assert_eq!(resumes(&c), 2, "{}", c.told(&job));
    assert!(c.losses("tiny") == want, "the losses differ from an undisturbed run's");
    c.ended(&limited, "COMPLETED");
    assert!(c.shared("saved").exists());
    assert_eq!(c.field(&limited, "Restarts"), "1", "{}", c.told(&limited));
    c.said(&limited, "is put back into the queue");
    c.nothing_left();
}

#[test]
fn a_lost_node_is_answered_by_a_requeue_and_a_resume() {
    let Some(c) = Cluster::up("a_lost_node_is_answered_by_a_requeue_and_a_resume", 4) else { return };
    // Another node than the batch script's is lost: launch notices, and asks to be queued again.
    let script = "echo $(hostname) >> up.$RANK; [ $(wc -l < up.$RANK) -gt 1 ] && exit 0; exec sleep 1000";
    c.program("{nodes: 3}", "grace_period: 5s", script);
    let job = c.ok("h0", "./launch sbatch job.yaml");
    let up = || (0..3).all(|rank| c.shared(&format!("up.{rank}")).exists()).then_some(());
    await_that("the start", || c.told(&job), up);
    assert!(c.call(&["crash", "h3"]).status.success());
    c.ended(&job, "COMPLETED");
    assert_eq!(c.field(&job, "Restarts"), "1", "{}", c.told(&job));
    c.said(&job, "is put back into the queue");
    let ran = c.read("up.2");
    assert_eq!(ran.lines().collect::<Vec<_>>(), ["h3", "h4"]);
    assert!(c.call(&["boot", "h3"]).status.success());

    // The batch script's own node is lost: Slurm notices, and queues the job again.
    let want = c.training(2, 400);
    let net = fs::read_to_string(c.dir.join("net")).unwrap();
    let interface = format!("{}.0/24", net.trim());
    let set = format!("--set cluster.interface={interface}");
    let job = c.ok("h0", &format!("./launch sbatch job.yaml {set} -- --exclude=h3"));
    let begun = || (c.last_step("tiny") >= 30).then_some(());
    await_that("the first checkpoint", || c.told(&job), begun);
    let node = c.field(&job, "BatchHost");
    assert!(c.call(&["crash", &node]).status.success());
    c.ended(&job, "COMPLETED");
    assert_ne!(c.field(&job, "Restarts"), "0", "{}", c.told(&job));
    assert!(c.losses("tiny") == want, "the losses differ from an undisturbed run's");
    // Where ranks listen for those of other nodes is what was asked for.
    let log = c.ok("h0", "cat runs/tiny/2*/logs/rank-0.log");
    let chosen = |line: &str| line.contains(&format!("{}.", net.trim())) && line.contains(&interface);
    assert!(log.lines().any(chosen), "{log}");
}
