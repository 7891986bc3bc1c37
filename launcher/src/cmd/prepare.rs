//! What `plan` and `run` begin with: load the job, find out about the machine, plan, judge.
use crate::{
    discover::{self, Facts},
    error::{Failure, Kind},
    plan::{self, Plan},
    secrets::{self, Secrets},
};
use contract::{
    JobSpec, Problem, Source, SourceMap,
    ids::RunId,
    judge::{TrainJudge, Verdict},
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
    pub(crate) facts: Facts,
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
    let plan = plan::plan(&job, &facts, run).map_err(|f| Failure::job(&file, located(&map, &f)))?;
    warnings.extend(located(&map, &plan.warnings));
    let verdict = match &job.train {
        Some(_) => {
            let threads = plan.nodes.iter().flat_map(|n| &n.workers).map(|w| w.threads).max().unwrap_or(1);
            let verdict = judge.judge(&job, plan.world, threads);
            if !verdict.problems.is_empty() {
                return Err(Failure::job(&file, located(&map, &verdict.problems)));
            }
            warnings.extend(located(&map, &verdict.warnings));
            warnings.extend(too_little_memory(&map, &facts, &verdict));
            Some(verdict)
        }
        None => None,
    };
    Ok(Prepared { job, facts, plan, secrets, verdict, warnings })
}

fn located(map: &SourceMap, findings: &[contract::judge::Finding]) -> Vec<Problem> {
    findings.iter().map(|f| map.problem(f)).collect()
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
