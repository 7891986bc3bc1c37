//! [`load_job`]: reads a job file or text into a [`JobSpec`], and reports all mistakes together.
use crate::{
    check::check_job,
    deprecated,
    key_table::{KEYS, canonicalize_key_path},
    keys::decoder::JobDecoder,
    overrides,
    spec::job::{JobSpec, make_job_name},
    yaml::{
        parse::parse_yaml,
        source_map::{JobArgument, SourceMap},
        text_file::{
            MAX_JOB_BYTES, decode_utf8, file_error, read_limited_file, reject_control_characters,
            too_large_error,
        },
        value_error::ValueError,
    },
};
use diagnostic::{Diagnostic, Location, codes::job as codes};
use std::path::{Path, PathBuf};

/// The name by which messages refer to a job that was made from command-line arguments instead of a
/// job file.
const COMMAND_LINE_NAME: &str = "the command line";

/// The file or text from which a job is loaded.
#[derive(Clone, Debug)]
pub enum JobSource {
    /// The file at this path. Loading fails if the file has more than [`MAX_JOB_BYTES`] bytes.
    File(PathBuf),
    /// A text in memory. Loading fails if the text has more than [`MAX_JOB_BYTES`] bytes.
    Text {
        /// The file name that messages show. A job without the key `name` is named after this file.
        name: String,
        /// The content of the job in YAML.
        text: String,
    },
    /// A text that was made from command-line arguments. Messages show the arguments in place of
    /// the text.
    CommandLine {
        /// The content of the job in YAML.
        text: String,
        /// The arguments from which parts of the text were made.
        arguments: Vec<JobArgument>,
    },
}

impl JobSource {
    /// Returns the name by which messages refer to the job: the file name, or `the command line`.
    pub fn name(&self) -> String {
        match self {
            JobSource::File(path) => path.display().to_string(),
            JobSource::Text { name, .. } => name.clone(),
            JobSource::CommandLine { .. } => COMMAND_LINE_NAME.to_owned(),
        }
    }
}

/// Reads, decodes and checks the job in `source`, after applying the `--set path=value` arguments
/// in `overrides`.
///
/// Relative paths in the job stay relative, except `run.workdir`, which becomes absolute. Returns
/// the job, the locations of its keys, and warnings. The error is a list of all mistakes, in the
/// order of the file. The list is never empty.
pub fn load_job(
    source: JobSource,
    overrides: &[String],
) -> Result<(JobSpec, SourceMap, Vec<Diagnostic>), Vec<Diagnostic>> {
    let name = source.name();
    let (text, arguments) = match source {
        JobSource::File(path) => {
            let bytes = read_limited_file(&path, &name, "job file").map_err(|error| vec![error])?;
            (decode_utf8(&name, bytes).map_err(|error| vec![error])?, None)
        }
        JobSource::Text { text, .. } => (text, None),
        JobSource::CommandLine { text, arguments } => (text, Some(arguments)),
    };
    if text.len() as u64 > MAX_JOB_BYTES {
        return Err(vec![too_large_error(&name, "job file", text.len() as u64)]);
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let sources = match arguments {
        Some(arguments) => SourceMap::from_command_line(&name, text, arguments),
        None => SourceMap::new(&name, text),
    };
    load_job_text(sources, &name, text, overrides)
}

/// Decodes and checks a job from its YAML text, after applying the `--set path=value` arguments in
/// `overrides`. Returns what [`load_job`] returns. The caller must already have checked that the
/// text has at most [`MAX_JOB_BYTES`] bytes, and removed a byte order mark.
fn load_job_text(
    mut sources: SourceMap,
    name: &str,
    text: &str,
    overrides: &[String],
) -> Result<(JobSpec, SourceMap, Vec<Diagnostic>), Vec<Diagnostic>> {
    const SHORTEST_JOB: &str =
        "the shortest job is `run: {command: [./program]}`; docs/job.md lists the keys";
    let fail = |sources: &SourceMap, error: ValueError| vec![error.into_diagnostic_without_key(sources)];
    reject_control_characters(text).map_err(|error| fail(&sources, error))?;
    let mut root = match parse_yaml(text, SourceMap::JOB_FILE_INDEX, 0) {
        Ok(Some(root)) => root,
        Ok(None) => {
            let error = file_error(codes::JOB_EMPTY, name, "the job is empty");
            return Err(vec![error.with_help(SHORTEST_JOB)]);
        }
        Err(error) => return Err(fail(&sources, error)),
    };
    let mut errors = Vec::new();
    for text in overrides {
        errors.extend(overrides::apply_override(&mut root, &mut sources, text).err());
    }
    let mut decoder = JobDecoder::new(sources, &KEYS);
    decoder.errors = errors;
    deprecated::rewrite_deprecated_names(&mut decoder, &mut root);
    decoder.sources.index_keys(&root, canonicalize_key_path);
    let mut job = JobSpec::decode_tree(&mut decoder, &root, derive_job_name(name));
    check_job(&mut decoder, &job);
    match std::path::absolute(&job.run.workdir) {
        Ok(absolute) => job.run.workdir = absolute,
        Err(error) => {
            let diagnostic =
                Diagnostic::error(codes::JOB_WORKDIR_INVALID, "cannot make `run.workdir` absolute")
                    .with_subject("run.workdir")
                    .with_cause(&error);
            let diagnostic = decoder.sources.add_location(diagnostic);
            decoder.push_error(diagnostic);
        }
    }
    if decoder.errors.is_empty() {
        return Ok((job, decoder.sources, decoder.warnings));
    }
    decoder.errors.sort_by_key(|error| {
        let location = error.location();
        (
            matches!(location, Some(Location::Override { .. })),
            location.map_or(0, Location::line),
            location.map_or(0, Location::column),
        )
    });
    Err(decoder.errors)
}

/// Returns the default name of a job, which is the name of its file without the extension.
fn derive_job_name(file: &str) -> String {
    let stem = Path::new(file).file_stem().unwrap_or_default();
    make_job_name(&stem.to_string_lossy(), "job")
}
