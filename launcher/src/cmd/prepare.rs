//! [`prepare_job`]: loads a job, inspects this machine, makes the plan and runs the preflight
//! checks, for `launch run` and `launch plan`.
use super::output::invalid_job_error;
use crate::{
    cluster::{ClusterError, HostTarget, find_cluster},
    discover::{self, Inventory},
    format::format_binary_bytes,
    plan::{self, Attempt, JobHost, Plan},
    secrets::{self, SecretVariables},
};
use clap::Args;
use diagnostic::{
    Category, Diagnostic,
    codes::{host, job as job_codes},
};
use jobspec::{JobSource, JobSpec, MinHosts, SourceMap, ids::RunId};
use protocol::preflight::{Preflight, PreflightReport};
use std::path::PathBuf;

/// The job and the overrides of commands that only read a job.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// Job file
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,
    /// Change a key of the job, e.g. --set train.steps=50 (YAML value; repeatable)
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

impl JobArgs {
    /// Returns a request to load the job file with the overrides.
    pub(crate) fn to_request(&self) -> JobRequest {
        JobRequest { source: JobSource::File(self.job.clone()), set: self.set.clone() }
    }
}

/// A request to load a job, with overrides.
#[derive(Debug)]
pub(crate) struct JobRequest {
    /// The file or text from which the job is read.
    pub(crate) source: JobSource,
    /// The overrides from the command line (`--set path=value`).
    pub(crate) set: Vec<String>,
}

/// A job that passed all checks on this machine, with the plan and inputs for the controller.
#[derive(Debug)]
pub(crate) struct PreparedJob {
    pub(crate) job: JobSpec,
    /// The inventory of this machine.
    pub(crate) inventory: Inventory,
    /// The hosts in the order of their ranks.
    pub(crate) hosts: Vec<HostTarget>,
    /// The preliminary plan, which relies on the job's declarations about other hosts. The
    /// controller makes the final plan from the inventories that the agents report.
    pub(crate) plan: Plan,
    pub(crate) secrets: SecretVariables,
    /// The preflight report of built-in training; `None` for a job that runs a program.
    pub(crate) preflight: Option<PreflightReport>,
    pub(crate) warnings: Vec<Diagnostic>,
}

/// Loads a job, checks it and makes its plan. Writes no files.
///
/// # Errors
///
/// Fails if the job is invalid, with one error that has each mistake as a detail. Also fails if the
/// hosts, the secrets or the GPUs of this machine are not available.
pub(crate) fn prepare_job(
    request: &JobRequest,
    run: &RunId,
    preflight: &dyn Preflight,
) -> diagnostic::Result<PreparedJob> {
    let file = request.source.name();
    let loaded = jobspec::load_job(request.source.clone(), &request.set);
    let (job, map, mut warnings) = loaded.map_err(|mistakes| invalid_job_error(&file, mistakes))?;
    let invalid = |mistakes: Vec<Diagnostic>| invalid_job_error(&file, locate_diagnostics(&map, &mistakes));
    if !job.run.workdir.is_dir() {
        let message = format!("the directory `{}` does not exist", job.run.workdir.display());
        let error = Diagnostic::error(job_codes::JOB_WORKDIR_INVALID, message);
        return Err(invalid(vec![error.with_subject("run.workdir")]));
    }
    let secrets = secrets::resolve_secret_variables(&job.run).map_err(invalid)?;
    let inventory = discover::local::discover_local().map_err(|e| {
        Diagnostic::error(host::INVENTORY_UNREADABLE, "cannot determine the CPUs and memory of this machine")
            .with_cause(&e)
            .with_help("launch reads them from /proc; check that it is mounted")
    })?;
    let hosts = find_cluster(&job).and_then(|cluster| cluster.hosts(&job, &inventory.host));
    let hosts = hosts.map_err(|error| match error {
        ClusterError::Job(mistakes) => invalid(mistakes),
        ClusterError::Provider(error) => error,
    })?;
    let too_few = check_host_counts(&job, hosts.len());
    if !too_few.is_empty() {
        return Err(invalid(too_few));
    }
    if job.train.is_some() && job.cluster.trains_on_gpus() && hosts.iter().any(|host| host.local) {
        preflight.check_gpus(&job).map_err(|error| {
            error.with_category(Category::Cluster).with_help("`cluster.devices: cpu` trains on CPUs")
        })?;
    }
    let planning: Vec<JobHost> = hosts.iter().map(|host| build_planning_host(host, &inventory)).collect();
    let plan = plan::plan_attempt(&job, &planning, run, &Attempt::default()).map_err(invalid)?;
    warnings.extend(locate_diagnostics(&map, &plan.warnings));
    let report = match &job.train {
        Some(_) => {
            let threads = plan.host_plans.iter().flat_map(|h| &h.workers).map(|w| w.threads).max();
            let report = preflight.check_job(&job, plan.world, threads.unwrap_or(1));
            if !report.errors.is_empty() {
                return Err(invalid(report.errors));
            }
            warnings.extend(locate_diagnostics(&map, &report.warnings));
            // GPU memory is checked where it is allocated.
            let on_cpus = !job.cluster.trains_on_gpus();
            warnings.extend(check_memory(&map, &inventory, &report).filter(|_| on_cpus));
            Some(report)
        }
        None => None,
    };
    Ok(PreparedJob { job, inventory, hosts, plan, secrets, preflight: report, warnings })
}

/// Returns a host for a plan that is made before the agents run. At that time, only the inventory
/// of this machine is known, so the inventory of any other host is empty.
pub(super) fn build_planning_host(target: &HostTarget, local: &Inventory) -> JobHost {
    let inventory = if target.local { local.clone() } else { Inventory::unknown(&target.name) };
    let (name, selected_slots) = (target.name.clone(), target.selected_slots.clone());
    JobHost { name, slots: target.slots, selected_slots, local: target.local, inventory }
}

/// Returns the diagnostics, with file, line and column added to each one whose subject is a key of
/// the job.
fn locate_diagnostics(map: &SourceMap, diagnostics: &[Diagnostic]) -> Vec<Diagnostic> {
    diagnostics.iter().map(|d| map.add_location(d.clone())).collect()
}

/// Returns an error for `cluster.use_hosts` if it exceeds the number of hosts, and an error for
/// `run.min_hosts` if it exceeds the number of used hosts.
fn check_host_counts(job: &JobSpec, hosts: usize) -> Vec<Diagnostic> {
    let used = job.cluster.use_hosts.map_or(hosts, |n| n as usize);
    let min_hosts = if let MinHosts::AtLeast(n) = job.run.min_hosts { n as usize } else { 0 };
    let limits =
        [("cluster.use_hosts", used, hosts, "has"), ("run.min_hosts", min_hosts, used.min(hosts), "uses")];
    let exceeded = limits.into_iter().filter(|(_, requested, available, _)| requested > available);
    let error = |(key, requested, available, verb): (&str, usize, usize, &str)| {
        let noun = if available == 1 { "host" } else { "hosts" };
        let message = format!("`{key}` is {requested}, but the job {verb} {available} {noun}");
        Diagnostic::error(host::HOSTS_TOO_FEW, message)
            .with_subject(key)
            .with_field("requested", requested)
            .with_field("available", available)
            .with_help("name more hosts, or lower the number")
    };
    exceeded.map(error).collect()
}

/// Returns a warning if all workers together need more host memory than this machine has. Returns
/// `None` if the memory suffices or if the memory size of the machine is unknown.
fn check_memory(map: &SourceMap, inventory: &Inventory, report: &PreflightReport) -> Option<Diagnostic> {
    let required: u64 = report.memory.iter().map(|m| m.total).sum();
    if inventory.memory == 0 || required <= inventory.memory {
        return None;
    }
    let message = format!(
        "the workers need about {} of memory; this machine has {}",
        format_binary_bytes(required),
        format_binary_bytes(inventory.memory)
    );
    let warning = Diagnostic::warning(host::MEMORY_INSUFFICIENT, message)
        .with_subject("train")
        .with_field("required_bytes", required)
        .with_field("available_bytes", inventory.memory)
        .with_help("use a smaller `batch.micro`, `recompute: block` or a higher `zero.stage`");
    Some(map.add_location(warning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_cannot_require_more_hosts_than_it_has() {
        let mut job = crate::testing::sample_job();
        let mut keys = |use_hosts, min_hosts, hosts| {
            (job.cluster.use_hosts, job.run.min_hosts) = (use_hosts, min_hosts);
            let errors = check_host_counts(&job, hosts);
            errors.iter().map(|e| e.subject().unwrap_or_default().to_owned()).collect::<Vec<_>>()
        };
        assert!(keys(None, MinHosts::All, 1).is_empty());
        assert!(keys(Some(2), MinHosts::AtLeast(2), 3).is_empty());
        assert_eq!(keys(Some(2), MinHosts::All, 1), ["cluster.use_hosts"]);
        assert_eq!(keys(Some(2), MinHosts::AtLeast(3), 3), ["run.min_hosts"]);
    }
}
