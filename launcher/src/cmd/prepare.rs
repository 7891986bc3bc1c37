//! What `plan` and `run` begin with: load the job, find out about the machine, plan, judge.
use super::targets::{self, Unfit};
use crate::{
    controller::HostTarget,
    discover::{self, Facts},
    error::{Failure, Kind},
    plan::{self, Epoch, Host, Plan},
    secrets::{self, Secrets},
};
use contract::{
    JobSpec, Problem, Source, SourceMap,
    ids::RunId,
    job::MinHosts,
    preflight::{Finding, TrainJudge, Verdict},
};

/// A job to prepare, and changes to it.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) source: Source,
    pub(crate) set: Vec<String>,
}

/// A job that may start.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) job: JobSpec,
    /// Of this machine.
    pub(crate) facts: Facts,
    pub(crate) hosts: Vec<HostTarget>,
    /// With what is promised of other hosts; the controller plans again with what their agents find.
    pub(crate) plan: Plan,
    pub(crate) secrets: Secrets,
    /// What the built-in runtime says of `train`; `None` without one.
    pub(crate) verdict: Option<Verdict>,
    pub(crate) warnings: Vec<Problem>,
}

/// Reads everything, changes nothing.
pub(crate) fn prepare(asked: &Asked, run: &RunId, judge: &dyn TrainJudge) -> Result<Prepared, Failure> {
    let file = match &asked.source {
        Source::File(path) => path.display().to_string(),
        Source::Text { name, .. } => name.clone(),
    };
    let loaded = contract::load(asked.source.clone(), &asked.set);
    let (job, map, mut warnings) = loaded.map_err(|problems| Failure::job(&file, problems))?;
    if !job.run.workdir.is_dir() {
        let message = format!("the directory `{}` doesn't exist", job.run.workdir.display());
        let place = map.locate("run.workdir");
        let problem = Problem { path: "run.workdir".to_owned(), place, message, hint: None };
        return Err(Failure::job(&file, vec![problem]));
    }
    let secrets = secrets::resolve(&job.run).map_err(|f| Failure::job(&file, located(&map, &f)))?;
    let facts = discover::local::facts().map_err(|e| {
        Failure::new(Kind::Cluster, "this machine's CPUs and memory can't be found out")
            .cause(&e)
            .hint("launch reads them from /proc: is it mounted?")
    })?;
    let hosts = targets::of(&job, &facts).map_err(|e| match e {
        Unfit::Job(findings) => Failure::job(&file, located(&map, &findings)),
        Unfit::Cluster(failure) => failure,
    })?;
    let missing = too_few_hosts(&job, hosts.len());
    if !missing.is_empty() {
        return Err(Failure::job(&file, located(&map, &missing)));
    }
    if job.train.is_some() && job.cluster.trains_on_gpus() && hosts.iter().any(|host| host.local) {
        judge.gpus(&job).map_err(|why| {
            let message = format!("no GPU can be used here for `cluster.devices`: {why}");
            Failure::new(Kind::Cluster, message).hint("`cluster.devices: cpu` trains on CPUs")
        })?;
    }
    let promised: Vec<Host> = hosts.iter().map(|host| targets::promised(host, &facts)).collect();
    let plan = plan::plan(&job, &promised, run, &Epoch::default())
        .map_err(|f| Failure::job(&file, located(&map, &f)))?;
    warnings.extend(located(&map, &plan.warnings));
    let verdict = match &job.train {
        Some(_) => {
            let threads = plan.nodes.iter().flat_map(|n| &n.workers).map(|w| w.threads).max().unwrap_or(1);
            let verdict = judge.judge(&job, plan.world, threads);
            if !verdict.problems.is_empty() {
                return Err(Failure::job(&file, located(&map, &verdict.problems)));
            }
            warnings.extend(located(&map, &verdict.warnings));
            // that of GPUs is told where it is short
            let on_host = !job.cluster.trains_on_gpus();
            warnings.extend(too_little_memory(&map, &facts, &verdict).filter(|_| on_host));
            Some(verdict)
        }
        None => None,
    };
    Ok(Prepared { job, facts, hosts, plan, secrets, verdict, warnings })
}

fn located(map: &SourceMap, findings: &[contract::preflight::Finding]) -> Vec<Problem> {
    findings.iter().map(|f| map.problem(f)).collect()
}

/// Keys that ask for more hosts than the job has.
fn too_few_hosts(job: &JobSpec, hosts: usize) -> Vec<Finding> {
    let used = job.cluster.use_hosts.map_or(hosts, |n| n as usize);
    let fewest = if let MinHosts::AtLeast(n) = job.run.min_hosts { n as usize } else { 0 };
    let asked =
        [("cluster.use_hosts", used, hosts, "has"), ("run.min_hosts", fewest, used.min(hosts), "uses")];
    let wrong = asked.into_iter().filter(|(_, asked, there, _)| asked > there);
    wrong
        .map(|(path, asked, there, verb)| Finding {
            path: path.to_owned(),
            message: format!("`{path}` is {asked}, and the job {verb} {there}"),
            hint: Some("name more hosts, or ask for fewer".to_owned()),
        })
        .collect()
}

/// A warning when the workers together need more memory than the machine has.
fn too_little_memory(map: &SourceMap, facts: &Facts, verdict: &Verdict) -> Option<Problem> {
    let needed: u64 = verdict.memory.iter().map(|m| m.total).sum();
    if facts.memory == 0 || needed <= facts.memory {
        return None;
    }
    let message = format!(
        "the workers need about {} of memory, this machine has {}",
        super::plan::bytes(needed),
        super::plan::bytes(facts.memory)
    );
    Some(Problem {
        path: "train".to_owned(),
        place: map.locate("train"),
        message,
        hint: Some(
            "a smaller `batch.micro`, `recompute: block` or a higher `zero.stage` needs less".to_owned(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_hosts_than_there_are_can_not_be_asked_for() {
        let mut job = crate::testing::job();
        let mut paths = |use_hosts, min_hosts, hosts| {
            (job.cluster.use_hosts, job.run.min_hosts) = (use_hosts, min_hosts);
            too_few_hosts(&job, hosts).into_iter().map(|f| f.path).collect::<Vec<_>>()
        };
        assert!(paths(None, MinHosts::All, 1).is_empty());
        assert!(paths(Some(2), MinHosts::AtLeast(2), 3).is_empty());
        assert_eq!(paths(Some(2), MinHosts::All, 1), ["cluster.use_hosts"]);
        assert_eq!(paths(Some(2), MinHosts::AtLeast(3), 3), ["run.min_hosts"]);
    }
}
