//! [`prepare`]: the common part of `launch run`, `plan` and `--dry-run`. Loads the job, inspects
//! the machine, makes the plan and runs the preflight checks.
use super::{
    invalid_job,
    targets::{self, HostsError},
};
use crate::{
    controller::HostTarget,
    discover::{self, Inventory},
    plan::{self, Attempt, JobHost, Plan},
    secrets::{self, Secrets},
};
use contract::{
    JobSpec, Source, SourceMap,
    ids::RunId,
    job::MinHosts,
    preflight::{Preflight, PreflightReport},
};
use diagnostic::{
    Category, Diagnostic,
    codes::{host, job as job_codes},
};

/// A job to prepare.
#[derive(Debug)]
pub(crate) struct JobRequest {
    /// Where the job is read from.
    pub(crate) source: Source,
    /// The `--set` arguments.
    pub(crate) set: Vec<String>,
}

/// A job that may start.
#[derive(Debug)]
pub(crate) struct PreparedJob {
    pub(crate) job: JobSpec,
    /// This machine.
    pub(crate) inventory: Inventory,
    /// The hosts in the order of their ranks.
    pub(crate) hosts: Vec<HostTarget>,
    /// The plan from what the job declares about other hosts. The controller plans again with what
    /// the agents find there.
    pub(crate) plan: Plan,
    pub(crate) secrets: Secrets,
    /// The checks of the built-in training; `None` for a job that runs a program.
    pub(crate) preflight: Option<PreflightReport>,
    pub(crate) warnings: Vec<Diagnostic>,
}

/// Loads, checks and plans a job. Reads files, and changes nothing.
pub(crate) fn prepare(
    request: &JobRequest,
    run: &RunId,
    preflight: &dyn Preflight,
) -> diagnostic::Result<PreparedJob> {
    let file = match &request.source {
        Source::File(path) => path.display().to_string(),
        Source::Text { name, .. } => name.clone(),
    };
    let loaded = contract::load(request.source.clone(), &request.set);
    let (job, map, mut warnings) = loaded.map_err(|mistakes| invalid_job(&file, mistakes))?;
    let invalid = |mistakes: Vec<Diagnostic>| invalid_job(&file, locate(&map, &mistakes));
    if !job.run.workdir.is_dir() {
        let message = format!("the directory `{}` does not exist", job.run.workdir.display());
        let error = Diagnostic::error(job_codes::JOB_WORKDIR_INVALID, message);
        return Err(invalid(vec![error.with_subject("run.workdir")]));
    }
    let secrets = secrets::resolve(&job.run).map_err(invalid)?;
    let inventory = discover::local::inventory().map_err(|e| {
        Diagnostic::error(host::INVENTORY_UNREADABLE, "cannot determine the CPUs and memory of this machine")
            .with_cause(&e)
            .with_help("launch reads them from /proc; check that it is mounted")
    })?;
    let hosts = targets::job_hosts(&job, &inventory).map_err(|error| match error {
        HostsError::Job(mistakes) => invalid(mistakes),
        HostsError::Cluster(error) => error,
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
    let planning: Vec<JobHost> = hosts.iter().map(|host| targets::planning_host(host, &inventory)).collect();
    let plan = plan::plan(&job, &planning, run, &Attempt::default()).map_err(invalid)?;
    warnings.extend(locate(&map, &plan.warnings));
    let report = match &job.train {
        Some(_) => {
            let threads = plan.host_plans.iter().flat_map(|h| &h.workers).map(|w| w.threads).max();
            let report = preflight.check_job(&job, plan.world, threads.unwrap_or(1));
            if !report.errors.is_empty() {
                return Err(invalid(report.errors));
            }
            warnings.extend(locate(&map, &report.warnings));
            // GPU memory is checked where it is allocated.
            let on_cpus = !job.cluster.trains_on_gpus();
            warnings.extend(check_memory(&map, &inventory, &report).filter(|_| on_cpus));
            Some(report)
        }
        None => None,
    };
    Ok(PreparedJob { job, inventory, hosts, plan, secrets, preflight: report, warnings })
}

/// Adds the places of their keys to diagnostics.
fn locate(map: &SourceMap, diagnostics: &[Diagnostic]) -> Vec<Diagnostic> {
    diagnostics.iter().map(|d| map.locate(d.clone())).collect()
}

/// Errors of keys that ask for more hosts than the job has.
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

/// A warning when the workers of this machine together need more memory than it has.
fn check_memory(map: &SourceMap, inventory: &Inventory, report: &PreflightReport) -> Option<Diagnostic> {
    let required: u64 = report.memory.iter().map(|m| m.total).sum();
    if inventory.memory == 0 || required <= inventory.memory {
        return None;
    }
    let message = format!(
        "the workers need about {} of memory; this machine has {}",
        super::plan::bytes(required),
        super::plan::bytes(inventory.memory)
    );
    let warning = Diagnostic::warning(host::MEMORY_INSUFFICIENT, message)
        .with_subject("train")
        .with_field("required_bytes", required)
        .with_field("available_bytes", inventory.memory)
        .with_help("use a smaller `batch.micro`, `recompute: block` or a higher `zero.stage`");
    Some(map.locate(warning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_cannot_require_more_hosts_than_it_has() {
        let mut job = crate::testing::job();
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
