//! Other launchers' settings as a job.yaml: Accelerate's config, DeepSpeed's, torchrun's arguments.
//!
//! Each key is carried over, or a note names it and says why not and what to do. What comes out is a job that loads.
mod accelerate;
mod deepspeed;
mod draft;
mod keys;
mod torchrun;
mod wording;

pub(crate) use accelerate::accelerate;
pub(crate) use deepspeed::deepspeed;
pub(crate) use draft::Imported;
pub(crate) use torchrun::torchrun;

use contract::{Problem, hosts};
use draft::Draft;
use std::path::Path;

/// What a person gives beside the file: where it runs, and what.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beside<'a> {
    /// A hostfile of DeepSpeed or Open MPI.
    pub(crate) hostfile: Option<&'a Path>,
    /// The program and its arguments; empty when not given.
    pub(crate) program: &'a [String],
}

/// Slots of all hosts of a hostfile; `None` where one doesn't say.
fn slots(text: &str) -> Result<Option<u64>, String> {
    let hosts = hosts::parse_hostfile(text).map_err(|faults| {
        faults.first().map_or_else(String::new, |f| format!("line {}: {}", f.line, f.message))
    })?;
    Ok(hosts.iter().map(|h| h.slots.map(u64::from)).sum())
}

/// The program as a command: a bare script is Python's, as the launchers have it.
fn command(program: &[String]) -> Vec<String> {
    let script = program.first().is_some_and(|first| first.ends_with(".py"));
    let python = script.then(|| "python".to_owned());
    python.into_iter().chain(program.iter().cloned()).collect()
}

/// Writes what runs; a config file doesn't name it.
fn run(draft: &mut Draft, beside: &Beside<'_>, what: &str) {
    match beside.program {
        [] => {
            draft.own("run.command", "[python, train.py]");
            let why = format!("{what} doesn't name the program: `[python, train.py]` stands there");
            draft.note("run.command", why, "write yours, or give it after `--`");
        }
        program => draft.own("run.command", &wording::list(&command(program))),
    }
}

/// Several hosts are wanted and nobody names them.
fn unnamed_hosts(draft: &mut Draft, from: &str, hosts: u64) {
    draft.wish(from, "slurm.nodes", hosts.to_string());
    let why =
        format!("{hosts} hosts are wanted, and nothing names them; `slurm.nodes` is for `launch sbatch`");
    draft.note("cluster.hosts", why, "name them in `cluster.hosts`, or give `--hostfile`");
}

/// The hostfile as the job names it.
fn hostfile(draft: &mut Draft, from: &str, file: &Path) {
    let path = file.display().to_string();
    draft.wish(from, "cluster.hosts", format!("{{file: {}}}", contract::job::quoted(&path)));
}

/// Why nothing could be made of a file.
pub(crate) type Refused = Vec<Problem>;

#[cfg(test)]
mod tests;
