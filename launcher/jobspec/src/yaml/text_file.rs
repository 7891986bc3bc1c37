//! Reads the text of a job file or of another program's file, within limits.
use super::{source_map::SourceMap, tree::SourceSpan, value_error::ValueError};
use crate::input_file::read_input_file;
use diagnostic::{Code, Diagnostic, Location, codes::job as codes};
use std::path::Path;

/// The largest size of a job file, in bytes.
pub const MAX_JOB_BYTES: u64 = 1 << 20;

/// Creates an error about the file `name` as a whole, without a position in the file.
pub(crate) fn file_error(code: Code, name: &str, message: impl Into<String>) -> Diagnostic {
    Diagnostic::error(code, message).with_location(Location::File { file: name.to_owned() })
}

/// Reads the whole file at `path`, and fails if it is larger than 1 MiB, the limit for job files.
/// Messages name the file `name`, and describe it as `what`, such as `job file`.
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
    if metadata.len() > MAX_JOB_BYTES {
        return Err(too_large_error(name, what, metadata.len()));
    }
    // The length in the metadata is not reliable for pipes and growing files.
    let bytes = read_input_file(path, MAX_JOB_BYTES).map_err(cannot_read)?;
    if bytes.len() as u64 > MAX_JOB_BYTES {
        return Err(too_large_error(name, what, bytes.len() as u64));
    }
    Ok(bytes)
}

/// Creates the error that the file `name` is larger than the limit on the size of a job file (1
/// MiB). `bytes` is a lower bound of the file's size, because the reader stops one byte above the
/// limit.
pub(crate) fn too_large_error(name: &str, what: &str, bytes: u64) -> Diagnostic {
    let mib = bytes as f64 / MAX_JOB_BYTES as f64;
    let message = format!("the {what} is too large: {mib:.1} MiB or more, at most 1 MiB is allowed");
    file_error(codes::JOB_TOO_LARGE, name, message)
        .with_field("bytes", bytes)
        .with_field("max_bytes", MAX_JOB_BYTES)
        .with_help("check that the path is correct")
}

/// Converts the content of the file `name` from UTF-8 to text. Fails if a byte is not UTF-8. The
/// error states the position of the first such byte.
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

/// Fails if the text of a file contains control characters other than tabs and line breaks. YAML
/// does not allow them, and a parser may take NUL for the end of the file.
pub(crate) fn reject_control_characters(text: &str) -> Result<(), ValueError> {
    let control = |c: char| (c.is_ascii_control() && !matches!(c, '\t' | '\n' | '\r')) || c == '\u{feff}';
    match text.char_indices().find(|&(_, c)| control(c)) {
        Some((at, c)) => {
            let span = SourceSpan {
                source: SourceMap::JOB_FILE_INDEX,
                start: at as u32,
                end: (at + c.len_utf8()) as u32,
            };
            let message = format!("the text contains the control character U+{:04X}", c as u32);
            Err(ValueError::new(codes::JOB_CONTROL_CHARACTER, span, message)
                .with_help("remove the character; the file must be plain text"))
        }
        None => Ok(()),
    }
}
