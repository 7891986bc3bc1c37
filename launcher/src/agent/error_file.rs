//! Reads the error that a failed worker program has recorded in its error file, to which the
//! environment variable `TORCHELASTIC_ERROR_FILE` points.
//!
//! torch's `@record` writes `{"message": {"message": "ValueError: …", "extraInfo": {…}}}`, and
//! other programs `{"message": "…"}`. The file is untrusted input and may also be a link or a pipe.
use serde_json::Value;
use std::{fs::OpenOptions, io::Read, os::unix::fs::OpenOptionsExt, path::Path};

/// The largest size, in bytes, of the file with a failed program's error
/// (`TORCHELASTIC_ERROR_FILE`) that is read. The file may contain a whole traceback.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The length, in characters, to which the error message in the error file of a failed program is
/// truncated.
const MAX_MESSAGE_CHARS: usize = 500;

/// Reads the error message from `file`, in which a failed worker program has recorded its error
/// (`TORCHELASTIC_ERROR_FILE`), and joins the message to one line. Returns `None` if the file is
/// missing or invalid.
pub(super) fn read_error_message(file: &Path) -> Option<String> {
    // Without these flags, opening a named pipe would block, and a link could lead to any file.
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(file).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return None;
    }
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).ok()?;
    parse_error_message(&text)
}

/// Parses the content of the file in which a failed worker program has recorded its error
/// (`TORCHELASTIC_ERROR_FILE`). Returns the error message, joined to one line and truncated, or
/// `None` if the content is invalid or the message is empty.
pub(crate) fn parse_error_message(text: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(text).ok()?;
    let message = value.get("message")?;
    let message = message.get("message").unwrap_or(message).as_str()?;
    let words: Vec<&str> = message.split(|c: char| c.is_whitespace() || c.is_control()).collect();
    let line = words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
    let end = line.char_indices().nth(MAX_MESSAGE_CHARS).map(|(end, _)| end);
    match end {
        _ if line.is_empty() => None,
        Some(end) => Some(format!("{} […]", &line[..end])),
        None => Some(line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    #[test]
    fn error_files_of_torch_and_other_programs_are_parsed() {
        for (text, expected) in [
            (
                r#"{"message": {"message": "ValueError: bad", "extraInfo": {"timestamp": "1"}}}"#,
                Some("ValueError: bad"),
            ),
            (r#"{"message": "out of luck", "timestamp": 12}"#, Some("out of luck")),
            ("{\"message\": \"two\\nlines \\u001b[31m red\"}", Some("two lines [31m red")),
            (r#"{"message": ""}"#, None),
            (r#"{"message": {"code": 1}}"#, None),
            (r#"{"message": 7}"#, None),
            (r#"{}"#, None),
            ("", None),
            ("{\"message\": \"cut", None),
        ] {
            assert_eq!(parse_error_message(text.as_bytes()).as_deref(), expected, "{text}");
        }
        let long = parse_error_message(format!("{{\"message\": \"{}\"}}", "é".repeat(1000)).as_bytes())
            .expect("a message");
        assert_eq!(long, format!("{} […]", "é".repeat(MAX_MESSAGE_CHARS)));
        let deep = "[".repeat(100_000);
        assert_eq!(parse_error_message(format!("{{\"message\": {deep}").as_bytes()), None);
    }

    #[test]
    fn only_regular_files_up_to_the_size_limit_are_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("error.json");
        assert_eq!(read_error_message(&file), None);
        fs::write(&file, r#"{"message": "recorded"}"#).expect("written");
        assert_eq!(read_error_message(&file).as_deref(), Some("recorded"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        assert_eq!(read_error_message(&link), None);
        assert_eq!(read_error_message(dir.path()), None);
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        assert_eq!(read_error_message(&pipe), None, "opening a pipe must not block");
        let padded = format!("{{\"message\": \"recorded\"}}{}", " ".repeat(MAX_FILE_BYTES as usize));
        fs::write(&file, padded).expect("written");
        assert_eq!(read_error_message(&file), None);
    }

    proptest! {
        #[test]
        fn untrusted_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Some(line) = parse_error_message(&bytes) {
                prop_assert!(!line.contains(char::is_control));
            }
        }
    }
}
