//! [`SlurmCluster`]: starts a real Slurm cluster on this machine (tests/slurm/cluster), writes the
//! jobs of a test, and reads the events of their runs.
use crate::support::{
    TINY_JOB, assert_snapshot,
    environment::{LAUNCH_EXECUTABLE, SIMULATION_ROOT, clean_command},
    generate_corpus, output_to_text,
    poll_pauses::PollPauses,
    process_list::{find_processes_with_variable, read_command_line},
    report_skip,
};
use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Output,
    time::{Duration, Instant},
};

/// The longest wait for any condition.
const WAIT_LIMIT: Duration = Duration::from_secs(100);

/// A real Slurm cluster in namespaces of this machine. Dropping the value removes the cluster.
pub(super) struct SlurmCluster {
    pub(super) dir: PathBuf,
    _lock: Flock<fs::File>,
}

/// Returns the path of the script that starts and stops clusters.
fn cluster_script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm/cluster")
}

/// Calls `look` repeatedly until it returns a value, and returns the value. Panics after
/// [`WAIT_LIMIT`], with `what` as the description of the awaited condition and the text that
/// `context` returns.
#[track_caller]
pub(super) fn wait_until<T>(
    what: &str,
    context: impl Fn() -> String,
    mut look: impl FnMut() -> Option<T>,
) -> T {
    let began = Instant::now();
    let mut pauses = PollPauses::new();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < WAIT_LIMIT, "{what} didn't happen:\n{}", context());
        pauses.pause();
    }
}

impl SlurmCluster {
    /// Starts a cluster with `nodes` compute nodes, each of which has 4 emulated GPUs. Returns
    /// `None` if this machine cannot run Slurm.
    pub(super) fn start(test: &str, nodes: u32) -> Option<SlurmCluster> {
        SlurmCluster::start_with_gpus(test, &vec![4; nodes as usize])
    }

    /// Starts a cluster with a compute node for each item of `gpus`, which is the number of its
    /// emulated GPUs, after the removal of clusters whose test has ended. Returns `None` if this
    /// machine cannot run Slurm; the test is then skipped.
    pub(super) fn start_with_gpus(test: &str, gpus: &[u32]) -> Option<SlurmCluster> {
        // SAFETY: reads the user id, and cannot fail.
        let root = unsafe { libc::geteuid() } == 0;
        let installed = ["/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged"];
        if !root {
            report_skip(test, "needs root, for a Slurm cluster in namespaces");
            return None;
        }
        if !installed.iter().all(|file| Path::new(file).exists()) {
            report_skip(test, "needs Slurm; scripts/setup-tests installs it");
            return None;
        }
        let lock = fs::File::create(Path::new(SIMULATION_ROOT).join("launch-slurm.lock")).unwrap();
        let lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, e)| e).unwrap();
        let pattern = Path::new(SIMULATION_ROOT).join("launch-slurm.*");
        clean_command(cluster_script()).arg("sweep").arg(pattern).status().unwrap();
        let dir = Path::new(SIMULATION_ROOT).join(format!("launch-slurm.{}", std::process::id()));
        let cluster = SlurmCluster { dir, _lock: lock };
        let numbers: Vec<String> = [gpus.len() as u32].iter().chain(gpus).map(u32::to_string).collect();
        let args: Vec<&str> = ["up"].into_iter().chain(numbers.iter().map(String::as_str)).collect();
        let up = cluster.run_cluster_script(&args);
        assert!(up.status.success(), "the cluster did not start: {}", output_to_text(&up));
        fs::copy(LAUNCH_EXECUTABLE, cluster.shared_path("launch")).unwrap();
        fs::write(cluster.shared_path("corpus.txt"), generate_corpus()).unwrap();
        Some(cluster)
    }

    /// Runs a command of tests/slurm/cluster for this cluster.
    pub(super) fn run_cluster_script(&self, args: &[&str]) -> Output {
        clean_command(cluster_script()).arg(&self.dir).args(args).output().unwrap()
    }

    /// Runs a shell command on a node, in the shared directory.
    pub(super) fn run_on_node(&self, node: &str, command: &str) -> Output {
        let marked = format!("cd /shared && export LAUNCH_TEST_MARKER={} && {command}", self.marker());
        self.run_cluster_script(&["exec", node, "sh", "-c", &marked])
    }

    /// Returns the value of the environment variable that marks all processes of the test.
    pub(super) fn marker(&self) -> String {
        format!("slurm-{}", std::process::id())
    }

    /// Runs a shell command on a node and returns its standard output. Panics if the command fails.
    #[track_caller]
    pub(super) fn run_on_node_successfully(&self, node: &str, command: &str) -> String {
        let output = self.run_on_node(node, command);
        assert!(output.status.success(), "{command}: {}", output_to_text(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Returns a path in the directory that all nodes share.
    pub(super) fn shared_path(&self, name: &str) -> PathBuf {
        self.dir.join("shared").join(name)
    }

    /// Reads a file in the shared directory. Returns an empty string if the file cannot be read.
    pub(super) fn read_shared_file(&self, name: &str) -> String {
        fs::read_to_string(self.shared_path(name)).unwrap_or_default()
    }

    /// Writes a job whose ranks run a shell script. `slurm` and `run` are further YAML of these
    /// sections.
    pub(super) fn write_program_job(&self, slurm: &str, run: &str, script: &str) {
        let command = serde_json::to_string(&["sh", "-c", script]).unwrap();
        let yaml = format!("name: test\nslurm: {slurm}\nrun:\n  command: {command}\n  {run}\n");
        fs::write(self.shared_path("job.yaml"), yaml).unwrap();
    }

    /// Writes a training job with two workers on each of `nodes` nodes, and runs the job on one
    /// machine without interruption. Returns the loss and the gradient norm of each step of this
    /// run, as the bits of the floats.
    pub(super) fn write_training_job(&self, nodes: u32, steps: u64) -> BTreeMap<u64, (u64, u64)> {
        let job = TINY_JOB
            .replace("steps: 20", &format!("steps: {steps}"))
            .replace("{every: 10, keep: 2}", "{every: 25, keep: 2}");
        let slurm = format!("slurm: {{nodes: {nodes}, signal_time: 10s}}\n");
        fs::write(self.shared_path("job.yaml"), job + &slurm).unwrap();
        let uninterrupted = "./launch job.yaml --set name=uninterrupted --set cluster.hosts=local";
        self.run_on_node_successfully("h1", uninterrupted);
        self.collect_step_bits("uninterrupted")
    }

    /// Returns the bits of loss and gradient norm of each step, over all runs of a job. Panics if
    /// two runs executed the same step with different bits.
    pub(super) fn collect_step_bits(&self, job: &str) -> BTreeMap<u64, (u64, u64)> {
        let mut losses = BTreeMap::new();
        for event in self.read_events(job).iter().filter(|e| e["event"] == "step") {
            let bits = |name: &str| event[name].as_f64().unwrap().to_bits();
            let step = (bits("loss"), bits("grad_norm"));
            let before = losses.insert(event["step"].as_u64().unwrap(), step);
            assert!(before.is_none_or(|before| before == step), "{event}");
        }
        losses
    }

    /// Reads the events of all runs of a job, in order.
    pub(super) fn read_events(&self, job: &str) -> Vec<Value> {
        let entries = fs::read_dir(self.shared_path("runs").join(job)).into_iter().flatten().flatten();
        let mut runs: Vec<PathBuf> =
            entries.map(|e| e.path().join("events.jsonl")).filter(|f| f.exists()).collect();
        runs.sort();
        let lines = |file: &PathBuf| fs::read_to_string(file).unwrap_or_default();
        let parse =
            |text: String| text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect::<Vec<Value>>();
        runs.iter().flat_map(|file| parse(lines(file))).collect()
    }

    /// Returns the last `failure` event of a job. Panics if there is none.
    #[track_caller]
    pub(super) fn expect_last_failure(&self, job: &str) -> Value {
        let events = self.read_events(job).into_iter().rev();
        events.into_iter().find(|event| event["event"] == "failure").expect("a failure")
    }

    /// Compares the messages of all `notice` events of a job's runs with a snapshot. Before the
    /// comparison, replaces IDs of Slurm jobs and addresses by placeholders.
    #[track_caller]
    pub(super) fn assert_notices(&self, job: &str, snapshot: &str) {
        let events = self.read_events(job);
        let notices = events.iter().filter(|event| event["event"] == "notice");
        let lines: Vec<&str> = notices.filter_map(|event| event["message"].as_str()).collect();
        let net = fs::read_to_string(self.dir.join("net")).unwrap();
        let address = format!(r"{}\.\d+", net.trim().replace('.', r"\."));
        let filters = [
            (r"Slurm job \d+", "Slurm job [ID]"),
            (address.as_str(), "[ADDRESS]"),
            // Slurm signals the agents and the batch script, and either signal may be first.
            ("received SIGTERM: workers", "the batch system is about to end the job: workers"),
        ];
        assert_snapshot(&self.dir, snapshot, &lines.join("\n"), &filters);
    }

    /// Returns the reasons for which Slurm has ended the runs of a job, from their notices
    /// `batch-job-end`.
    pub(super) fn read_end_reasons(&self, job: &str) -> Vec<String> {
        let events = self.read_events(job);
        let diagnostics = events.iter().filter_map(|event| event["diagnostics"].as_array()).flatten();
        let ends = diagnostics.filter(|diagnostic| diagnostic["code"] == "batch-job-end");
        ends.map(|end| end["fields"]["reason"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns the last step that any run of the job has reported, or 0.
    pub(super) fn read_last_step(&self, job: &str) -> u64 {
        let events = self.read_events(job);
        events.iter().rev().find_map(|e| e["step"].as_u64().filter(|_| e["event"] == "step")).unwrap_or(0)
    }

    /// Returns one field of a Slurm job as `scontrol show job` prints it, or an empty string.
    pub(super) fn read_job_field(&self, job: &str, name: &str) -> String {
        let shown = self.run_on_node("h0", &format!("scontrol -o show job {job}"));
        let value = |word: &str| word.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        String::from_utf8_lossy(&shown.stdout).split_whitespace().find_map(value).unwrap_or_default()
    }

    /// Returns the state, logs and last events of a job as text for the message of a failed test.
    pub(super) fn describe_job(&self, job: &str) -> String {
        let shown = output_to_text(&self.run_on_node(
            "h0",
            &format!("scontrol show job {job}; sinfo -N -l; cat runs/*/slurm-{job}.out slurm-{job}.out"),
        ));
        let events: Vec<String> =
            self.read_events("test").iter().chain(&self.read_events("tiny")).map(Value::to_string).collect();
        let tail = events.len().saturating_sub(10);
        format!("{shown}\n{}", events[tail..].join("\n"))
    }

    /// Waits until a Slurm job ends. Panics after [`WAIT_LIMIT`], or if the job ends in another
    /// state than `state`.
    #[track_caller]
    pub(super) fn wait_for_job_end(&self, job: &str, state: &str) {
        let states = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"];
        let found = wait_until(
            &format!("the end of job {job}"),
            || self.describe_job(job),
            || Some(self.read_job_field(job, "JobState")).filter(|found| states.contains(&found.as_str())),
        );
        assert_eq!(found, state, "{}", self.describe_job(job));
    }

    /// Waits until no process of the test remains on any node. Panics after [`WAIT_LIMIT`].
    #[track_caller]
    pub(super) fn assert_nothing_left(&self) {
        let marker = format!("LAUNCH_TEST_MARKER={}", self.marker());
        let alive = || -> Vec<String> {
            find_processes_with_variable(&marker).into_iter().map(read_command_line).collect()
        };
        wait_until("the end of all processes", || alive().join("\n"), || alive().is_empty().then_some(()));
    }
}

impl Drop for SlurmCluster {
    fn drop(&mut self) {
        let down = self.run_cluster_script(&["down"]);
        if !down.status.success() {
            eprintln!("the cluster {} was not removed: {}", self.dir.display(), output_to_text(&down));
        }
    }
}
