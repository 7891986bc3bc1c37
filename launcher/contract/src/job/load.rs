//! [`load_job`]: reads a job file or text into a [`JobSpec`], and reports all mistakes together.
use super::{
    JobSpec, check,
    decode::JobDecoder,
    deprecated, keys, overrides, sections,
    source_map::{SourceMap, SourceSpan},
    value_error::ValueError,
    yaml::parse_yaml,
};
use diagnostic::{Code, Diagnostic, Location, codes::job as codes};
use std::{
    io::Read as _,
    ops::Range,
    path::{Path, PathBuf},
};

/// The largest size of a job file, in bytes.
pub const MAX_JOB: u64 = 1 << 20;
/// The name by which messages refer to a job without a job file.
const COMMAND_LINE: &str = "the command line";

/// The file or text that a job is loaded from.
#[derive(Clone, Debug)]
pub enum JobSource {
    /// The file at this path. Loading fails if the file has more than [`MAX_JOB`] bytes.
    File(PathBuf),
    /// A text in memory. Loading fails if the text has more than [`MAX_JOB`] bytes.
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
            JobSource::CommandLine { .. } => COMMAND_LINE.to_owned(),
        }
    }
}

/// A command-line argument from which a part of a job was made.
#[derive(Clone, Debug)]
pub struct JobArgument {
    /// The bytes of the job's text that were made from the argument.
    pub range: Range<usize>,
    /// The argument as messages show it, such as `--workers 4`.
    pub argument: String,
}

/// Loads a job, and applies the `--set` arguments in `overrides` in order.
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
    if text.len() as u64 > MAX_JOB {
        return Err(vec![too_large_error(&name, "job file", text.len() as u64)]);
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let sources = match arguments {
        Some(arguments) => SourceMap::from_command_line(&name, text, arguments),
        None => SourceMap::new(&name, text),
    };
    load_job_text(sources, &name, text, overrides)
}

/// Loads a job from `text`, the first text of `sources`. Returns what [`load_job`] returns. The
/// caller must already have checked that the text has at most [`MAX_JOB`] bytes, and removed a byte
/// order mark.
fn load_job_text(
    mut sources: SourceMap,
    name: &str,
    text: &str,
    overrides: &[String],
) -> Result<(JobSpec, SourceMap, Vec<Diagnostic>), Vec<Diagnostic>> {
    const SHORTEST_JOB: &str =
        "the shortest job is `run: {command: [./program]}`; docs/job.md lists the keys";
    let fail = |sources: &SourceMap, error: ValueError| vec![error.into_diagnostic(sources)];
    check_characters(text).map_err(|error| fail(&sources, error))?;
    let mut root = match parse_yaml(text, SourceMap::JOB, 0) {
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
    let mut decoder = JobDecoder::new(sources);
    decoder.errors = errors;
    deprecated::rewrite_deprecated_names(&mut decoder, &mut root);
    decoder.sources.index_keys(&root, keys::canonicalize_key_path);
    let mut job = sections::decode_job(&mut decoder, &root, &derive_job_name(name));
    check::check_job(&mut decoder, &job);
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

/// Creates an error about the file `name` as a whole.
pub(crate) fn file_error(code: Code, name: &str, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_location(Location::File { file: name.to_owned() })
}

/// Reads a file. Fails if the file is larger than [`MAX_JOB`] bytes. Messages name the file `name`,
/// and describe it as `what`, such as `job file`.
pub(crate) fn read_limited_file(path: &Path, name: &str, what: &str) -> diagnostic::Result<Vec<u8>> {
    let cannot_read = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            file_error(codes::JOB_FILE_NOT_FOUND, name, format!("the {what} does not exist"))
        }
        _ => {
            file_error(codes::JOB_FILE_UNREADABLE, name, format!("cannot read the {what}")).with_cause(&error)
        }
    };
    let metadata = std::fs::metadata(path).map_err(cannot_read)?;
    if metadata.is_dir() {
        let message = format!("expected a {what}, found a directory");
        return Err(
            file_error(codes::JOB_FILE_UNREADABLE, name, message).with_help("name a file in the directory")
        );
    }
    if metadata.len() > MAX_JOB {
        return Err(too_large_error(name, what, metadata.len()));
    }
    let mut bytes = Vec::new();
    // The length in the metadata is not reliable for pipes and growing files.
    let file = std::fs::File::open(path).map_err(cannot_read)?;
    file.take(MAX_JOB + 1).read_to_end(&mut bytes).map_err(cannot_read)?;
    if bytes.len() as u64 > MAX_JOB {
        return Err(too_large_error(name, what, bytes.len() as u64));
    }
    Ok(bytes)
}

/// Creates the error that the file `name` has more than [`MAX_JOB`] bytes. `bytes` is a lower bound
/// of the file's size, because the reader stops one byte above the limit.
fn too_large_error(name: &str, what: &str, bytes: u64) -> Diagnostic {
    let mib = bytes as f64 / MAX_JOB as f64;
    let message = format!("the {what} is too large: {mib:.1} MiB or more, at most 1 MiB is allowed");
    file_error(codes::JOB_TOO_LARGE, name, message)
        .with_field("bytes", bytes)
        .with_field("max_bytes", MAX_JOB)
        .with_help("check that the path is correct")
}

/// Converts the content of the file `name` to text. Fails if a byte is not UTF-8. The error states
/// the position of the first such byte.
pub(crate) fn decode_utf8(name: &str, bytes: Vec<u8>) -> diagnostic::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let line = bytes[..at].iter().filter(|&&b| b == b'\n').count() + 1;
        let help = match bytes {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "the file seems to be UTF-16: save it as UTF-8",
            _ => "save the file as UTF-8",
        };
        let message =
            format!("the file is not UTF-8 text: byte 0x{:02x} at offset {at}, line {line}", bytes[at]);
        file_error(codes::JOB_NOT_UTF8, name, message)
            .with_field("offset", at)
            .with_field("line", line)
            .with_help(help)
    })
}

/// Fails if the text contains control characters other than tabs and line breaks. YAML does not
/// allow them, and a parser may take NUL for the end of the file.
pub(crate) fn check_characters(text: &str) -> Result<(), ValueError> {
    let control = |c: char| (c.is_ascii_control() && !matches!(c, '\t' | '\n' | '\r')) || c == '\u{feff}';
    match text.char_indices().find(|&(_, c)| control(c)) {
        Some((at, c)) => {
            let span =
                SourceSpan { source: SourceMap::JOB, start: at as u32, end: (at + c.len_utf8()) as u32 };
            let message = format!("the text contains the control character U+{:04X}", c as u32);
            Err(ValueError::new(codes::JOB_CONTROL_CHARACTER, span, message)
                .with_help("remove the character; the file must be plain text"))
        }
        None => Ok(()),
    }
}

/// Returns the name of a job without the key `name`: the file name without its extension.
/// Characters that are not safe in a path are replaced by `-`.
fn derive_job_name(file: &str) -> String {
    const MAX_NAME: usize = 100;
    let stem = Path::new(file).file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let safe: String = stem
        .chars()
        .take(MAX_NAME)
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' })
        .collect();
    let safe = safe.trim_start_matches(['.', '-']);
    if safe.is_empty() { "job".to_owned() } else { safe.to_owned() }
}
