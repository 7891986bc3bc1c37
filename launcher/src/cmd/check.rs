//! `launch check`: inspects all hosts of a job in parallel and reports the problems that would
//! prevent the job from starting.
mod accelerators;
mod agents;
mod check_report;
mod evaluate;
mod gpus;
mod network;
mod probe;
mod render;

use super::{
    context::CommandContext,
    job_preparation::{JobArgs, JobLoadRequest, LoadedJob},
    node_role::{NodeArgs, NodeRole, choose_role},
    output::{print_json, print_text, print_warnings},
};
use crate::cluster::{find_host_provider, join_run};
use check_report::CheckReport;
use clap::Args;
use diagnostic::{
    Diagnostic,
    codes::{command, host},
};
use jobspec::{HostSelection, JobSpec, hosts::RendezvousAddress};
use network::{NetworkCheckOptions, measure_network};
use protocol::{exit, host_name::read_host_name};
use std::{
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

/// The arguments of `launch check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Also measure the connections between the hosts, and find slow and unreachable hosts
    #[arg(long)]
    network: bool,
    #[command(flatten)]
    node: NodeArgs,
}

/// Runs `launch check`: checks every host of the job and prints the results. Returns exit code 3 if
/// a check failed. A node that joins, other than node 0, only answers node 0.
pub(crate) fn run(args: CheckArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let check = |request: &JobLoadRequest| {
        let report = check_hosts(request, args.network)?;
        let code = match context.format.json {
            true => print_json(&render::render_json(&report)),
            false => print_text(&render::render_text(&report)),
        }?;
        Ok(find_failure_exit_code(&report).unwrap_or(code))
    };
    match choose_role(&args.node, args.job.to_job_load_request())? {
        NodeRole::Alone(request) => check(&request),
        NodeRole::Controller { request, fallback } => match (check(&request), fallback) {
            (Err(error), Some(address)) if error.code() == host::JOIN_ADDRESS_IN_USE => {
                join_check_as_node(&request, &address, None)
            }
            (result, _) => result,
        },
        NodeRole::Member { request, address, node_rank } => join_check_as_node(&request, &address, node_rank),
    }
}

/// Joins the `launch check` that node 0 at `address` runs for all nodes, and lets node 0 inspect
/// this node. Returns the exit code of the check.
fn join_check_as_node(
    request: &JobLoadRequest,
    address: &RendezvousAddress,
    node_rank: Option<u32>,
) -> diagnostic::Result<u8> {
    join_run(&load_job(request)?.job, address, node_rank)
}

/// Loads the job of `launch check`, and marks the job so that joining nodes take part in a check
/// instead of a run.
fn load_job(request: &JobLoadRequest) -> diagnostic::Result<LoadedJob> {
    let mut loaded = LoadedJob::load(request)?;
    loaded.job.cluster.join.checks_hosts = true;
    Ok(loaded)
}

/// Returns the exit code for a failed `launch check` if any check in the report failed, and `None`
/// otherwise.
fn find_failure_exit_code(report: &CheckReport) -> Option<u8> {
    report.has_failed().then_some(exit::CLUSTER)
}

/// Starts an agent on every host of the job, requests an inspection from each agent, and evaluates
/// the answers. With `network`, also measures the connections between the hosts. Blocks until all
/// hosts have answered or timed out. Fails if the job is invalid or the hosts cannot be determined.
fn check_hosts(request: &JobLoadRequest, network: bool) -> diagnostic::Result<CheckReport> {
    let loaded = load_job(request)?;
    let job = &loaded.job;
    let located = |error| loaded.convert_cluster_error(error);
    let cluster = find_host_provider(job).map_err(located)?;
    let mut warnings = Vec::new();
    let hosts = cluster.hosts(job, &read_host_name(), &mut warnings).map_err(located)?;
    print_warnings(&warnings);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| {
        Diagnostic::error(command::ASYNC_RUNTIME_FAILED, "cannot start the event loop").with_cause(&e)
    })?;
    let are_local = hosts.iter().map(|host| host.local).collect();
    let network = network.then(|| NetworkCheckOptions::new(job, are_local, compute_peer_timeout_ms(job)));
    let network = network.transpose()?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let transport = cluster.transport(job).map_err(located)?;
        let names = hosts.iter().map(|host| host.name.clone()).collect();
        let (agents, reaper) = agents::start_agents(transport, names);
        let (targets, nonce) = (collect_probe_targets(job), create_probe_file_nonce());
        let mut sessions = probe::probe_hosts(agents, &targets, &nonce, compute_peer_timeout_ms(job)).await;
        let mut measured = None;
        if let Some(targets) = &network {
            let (measured_sessions, found) = measure_network(sessions, targets).await;
            (sessions, measured) = (measured_sessions, Some(found));
        }
        let (probes, agents) = probe::separate_results_from_agents(sessions);
        let mut report = evaluate::evaluate_probes(job, &hosts, cluster.check_settings(), probes);
        if let Some(measured) = measured {
            network::add_network_checks(&mut report, &measured);
        }
        if job.cluster.hosts == HostSelection::Join {
            probe::end_probed_agents(agents, find_failure_exit_code(&report).unwrap_or(exit::DONE)).await;
        } else {
            // The agents end, close their ports and remove their nonce files.
            drop(agents);
        }
        reaper.end_child_processes().await;
        Ok(report)
    })
}

/// Collects what the agents of `launch check` inspect on their hosts: the working, log and
/// checkpoint directories, the CUDA library paths, and the ports. For built-in training on GPUs,
/// adds `cluster.cuda_library_paths`.
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

/// Returns the time limit for a test connection between two hosts, in milliseconds, which is
/// `cluster.ssh.connect_timeout` but at most 5 s.
fn compute_peer_timeout_ms(job: &JobSpec) -> u64 {
    job.cluster.ssh.connect_timeout_ms.min(5000)
}

/// Creates a text unique to this `launch check`, for the names of test files that show which hosts
/// share a directory.
fn create_probe_file_nonce() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}
