//! `launch import`: prints a job.yaml made from another launcher's configuration, and notes about
//! it.
use crate::{
    cli::{ImportArgs, ImportFrom},
    discover::hosts::{parse_entries, read_hostfile},
    import::{self, ImportContext, ImportNote, ImportedJob},
    report::plain,
};
use contract::job::{Document, Syntax};
use diagnostic::{Category, Diagnostic, codes::command};
use serde_json::json;
use std::path::Path;

/// Prints the job on stdout and the notes on stderr.
pub(crate) fn run(args: &ImportArgs, as_json: bool) -> diagnostic::Result<u8> {
    let ImportedJob { job, notes } = import_job(&args.from)?;
    if as_json {
        let notes: Vec<String> = notes.iter().map(ImportNote::to_string).collect();
        let object = json!({ "job": job, "notes": notes });
        return super::print(&format!("{object}\n"));
    }
    let code = super::print(&job)?;
    plain::write_message(&notes.iter().map(|note| format!("{note}\n")).collect::<String>());
    Ok(code)
}

fn import_job(from: &ImportFrom) -> diagnostic::Result<ImportedJob> {
    match from {
        ImportFrom::Accelerate(args) => {
            let name = args.file.display().to_string();
            let is_json = args.file.extension().is_some_and(|e| e == "json");
            let document = read_document(&args.file, if is_json { Syntax::Json } else { Syntax::Yaml })?;
            hostfile_text(args.hostfile.as_deref())?;
            let context = ImportContext { hostfile: args.hostfile.as_deref(), program: &args.program };
            import::accelerate(&document, &context).map_err(|mistakes| invalid_config(&name, mistakes))
        }
        ImportFrom::Deepspeed(args) => {
            let name = args.file.display().to_string();
            let document = read_document(&args.file, Syntax::Json)?;
            let hosts = hostfile_text(args.hostfile.as_deref())?;
            let context = ImportContext { hostfile: args.hostfile.as_deref(), program: &args.program };
            import::deepspeed(&document, hosts.as_deref(), &context)
                .map_err(|mistakes| invalid_config(&name, mistakes))
        }
        ImportFrom::Torchrun(args) => {
            hostfile_text(args.hostfile.as_deref())?;
            let context = ImportContext { hostfile: args.hostfile.as_deref(), program: &[] };
            import::torchrun(&args.arguments, &context)
                .map_err(|mistakes| invalid_config("torchrun's command line", mistakes))
        }
    }
}

fn read_document(file: &Path, syntax: Syntax) -> diagnostic::Result<Document> {
    let name = file.display().to_string();
    Document::read(file, syntax).map_err(|error| invalid_config(&name, vec![error]))
}

/// Error: the configuration has these mistakes.
fn invalid_config(name: &str, mistakes: Vec<Diagnostic>) -> Diagnostic {
    let noun = if mistakes.len() == 1 { "mistake" } else { "mistakes" };
    let message = format!("{name} has {} {noun}; no job was written", mistakes.len());
    let summary = Diagnostic::error(command::IMPORT_INVALID, message)
        .with_subject(name)
        .with_field("mistakes", mistakes.len());
    mistakes.into_iter().fold(summary, Diagnostic::with_detail)
}

/// The text of a valid hostfile, if one is given.
fn hostfile_text(file: Option<&Path>) -> diagnostic::Result<Option<String>> {
    let Some(file) = file else { return Ok(None) };
    let as_option = |error: Diagnostic| error.with_subject("--hostfile").with_category(Category::Usage);
    let text = read_hostfile(file).map_err(as_option)?;
    match parse_entries(file, &text) {
        Ok(_) => Ok(Some(text)),
        Err(mistakes) => Err(mistakes
            .into_iter()
            .next()
            .map_or_else(|| invalid_config(&file.display().to_string(), Vec::new()), as_option)),
    }
}
