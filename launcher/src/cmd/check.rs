//! `launch check`: inspects all hosts of a job at once and reports what would prevent it from
//! starting.
mod evaluate;
mod gpus;
mod probe;
mod render;
mod slurm;

use super::invalid_job_error;
use crate::{
    cli::JobArgs,
    discover::cluster_hosts::{ClusterHost, resolve_hosts},
    transport::{self, AgentProcess, LocalTransport, Transport, ssh},
};
use contract::{JobSource, JobSpec, exit, probe::HostInspection};
use diagnostic::{
    Code, Diagnostic,
    codes::{command, host as codes},
};
use serde_json::{Map, Value};
use std::{
    path::PathBuf,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Runs `launch check`: checks every host of the job and prints the results. Returns exit code 3 if
/// a check failed.
pub(crate) fn run(args: &JobArgs, json: bool) -> diagnostic::Result<u8> {
    let report = check_hosts(args)?;
    let text =
        if json { format!("{}\n", render::render_json(&report)) } else { render::render_text(&report) };
    let code = super::print_output(&text)?;
    Ok(if report.has_failed() { exit::CLUSTER } else { code })
}

/// The results of all checks.
#[derive(Debug)]
struct CheckReport {
    /// The name of the job.
    name: String,
    hosts: Vec<HostReport>,
    /// Checks that concern all hosts together.
    checks: Vec<CheckResult>,
}

impl CheckReport {
    /// Returns whether a check of any host or of the job failed.
    fn has_failed(&self) -> bool {
        let mut checks = self.hosts.iter().flat_map(|h| &h.checks).chain(&self.checks);
        checks.any(|c| c.level == CheckLevel::Fail)
    }
}

/// The results of one host.
#[derive(Debug)]
struct HostReport {
    /// The name that the job gives the host.
    name: String,
    /// What the agent of the host reported; `None` if no agent answered.
    inspection: Option<HostInspection>,
    /// By how many seconds the clock of the host is ahead of this machine's, and the uncertainty of
    /// that in seconds.
    clock_skew_s: Option<(f64, f64)>,
    checks: Vec<CheckResult>,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq)]
struct CheckResult {
    /// The name of the check, as docs/cli.md lists it.
    name: &'static str,
    level: CheckLevel,
    /// The observed value or the error, on one line.
    found: String,
    /// The code of a failure or warning.
    code: Option<Code>,
    /// The advice for a failure or warning.
    help: Option<String>,
    /// Values for programs, under the names that the diagnostic of the code uses.
    fields: Map<String, Value>,
    /// Whether `found` names the host.
    names_host: bool,
}

impl CheckResult {
    /// Returns a passed check.
    fn ok(name: &'static str, found: impl Into<String>) -> CheckResult {
        let (found, fields) = (found.into(), Map::new());
        CheckResult { name, level: CheckLevel::Ok, found, code: None, help: None, fields, names_host: false }
    }

    /// Returns a check that was not run because an earlier one failed.
    fn skipped(name: &'static str) -> CheckResult {
        CheckResult { level: CheckLevel::Skipped, ..CheckResult::ok(name, "") }
    }

    /// Returns a check with a problem that does not prevent the job from starting.
    fn warn(
        name: &'static str,
        code: Code,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> CheckResult {
        let (level, help) = (CheckLevel::Warn, Some(help.into()));
        CheckResult { level, code: Some(code), help, ..CheckResult::ok(name, found) }
    }

    /// Returns a check with a problem that prevents the job from starting.
    fn failed(
        name: &'static str,
        code: Code,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> CheckResult {
        CheckResult { level: CheckLevel::Fail, ..CheckResult::warn(name, code, found, help) }
    }

    /// Sets a value for programs.
    fn with_field(mut self, name: &str, value: impl Into<Value>) -> CheckResult {
        self.fields.insert(name.to_owned(), value.into());
        self
    }
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CheckLevel {
    /// Nothing is wrong.
    Ok,
    /// The job may start.
    Warn,
    /// The job would not start.
    Fail,
    /// An earlier check failed, so this one was not run.
    Skipped,
}

/// A host with the agent that was started on it, or the error of the start. Dropping it kills an
/// agent that is a child process.
struct StartedAgent {
    name: String,
    agent: diagnostic::Result<AgentProcess>,
    /// The progress of the SSH connection; `None` for this machine and the nodes of Slurm.
    progress: Option<Arc<ssh::ConnectionProgress>>,
}

/// Starts an agent on every host of the job, has all of them inspect their hosts, and evaluates the
/// answers. Fails if the job is invalid or its hosts cannot be determined.
fn check_hosts(args: &JobArgs) -> diagnostic::Result<CheckReport> {
    let file = args.job.display().to_string();
    let loaded = contract::load_job(JobSource::File(args.job.clone()), &args.set);
    let (job, map, _) = loaded.map_err(|mistakes| invalid_job_error(&file, mistakes))?;
    let hosts = resolve_hosts(&job.cluster, &job.run.workdir).map_err(|errors| {
        invalid_job_error(&file, errors.into_iter().map(|e| map.add_location(e)).collect())
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| {
        Diagnostic::error(command::ASYNC_RUNTIME_FAILED, "cannot start the event loop").with_cause(&e)
    })?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let nodes = if hosts.is_none() { super::targets::create_slurm_transport(&job)? } else { None };
        let (agents, step) = match (&hosts, nodes) {
            (Some(hosts), _) => (start_ssh_agents(&job, hosts)?, None),
            (None, Some((transport, names))) => {
                let (agents, step) = slurm::start_agents(transport, &names);
                (agents, Some(step))
            }
            (None, None) => (vec![start_local_agent()], None),
        };
        let (targets, nonce) = (collect_probe_targets(&job), create_nonce());
        let probes = probe::probe_hosts(agents, &targets, &nonce, limit_peer_timeout_ms(&job)).await;
        if let Some(step) = step {
            step.wait_or_kill().await;
        }
        Ok(evaluate::evaluate_probes(&job, hosts.as_deref(), probes))
    })
}

/// Starts an agent on this machine.
fn start_local_agent() -> StartedAgent {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
    let agent = LocalTransport.start_agents(std::slice::from_ref(&name)).pop().unwrap_or_else(|| {
        let message = format!("no agent was started on host {name}");
        Err(Diagnostic::error(codes::AGENT_START_FAILED, message))
    });
    StartedAgent { name, agent, progress: None }
}

/// Starts an agent on each of these hosts over SSH.
fn start_ssh_agents(job: &JobSpec, hosts: &[ClusterHost]) -> diagnostic::Result<Vec<StartedAgent>> {
    let ssh = super::targets::create_ssh_transport(job, hosts)?;
    let start = |host: &ClusterHost| {
        let name = host.host.name();
        match ssh.start_agent(&name) {
            Ok((agent, progress)) => StartedAgent { name, agent: Ok(agent), progress: Some(progress) },
            Err(error) => StartedAgent { name, agent: Err(error), progress: None },
        }
    };
    Ok(hosts.iter().map(start).collect())
}

/// Collects the directories that the job writes to and, if the job trains on GPUs, the directories
/// in which CUDA libraries are searched first.
fn collect_probe_targets(job: &JobSpec) -> probe::ProbeTargets {
    let workdir = &job.run.workdir;
    let logs = workdir.join(job.run.logs.dir.replace("{name}", &job.name));
    let logs = logs.to_string_lossy().split("{run}").next().map(PathBuf::from).unwrap_or_default();
    let checkpoints = job.train.is_some().then(|| workdir.join(&job.checkpoint.dir));
    let on_gpus = job.train.is_some() && job.cluster.trains_on_gpus();
    let library_dirs = || job.cluster.cuda_library_paths.iter().map(|dir| workdir.join(dir)).collect();
    probe::ProbeTargets {
        dirs: [workdir.clone(), logs].into_iter().chain(checkpoints).collect(),
        cuda: on_gpus.then(library_dirs),
    }
}

/// Returns the time limit for a TCP connection between two hosts, in milliseconds: that of SSH, but
/// at most 5 s.
fn limit_peer_timeout_ms(job: &JobSpec) -> u64 {
    job.cluster.ssh.connect_timeout_ms.min(5000)
}

/// Returns text that differs from one run of `launch check` to the next, made from the process ID
/// and the time.
fn create_nonce() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}

impl Drop for StartedAgent {
    fn drop(&mut self) {
        if let Ok(agent) = &self.agent
            && let transport::AgentHandle::Child(pid) = agent.handle
        {
            // The agent exits when its stream is closed; a blocked one is killed.
            let pid = nix::unistd::Pid::from_raw(pid as i32);
            _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            _ = nix::sys::wait::waitpid(pid, None);
        }
    }
}
