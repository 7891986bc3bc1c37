//! `launch sbatch`: submits a job to the batch system, or prints its batch script.
use super::{
    context::CommandContext,
    job_preparation::{JobLoadRequest, LoadedJob},
    output::{print_file_text, print_json, print_line},
};
use crate::{
    cluster::{self, Submission, SubmitRequest},
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
    /// Set a key of the job to a YAML value, such as --set slurm.nodes=4; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
    /// Print the script instead of submitting it
    #[arg(long)]
    print: bool,
    /// Additional options of sbatch, which override those of the script; not with --print
    #[arg(last = true, value_name = "OPTION", conflicts_with = "print")]
    options: Vec<String>,
}

/// Runs `launch sbatch`: submits the job or, with `--print`, prints the batch script.
///
/// Prints the ID of the batch job or, with `--json`, an object with the ID and the output file.
pub(crate) fn run(args: SbatchArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let loaded = LoadedJob::load(&JobLoadRequest {
        source: JobSource::File(args.job.clone()),
        set: args.set.clone(),
    })?;
    let (job, name) = (loaded.job.clone(), &loaded.job.name);
    let request =
        SubmitRequest { job, job_file: &args.job, set: &args.set, options: &args.options, print: args.print };
    match cluster::submit_job("sbatch", request).map_err(|error| loaded.convert_cluster_error(error))? {
        Submission::Script(text) => print_file_text(&text),
        Submission::Queued { id, output } if context.format.json => {
            print_json(&json!({"job": id, "output": output}))
        }
        Submission::Queued { id, output } => {
            command_output::write_message(&format!(
                "submitted {name} as job {id}; its output goes to {output}\n"
            ));
            print_line(id)
        }
    }
}
