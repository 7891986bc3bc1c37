//! `launch schema`: prints the JSON Schema of job.yaml.
use super::{context::CommandContext, output::print_text};
use clap::Args;

/// Arguments of `launch schema`.
#[derive(Debug, Args)]
pub(crate) struct SchemaArgs {}

/// Runs `launch schema`: prints the JSON Schema with which editors complete and check a job.yaml.
pub(crate) fn run(_: SchemaArgs, _: &CommandContext) -> diagnostic::Result<u8> {
    print_text(&format!("{:#}\n", jobspec::build_schema()))
}
