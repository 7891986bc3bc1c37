//! [`prepare_job`]: loads a job, inspects this machine, makes the plan and runs the preflight
//! checks, for `launch run` and `launch plan`.
use super::{
    machine_memory::{MachineMemory, check_machine_memory},
    output::invalid_job_error,
};
use crate::{
    cluster::{ClusterError, HostTarget, find_host_provider},
    discover,
    mlflow::{self, MlflowSettings},
    plan::{self, Attempt, JobHost, Plan},
    secrets::{self, SecretVariables},
};
use clap::Args;
use diagnostic::{
    Category, Diagnostic,
    codes::{host, job as job_codes},
    quantity::format_count,
};
use jobspec::{
    JobSource, JobSpec, MinHosts, SourceMap,
    ids::{Rank, RunId},
};
use protocol::{
    control::HostInventory,
    preflight::{Preflight, PreflightReport},
};
use std::path::PathBuf;

/// The arguments of commands that only read a job: the job file, and overrides of its keys.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// Job file
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,
    /// Set a key of the job to a YAML value, such as --set train.steps=50; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    pub(crate) set: Vec<String>,
}

impl JobArgs {
    /// Returns a request to load the job file that the command line names, with the overrides of
    /// its `--set` options.
    pub(crate) fn to_job_load_request(&self) -> JobLoadRequest {
        JobLoadRequest { source: JobSource::File(self.job.clone()), set: self.set.clone() }
    }
}

/// A request to load a job, which contains the path of the job file or the job's text, and the
/// overrides of keys from `--set`.
#[derive(Debug)]
pub(crate) struct JobLoadRequest {
    /// The file or text from which the job is read.
    pub(crate) source: JobSource,
    /// The overrides from the command line (`--set path=value`).
    pub(crate) set: Vec<String>,
}

/// A job that has passed all checks on this machine and is ready to run, with its plan, its hosts
/// and this machine's hardware inventory.
#[derive(Debug)]
pub(crate) struct PreparedJob {
    pub(crate) job: JobSpec,
    /// The inventory of this machine.
    pub(crate) inventory: HostInventory,
    /// The memory in bytes of the smallest GPU of this machine; `None` if the built-in training
    /// uses no GPU of this machine.
    pub(crate) gpu_memory: Option<u64>,
    /// The hosts in the order of their ranks.
    pub(crate) hosts: Vec<HostTarget>,
    /// The preliminary plan, which relies on the job's declarations about other hosts. The
    /// controller makes the final plan from the inventories that the agents report.
    pub(crate) plan: Plan,
    pub(crate) secrets: SecretVariables,
    /// How the run is recorded with MLflow; `None` if the job does not request this.
    pub(crate) mlflow: Option<MlflowSettings>,
    /// The preflight report of built-in training; `None` for a job that runs a program.
    pub(crate) preflight: Option<PreflightReport>,
    pub(crate) warnings: Vec<Diagnostic>,
}

/// A loaded job together with its source text, in which later errors about a key of the job find
/// the line and column of this key.
pub(super) struct LoadedJob {
    pub(super) job: JobSpec,
    file: String,
    sources: SourceMap,
    warnings: Vec<Diagnostic>,
}

impl LoadedJob {
    /// Loads the job that `request` describes. Fails with one error that has each mistake as a
    /// detail.
    pub(super) fn load(request: &JobLoadRequest) -> diagnostic::Result<LoadedJob> {
        let file = request.source.name();
        match jobspec::load_job(request.source.clone(), &request.set) {
            Ok((job, sources, warnings)) => Ok(LoadedJob { job, file, sources, warnings }),
            Err(mistakes) => Err(invalid_job_error(&file, mistakes)),
        }
    }

    /// Combines several mistakes in the job file into one error that lists each of them.
    pub(super) fn create_invalid_job_error(&self, mistakes: Vec<Diagnostic>) -> Diagnostic {
        invalid_job_error(&self.file, self.add_mistake_locations(mistakes))
    }

    /// Converts an error that occurred while the hosts of the job were determined, for example from
    /// a hostfile, to a diagnostic.
    pub(super) fn convert_cluster_error(&self, error: ClusterError) -> Diagnostic {
        error.into_diagnostic(|mistakes| self.create_invalid_job_error(mistakes))
    }

    /// Adds file, line and column to each diagnostic whose subject is a key of the job.
    fn add_mistake_locations(&self, diagnostics: impl IntoIterator<Item = Diagnostic>) -> Vec<Diagnostic> {
        diagnostics.into_iter().map(|diagnostic| self.sources.add_location(diagnostic)).collect()
    }
}

/// Loads a job, checks it, and plans which worker runs on which host. Writes no files.
///
/// # Errors
///
/// Fails if the job is invalid, with one error that has each mistake as a detail. Also fails if the
/// hosts, the secrets or the GPUs of this machine are not available.
pub(crate) fn prepare_job(
    request: &JobLoadRequest,
    run: &RunId,
    preflight: &dyn Preflight,
) -> diagnostic::Result<PreparedJob> {
    let mut loaded = LoadedJob::load(request)?;
    let mut warnings = std::mem::take(&mut loaded.warnings);
    let job = &loaded.job;
    let invalid = |mistakes| loaded.create_invalid_job_error(mistakes);
    if !job.run.workdir.is_dir() {
        let message = format!("the directory `{}` does not exist", job.run.workdir.display());
        let error = Diagnostic::error(job_codes::JOB_WORKDIR_INVALID, message);
        return Err(invalid(vec![error.with_subject("run.workdir")]));
    }
    let secrets = secrets::resolve_secret_variables(&job.run).map_err(invalid)?;
    let mlflow = mlflow::resolve_mlflow_settings(job).map_err(invalid)?;
    let inventory = discover_inventory()?;
    let provider = find_host_provider(job);
    let hosts = provider.and_then(|cluster| cluster.hosts(job, &inventory.host, &mut warnings));
    let hosts = hosts.map_err(|error| loaded.convert_cluster_error(error))?;
    let too_few = check_host_counts(job, hosts.len());
    if !too_few.is_empty() {
        return Err(invalid(too_few));
    }
    let mut gpu_memory = None;
    if job.train.is_some() && job.cluster.trains_on_gpus() && hosts.iter().any(|host| host.local) {
        gpu_memory = Some(preflight.check_gpus(job).map_err(|error| {
            error.with_category(Category::Cluster).with_help("`cluster.devices: cpu` trains on CPUs")
        })?);
    }
    let planning: Vec<JobHost> = hosts.iter().map(|host| build_planning_host(host, &inventory)).collect();
    let plan = plan::plan_attempt(job, &planning, run, &Attempt::default()).map_err(invalid)?;
    warnings.extend(loaded.add_mistake_locations(plan.warnings.iter().cloned()));
    let mut report = None;
    if job.train.is_some() {
        let threads = plan.host_plans.iter().flat_map(|h| &h.workers).map(|w| w.threads).max();
        let checked = preflight.check_job(job, plan.world, threads.unwrap_or(1));
        if !checked.errors.is_empty() {
            return Err(invalid(checked.errors));
        }
        warnings.extend(loaded.add_mistake_locations(checked.warnings.iter().cloned()));
        let machine = MachineMemory { host: inventory.memory, smallest_gpu: gpu_memory };
        let local_plans = hosts.iter().zip(&plan.host_plans).filter(|(target, _)| target.local);
        let local_ranks: Vec<Rank> =
            local_plans.flat_map(|(_, plan)| plan.workers.iter().map(|worker| worker.rank)).collect();
        let too_little = check_machine_memory(job, &local_ranks, machine, &checked.memory);
        warnings.extend(loaded.add_mistake_locations(too_little));
        report = Some(checked);
    }
    Ok(PreparedJob {
        job: loaded.job,
        inventory,
        gpu_memory,
        hosts,
        plan,
        secrets,
        mlflow,
        preflight: report,
        warnings,
    })
}

/// Discovers the inventory of this machine: its CPUs, GPUs, memory and network addresses.
pub(super) fn discover_inventory() -> diagnostic::Result<HostInventory> {
    discover::local_host::discover_local_host().map_err(|e| {
        Diagnostic::error(host::INVENTORY_UNREADABLE, "cannot determine the CPUs and memory of this machine")
            .with_cause(&e)
            .with_help("launch reads them from /proc; check that it is mounted")
    })
}

/// Describes the host `target` for the planner before any agent runs, with the hardware inventory
/// for this machine and without one for other hosts. At that time, only the inventory of this
/// machine is known, so the inventory of any other host is empty.
pub(super) fn build_planning_host(target: &HostTarget, local: &HostInventory) -> JobHost {
    let inventory = if target.local { local.clone() } else { HostInventory::unknown(&target.name) };
    let (name, selected_slots) = (target.name.clone(), target.selected_slots.clone());
    JobHost { name, slots: target.slots, selected_slots, local: target.local, inventory }
}

/// Returns an error for each of the keys `cluster.use_hosts` and `run.min_hosts` whose value
/// exceeds the number of available hosts.
fn check_host_counts(job: &JobSpec, hosts: usize) -> Vec<Diagnostic> {
    let used = job.cluster.use_hosts.map_or(hosts, |n| n as usize);
    let min_hosts = if let MinHosts::AtLeast(n) = job.run.min_hosts { n as usize } else { 0 };
    let limits =
        [("cluster.use_hosts", used, hosts, "has"), ("run.min_hosts", min_hosts, used.min(hosts), "uses")];
    let exceeded = limits.into_iter().filter(|(_, requested, available, _)| requested > available);
    let error = |(key, requested, available, verb): (&str, usize, usize, &str)| {
        let hosts = format_count(available, "host");
        let message = format!("`{key}` is {requested}, but the job {verb} {hosts}");
        Diagnostic::error(host::HOSTS_TOO_FEW, message)
            .with_subject(key)
            .with_field("requested", requested)
            .with_field("available", available)
            .with_help("name more hosts, or lower the number")
    };
    exceeded.map(error).collect()
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
