//! `launch import`: converts another launcher's configuration to a job.yaml and prints the job.yaml
//! with notes about the conversion.
use super::{
    context::CommandContext,
    output::{combine_mistakes, print_file_text, print_json},
};
use crate::{
    cluster::{parse_hostfile_entries, read_hostfile},
    import::{self, ImportNote, ImportOptions, ImportedJob},
    report::command_output,
};
use clap::{Args, Subcommand};
use diagnostic::{Category, Diagnostic, codes::command, terminal_text::filter_line};
use jobspec::{Document, DocumentSyntax};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Arguments of `launch import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(subcommand)]
    from: ImportCommand,
}

/// The launcher whose configuration `launch import` converts.
#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Convert the file that `accelerate config` writes
    Accelerate(ImportFileArgs),
    /// Convert a DeepSpeed configuration to a job of the built-in training, or of the program after
    /// `--`
    Deepspeed(ImportFileArgs),
    /// Convert the arguments of torchrun
    Torchrun(ImportTorchrunArgs),
}

/// Arguments of `launch import accelerate` and `launch import deepspeed`.
#[derive(Debug, Args)]
pub(crate) struct ImportFileArgs {
    /// Configuration file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Hostfile of DeepSpeed or Open MPI that names the hosts of the job
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Program that the job runs, and its arguments [default: with `accelerate` a placeholder; with
    /// `deepspeed` none, so that the job uses the built-in training]
    #[arg(last = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

/// Arguments of `launch import torchrun`.
#[derive(Debug, Args)]
pub(crate) struct ImportTorchrunArgs {
    /// Hostfile of DeepSpeed or Open MPI that names the hosts of the job
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Options of torchrun, the script, and the script's arguments
    #[arg(last = true, value_name = "ARGS", required = true)]
    arguments: Vec<String>,
}

/// Runs `launch import`: prints the imported job to stdout and the notes about the conversion to
/// stderr. With `--json`, prints both as one JSON object to stdout.
pub(crate) fn run(args: ImportArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let ImportedJob { job, notes, .. } = import_job(&args.from)?;
    if context.format.json {
        let notes: Vec<String> = notes.iter().map(ImportNote::to_string).collect();
        return print_json(&json!({ "job": job, "notes": notes }));
    }
    let code = print_file_text(&job)?;
    let lines = notes.iter().map(|note| format!("{}\n", filter_line(&note.to_string())));
    command_output::write_message(&lines.collect::<String>());
    Ok(code)
}

/// Reads the configuration of another launcher and converts it to a job.
fn import_job(from: &ImportCommand) -> diagnostic::Result<ImportedJob> {
    let (name, converted) = match from {
        ImportCommand::Accelerate(args) => {
            let is_json = args.file.extension().is_some_and(|e| e == "json");
            let document =
                read_document(&args.file, if is_json { DocumentSyntax::Json } else { DocumentSyntax::Yaml })?;
            read_valid_hostfile(args.hostfile.as_deref())?;
            let options = ImportOptions { hostfile: args.hostfile.as_deref(), program: &args.program };
            (args.file.display().to_string(), import::convert_accelerate_config(&document, &options))
        }
        ImportCommand::Deepspeed(args) => {
            let document = read_document(&args.file, DocumentSyntax::Json)?;
            let hosts = read_valid_hostfile(args.hostfile.as_deref())?;
            let options = ImportOptions { hostfile: args.hostfile.as_deref(), program: &args.program };
            let converted = import::convert_deepspeed_config(&document, hosts.as_deref(), &options);
            (args.file.display().to_string(), converted)
        }
        ImportCommand::Torchrun(args) => {
            read_valid_hostfile(args.hostfile.as_deref())?;
            let options = ImportOptions { hostfile: args.hostfile.as_deref(), program: &[] };
            let converted = import::convert_torchrun_args(&args.arguments, &options);
            ("torchrun's command line".to_owned(), converted)
        }
    };
    converted.map_err(|mistakes| invalid_config_error(&name, mistakes))
}

/// Reads and parses a configuration file in JSON or YAML.
fn read_document(file: &Path, syntax: DocumentSyntax) -> diagnostic::Result<Document> {
    let name = file.display().to_string();
    Document::read(file, syntax).map_err(|error| invalid_config_error(&name, vec![error]))
}

/// Combines all mistakes in the configuration `name` into one error that lists each of them.
fn invalid_config_error(name: &str, mistakes: Vec<Diagnostic>) -> Diagnostic {
    combine_mistakes(command::IMPORT_INVALID, name, mistakes, "no job was written")
}

/// Reads the file that `--hostfile` names, and returns the text of the file. Returns `None` without
/// the option. Fails if the hostfile is unreadable or invalid.
fn read_valid_hostfile(file: Option<&Path>) -> diagnostic::Result<Option<String>> {
    let Some(file) = file else { return Ok(None) };
    let as_option = |error: Diagnostic| error.with_subject("--hostfile").with_category(Category::Usage);
    let text = read_hostfile(file).map_err(as_option)?;
    match parse_hostfile_entries(file, &text) {
        Ok(_) => Ok(Some(text)),
        Err(mistakes) => Err(mistakes
            .into_iter()
            .next()
            .map_or_else(|| invalid_config_error(&file.display().to_string(), Vec::new()), as_option)),
    }
}
