//! `launch check`: inspects all hosts of a job at once and reports what would prevent it from
//! starting.
mod evaluate;
mod gpus;
mod probe;
mod render;
mod slurm;

use super::invalid_job;
use crate::{
    cli::JobArgs,
    discover::hosts::{ClusterHost, hosts},
    transport::{self, AgentProcess, LocalTransport, Transport, ssh},
};
use contract::{JobSpec, Source, exit, probe::HostInspection};
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

/// Checks every host of the job. Exit code 3 if a check failed.
pub(crate) fn run(args: &JobArgs, json: bool) -> diagnostic::Result<u8> {
    let report = check(args)?;
    let text = if json { format!("{}\n", render::as_json(&report)) } else { render::as_text(&report) };
    let code = super::print(&text)?;
    Ok(if report.has_failed() { exit::CLUSTER } else { code })
}

/// The results of all checks.
#[derive(Debug)]
struct CheckReport {
    /// The name of the job.
    name: String,
    hosts: Vec<HostReport>,
    /// Checks that concern all hosts together.
    checks: Vec<Check>,
}

impl CheckReport {
    fn has_failed(&self) -> bool {
        let mut checks = self.hosts.iter().flat_map(|h| &h.checks).chain(&self.checks);
        checks.any(|c| c.level == CheckLevel::Fail)
    }
}

/// The results of one host.
#[derive(Debug)]
struct HostReport {
    /// The name as the job has it.
    name: String,
    /// What its agent reported; `None`: no agent answered.
    inspection: Option<HostInspection>,
    /// How far its clock is ahead of this machine's, and the uncertainty, seconds.
    clock_skew_s: Option<(f64, f64)>,
    checks: Vec<Check>,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq)]
struct Check {
    /// The name of the check, as docs/cli.md lists it.
    name: &'static str,
    level: CheckLevel,
    /// What was found, on one line.
    found: String,
    /// The code of a failure or warning.
    code: Option<Code>,
    /// What to do about a failure or warning.
    help: Option<String>,
    /// Values for programs, named as in the diagnostic of the code.
    fields: Map<String, Value>,
    /// Whether `found` names the host.
    names_host: bool,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        let (found, fields) = (found.into(), Map::new());
        Check { name, level: CheckLevel::Ok, found, code: None, help: None, fields, names_host: false }
    }

    fn skipped(name: &'static str) -> Check {
        Check { level: CheckLevel::Skipped, ..Check::ok(name, "") }
    }

    fn warn(name: &'static str, code: Code, found: impl Into<String>, help: impl Into<String>) -> Check {
        let (level, help) = (CheckLevel::Warn, Some(help.into()));
        Check { level, code: Some(code), help, ..Check::ok(name, found) }
    }

    fn failed(name: &'static str, code: Code, found: impl Into<String>, help: impl Into<String>) -> Check {
        Check { level: CheckLevel::Fail, ..Check::warn(name, code, found, help) }
    }

    fn with_field(mut self, name: &str, value: impl Into<Value>) -> Check {
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
    /// A check that comes before it failed.
    Skipped,
}

/// A host whose agent is starting.
struct StartedAgent {
    name: String,
    agent: diagnostic::Result<AgentProcess>,
    /// The progress of the SSH connection; `None` for this machine and the nodes of Slurm.
    progress: Option<Arc<ssh::ConnectionProgress>>,
}

fn check(args: &JobArgs) -> diagnostic::Result<CheckReport> {
    let file = args.job.display().to_string();
    let loaded = contract::load(Source::File(args.job.clone()), &args.set);
    let (job, map, _) = loaded.map_err(|mistakes| invalid_job(&file, mistakes))?;
    let hosts = hosts(&job.cluster, &job.run.workdir)
        .map_err(|errors| invalid_job(&file, errors.into_iter().map(|e| map.locate(e)).collect()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| {
        Diagnostic::error(command::ASYNC_RUNTIME_FAILED, "cannot start the event loop").with_cause(&e)
    })?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let nodes = if hosts.is_none() { super::targets::slurm_transport(&job)? } else { None };
        let (agents, step) = match (&hosts, nodes) {
            (Some(hosts), _) => (start_ssh_agents(&job, hosts)?, None),
            (None, Some((transport, names))) => {
                let (agents, step) = slurm::start(transport, &names);
                (agents, Some(step))
            }
            (None, None) => (vec![start_local_agent()], None),
        };
        let (targets, nonce) = (probe_targets(&job), nonce());
        let probes = probe::probe_hosts(agents, &targets, &nonce, connect_timeout_ms(&job)).await;
        if let Some(step) = step {
            step.end().await;
        }
        Ok(evaluate::evaluate(&job, hosts.as_deref(), probes))
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
    let ssh = super::targets::ssh_transport(job, hosts)?;
    let start = |host: &ClusterHost| {
        let name = host.host.name();
        match ssh.start_agent(&name) {
            Ok((agent, progress)) => StartedAgent { name, agent: Ok(agent), progress: Some(progress) },
            Err(error) => StartedAgent { name, agent: Err(error), progress: None },
        }
    };
    Ok(hosts.iter().map(start).collect())
}

/// The directories that the job writes to, and those of CUDA libraries if it trains on GPUs.
fn probe_targets(job: &JobSpec) -> probe::ProbeTargets {
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

/// Time limit of a connection between two hosts, milliseconds.
fn connect_timeout_ms(job: &JobSpec) -> u64 {
    job.cluster.ssh.connect_timeout_ms.min(5000)
}

/// A name that no other check has.
fn nonce() -> String {
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
