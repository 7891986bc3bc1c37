//! What a failed program wrote down of why (`TORCHELASTIC_ERROR_FILE`): torch's `@record` writes
//! `{"message": {"message": "ValueError: …", "extraInfo": {…}}}`, others `{"message": "…"}`.
//!
//! The program could write anything there, or put anything else in its place.
use serde_json::Value;
use std::{fs::OpenOptions, io::Read, os::unix::fs::OpenOptionsExt, path::Path};

/// Largest file that is read, bytes: the message lies beside a whole traceback.
const MAX_FILE: u64 = 1 << 20;
/// Longest message, characters.
const MAX_MESSAGE: usize = 500;

/// The message on one line; `None` when there is none that can be read.
pub(super) fn read(file: &Path) -> Option<String> {
    // A named pipe would be waited for, a link could lead anywhere.
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(file).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return None;
    }
    let mut text = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut text).ok()?;
    message(&text)
}

/// The message that the text of such a file has.
fn message(text: &[u8]) -> Option<String> {
    let value: Value = serde_json::from_slice(text).ok()?;
    let message = value.get("message")?;
    let message = message.get("message").unwrap_or(message).as_str()?;
    let words: Vec<&str> = message.split(|c: char| c.is_whitespace() || c.is_control()).collect();
    let line = words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
    let cut = line.char_indices().nth(MAX_MESSAGE).map(|(at, _)| at);
    match cut {
        _ if line.is_empty() => None,
        Some(at) => Some(format!("{} […]", &line[..at])),
        None => Some(line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    #[test]
    fn both_forms_are_understood() {
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
            assert_eq!(message(text.as_bytes()).as_deref(), expected, "{text}");
        }
        let long =
            message(format!("{{\"message\": \"{}\"}}", "é".repeat(1000)).as_bytes()).expect("a message");
        assert_eq!(long, format!("{} […]", "é".repeat(MAX_MESSAGE)));
        let deep = "[".repeat(100_000);
        assert_eq!(message(format!("{{\"message\": {deep}").as_bytes()), None);
    }

    #[test]
    fn only_a_plain_file_of_a_sane_size_is_read() {
        let place = tempfile::tempdir().expect("a directory");
        let file = place.path().join("error.json");
        assert_eq!(read(&file), None);
        fs::write(&file, r#"{"message": "told"}"#).expect("written");
        assert_eq!(read(&file).as_deref(), Some("told"));
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        assert_eq!(read(&link), None);
        assert_eq!(read(place.path()), None);
        let pipe = place.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        assert_eq!(read(&pipe), None, "and nobody waits for it");
        let padded = format!("{{\"message\": \"told\"}}{}", " ".repeat(MAX_FILE as usize));
        fs::write(&file, padded).expect("written");
        assert_eq!(read(&file), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Some(line) = message(&bytes) {
                prop_assert!(!line.contains(char::is_control));
            }
        }
    }
}
