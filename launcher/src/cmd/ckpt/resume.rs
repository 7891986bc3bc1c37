//! A program's `resume.from`: the folder that it gets, made to fit the number of workers before anything starts.
use crate::{
    error::{Failure, Kind},
    plan::Plan,
};
use ckpt::{
    CkptError,
    rng_files::{
        prepare,
        rule::{Asked, Policy},
    },
};
use contract::{
    env,
    job::{JobSpec, ResumeFrom, RngPolicy},
    preflight::Finding,
};
use std::path::{Path, PathBuf};

/// In an argument of `run.command`: the folder to resume from, nothing when there is none.
const PLACEHOLDER: &str = "{resume}";

/// Finds and prepares the folder for the plan's workers and tells them: in their environment, and where their command says
/// `{resume}`. Lines for a person become warnings of the plan. Jobs of the built-in runtime are left alone.
pub(crate) fn of_program(job: &JobSpec, plan: &mut Plan) -> Result<(), Failure> {
    if job.run.command.is_none() {
        return Ok(());
    }
    let (path, lines) = folder(job, plan.world).map_err(|e| failure(&e))?;
    let said = lines.into_iter().map(|message| Finding { path: "resume.from".into(), message, hint: None });
    plan.warnings.extend(said);
    let text = match &path {
        Some(path) => path.to_str().ok_or_else(|| not_text(path))?,
        None => "",
    };
    for worker in plan.nodes.iter_mut().flat_map(|n| &mut n.workers) {
        if job.resume.from != ResumeFrom::Never {
            worker.env.push((env::LAUNCH_RESUME_FROM.to_owned(), text.to_owned()));
        }
        for word in worker.command.iter_mut().flatten().filter(|w| w.contains(PLACEHOLDER)) {
            *word = word.replace(PLACEHOLDER, text);
        }
    }
    Ok(())
}

/// The folder for `world` workers, absolute; `None`: the program begins anew.
fn folder(job: &JobSpec, world: u32) -> Result<(Option<PathBuf>, Vec<String>), CkptError> {
    let workdir = &job.run.workdir;
    let (found, mut lines) = match &job.resume.from {
        ResumeFrom::Never => return Ok((None, Vec::new())),
        ResumeFrom::Auto => prepare::newest(&workdir.join(&job.checkpoint.dir))?,
        ResumeFrom::Path(path) => (Some(workdir.join(path)), Vec::new()),
    };
    let Some(dir) = found else {
        lines
            .push(format!("{} has no checkpoint yet: the program begins anew", job.checkpoint.dir.display()));
        return Ok((None, lines));
    };
    let policy = match job.resume.rng {
        RngPolicy::Reconcile => Policy::Reconcile,
        RngPolicy::Strict => Policy::Strict,
        RngPolicy::Reseed => Policy::Reseed,
    };
    let prepared = prepare::program(&dir, &Asked::new(world, policy))?;
    lines.extend(prepared.lines);
    lines.push(format!("the program resumes from {}", prepared.path.display()));
    Ok((Some(prepared.path), lines))
}

fn failure(error: &CkptError) -> Failure {
    let kind = if error.is_checkpoint_at_fault() { Kind::Checkpoint } else { Kind::Failed };
    Failure::new(kind, format!("resume.from: {error}"))
}

fn not_text(path: &Path) -> Failure {
    Failure::new(Kind::Checkpoint, format!("resume.from: {} is no UTF-8 text", path.display()))
}
