//! Converts the configuration of another launcher to a job.yaml: that of Accelerate or DeepSpeed,
//! or the arguments of torchrun.
//!
//! Every key is converted, or a note names it with the reason and what to do. The result always
//! loads.
mod accelerate;
mod deepspeed;
mod draft;
mod keys;
mod torchrun;
mod wording;

pub(crate) use accelerate::accelerate;
pub(crate) use deepspeed::deepspeed;
pub(crate) use draft::{ImportNote, ImportedJob};
pub(crate) use torchrun::torchrun;

use contract::hosts::{self, HostfileError};
use diagnostic::Diagnostic;
use draft::Draft;
use std::path::Path;

/// What the command line gives in addition to the configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct ImportContext<'a> {
    /// The hostfile of DeepSpeed or Open MPI (`--hostfile`).
    pub(crate) hostfile: Option<&'a Path>,
    /// The program and its arguments; empty if not given.
    pub(crate) program: &'a [String],
}

/// The sum of the slots of a hostfile; `None` if a host does not declare its slots.
fn total_slots(text: &str) -> Result<Option<u64>, HostfileError> {
    match hosts::parse_hostfile(text) {
        Ok(hosts) => Ok(hosts.iter().map(|h| h.slots.map(u64::from)).sum()),
        Err(errors) => errors.into_iter().next().map_or(Ok(None), Err),
    }
}

/// The command of a program. Like other launchers, a script is run with Python.
fn python_command(program: &[String]) -> Vec<String> {
    let script = program.first().is_some_and(|first| first.ends_with(".py"));
    let python = script.then(|| "python".to_owned());
    python.into_iter().chain(program.iter().cloned()).collect()
}

/// Sets the command, which a configuration does not name. `config` describes it for a note.
fn set_command(draft: &mut Draft, context: &ImportContext<'_>, config: &str) {
    match context.program {
        [] => {
            draft.set_required("run.command", "[python, train.py]");
            let reason = format!("{config} does not name the program; `[python, train.py]` is a placeholder");
            draft.note("run.command", reason, "replace it, or give the program after `--`");
        }
        program => draft.set_required("run.command", &wording::yaml_list(&python_command(program))),
    }
}

/// Notes that the configuration wants several hosts and does not name them.
fn note_unnamed_hosts(draft: &mut Draft, from: &str, hosts: u64) {
    draft.set_imported(from, "slurm.nodes", hosts.to_string());
    let reason =
        format!("{hosts} hosts are required but not named; `slurm.nodes` applies to `launch sbatch`");
    draft.note("cluster.hosts", reason, "name them in `cluster.hosts`, or give `--hostfile`");
}

/// Sets the hostfile of the job.
fn set_hostfile(draft: &mut Draft, from: &str, file: &Path) {
    let path = file.display().to_string();
    draft.set_imported(from, "cluster.hosts", format!("{{file: {}}}", contract::job::quote_yaml(&path)));
}

/// The mistakes of a configuration that cannot be converted.
pub(crate) type ImportErrors = Vec<Diagnostic>;

#[cfg(test)]
mod tests;
