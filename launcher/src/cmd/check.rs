//! `launch check`: what would stand in a job's way, on all of its hosts at once.
mod ask;
mod gpus;
mod judge;
mod show;
mod slurm;

use crate::{
    cli::JobArgs,
    discover::hosts::{ClusterHost, hosts},
    error::{Failure, Kind},
    transport::{self, AgentProcess, Local, Transport, ssh},
};
use contract::{JobSpec, Source, exit};
use std::{
    path::PathBuf,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Looks at every host of the job; the exit code.
pub(crate) fn run(args: &JobArgs, json: bool) -> u8 {
    match check(args) {
        Ok(checked) => {
            let failed = checked.failed();
            let text = if json { format!("{}\n", show::as_json(&checked)) } else { show::as_text(&checked) };
            match super::show(&text) {
                exit::DONE if failed => exit::CLUSTER,
                code => code,
            }
        }
        Err(failure) => super::fail(&failure),
    }
}

/// All that was found.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) name: String,
    pub(super) hosts: Vec<HostChecked>,
    /// Of all hosts together.
    pub(super) checks: Vec<Check>,
}

impl Checked {
    fn failed(&self) -> bool {
        self.hosts.iter().flat_map(|h| &h.checks).chain(&self.checks).any(|c| c.level == Level::Fail)
    }
}

/// One host.
#[derive(Debug)]
pub(super) struct HostChecked {
    pub(super) name: String,
    pub(super) look: Option<contract::probe::NodeLook>,
    /// Its clock less ours, seconds, and how far off that may be.
    pub(super) skew: Option<(f64, f64)>,
    pub(super) checks: Vec<Check>,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Check {
    pub(super) what: &'static str,
    pub(super) level: Level,
    pub(super) found: String,
    /// The next thing to do.
    pub(super) hint: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Ok,
    /// The job may start; worth a look.
    Warn,
    /// The job would not start.
    Fail,
    /// Something before it failed.
    Skipped,
}

/// A host with its agent on the way.
pub(super) struct Started {
    pub(super) name: String,
    pub(super) agent: std::io::Result<AgentProcess>,
    /// How far the connection got; `None`: nothing is connected to from here (this machine, Slurm's nodes).
    pub(super) progress: Option<Arc<ssh::Progress>>,
}

fn check(args: &JobArgs) -> Result<Checked, Failure> {
    let file = args.job.display().to_string();
    let loaded = contract::load(Source::File(args.job.clone()), &args.set);
    let (job, map, _) = loaded.map_err(|problems| Failure::job(&file, problems))?;
    let hosts = hosts(&job.cluster, &job.run.workdir)
        .map_err(|f| Failure::job(&file, f.iter().map(|f| map.problem(f)).collect()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|e| Failure::new(Kind::Cluster, "no descriptors to work with").cause(&e))?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let nodes = if hosts.is_none() { super::targets::slurm(&job)? } else { None };
        let (started, step) = match (&hosts, nodes) {
            (Some(hosts), _) => (elsewhere(&job, hosts)?, None),
            (None, Some((transport, names))) => {
                let (started, step) = slurm::start(transport, &names);
                (started, Some(step))
            }
            (None, None) => (vec![here()], None),
        };
        let asked = ask::ask(started, &wanted(&job), &nonce(), &limits(&job)).await;
        if let Some(step) = step {
            step.end().await;
        }
        Ok(judge::judge(&job, hosts.as_deref(), asked))
    })
}

/// An agent on this machine.
fn here() -> Started {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
    let agent = Local.start(std::slice::from_ref(&name)).pop();
    let agent = agent.unwrap_or_else(|| Err(std::io::Error::other("nothing was started")));
    Started { name, agent, progress: None }
}

fn elsewhere(job: &JobSpec, hosts: &[ClusterHost]) -> Result<Vec<Started>, Failure> {
    let ssh = super::targets::ssh(job, hosts)?;
    let start = |host: &ClusterHost| {
        let name = host.host.name();
        match ssh.begin(&name) {
            Ok((agent, progress)) => Started { name, agent: Ok(agent), progress: Some(progress) },
            Err(error) => Started { name, agent: Err(error), progress: None },
        }
    };
    Ok(hosts.iter().map(start).collect())
}

/// Where the job works, logs and saves; what it trains on.
fn wanted(job: &JobSpec) -> ask::Wanted {
    let workdir = &job.run.workdir;
    let logs = workdir.join(job.run.logs.dir.replace("{name}", &job.name));
    let logs = logs.to_string_lossy().split("{run}").next().map(PathBuf::from).unwrap_or_default();
    let checkpoints = job.train.is_some().then(|| workdir.join(&job.checkpoint.dir));
    let on_gpus = job.train.is_some() && job.cluster.trains_on_gpus();
    let folders = || job.cluster.cuda_libs.iter().map(|folder| workdir.join(folder)).collect();
    ask::Wanted {
        dirs: [workdir.clone(), logs].into_iter().chain(checkpoints).collect(),
        cuda: on_gpus.then(folders),
    }
}

fn limits(job: &JobSpec) -> ask::Limits {
    let connect = job.cluster.ssh.connect_timeout_ms;
    ask::Limits { reach_ms: connect.min(5000) }
}

fn nonce() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Ok(agent) = &self.agent
            && let transport::Carrier::Child(pid) = agent.carrier
        {
            // It leaves when its stream closes; whatever is left is ended here.
            let pid = nix::unistd::Pid::from_raw(pid as i32);
            _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            _ = nix::sys::wait::waitpid(pid, None);
        }
    }
}
