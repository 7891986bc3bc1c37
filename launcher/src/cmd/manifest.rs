//! `launch manifest`: prints what a scheduler needs to run a job: Kubernetes objects or a batch
//! script.
mod kubernetes;
mod yaml_text;

use super::{
    context::CommandContext,
    job_preparation::{JobArgs, JobLoadRequest, LoadedJob},
    output::{print_file_text, print_json},
};
use crate::cluster::{self, Submission, SubmitRequest};
use clap::{Args, Subcommand};
use diagnostic::{Diagnostic, codes::run};
use jobspec::JobSource;
use kubernetes::KubernetesArgs;
use serde_json::json;
use yaml_text::format_yaml_documents;

/// Arguments of `launch manifest`.
#[derive(Debug, Args)]
pub(crate) struct ManifestArgs {
    #[command(subcommand)]
    scheduler: Scheduler,
}

/// The scheduler for which `launch manifest` prints the description of a job.
#[derive(Debug, Subcommand)]
enum Scheduler {
    /// Print a JobSet or an Indexed Job, with a ConfigMap for the job file and a Secret with a new
    /// key for the nodes
    Kubernetes(Box<KubernetesArgs>),
    /// Print the batch script of `launch sbatch`
    Slurm(JobArgs),
}

/// Runs `launch manifest`: prints the Kubernetes objects or the batch script of a job, and returns
/// the exit code.
pub(crate) fn run(args: ManifestArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    match args.scheduler {
        Scheduler::Slurm(args) => print_batch_script(&args),
        Scheduler::Kubernetes(args) => {
            let source = JobSource::File(args.job.job.clone());
            let loaded = LoadedJob::load(&JobLoadRequest { source, set: args.job.set.clone() })?;
            let objects = kubernetes::build_objects(&args, &loaded.job)?;
            match context.format.json {
                true => print_json(&json!({"apiVersion": "v1", "kind": "List", "items": objects})),
                false => print_file_text(&format_yaml_documents(&objects)),
            }
        }
    }
}

/// Prints the Slurm batch script that `launch sbatch` would submit for a job, and returns the exit
/// code.
fn print_batch_script(args: &JobArgs) -> diagnostic::Result<u8> {
    let loaded = LoadedJob::load(&args.to_job_load_request())?;
    let job = loaded.job.clone();
    let request = SubmitRequest { job, job_file: &args.job, set: &args.set, options: &[], print: true };
    match cluster::submit_job("sbatch", request).map_err(|error| loaded.convert_cluster_error(error))? {
        Submission::Script(text) => print_file_text(&text),
        Submission::Queued { .. } => {
            Err(Diagnostic::error(run::INTERNAL, "the job was submitted instead of printed"))
        }
    }
}
