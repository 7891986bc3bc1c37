//! `launch check`: inspects all hosts of a job in parallel and reports the problems that would
//! prevent the job from starting.
mod accelerators;
mod agents;
mod check_report;
mod evaluate;
mod gpus;
mod probe;
mod render;

use super::{
    context::CommandContext,
    output::{print_json, print_output},
    prepare::{JobArgs, LoadedJob},
};
use crate::cluster::find_cluster;
use check_report::CheckReport;
use diagnostic::{
    Diagnostic,
    codes::{command, host},
};
use jobspec::{HostSelection, JobSpec};
use protocol::{exit, host_name::read_host_name};
use std::{
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

/// Runs `launch check`: checks every host of the job and prints the results. Returns exit code 3 if
/// a check failed.
pub(crate) fn run(args: JobArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let report = check_hosts(&args)?;
    let code = match context.format.json {
        true => print_json(&render::render_json(&report)),
        false => print_output(&render::render_text(&report)),
    }?;
    Ok(if report.has_failed() { exit::CLUSTER } else { code })
}

/// Starts an agent on every host of the job, requests an inspection from each agent, and evaluates
/// the answers. Blocks until all hosts have answered or timed out. Fails if the job is invalid or
/// the hosts cannot be determined.
fn check_hosts(args: &JobArgs) -> diagnostic::Result<CheckReport> {
    let loaded = LoadedJob::load(&args.to_request())?;
    let job = &loaded.job;
    if job.cluster.hosts == HostSelection::Join {
        let message = "`launch check` cannot start anything on nodes that join";
        return Err(Diagnostic::error(host::JOIN_OPTION_UNSUPPORTED, message)
            .with_subject("cluster.hosts")
            .with_help("run `launch check --set cluster.hosts=local` on each node"));
    }
    let located = |error| loaded.cluster_error(error);
    let cluster = find_cluster(job).map_err(located)?;
    let hosts = cluster.hosts(job, &read_host_name()).map_err(located)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| {
        Diagnostic::error(command::ASYNC_RUNTIME_FAILED, "cannot start the event loop").with_cause(&e)
    })?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let names = hosts.iter().map(|host| host.name.clone()).collect();
        let (agents, reaper) = agents::start_agents(cluster.transport(job).map_err(located)?, names);
        let (targets, nonce) = (collect_probe_targets(job), create_nonce());
        let probes = probe::probe_hosts(agents, &targets, &nonce, limit_peer_timeout_ms(job)).await;
        reaper.wait_or_kill().await;
        Ok(evaluate::evaluate_probes(job, &hosts, cluster.preflight(), probes))
    })
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
        ports: job.cluster.ports,
    }
}

/// Returns the time limit for a TCP connection between two hosts, in milliseconds: the connection
/// timeout of SSH (`cluster.ssh`), but at most 5 s.
fn limit_peer_timeout_ms(job: &JobSpec) -> u64 {
    job.cluster.ssh.connect_timeout_ms.min(5000)
}

/// Creates a text that differs from one `launch check` to the next, from the process ID and the
/// time. The names of the nonce files contain the text.
fn create_nonce() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}
