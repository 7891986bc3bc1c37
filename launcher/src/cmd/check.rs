//! `launch check`: inspects all hosts of a job in parallel and reports what would prevent it from
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

/// The results of all checks of one `launch check`.
#[derive(Debug)]
struct CheckReport {
    /// The name of the job.
    name: String,
    hosts: Vec<HostReport>,
    /// Checks that concern all hosts together.
    checks: Vec<CheckResult>,
}

impl CheckReport {
    /// Returns whether a check failed, either of a single host or of all hosts together.
    fn has_failed(&self) -> bool {
        let mut checks = self.hosts.iter().flat_map(|h| &h.checks).chain(&self.checks);
        checks.any(|c| c.level == CheckLevel::Fail)
    }
}

/// The results of `launch check` for one host.
#[derive(Debug)]
struct HostReport {
    /// The name that the job gives the host.
    name: String,
    /// The inspection that the agent of the host reported; `None` if no agent answered.
    inspection: Option<HostInspection>,
    /// The time by which the host's clock is ahead of this machine's clock, and the uncertainty of
    /// this time, both in seconds. `None` if no agent answered.
    clock_skew_s: Option<(f64, f64)>,
    checks: Vec<CheckResult>,
}

/// The result of one check, such as `dns` or `gpu memory`.
#[derive(Clone, Debug, PartialEq)]
struct CheckResult {
    /// The name of the check, as docs/cli.md lists it.
    name: &'static str,
    level: CheckLevel,
    /// The observed value or the error as one line of text. Empty if the check was skipped.
    found: String,
    /// The diagnostic code of a failure or warning; `None` if the check passed or was skipped.
    code: Option<Code>,
    /// The advice for a failure or warning; `None` if the check passed or was skipped.
    help: Option<String>,
    /// The member `fields` of this check in the JSON report: values by name. The names are those of
    /// the fields of the diagnostic.
    fields: Map<String, Value>,
    /// Whether the text in `found` already names the host.
    names_host: bool,
}

impl CheckResult {
    /// Returns the result of a passed check. `found` is the observed value.
    fn ok(name: &'static str, found: impl Into<String>) -> CheckResult {
        let (found, fields) = (found.into(), Map::new());
        CheckResult { name, level: CheckLevel::Ok, found, code: None, help: None, fields, names_host: false }
    }

    /// Returns the result of a check that was not run because an earlier check failed.
    fn skipped(name: &'static str) -> CheckResult {
        CheckResult { level: CheckLevel::Skipped, ..CheckResult::ok(name, "") }
    }

    /// Returns a warning: the result of a check that found a problem with which the job can start.
    fn warn(
        name: &'static str,
        code: Code,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> CheckResult {
        let (level, help) = (CheckLevel::Warn, Some(help.into()));
        CheckResult { level, code: Some(code), help, ..CheckResult::ok(name, found) }
    }

    /// Returns a failure: the result of a check that found a problem with which the job cannot
    /// start.
    fn failed(
        name: &'static str,
        code: Code,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> CheckResult {
        CheckResult { level: CheckLevel::Fail, ..CheckResult::warn(name, code, found, help) }
    }

    /// Adds a value to `fields`, or replaces the value with this name. The JSON report contains the
    /// fields, the text report does not.
    fn with_field(mut self, name: &str, value: impl Into<Value>) -> CheckResult {
        self.fields.insert(name.to_owned(), value.into());
        self
    }
}

/// The outcome of a check: passed, warning, failed or skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CheckLevel {
    /// The check found no problem.
    Ok,
    /// The check found a problem with which the job can start.
    Warn,
    /// The check found a problem with which the job cannot start.
    Fail,
    /// The check was not run because an earlier check failed.
    Skipped,
}

/// A host, with the agent that was started there or the error of starting the agent. If the agent
/// is a child process, dropping this value kills and reaps the agent.
struct StartedAgent {
    name: String,
    agent: diagnostic::Result<AgentProcess>,
    /// The progress of the SSH connection to the host. `None` if the host is this machine or a node
    /// of Slurm, or if the connection could not be started.
    progress: Option<Arc<ssh::ConnectionProgress>>,
}

/// Starts an agent on every host of the job, requests an inspection from each agent, and evaluates
/// the answers. Blocks until all hosts have answered or timed out. Fails if the job is invalid or
/// the hosts cannot be determined.
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

/// Starts an agent as a child process on this machine. A failed start is part of the result.
fn start_local_agent() -> StartedAgent {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
    let agent = LocalTransport.start_agents(std::slice::from_ref(&name)).pop().unwrap_or_else(|| {
        let message = format!("no agent was started on host {name}");
        Err(Diagnostic::error(codes::AGENT_START_FAILED, message))
    });
    StartedAgent { name, agent, progress: None }
}

/// Starts an agent on each of these hosts over SSH. A failed start on one host is part of the
/// result of the host.
fn start_ssh_agents(job: &JobSpec, hosts: &[ClusterHost]) -> diagnostic::Result<Vec<StartedAgent>> {
    let ssh = super::targets::create_ssh_transport(job, hosts)?;
    let start = |host: &ClusterHost| {
        let name = host.host.name_with_port();
        match ssh.start_agent(&name) {
            Ok((agent, progress)) => StartedAgent { name, agent: Ok(agent), progress: Some(progress) },
            Err(error) => StartedAgent { name, agent: Err(error), progress: None },
        }
    };
    Ok(hosts.iter().map(start).collect())
}

/// Collects the absolute paths of the directories that the agents inspect: working, log and
/// checkpoint directory. For built-in training on GPUs, adds `cluster.cuda_library_paths`.
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

/// Returns the time limit for a TCP connection between two hosts, in milliseconds: the connection
/// timeout of SSH (`cluster.ssh`), but at most 5 s.
fn limit_peer_timeout_ms(job: &JobSpec) -> u64 {
    job.cluster.ssh.connect_timeout_ms.min(5000)
}

/// Creates a text from the process ID and the time that differs from one `launch check` to the
/// next. The names of the nonce files contain the text.
fn create_nonce() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}

impl Drop for StartedAgent {
    fn drop(&mut self) {
        if let Ok(agent) = &self.agent
            && let transport::AgentHandle::Child(pid) = agent.handle
        {
            // An agent exits when its control connection is closed, but a blocked agent does not.
            let pid = nix::unistd::Pid::from_raw(pid as i32);
            _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            _ = nix::sys::wait::waitpid(pid, None);
        }
    }
}
