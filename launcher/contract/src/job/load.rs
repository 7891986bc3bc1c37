//! [`load`]: a file or text → [`JobSpec`], with every problem at once.
use super::{
    JobSpec, check,
    decode::Decoder,
    keys, overrides, sections,
    source::{SourceMap, Span},
    tree::{Fault, parse},
};
use crate::problem::{Place, Problem};
use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

/// Largest job file, bytes.
pub const MAX_JOB: u64 = 1 << 20;

/// Where a job comes from.
#[derive(Clone, Debug)]
pub enum Source {
    File(PathBuf),
    /// Text, and the file name to say in messages.
    Text {
        name: String,
        text: String,
    },
}

/// Reads a job, with `--set` overrides applied in order.
///
/// Relative paths of the job stay as written, except `run.workdir`, which is made absolute from the current directory.
/// Gives the job, where its keys were written, and warnings; or every problem that was found, at least one.
pub fn load(
    source: Source,
    overrides: &[String],
) -> Result<(JobSpec, SourceMap, Vec<Problem>), Vec<Problem>> {
    let (name, text) = match source {
        Source::File(path) => {
            let name = path.display().to_string();
            let bytes = read(&path, &name, "job file").map_err(|p| vec![*p])?;
            let text = decode_utf8(&name, bytes).map_err(|p| vec![*p])?;
            (name, text)
        }
        Source::Text { name, text } => (name, text),
    };
    if text.len() as u64 > MAX_JOB {
        return Err(vec![*too_large(&name, "job file", text.len() as u64)]);
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    from_text(&name, text, overrides)
}

fn from_text(
    name: &str,
    text: &str,
    overrides: &[String],
) -> Result<(JobSpec, SourceMap, Vec<Problem>), Vec<Problem>> {
    let mut map = SourceMap::new(name, text);
    let one = |map: &SourceMap, fault: Fault| {
        let place = fault.span.map_or_else(|| Place::File { file: name.to_owned() }, |span| map.place(span));
        vec![Problem { path: String::new(), place, message: fault.message, hint: fault.hint }]
    };
    printable(text).map_err(|fault| one(&map, fault))?;
    let mut root = match parse(text, SourceMap::JOB, 0) {
        Ok(Some(root)) => root,
        Ok(None) => {
            return Err(vec![Problem {
                path: String::new(),
                place: Place::File { file: name.to_owned() },
                message: "the job is empty".to_owned(),
                hint: Some(HOW_TO_BEGIN.to_owned()),
            }]);
        }
        Err(fault) => return Err(one(&map, fault)),
    };
    let mut problems = Vec::new();
    for text in overrides {
        if let Err(problem) = overrides::apply(&mut root, &mut map, text) {
            problems.push(*problem);
        }
    }
    map.index(&root, keys::canonical);
    let mut decoder = Decoder::new(map);
    decoder.problems = problems;
    let mut job = sections::job(&mut decoder, &root, &stem(name));
    check::job(&mut decoder, &job);
    match std::path::absolute(&job.run.workdir) {
        Ok(absolute) => job.run.workdir = absolute,
        Err(error) => {
            decoder.refuse("run.workdir", format!("`run.workdir` can't be made absolute: {error}"), "")
        }
    }
    if decoder.problems.is_empty() {
        Ok((job, decoder.map, decoder.warnings))
    } else {
        // In the order of the file: people fix from the top.
        decoder
            .problems
            .sort_by_key(|p| (matches!(p.place, Place::Override { .. }), p.place.line(), p.place.column()));
        Err(decoder.problems)
    }
}

const HOW_TO_BEGIN: &str = "the shortest job is `run: {command: [./program]}`; docs/job.md has every key";

/// Reads a small file; `what` is the word for it.
pub(crate) fn read(path: &Path, name: &str, what: &str) -> Result<Vec<u8>, Box<Problem>> {
    let fail = |message: String, hint: Option<&str>| {
        Box::new(Problem {
            path: String::new(),
            place: Place::File { file: name.to_owned() },
            message,
            hint: hint.map(str::to_owned),
        })
    };
    let cannot = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => fail(format!("there is no such {what}"), None),
        _ => fail(format!("the {what} can't be read: {error}"), None),
    };
    let metadata = std::fs::metadata(path).map_err(cannot)?;
    if metadata.is_dir() {
        return Err(fail(format!("this is a directory, not a {what}"), Some("name the file in it")));
    }
    if metadata.len() > MAX_JOB {
        return Err(too_large(name, what, metadata.len()));
    }
    let mut bytes = Vec::new();
    // A pipe or a growing file has no length to trust.
    let file = std::fs::File::open(path).map_err(cannot)?;
    file.take(MAX_JOB + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > MAX_JOB {
        return Err(too_large(name, what, bytes.len() as u64));
    }
    Ok(bytes)
}

fn too_large(name: &str, what: &str, bytes: u64) -> Box<Problem> {
    Box::new(Problem {
        path: String::new(),
        place: Place::File { file: name.to_owned() },
        message: format!(
            "the {what} is too large: {:.1} MiB or more, at most 1 MiB is read",
            bytes as f64 / MAX_JOB as f64
        ),
        hint: Some("is it really what its name says?".to_owned()),
    })
}

/// The file as text.
pub(crate) fn decode_utf8(name: &str, bytes: Vec<u8>) -> Result<String, Box<Problem>> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let line = bytes[..at].iter().filter(|&&b| b == b'\n').count() + 1;
        let hint = match bytes {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "it seems to be UTF-16: save it as UTF-8",
            _ => "save it as UTF-8",
        };
        Box::new(Problem {
            path: String::new(),
            place: Place::File { file: name.to_owned() },
            message: format!(
                "the file isn't UTF-8 text: byte 0x{:02x} at offset {at}, line {line}",
                bytes[at]
            ),
            hint: Some(hint.to_owned()),
        })
    })
}

/// YAML has no control characters but tab and line breaks; a parser may take NUL for the end of the file.
pub(crate) fn printable(text: &str) -> Result<(), Fault> {
    let control = |c: char| (c.is_ascii_control() && !matches!(c, '\t' | '\n' | '\r')) || c == '\u{feff}';
    match text.char_indices().find(|&(_, c)| control(c)) {
        Some((at, c)) => {
            let span = Span { source: SourceMap::JOB, start: at as u32, end: (at + c.len_utf8()) as u32 };
            let message = format!("the text has the control character U+{:04X}", c as u32);
            Err(Fault::at(span, message).hint("it must be plain text"))
        }
        None => Ok(()),
    }
}

/// The job's name when it isn't given: the file's name without its ending, made safe.
fn stem(name: &str) -> String {
    let stem = Path::new(name).file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let safe: String = stem
        .chars()
        .take(100)
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' })
        .collect();
    let safe = safe.trim_start_matches(['.', '-']);
    if safe.is_empty() { "job".to_owned() } else { safe.to_owned() }
}
