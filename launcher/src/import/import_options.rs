//! Defines [`ImportOptions`], the options of `launch import`, and converts its hostfile and program
//! to keys of job.yaml.
use super::{job_draft::JobDraft, value_text};
use diagnostic::Diagnostic;
use jobspec::hosts::{self, HostfileError};
use std::path::Path;

/// The options of `launch import` in addition to the configuration to import: a hostfile, and the
/// program that the job runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct ImportOptions<'a> {
    /// The path of a hostfile of DeepSpeed or Open MPI (`--hostfile`).
    pub(crate) hostfile: Option<&'a Path>,
    /// The program and its arguments that the job runs; empty if not given.
    pub(crate) program: &'a [String],
}

/// The errors that prevent the conversion of another launcher's configuration to a job.yaml.
pub(crate) type ImportErrors = Vec<Diagnostic>;

/// Adds up the slots (places for workers) of all hosts in the text of a hostfile. Returns `None` if
/// a host does not state its slots. Fails with the first mistake of the hostfile.
pub(super) fn count_hostfile_slots(text: &str) -> Result<Option<u64>, HostfileError> {
    match hosts::parse_hostfile(text) {
        Ok(hosts) => Ok(hosts.iter().map(|h| h.slots.map(u64::from)).sum()),
        Err(errors) => errors.into_iter().next().map_or(Ok(None), Err),
    }
}

/// Returns the command that runs the user's `program`, with `python` in front if it is a Python
/// script, as other launchers do.
pub(super) fn build_python_command(program: &[String]) -> Vec<String> {
    let script = program.first().is_some_and(|first| first.ends_with(".py"));
    let python = script.then(|| "python".to_owned());
    python.into_iter().chain(program.iter().cloned()).collect()
}

/// Sets `run.command` to the program that the user has given to `launch import`. Without a program,
/// sets a placeholder and adds a note, in which `config` describes the imported configuration.
pub(super) fn set_command(draft: &mut JobDraft, context: &ImportOptions<'_>, config: &str) {
    match context.program {
        [] => {
            draft.set_required_key("run.command", "[python, train.py]");
            let reason = format!("{config} does not name the program; `[python, train.py]` is a placeholder");
            draft.add_key_note("run.command", reason, "replace it, or give the program after `--`");
        }
        program => draft
            .set_required_key("run.command", &value_text::format_yaml_list(&build_python_command(program))),
    }
}

/// Sets the job.yaml key `slurm.nodes` to the number of hosts that an imported configuration
/// requires, and adds a note for the user. `from` is the imported key that contains the number.
pub(super) fn set_slurm_nodes_with_note(draft: &mut JobDraft, from: &str, hosts: u64) {
    draft.set_imported_key(from, "slurm.nodes", hosts.to_string());
    let reason =
        format!("{hosts} hosts are required but not named; `slurm.nodes` applies to `launch sbatch`");
    draft.add_key_note("cluster.hosts", reason, "name them in `cluster.hosts`, or give `--hostfile`");
}

/// Sets the job.yaml key `cluster.hosts` to the hostfile `file`. `from` is the imported key or
/// option that names the hostfile.
pub(super) fn set_hostfile(draft: &mut JobDraft, from: &str, file: &Path) {
    let path = file.display().to_string();
    draft.set_imported_key(from, "cluster.hosts", format!("{{file: {}}}", jobspec::quote_yaml(&path)));
}
