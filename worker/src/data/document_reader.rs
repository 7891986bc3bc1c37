//! Reads text files and JSON lines files as a sequence of documents, in parts of limited size.
//!
//! - A text file is one document.
//! - Each record of a `.jsonl`, `.ndjson` or `.parquet` file is one document. `train.data.field`
//!   names the field with its text or chat.
//!
//! **Held-out split.** A piece of text is held out if a hash of its content is below the share. The
//! split therefore does not depend on neighbouring pieces, the name of the file or the order of
//! files, and it does not change when files are added. A record is one piece. Text files are cut
//! into pieces of at most [`MAX_PIECE_BYTES`] bytes, after the last newline or otherwise between
//! characters, so that a few long files can be split, too. Adjacent pieces on the same side form
//! one document.
use super::{
    chat_template::ChatTemplate,
    error::{DataError, RecordPosition},
    json_lines::{parse_text_record, read_json_lines},
    split::SplitFilter,
};
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

/// Maximum size in bytes of a piece of a text file; each piece belongs as a whole either to the
/// training or to the evaluation data.
pub(crate) const MAX_PIECE_BYTES: usize = 16 << 10;
/// Maximum size in bytes of the text that the tokenizer gets in one call; longer text files are
/// divided. Longer documents are cut after a newline, or otherwise between characters. The text of
/// a record is never cut and may be longer.
const MAX_SEGMENT_BYTES: usize = 256 << 10;

/// How a record (JSON line or Parquet row) is converted to text: the name of the field with the
/// text or chat, and the chat template.
#[derive(Clone, Copy)]
pub(crate) struct RecordReadOptions<'a> {
    /// The field or column of a record with the text or messages.
    pub(crate) field: &'a str,
    /// The template that renders chats; absent if records are text.
    pub(crate) chat_template: Option<&'a ChatTemplate>,
}

/// One item of the sequence that the reader of a data file produces: text of a document, a whole
/// chat, or the end of a document. A file is read as a sequence of parts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DocumentPart {
    /// Text of the current document, never empty.
    Text(String),
    /// The line of a JSON lines file with a chat, which is a complete document.
    ChatLine(String),
    /// The end of a document that consists of one or more [`DocumentPart::Text`].
    End,
}

/// The format of a data file, determined by the file's extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataFileFormat {
    /// Plain text in UTF-8.
    Text,
    /// One JSON object per line.
    JsonLines,
    /// Parquet with one record per row.
    Parquet,
}

impl DataFileFormat {
    /// Returns the format of a data file, which the extension of `path` determines. A file with an
    /// unknown extension is text.
    pub(crate) fn from_path(path: &Path) -> DataFileFormat {
        match get_lower_case_extension(path).as_str() {
            "jsonl" | "ndjson" => DataFileFormat::JsonLines,
            "parquet" => DataFileFormat::Parquet,
            _ => DataFileFormat::Text,
        }
    }
}

/// Returns the file name extension of a path in lower case without the dot, or an empty string.
fn get_lower_case_extension(path: &Path) -> String {
    path.extension().and_then(|e| e.to_str()).unwrap_or("").to_ascii_lowercase()
}

/// Callback that receives the texts and ends of the documents of a data file in order, with line
/// numbers for a JSON lines file. An error ends the reading.
pub(crate) type DocumentPartSink<'a> =
    dyn FnMut(DocumentPart, Option<RecordPosition>) -> Result<(), DataError> + 'a;

/// A data file that was opened for reading, and its format.
pub(crate) struct OpenDataFile {
    pub(crate) file: File,
    pub(crate) format: DataFileFormat,
}

/// Reads a text or JSON lines file and passes its documents, part by part, to the callback `sink`.
/// Returns the BLAKE3 hash of the bytes that were read, with which the caller can detect that the
/// file changed.
pub(crate) fn read_documents(
    data: OpenDataFile,
    path: &Path,
    options: RecordReadOptions,
    filter: SplitFilter,
    sink: &mut DocumentPartSink,
) -> Result<blake3::Hash, DataError> {
    let mut input = HashingReader { inner: data.file, hasher: blake3::Hasher::new() };
    match data.format {
        DataFileFormat::JsonLines => {
            read_json_lines(&mut input, path, u64::MAX, &mut |line, text| {
                emit_record(line, text, path, options, filter, sink)
            })?;
        }
        DataFileFormat::Text | DataFileFormat::Parquet => {
            read_text_documents(&mut input, path, filter, &mut |part| sink(part, None))?;
        }
    }
    Ok(input.hasher.finalize())
}

/// Converts one line of a JSON lines file to a document and passes it to the callback `sink`, if
/// `filter` accepts the text. The filter is not applied to a chat, whose text is not known.
fn emit_record(
    line: u64,
    text: &str,
    path: &Path,
    options: RecordReadOptions,
    filter: SplitFilter,
    sink: &mut DocumentPartSink,
) -> Result<(), DataError> {
    let position = RecordPosition::Line(line);
    if options.chat_template.is_some() {
        return sink(DocumentPart::ChatLine(text.to_owned()), Some(position));
    }
    let text = parse_text_record(text, options.field);
    let text = text.map_err(|problem| DataError::invalid_record(path, position, problem))?;
    if !text.is_empty() && filter.accepts_piece(&text) {
        sink(DocumentPart::Text(text), Some(position))?;
        sink(DocumentPart::End, Some(position))?;
    }
    Ok(())
}

/// Opens a data file of a job, and determines its format from its name. Rejects compressed files,
/// text files for chats, and files that are not regular.
pub(crate) fn open_data_file(path: &Path, options: RecordReadOptions) -> Result<OpenDataFile, DataError> {
    reject_compressed_file(path)?;
    let unreadable = |source| DataError::unreadable(path, source);
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
    let kind = file.metadata().map_err(unreadable)?.file_type();
    if !kind.is_file() {
        let pattern = path.display().to_string();
        let path = path.to_path_buf();
        return Err(DataError::NotAFile { pattern, path, is_directory: kind.is_dir() });
    }
    match DataFileFormat::from_path(path) {
        DataFileFormat::Text if options.chat_template.is_some() => {
            Err(DataError::NotAChatFile { path: path.to_path_buf() })
        }
        format => Ok(OpenDataFile { file, format }),
    }
}

/// Checks that the first 16 KiB of a text file are UTF-8, and returns whether the file contains any
/// text. Returns false if the file is empty, and fails if the piece is not UTF-8.
pub(crate) fn check_first_text_piece(input: &mut impl Read, path: &Path) -> Result<bool, DataError> {
    let mut bytes = vec![0; MAX_PIECE_BYTES];
    let n = read_until_full(input, &mut bytes).map_err(|source| DataError::unreadable(path, source))?;
    bytes.truncate(n);
    match std::str::from_utf8(&bytes) {
        // The end of the piece may cut a character.
        Err(e) if e.error_len().is_some() || n < MAX_PIECE_BYTES => Err(DataError::NotUtf8 {
            path: path.to_path_buf(),
            line: 1 + count_newlines(&bytes[..e.valid_up_to()]),
            offset: e.valid_up_to() as u64,
        }),
        _ => Ok(n > 0),
    }
}

/// Rejects compressed and other binary files by their extension. Without this check such files
/// would be read as text and reported as invalid UTF-8.
fn reject_compressed_file(path: &Path) -> Result<(), DataError> {
    let extension = get_lower_case_extension(path);
    let remedy = match extension.as_str() {
        "gz" => "decompress the file with gunzip",
        "zst" => "decompress the file with zstd -d",
        "xz" => "decompress the file with unxz",
        "bz2" => "decompress the file with bunzip2",
        "zip" => "decompress the file with unzip",
        "arrow" => "convert the file to Parquet or JSON lines",
        _ => return Ok(()),
    };
    Err(DataError::CompressedFile { path: path.to_path_buf(), extension, remedy })
}

/// Computes the BLAKE3 hash of a whole file, independently of its current read position.
pub(crate) fn hash_file(file: &File) -> io::Result<blake3::Hash> {
    let (mut hasher, mut buffer, mut offset) = (blake3::Hasher::new(), vec![0; 1 << 18], 0);
    loop {
        match file.read_at(&mut buffer, offset) {
            Ok(0) => return Ok(hasher.finalize()),
            Ok(n) => {
                hasher.update(&buffer[..n]);
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Wrapper of a reader that computes a hash of all bytes that pass through it.
struct HashingReader<R> {
    inner: R,
    hasher: blake3::Hasher,
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hasher.update(&buf[..n]);
        Ok(n)
    }
}

/// Callback that receives the texts and the ends of the documents of a text file, in their order.
type TextPartSink<'a> = dyn FnMut(DocumentPart) -> Result<(), DataError> + 'a;

/// Joins consecutive pieces of a text file to a document, and passes its text to a callback in
/// segments of limited size.
struct DocumentAssembler<'a, 'b> {
    /// Text of the current document that was not passed to the callback yet.
    pending: String,
    /// Whether the current document has text, pending or already passed to the callback.
    has_text: bool,
    sink: &'a mut TextPartSink<'b>,
}

impl DocumentAssembler<'_, '_> {
    /// Appends a piece of the text file to the current document.
    fn add_piece(&mut self, piece: &str) -> Result<(), DataError> {
        if self.pending.len() + piece.len() > MAX_SEGMENT_BYTES {
            self.flush_pending_text()?;
        }
        self.pending.push_str(piece);
        self.has_text |= !piece.is_empty();
        Ok(())
    }

    /// Passes the text of the current document that was collected so far to the callback, and
    /// empties the collection. Does nothing without pending text.
    fn flush_pending_text(&mut self) -> Result<(), DataError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        (self.sink)(DocumentPart::Text(std::mem::take(&mut self.pending)))
    }

    /// Ends the current document, and passes its remaining text and its end to the callback. Does
    /// nothing if the document has no text.
    fn end_document(&mut self) -> Result<(), DataError> {
        self.flush_pending_text()?;
        if std::mem::take(&mut self.has_text) { (self.sink)(DocumentPart::End) } else { Ok(()) }
    }
}

/// Reads a text file and passes the pieces that `filter` selects (training data, evaluation data or
/// both) to the callback `sink` as documents. A rejected piece ends the current document.
fn read_text_documents(
    input: &mut impl Read,
    path: &Path,
    filter: SplitFilter,
    sink: &mut TextPartSink,
) -> Result<(), DataError> {
    let mut assembler = DocumentAssembler { pending: String::new(), has_text: false, sink };
    let (mut buffer, mut filled) = (vec![0u8; 16 * MAX_PIECE_BYTES], 0);
    let (mut offset, mut line) = (0u64, 1u64);
    loop {
        let n = read_until_full(input, &mut buffer[filled..])
            .map_err(|source| DataError::unreadable(path, source))?;
        filled += n;
        let at_end = filled < buffer.len();
        let mut from = 0;
        while from < filled && (at_end || filled - from > MAX_PIECE_BYTES) {
            let length = find_first_piece_length(&buffer[from..filled]);
            let bytes = &buffer[from..from + length];
            let piece = std::str::from_utf8(bytes).map_err(|e| DataError::NotUtf8 {
                path: path.to_path_buf(),
                line: line + count_newlines(&bytes[..e.valid_up_to()]),
                offset: offset + (from + e.valid_up_to()) as u64,
            })?;
            if filter.accepts_piece(piece) {
                assembler.add_piece(piece)?
            } else {
                assembler.end_document()?
            }
            line += count_newlines(bytes);
            from += length;
        }
        offset += from as u64;
        buffer.copy_within(from..filled, 0);
        filled -= from;
        if at_end {
            return assembler.end_document();
        }
    }
}

/// Counts the newline characters in `bytes`.
fn count_newlines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&b| b == b'\n').count() as u64
}

/// Reads from `input` until `buffer` is full or the input ends, and returns the number of bytes
/// that were read.
fn read_until_full(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
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

/// Returns the length in bytes of the first piece of a text file's unread content `bytes`; a piece
/// is used either for training or for evaluation. The caller must pass more than
/// [`MAX_PIECE_BYTES`] bytes, or the whole rest of the file.
fn find_first_piece_length(bytes: &[u8]) -> usize {
    if bytes.len() <= MAX_PIECE_BYTES {
        return bytes.len();
    }
    if let Some(newline) = bytes[..MAX_PIECE_BYTES].iter().rposition(|&b| b == b'\n') {
        return newline + 1;
    }
    // The byte after the cut begins a character. Invalid UTF-8 is cut anywhere; the reader rejects
    // it.
    (MAX_PIECE_BYTES - 3..=MAX_PIECE_BYTES)
        .rev()
        .find(|&i| bytes[i] & 0xC0 != 0x80)
        .unwrap_or(MAX_PIECE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{
        error::RecordProblem,
        json_lines::MAX_LINE_BYTES,
        split::{Split, is_held_out},
    };
    use proptest::prelude::*;
    use serde_json::error::Category;
    use std::fs;

    /// Writes a file with the given name and content, and returns the documents that are read from
    /// it.
    fn write_and_read_documents(
        name: &str,
        content: &[u8],
        filter: SplitFilter,
    ) -> Result<Vec<String>, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        let (mut done, mut now) = (Vec::new(), String::new());
        let format = RecordReadOptions { field: "text", chat_template: None };
        let data = open_data_file(&path, format)?;
        let hash = read_documents(data, &path, format, filter, &mut |part, _| {
            match part {
                DocumentPart::ChatLine(line) => panic!("{line}"),
                DocumentPart::Text(t) => {
                    assert!(!t.is_empty() && t.len() <= MAX_SEGMENT_BYTES.max(MAX_LINE_BYTES));
                    now.push_str(&t);
                }
                DocumentPart::End => {
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
    fn a_text_file_is_one_document() {
        let text = "Ünï¢ødé\r\n".repeat(200_000);
        assert_eq!(write_and_read_documents("a.txt", text.as_bytes(), SplitFilter::All).unwrap(), [text]);
        let no_newline = "é".repeat(600_000);
        assert_eq!(
            write_and_read_documents("a.txt", no_newline.as_bytes(), SplitFilter::All).unwrap(),
            [no_newline]
        );
        assert!(write_and_read_documents("a.txt", b"", SplitFilter::All).unwrap().is_empty());
    }

    #[test]
    fn each_json_line_is_one_document() {
        let content = "\u{feff}{\"text\": \"a\\n\", \"x\": [1, {\"text\": 2}]}\n\n  \r\n{\"id\":1,\"text\":\"b\"}\n{\"text\":\"\"}\n{\"text\":\"c\"}";
        for name in ["a.jsonl", "a.NDJSON"] {
            assert_eq!(
                write_and_read_documents(name, content.as_bytes(), SplitFilter::All).unwrap(),
                ["a\n", "b", "c"]
            );
        }
    }

    #[test]
    fn invalid_lines_are_reported_with_their_line_number() {
        let problem =
            |content: &str| match write_and_read_documents("a.jsonl", content.as_bytes(), SplitFilter::All)
                .unwrap_err()
            {
                DataError::InvalidRecord { path, position: RecordPosition::Line(line), problem } => {
                    assert!(path.ends_with("a.jsonl"));
                    (line, problem)
                }
                other => panic!("{other}"),
            };
        let missing = |content: &str| match problem(content) {
            (line, RecordProblem::FieldMissing { field, present }) => {
                assert_eq!(field, "text");
                (line, present)
            }
            other => panic!("{other:?}"),
        };
        let (line, present) = missing("{\"text\":\"a\"}\n{\"txt\":\"a\",\"id\":1}\n");
        assert_eq!((line, present), (2, vec!["txt".to_owned(), "id".to_owned()]));
        assert_eq!(missing("{}"), (1, Vec::new()));
        let category = |content: &str| match problem(content) {
            (line, RecordProblem::InvalidJson { category, column, .. }) => (line, category, column),
            other => panic!("{other:?}"),
        };
        assert_eq!(category("{\"text\":3}"), (1, Category::Data, 9));
        assert_eq!(category("[1]").1, Category::Data);
        assert_eq!(category("\n\n{\"text\":\"a\""), (3, Category::Eof, 11));
        assert_eq!(category("{\"text\":\"a\"} x"), (1, Category::Syntax, 14));
        assert_eq!(category(&format!("{{\"x\":{}", "[".repeat(100_000))).1, Category::Eof);
        let long = format!("{{\"text\":\"{}\"}}\n", "x".repeat(MAX_LINE_BYTES));
        assert!(matches!(problem(&long), (1, RecordProblem::LineTooLong { limit: MAX_LINE_BYTES })));
    }

    #[test]
    fn invalid_utf8_is_reported_with_its_line_and_offset() {
        let mut content = "fine\n".repeat(300_000).into_bytes();
        let at = 1_234_567;
        content[at] = 0xff;
        let line = at as u64 / 5 + 1;
        for name in ["a.txt", "b.bin"] {
            match write_and_read_documents(name, &content, SplitFilter::All).unwrap_err() {
                DataError::NotUtf8 { offset, line: l, .. } => assert_eq!((offset, l), (at as u64, line)),
                other => panic!("{other}"),
            }
        }
        let cut = &"é".as_bytes()[..1];
        assert!(matches!(
            write_and_read_documents("a.txt", cut, SplitFilter::All),
            Err(DataError::NotUtf8 { offset: 0, .. })
        ));
        let bad = write_and_read_documents("a.txt", &[0x80; 100_000], SplitFilter::All);
        assert!(matches!(bad, Err(DataError::NotUtf8 { offset: 0, .. })));
        let line =
            write_and_read_documents("a.jsonl", b"{\"text\":\"a\"}\n{\"text\":\"\xff\"}\n", SplitFilter::All);
        assert!(matches!(line, Err(DataError::NotUtf8 { offset: 22, line: 2, .. })), "{line:?}");
    }

    /// Returns a text of `n` numbered lines.
    fn build_numbered_lines(n: usize) -> String {
        (0..n).map(|i| format!("This is line number {i} of a long file.\n")).collect()
    }

    #[test]
    fn long_files_are_split_without_losing_text() {
        let text = build_numbered_lines(60_000);
        let side = |s| write_and_read_documents("a.txt", text.as_bytes(), SplitFilter::Only(s, 0.2)).unwrap();
        let (train, held) = (side(Split::Train), side(Split::HeldOut));
        let size = |d: &[String]| d.iter().map(String::len).sum::<usize>();
        assert_eq!(size(&train) + size(&held), text.len());
        let share = size(&held) as f64 / text.len() as f64;
        assert!((0.1..0.3).contains(&share), "{share}");
        // Pieces end at line ends, and every document is a contiguous range of the file.
        for d in train.iter().chain(&held) {
            assert!(d.ends_with('\n') && text.contains(d.as_str()));
        }
    }

    #[test]
    fn the_split_does_not_change_when_lines_are_added() {
        let line = |i: usize| format!("{{\"text\":\"document {i}\"}}\n");
        let content = |n: usize| (0..n).map(line).collect::<String>();
        let held = |n: usize| {
            write_and_read_documents("a.jsonl", content(n).as_bytes(), SplitFilter::Only(Split::HeldOut, 0.1))
                .unwrap()
        };
        let (small, large) = (held(1000), held(2000));
        assert!((60..140).contains(&small.len()), "{}", small.len());
        assert!(large.starts_with(&small));
    }

    proptest! {
        /// Checks that a file of any bytes gives documents or an error, and never a panic.
        #[test]
        fn any_bytes_are_read_or_rejected(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            padding in prop_oneof![Just(0), MAX_PIECE_BYTES - 150..MAX_PIECE_BYTES + 50, 16 * MAX_PIECE_BYTES - 150..16 * MAX_PIECE_BYTES + 50],
            share in 0.0f64..1.0,
        ) {
            let content = [vec![b'x'; padding], bytes].concat();
            for name in ["a.txt", "a.jsonl"] {
                for filter in [SplitFilter::All, SplitFilter::Only(Split::Train, share)] {
                    let result = write_and_read_documents(name, &content, filter);
                    if name == "a.txt" {
                        prop_assert_eq!(result.is_ok(), std::str::from_utf8(&content).is_ok());
                    }
                }
            }
        }

        #[test]
        fn a_share_of_0_holds_out_no_text_and_1_all_text(text in ".{1,50}") {
            prop_assert!(!is_held_out(&text, 0.0));
            prop_assert!(is_held_out(&text, 1.0));
        }

        #[test]
        fn both_sides_together_have_all_text(
            words in proptest::collection::vec("[a-zé\n]{0,3000}", 1..40),
            share in 0.0f64..1.0,
        ) {
            let text = words.concat();
            let side = |s| write_and_read_documents("a.txt", text.as_bytes(), SplitFilter::Only(s, share)).unwrap().concat();
            let mut both: Vec<char> = (side(Split::Train) + &side(Split::HeldOut)).chars().collect();
            let mut whole: Vec<char> = text.chars().collect();
            both.sort_unstable();
            whole.sort_unstable();
            prop_assert_eq!(both, whole);
        }
    }
}
