//! `launch sbatch`: submits a job to the batch system, or prints its batch script.
use super::{
    context::CommandContext,
    output::{invalid_job_error, print_output},
};
use crate::{
    cluster::{self, ClusterError, Submission, SubmitRequest},
    report::command_output,
};
use clap::Args;
use jobspec::JobSource;
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `launch sbatch`.
#[derive(Debug, Args)]
pub(crate) struct SbatchArgs {
    /// Job file
    #[arg(value_name = "JOB")]
    job: PathBuf,
    /// Change a key of the job, e.g. --set slurm.nodes=4 (YAML value; repeatable)
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
    /// Print the script instead of submitting it
    #[arg(long)]
    print: bool,
    /// Additional options of sbatch, which override those of the script
    #[arg(last = true, value_name = "OPTION", conflicts_with = "print")]
    options: Vec<String>,
}

/// Runs `launch sbatch`: submits the job or, with `--print`, prints the batch script.
///
/// Prints the ID of the batch job or, with `--json`, an object with the ID and the output file.
pub(crate) fn run(args: SbatchArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let file = args.job.display().to_string();
    let loaded = jobspec::load_job(JobSource::File(args.job.clone()), &args.set);
    let (job, map, _) = loaded.map_err(|mistakes| invalid_job_error(&file, mistakes))?;
    let name = job.name.clone();
    let request =
        SubmitRequest { job, job_file: &args.job, set: &args.set, options: &args.options, print: args.print };
    let submission = cluster::submit_job("sbatch", request).map_err(|error| match error {
        ClusterError::Job(mistakes) => {
            invalid_job_error(&file, mistakes.into_iter().map(|error| map.add_location(error)).collect())
        }
        ClusterError::Provider(error) => error,
    })?;
    print_output(&match submission {
        Submission::Script(text) => text,
        Submission::Queued { id, output } if context.format.json => {
            format!("{}\n", json!({"job": id, "output": output}))
        }
        Submission::Queued { id, output } => {
            command_output::write_message(&format!(
                "submitted {name} as job {id}; its output goes to {output}\n"
            ));
            format!("{id}\n")
        }
    })
}
