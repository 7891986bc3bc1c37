//! Files to documents, streaming: whatever a file's size, memory holds one segment of text files and one line of JSON lines.
//!
//! - A text file is one document.
//! - Each record of a `.jsonl`, `.ndjson` or `.parquet` file is one document: its named field, a text or a chat.
//!
//! **Held-out split.** A piece of text is held out when a hash of its content falls below the share, so the split does not depend on its
//! neighbours, its file's name or order, and stays the same when files are added. A record is one piece. Text files are cut into pieces of
//! [`PIECE`] bytes at the most (after the last newline, else between characters), so that few long files can be split too; a run of adjacent pieces on
//! the same side is one document.
use super::{
    chat::{ChatTemplate, Marked},
    error::DataError,
    parquet,
    records::{Record, read_json_lines},
};
use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// Longest piece of a text file that is held out or not as a whole, bytes.
pub(crate) const PIECE: usize = 16 << 10;
/// Longest text that is tokenized at once, bytes (one JSON line may be longer). Longer documents are cut after a newline, else between characters.
const SEGMENT: usize = 256 << 10;
/// Which side of the held-out split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    Train,
    HeldOut,
}

/// Which pieces are wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    /// Every piece.
    All,
    /// Those on one side of a split with this share held out.
    Side(Split, f64),
}

impl Choice {
    pub(crate) fn takes(self, piece: &str) -> bool {
        match self {
            Choice::All => true,
            Choice::Side(split, share) => (split == Split::HeldOut) == is_held_out(piece, share),
        }
    }
}

/// Whether a piece of text belongs to the held-out share.
fn is_held_out(piece: &str, share: f64) -> bool {
    let digest = blake3::derive_key("launch 2026 held-out split v1", piece.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    // the top 53 bits: exact in f64
    ((u64::from_le_bytes(first) >> 11) as f64) < share * (1u64 << 53) as f64
}

/// What a file gives, in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Text of the current document, never empty.
    Text(String),
    /// The whole of a document, some of which is no target.
    Marked(Marked),
    /// The current document ends; it had text.
    End,
}

/// How a file's bytes are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    JsonLines,
    Parquet,
}

impl Kind {
    pub(crate) fn of(path: &Path) -> Kind {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
        match extension.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Kind::JsonLines,
            "parquet" => Kind::Parquet,
            _ => Kind::Text,
        }
    }
}

pub(crate) type Sink<'a> = dyn FnMut(Part) -> Result<(), DataError> + 'a;

/// How the records of a source are read.
#[derive(Clone, Copy)]
pub(crate) struct Reading<'a> {
    /// The field of a record that holds its text or chat.
    pub(crate) field: &'a str,
    /// Writes chats out; absent where records are text.
    pub(crate) chat: Option<&'a ChatTemplate>,
}

/// Reads one file into `sink`; returns the BLAKE3 of its content, so that the caller can tell whether it read what it meant to.
pub(crate) fn read_file(
    path: &Path,
    reading: Reading,
    choice: Choice,
    sink: &mut Sink,
) -> Result<blake3::Hash, DataError> {
    let (kind, file) = open(path, reading)?;
    let mut input = Hashing { inner: file, hasher: blake3::Hasher::new() };
    let mut take = |record: Record| take_record(record, reading, choice, sink);
    match kind {
        Kind::Text => read_text(&mut input, path, choice, sink)?,
        Kind::JsonLines => read_json_lines(&mut input, path, reading, u64::MAX, &mut take)?,
        Kind::Parquet => parquet::read(&mut input, path, reading, &mut take)?,
    }
    Ok(input.hasher.finalize())
}

/// Looks at the first record of a file, or the beginning of a text, and reads no further: can it be used? False: there is none.
pub(crate) fn has_record(path: &Path, reading: Reading) -> Result<bool, DataError> {
    let (kind, mut file) = open(path, reading)?;
    let mut found = false;
    let mut take = |record: Record| {
        found = true;
        take_record(record, reading, Choice::All, &mut |_| Ok(()))
    };
    match kind {
        Kind::Text => return begins_with_text(&mut file, path),
        Kind::JsonLines => read_json_lines(&mut file, path, reading, 1, &mut take)?,
        Kind::Parquet => parquet::read_rows(file, path, reading, 1, &mut take)?,
    }
    Ok(found)
}

/// A file and how its bytes are to be read.
fn open(path: &Path, reading: Reading) -> Result<(Kind, File), DataError> {
    refuse_what_is_packed(path)?;
    let file = File::open(path).map_err(|source| DataError::Read { path: path.to_path_buf(), source })?;
    match Kind::of(path) {
        Kind::Text if reading.chat.is_some() => {
            let why =
                "it holds running text, not chats: chats are records of .jsonl or .parquet files".into();
            Err(DataError::BadFile { path: path.to_path_buf(), why })
        }
        kind => Ok((kind, file)),
    }
}

/// Is the first piece of a file text? False: it is empty.
fn begins_with_text(input: &mut impl Read, path: &Path) -> Result<bool, DataError> {
    let mut bytes = vec![0; PIECE];
    let n =
        fill_up(input, &mut bytes).map_err(|source| DataError::Read { path: path.to_path_buf(), source })?;
    bytes.truncate(n);
    match std::str::from_utf8(&bytes) {
        // The cut may go through a character.
        Err(e) if e.error_len().is_some() || n < PIECE => Err(DataError::NotUtf8 {
            path: path.to_path_buf(),
            line: 1 + newlines(&bytes[..e.valid_up_to()]),
            offset: e.valid_up_to() as u64,
        }),
        _ => Ok(n > 0),
    }
}

/// A document of one record, if it is wanted; or why there is none.
fn take_record(
    record: Record,
    reading: Reading,
    choice: Choice,
    sink: &mut Sink,
) -> Result<Result<(), String>, DataError> {
    let part = match (record, reading.chat) {
        (Record::Chat(chat), Some(template)) => match template.write(&chat) {
            Ok(marked) if template.marks_targets() => Part::Marked(marked),
            Ok(marked) => Part::Text(marked.text),
            Err(why) => return Ok(Err(why)),
        },
        (Record::Text(text), _) => Part::Text(text),
        (Record::Chat(_), None) => return Ok(Err("a chat where text is read".into())),
    };
    let text = match &part {
        Part::Text(text) | Part::Marked(Marked { text, .. }) => text,
        Part::End => return Ok(Ok(())),
    };
    if !text.is_empty() && choice.takes(text) {
        sink(part)?;
        sink(Part::End)?;
    }
    Ok(Ok(()))
}

/// Compressed and other binary files by their names: read as text they would be "not UTF-8".
fn refuse_what_is_packed(path: &Path) -> Result<(), DataError> {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_ascii_lowercase();
    let unpack = match extension.as_str() {
        "gz" => "gunzip",
        "zst" => "zstd -d",
        "xz" => "unxz",
        "bz2" => "bunzip2",
        "zip" => "unzip",
        "arrow" => "writing it as Parquet or JSON lines",
        _ => return Ok(()),
    };
    let why = format!("`.{extension}` files aren't read: unpack it first ({unpack})");
    Err(DataError::BadFile { path: path.to_path_buf(), why })
}

/// Hashes what is read through it.
struct Hashing<R> {
    inner: R,
    hasher: blake3::Hasher,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hasher.update(&buf[..n]);
        Ok(n)
    }
}

impl parquet::AsFile for Hashing<File> {
    fn as_file(&mut self) -> &mut File {
        &mut self.inner
    }
}

/// Joins adjacent wanted pieces into segments and documents.
struct Joiner<'a, 'b> {
    pending: String,
    /// The current document has text, given or pending.
    open: bool,
    sink: &'a mut Sink<'b>,
}

impl Joiner<'_, '_> {
    fn piece(&mut self, piece: &str) -> Result<(), DataError> {
        if self.pending.len() + piece.len() > SEGMENT {
            self.flush()?;
        }
        self.pending.push_str(piece);
        self.open |= !piece.is_empty();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), DataError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        (self.sink)(Part::Text(std::mem::take(&mut self.pending)))
    }

    fn end(&mut self) -> Result<(), DataError> {
        self.flush()?;
        if std::mem::take(&mut self.open) { (self.sink)(Part::End) } else { Ok(()) }
    }
}

fn read_text(input: &mut impl Read, path: &Path, choice: Choice, sink: &mut Sink) -> Result<(), DataError> {
    let mut joiner = Joiner { pending: String::new(), open: false, sink };
    let (mut buffer, mut filled) = (vec![0u8; 16 * PIECE], 0);
    let (mut offset, mut line) = (0u64, 1u64);
    loop {
        let n = fill_up(input, &mut buffer[filled..])
            .map_err(|source| DataError::Read { path: path.to_path_buf(), source })?;
        filled += n;
        let at_end = filled < buffer.len();
        let mut from = 0;
        while from < filled && (at_end || filled - from > PIECE) {
            let length = piece_length(&buffer[from..filled]);
            let bytes = &buffer[from..from + length];
            let piece = std::str::from_utf8(bytes).map_err(|e| DataError::NotUtf8 {
                path: path.to_path_buf(),
                line: line + newlines(&bytes[..e.valid_up_to()]),
                offset: offset + (from + e.valid_up_to()) as u64,
            })?;
            if choice.takes(piece) {
                joiner.piece(piece)?
            } else {
                joiner.end()?
            }
            line += newlines(bytes);
            from += length;
        }
        offset += from as u64;
        buffer.copy_within(from..filled, 0);
        filled -= from;
        if at_end {
            return joiner.end();
        }
    }
}

fn newlines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&b| b == b'\n').count() as u64
}

/// Reads until `buffer` is full or the input ends.
fn fill_up(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut n = 0;
    while n < buffer.len() {
        match input.read(&mut buffer[n..]) {
            Ok(0) => break,
            Ok(k) => n += k,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}

/// Length of the first piece of `bytes` (which go beyond [`PIECE`] unless they end the file).
fn piece_length(bytes: &[u8]) -> usize {
    if bytes.len() <= PIECE {
        return bytes.len();
    }
    if let Some(newline) = bytes[..PIECE].iter().rposition(|&b| b == b'\n') {
        return newline + 1;
    }
    // the byte after the cut begins a character; broken text is cut anywhere and refused by its reader
    (PIECE - 3..=PIECE).rev().find(|&i| bytes[i] & 0xC0 != 0x80).unwrap_or(PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::records::MAX_LINE;
    use proptest::prelude::*;
    use std::fs;

    /// Documents of a file with this name and content.
    fn documents(name: &str, content: &[u8], choice: Choice) -> Result<Vec<String>, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        let (mut done, mut now) = (Vec::new(), String::new());
        let reading = Reading { field: "text", chat: None };
        let hash = read_file(&path, reading, choice, &mut |part| {
            match part {
                Part::Marked(m) => panic!("{m:?}"),
                Part::Text(t) => {
                    assert!(!t.is_empty() && t.len() <= SEGMENT.max(MAX_LINE));
                    now.push_str(&t);
                }
                Part::End => {
                    assert!(!now.is_empty());
                    done.push(std::mem::take(&mut now));
                }
            }
            Ok(())
        })?;
        assert!(now.is_empty(), "a document has no end");
        assert_eq!(hash, blake3::hash(content));
        Ok(done)
    }

    #[test]
    fn a_text_file_is_a_document() {
        let text = "Ünï¢ødé\r\n".repeat(200_000);
        assert_eq!(documents("a.txt", text.as_bytes(), Choice::All).unwrap(), [text]);
        let no_newline = "é".repeat(600_000);
        assert_eq!(documents("a.txt", no_newline.as_bytes(), Choice::All).unwrap(), [no_newline]);
        assert!(documents("a.txt", b"", Choice::All).unwrap().is_empty());
    }

    #[test]
    fn json_lines() {
        let content = "\u{feff}{\"text\": \"a\\n\", \"x\": [1, {\"text\": 2}]}\n\n  \r\n{\"id\":1,\"text\":\"b\"}\n{\"text\":\"\"}\n{\"text\":\"c\"}";
        for name in ["a.jsonl", "a.NDJSON"] {
            assert_eq!(documents(name, content.as_bytes(), Choice::All).unwrap(), ["a\n", "b", "c"]);
        }
    }

    #[test]
    fn bad_lines_are_named() {
        let said = |content: &str| {
            let e = documents("a.jsonl", content.as_bytes(), Choice::All).unwrap_err();
            assert!(e.hint().is_some());
            let said = e.to_string();
            said[said.find("a.jsonl").unwrap()..].to_string()
        };
        assert_eq!(
            said("{\"text\":\"a\"}\n{\"txt\":\"a\",\"id\":1}\n"),
            "a.jsonl:2: the object has no field `text`; it has `txt`, `id`"
        );
        assert_eq!(said("{}"), "a.jsonl:1: the object has no field `text`");
        assert!(said("{\"text\":3}").starts_with("a.jsonl:1: invalid type: integer `3`, expected a string"));
        assert!(said("[1]").starts_with("a.jsonl:1: invalid type: sequence, expected a JSON object"));
        assert!(said("\n\n{\"text\":\"a\"").starts_with("a.jsonl:3: EOF while parsing"));
        assert!(said("{\"text\":\"a\"} x").starts_with("a.jsonl:1: trailing characters"));
        assert!(said(&format!("{{\"x\":{}", "[".repeat(100_000))).contains("EOF while parsing"));
        let long = format!("{{\"text\":\"{}\"}}\n", "x".repeat(MAX_LINE));
        assert_eq!(said(&long), "a.jsonl:1: the line is longer than 16 MiB");
    }

    #[test]
    fn bytes_that_are_not_utf8_are_named() {
        let mut content = "fine\n".repeat(300_000).into_bytes();
        let at = 1_234_567;
        content[at] = 0xff;
        let line = at as u64 / 5 + 1;
        for name in ["a.txt", "b.bin"] {
            match documents(name, &content, Choice::All).unwrap_err() {
                DataError::NotUtf8 { offset, line: l, .. } => assert_eq!((offset, l), (at as u64, line)),
                other => panic!("{other}"),
            }
        }
        let cut = &"é".as_bytes()[..1];
        assert!(matches!(documents("a.txt", cut, Choice::All), Err(DataError::NotUtf8 { offset: 0, .. })));
        let bad = documents("a.txt", &[0x80; 100_000], Choice::All);
        assert!(matches!(bad, Err(DataError::NotUtf8 { offset: 0, .. })));
        let line = documents("a.jsonl", b"{\"text\":\"a\"}\n{\"text\":\"\xff\"}\n", Choice::All);
        assert!(matches!(line, Err(DataError::NotUtf8 { offset: 22, line: 2, .. })), "{line:?}");
    }

    fn numbered_lines(n: usize) -> String {
        (0..n).map(|i| format!("This is line number {i} of a long file.\n")).collect()
    }

    #[test]
    fn long_files_are_split_and_nothing_is_lost() {
        let text = numbered_lines(60_000);
        let side = |s| documents("a.txt", text.as_bytes(), Choice::Side(s, 0.2)).unwrap();
        let (train, held) = (side(Split::Train), side(Split::HeldOut));
        let size = |d: &[String]| d.iter().map(String::len).sum::<usize>();
        assert_eq!(size(&train) + size(&held), text.len());
        let share = size(&held) as f64 / text.len() as f64;
        assert!((0.1..0.3).contains(&share), "{share}");
        // whole lines, and every document is a stretch of the file
        for d in train.iter().chain(&held) {
            assert!(d.ends_with('\n') && text.contains(d.as_str()));
        }
    }

    #[test]
    fn split_is_stable_under_added_lines() {
        let line = |i: usize| format!("{{\"text\":\"document {i}\"}}\n");
        let content = |n: usize| (0..n).map(line).collect::<String>();
        let held = |n: usize| {
            documents("a.jsonl", content(n).as_bytes(), Choice::Side(Split::HeldOut, 0.1)).unwrap()
        };
        let (small, large) = (held(1000), held(2000));
        assert!((60..140).contains(&small.len()), "{}", small.len());
        assert!(large.starts_with(&small));
    }

    proptest! {
        /// Whatever the bytes: documents or one clear error.
        #[test]
        fn any_bytes(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            padding in prop_oneof![Just(0), PIECE - 150..PIECE + 50, 16 * PIECE - 150..16 * PIECE + 50],
            share in 0.0f64..1.0,
        ) {
            let content = [vec![b'x'; padding], bytes].concat();
            for name in ["a.txt", "a.jsonl"] {
                for choice in [Choice::All, Choice::Side(Split::Train, share)] {
                    let result = documents(name, &content, choice);
                    if name == "a.txt" {
                        prop_assert_eq!(result.is_ok(), std::str::from_utf8(&content).is_ok());
                    }
                }
            }
        }

        #[test]
        fn shares_at_the_ends(text in ".{1,50}") {
            prop_assert!(!is_held_out(&text, 0.0));
            prop_assert!(is_held_out(&text, 1.0));
        }

        #[test]
        fn both_sides_together_are_the_whole(
            words in proptest::collection::vec("[a-zé\n]{0,3000}", 1..40),
            share in 0.0f64..1.0,
        ) {
            let text = words.concat();
            let side = |s| documents("a.txt", text.as_bytes(), Choice::Side(s, share)).unwrap().concat();
            let mut both: Vec<char> = (side(Split::Train) + &side(Split::HeldOut)).chars().collect();
            let mut whole: Vec<char> = text.chars().collect();
            both.sort_unstable();
            whole.sort_unstable();
            prop_assert_eq!(both, whole);
        }
    }
}
