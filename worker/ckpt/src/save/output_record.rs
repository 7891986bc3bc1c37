//! [`OutputRecord`]: the JSON file in which launch lists the files that it wrote when it gathered
//! weights or converted a checkpoint, with their hashes. Other programs ignore the file.
use crate::codec::disk::{self, Directory, FILES_MAX, ReadBuffers, hash_file};
use crate::codec::json::{deserialize_list, parse_object};
use crate::codec::sealed_json::JsonSeal;
use crate::error::{CkptError, DamageReason, Result};
use crate::format_constants::CONVERT_RECORD_FILE;
use crate::hash::Hash;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Limit on the size in bytes of the file that lists what launch wrote when it gathered weights or
/// converted a checkpoint.
const RECORD_BYTES_MAX: u64 = 256 << 20;
/// The version number that this program writes into its lists of written files (records). Version 1
/// had only names, no hashes.
const RECORD_VERSION: u32 = 2;
/// Number of levels of subdirectories in which launch searches a repaired checkpoint for new files,
/// which it adds to the checkpoint's list of written files.
const SEARCH_DEPTH_MAX: u32 = 4;

/// Describes the list of written files of one command (gathering weights or converting a
/// checkpoint): its file name, its `format` value, and the command.
pub(crate) struct OutputRecordKind {
    /// Name of the file.
    pub(crate) file: &'static str,
    /// Value of the key `format` in the file.
    format: &'static str,
    /// The command that wrote the directory, as messages show it.
    pub(crate) operation: &'static str,
}

/// File name, format and command of `gathered.json`, the list of the files that `launch ckpt
/// gather` wrote to a directory.
pub(crate) const GATHER_RECORD_KIND: OutputRecordKind = OutputRecordKind {
    file: "gathered.json",
    format: "launch gathered weights",
    operation: "`launch ckpt gather`",
};
/// File name, format and command of `converted.json`, the list of the files that `launch ckpt
/// convert` wrote to a directory.
pub(crate) const CONVERT_RECORD_KIND: OutputRecordKind = OutputRecordKind {
    file: CONVERT_RECORD_FILE,
    format: "launch converted checkpoint",
    operation: "`launch ckpt convert`",
};

/// The list of the files that launch wrote to a directory when it gathered weights or converted a
/// checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct OutputRecord {
    /// The hash of the record file, computed with zeros in place of this field. Empty in version 1.
    #[serde(default)]
    blake3: String,
    format: String,
    #[serde(default)]
    version: u32,
    #[serde(default)]
    program: String,
    /// Number of completed steps of the source checkpoint, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) step: Option<u64>,
    /// Number of tokens on which the model of the source checkpoint was trained, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<u64>,
    /// Dtype of gathered weights, as torch names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dtype: Option<String>,
    #[serde(deserialize_with = "deserialize_list::<_, _, FILES_MAX>")]
    pub(crate) files: Vec<RecordedFile>,
}

/// A file in launch's list of written files (record): its name and, if recorded, its size and hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RecordedFile {
    /// Path in the directory, with `/` between names. In version 1, the name of a file or
    /// directory.
    pub(crate) name: String,
    /// The size in bytes and the hash of the file. `None` if the record does not have the hash.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<RecordedContent>,
}

/// The size and the hash of a file in a record of written files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RecordedContent {
    pub(crate) bytes: u64,
    pub(crate) blake3: Hash,
}

impl RecordedContent {
    /// Computes the size and the hash of a file with the content `text`, for a list of written
    /// files.
    pub(crate) fn from_text(text: &[u8]) -> RecordedContent {
        RecordedContent { bytes: text.len() as u64, blake3: Hash::digest(text) }
    }

    /// Computes the size and the hash of the file `name` in `directory`, for a list of written
    /// files.
    pub(crate) fn from_file(directory: &Directory, name: &str, scratch: &ReadBuffers) -> Result<Self> {
        hash_file(directory, name, scratch).map(|(bytes, blake3)| RecordedContent { bytes, blake3 })
    }
}

impl<'de> Deserialize<'de> for RecordedFile {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        d.deserialize_any(RecordedFileVisitor)
    }
}

/// Serde visitor that reads one entry of a list of written files, either as an object or, in
/// version 1 of the list, as a bare file name.
struct RecordedFileVisitor;

impl<'de> Visitor<'de> for RecordedFileVisitor {
    type Value = RecordedFile;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a file name, or an object with `name`, `bytes` and `blake3`")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> std::result::Result<RecordedFile, E> {
        Ok(RecordedFile { name: name.to_owned(), content: None })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<RecordedFile, A::Error> {
        #[derive(Deserialize)]
        struct Fields {
            name: String,
            bytes: Option<u64>,
            blake3: Option<Hash>,
        }
        let file = Fields::deserialize(MapAccessDeserializer::new(map))?;
        let content = file.bytes.zip(file.blake3).map(|(bytes, blake3)| RecordedContent { bytes, blake3 });
        Ok(RecordedFile { name: file.name, content })
    }
}

impl OutputRecordKind {
    /// Creates the record of an output directory: the list `files` of the files that launch wrote
    /// there when it gathered weights or converted a checkpoint.
    pub(crate) fn make_record(&self, files: Vec<RecordedFile>) -> OutputRecord {
        let program = format!("launch {}", env!("CARGO_PKG_VERSION"));
        OutputRecord { format: self.format.into(), program, files, ..OutputRecord::default() }
    }

    /// Reads the list of files (record) that launch stored in `directory` when it gathered weights
    /// or converted a checkpoint. Returns `None` if there is no record, or if another program wrote
    /// a file of this name.
    ///
    /// # Errors
    /// Fails if the record is damaged or exceeds a limit.
    pub(crate) fn read_record(&self, directory: &Directory) -> Result<Option<OutputRecord>> {
        if directory.file_size(self.file)?.is_none() {
            return Ok(None);
        }
        let mut text = directory.read_file(self.file, RECORD_BYTES_MAX)?;
        let parsed = self.parse_record(&mut text);
        parsed.map_err(|reason| CkptError::damaged(directory.path(), self.file, *reason))
    }

    /// Parses the text of a list of written files (record), and verifies the hash of this text.
    /// Returns `None` for a record of another kind.
    pub(crate) fn parse_record(
        &self,
        text: &mut [u8],
    ) -> std::result::Result<Option<OutputRecord>, Box<DamageReason>> {
        let is_sealed = JsonSeal::INDENTED.has_hash(text);
        if is_sealed && JsonSeal::INDENTED.unseal(text).is_err() {
            return Err(Box::new(DamageReason::HashMismatch));
        }
        let record: OutputRecord = parse_object(text).map_err(DamageReason::from)?;
        match record.version {
            _ if record.format != self.format => Ok(None),
            0 | 1 => Ok(Some(record)),
            RECORD_VERSION if is_sealed => Ok(Some(record)),
            RECORD_VERSION => Err(Box::new(DamageReason::HashMismatch)),
            version => {
                let reason = format!("the record has version {version}, newer than {RECORD_VERSION}");
                Err(Box::new(reason.into()))
            }
        }
    }

    /// Writes the list of written files (record) to the directory `dir`, with the files sorted by
    /// name.
    ///
    /// # Errors
    /// Fails if `dir` has a file of this name, or I/O fails.
    pub(crate) fn write_record(&self, dir: &Path, mut record: OutputRecord) -> Result<()> {
        record.files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        (record.version, record.blake3) = (RECORD_VERSION, JsonSeal::empty_hash());
        let mut text = serde_json::to_vec_pretty(&record).map_err(CkptError::invalid_save)?;
        text.push(b'\n');
        JsonSeal::INDENTED.seal(&mut text);
        disk::write_file(dir.join(self.file), &text).map(drop)
    }
}

impl OutputRecord {
    /// Returns the first path component of every file name in this record: the recorded files and
    /// subdirectories at the top level of the output directory.
    pub(crate) fn list_recorded_entries(&self) -> BTreeSet<&str> {
        self.files.iter().map(|f| f.name.split('/').next().unwrap_or_default()).collect()
    }
}

/// Updates launch's lists of written files (records) in `copy`, a repaired copy of a checkpoint
/// directory, to match the files that `copy` now contains. `copy` was made from the directory
/// `original`, and files were then replaced, added or removed in it. Keeps the recorded hashes of
/// the files `restored`, since a repair must have restored exactly their recorded content. Does
/// nothing for records that are damaged or have no hashes.
///
/// # Errors
/// Fails if a file of `copy` cannot be read, or a record cannot be written.
pub(crate) fn update_file_lists_of_modified_copy(
    copy: &Path,
    original: &Path,
    restored: &BTreeSet<String>,
) -> Result<()> {
    for marker in [GATHER_RECORD_KIND, CONVERT_RECORD_KIND] {
        let directory = Directory::open(copy)?;
        let Ok(Some(record)) = marker.read_record(&directory) else { continue };
        if record.version < RECORD_VERSION {
            continue;
        }
        let before = Directory::open(original)?;
        let files = list_updated_files(&directory, &before, &record, restored)?;
        if files != record.files {
            disk::unlink(&copy.join(marker.file))?;
            marker.write_record(copy, OutputRecord { files, ..record })?;
        }
    }
    Ok(())
}

/// Returns the new list of written files for a repaired directory: the old list without files that
/// the repair removed, plus files that the repair added.
fn list_updated_files(
    copy: &Directory,
    original: &Directory,
    record: &OutputRecord,
    restored: &BTreeSet<String>,
) -> Result<Vec<RecordedFile>> {
    let scratch = ReadBuffers::default();
    let mut files: BTreeMap<String, RecordedFile> = BTreeMap::new();
    for file in &record.files {
        let name = &file.name;
        let mut file = file.clone();
        match (copy.has_entry(name)?, original.has_entry(name)?) {
            (false, true) => continue,
            (true, existed)
                if file.content.is_some()
                    && !restored.contains(name)
                    && !(existed && is_same_content(copy, original, name, &scratch)?) =>
            {
                file.content = Some(RecordedContent::from_file(copy, name, &scratch)?);
            }
            // a file that is missing in both directories is damage
            _ => {}
        }
        files.insert(name.clone(), file);
    }
    for (path, ..) in disk::list_file_states(copy.path(), SEARCH_DEPTH_MAX)? {
        let name = path.strip_prefix(copy.path()).ok().and_then(Path::to_str);
        let Some(name) = name.filter(|n| ![GATHER_RECORD_KIND.file, CONVERT_RECORD_KIND.file].contains(n))
        else {
            continue;
        };
        if !files.contains_key(name) && !original.has_entry(name)? {
            let content = Some(RecordedContent::from_file(copy, name, &scratch)?);
            files.insert(name.to_owned(), RecordedFile { name: name.to_owned(), content });
        }
    }
    Ok(files.into_values().collect())
}

/// Returns true if the file `name` has equal content in the directories `a` and `b`.
fn is_same_content(a: &Directory, b: &Directory, name: &str, scratch: &ReadBuffers) -> Result<bool> {
    let identify = |directory: &Directory| {
        let metadata = directory.path().join(name).symlink_metadata().ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    if identify(a).is_some_and(|found| identify(b) == Some(found)) {
        return Ok(true);
    }
    Ok(hash_file(a, name, scratch)? == hash_file(b, name, scratch)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a record for tests that has a file with a hash, and a file without one.
    fn make_record() -> OutputRecord {
        let content = Some(RecordedContent::from_text(b"text"));
        let files = [("b/c", content), ("a", None)]
            .map(|(name, content)| RecordedFile { name: name.into(), content });
        OutputRecord {
            step: Some(7),
            dtype: Some("bfloat16".into()),
            ..GATHER_RECORD_KIND.make_record(files.into())
        }
    }

    #[test]
    fn a_written_record_is_read_and_every_changed_byte_is_detected() {
        let dir = tempfile::tempdir().expect("a directory");
        GATHER_RECORD_KIND.write_record(dir.path(), make_record()).expect("written");
        let directory = Directory::open(dir.path()).expect("exists");
        let record = GATHER_RECORD_KIND.read_record(&directory).expect("sound").expect("exists");
        assert_eq!((record.step, record.tokens, record.version), (Some(7), None, RECORD_VERSION));
        assert_eq!(record.list_recorded_entries().into_iter().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(record.files, make_record().files.into_iter().rev().collect::<Vec<_>>());
        assert!(CONVERT_RECORD_KIND.read_record(&directory).expect("no file").is_none());
        let text = std::fs::read(dir.path().join(GATHER_RECORD_KIND.file)).expect("there");
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut flipped = text.clone();
                flipped[at] ^= 1 << bit;
                let found = GATHER_RECORD_KIND.parse_record(&mut flipped);
                assert!(!matches!(found, Ok(Some(_))), "bit {bit} of byte {at}: {found:?}");
            }
        }
    }

    #[test]
    fn a_record_of_names_is_read_and_invalid_records_are_rejected() {
        let parse = |text: &str| GATHER_RECORD_KIND.parse_record(&mut text.as_bytes().to_vec());
        let old =
            parse(r#"{"format": "launch gathered weights", "program": "launch 0.1", "files": ["a", "b"]}"#);
        let old = old.expect("valid").expect("of this kind");
        assert_eq!(
            old.files.iter().map(|f| (f.name.as_str(), f.content)).collect::<Vec<_>>(),
            [("a", None), ("b", None)]
        );
        assert_eq!(parse(r#"{"format": "another", "files": []}"#), Ok(None));
        for (text, reason) in [
            (r#"{"format": "launch gathered weights", "version": 2, "files": []}"#, "BLAKE3"),
            (r#"{"format": "launch gathered weights", "version": 3, "files": []}"#, "newer than 2"),
            (r#"{"format": "launch gathered weights", "files": [1]}"#, "a file name"),
            (r#"{"format": "launch gathered weights", "files": [[["a"]]]}"#, "a file name"),
            (r#"{"format": "launch gathered weights"}"#, "missing field"),
            ("[]", "not an object"),
        ] {
            let found = parse(text).expect_err(text).to_string();
            assert!(found.contains(reason), "{text}: {found}");
        }
    }

    #[test]
    fn a_copy_gets_hashes_of_new_files_and_keeps_those_of_damaged_ones() {
        let dir = tempfile::tempdir().expect("a directory");
        let (original, copy) = (dir.path().join("original"), dir.path().join("copy"));
        let names = ["linked", "damaged", "replaced", "removed", "restored"];
        for directory in [&original, &copy] {
            std::fs::create_dir(directory).expect("made");
            names.iter().for_each(|n| std::fs::write(directory.join(n), n).expect("written"));
        }
        let content = |n: &str| Some(RecordedContent::from_text(n.as_bytes()));
        let file = |n: &str, content| RecordedFile { name: n.into(), content };
        let mut files: Vec<RecordedFile> = names.iter().map(|n| file(n, content(n))).collect();
        files.push(file("lost", content("lost")));
        files.push(file("no hash", None));
        CONVERT_RECORD_KIND.write_record(&copy, CONVERT_RECORD_KIND.make_record(files)).expect("written");
        std::fs::remove_file(copy.join("removed")).expect("removed");
        for directory in [&original, &copy] {
            std::fs::write(directory.join("damaged"), "DAMAGED").expect("written");
        }
        for name in ["replaced", "restored", "new"] {
            std::fs::write(copy.join(name), "NEW").expect("written");
        }
        update_file_lists_of_modified_copy(&copy, &original, &["restored".to_owned()].into())
            .expect("updated");
        let record = CONVERT_RECORD_KIND.read_record(&Directory::open(&copy).expect("exists"));
        let expected = [
            file("damaged", content("damaged")),
            file("linked", content("linked")),
            file("lost", content("lost")),
            file("new", content("NEW")),
            file("no hash", None),
            file("replaced", content("NEW")),
            file("restored", content("restored")),
        ];
        assert_eq!(record.expect("sound").expect("exists").files, expected);
    }
}
