//! [`GpuCheckReport`]: all results of a run of `launch gpu-check`, in the form of the JSON file
//! that the user requests by `--json`.
use super::message::{ResultRow, RowResult};
use diagnostic::{Diagnostic, codes};
use jobspec::{OutputFile, resolve_output_file};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::Path,
};

/// The version of the format of the JSON report of `launch gpu-check`.
const FORMAT_VERSION: u32 = 1;
/// The size in bytes of the largest JSON report of `launch gpu-check` that is read.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// All results of one run of `launch gpu-check`, as its JSON file contains them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GpuCheckReport {
    format: u32,
    /// The version of launch.
    launch: String,
    /// Whether the models are very small.
    pub(super) tiny: bool,
    pub(super) seconds: f64,
    pub(super) parts: Vec<PartRecord>,
}

/// The recorded results of one part of the GPU check: its rows of the result table, and further
/// values that only the JSON report contains.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PartRecord {
    pub(super) name: String,
    pub(super) result: RowResult,
    /// When the part started, in seconds after the start of the check.
    pub(super) began_at: f64,
    pub(super) seconds: f64,
    pub(super) rows: Vec<ResultRow>,
    /// Values that the table does not contain, by name.
    #[serde(default)]
    pub(super) details: Map<String, Value>,
    /// The start and the end of the output of the part's process. Empty if the part passed.
    #[serde(default)]
    pub(super) output: Vec<String>,
    /// The last calls that the part's process enqueued on the GPU. Empty if the part passed.
    #[serde(default)]
    pub(super) launches: Vec<String>,
    /// The runs that followed a failure, to find its reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) repeats: Vec<PartRecord>,
}

impl PartRecord {
    /// Creates the record of a part of the GPU check whose process has ended.
    pub(super) fn new(
        name: &str,
        began_at: f64,
        seconds: f64,
        rows: Vec<ResultRow>,
        details: Map<String, Value>,
    ) -> PartRecord {
        let (name, result) = (name.to_owned(), combine_row_results(&rows));
        let (output, launches, repeats) = (Vec::new(), Vec::new(), Vec::new());
        PartRecord { name, result, began_at, seconds, rows, details, output, launches, repeats }
    }

    /// Creates the record of a part of the GPU check that was skipped. `row` contains the reason.
    pub(super) fn new_skipped(name: &str, at: f64, row: ResultRow) -> PartRecord {
        PartRecord::new(name, at, 0.0, vec![row], Map::new())
    }
}

/// Returns the result of a part of the GPU check: failed if any table row failed, otherwise ok if
/// any row is ok, otherwise measured or skipped.
fn combine_row_results(rows: &[ResultRow]) -> RowResult {
    let has = |result| rows.iter().any(|row| row.result == result);
    match () {
        () if has(RowResult::Failed) => RowResult::Failed,
        () if has(RowResult::Ok) => RowResult::Ok,
        () if has(RowResult::Measured) || rows.is_empty() => RowResult::Measured,
        () => RowResult::Skipped,
    }
}

impl GpuCheckReport {
    /// Creates a report of a GPU check that contains no results yet.
    pub(super) fn new(tiny: bool) -> GpuCheckReport {
        let launch = env!("CARGO_PKG_VERSION").to_owned();
        GpuCheckReport { format: FORMAT_VERSION, launch, tiny, seconds: 0.0, parts: Vec::new() }
    }

    /// Returns the recorded results of the part `name` of the GPU check if the part has passed.
    pub(super) fn find_passed_part(&self, name: &str) -> Option<&PartRecord> {
        let is_passed = |part: &&PartRecord| matches!(part.result, RowResult::Ok | RowResult::Measured);
        self.parts.iter().filter(is_passed).find(|part| part.name == name)
    }

    /// Reads the JSON report of an earlier GPU check, to continue that check.
    pub(super) fn read(path: &Path, tiny: bool) -> diagnostic::Result<GpuCheckReport> {
        let fail = |reason: String| {
            let message = format!("cannot continue the check in {}: {reason}", path.display());
            Diagnostic::error(codes::command::USAGE, message).with_subject(path.display().to_string())
        };
        let report: GpuCheckReport = read_report_bytes(path)
            .map_err(|error| fail(error.to_string()))
            .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| fail(error.to_string())))?;
        if report.format != FORMAT_VERSION {
            return Err(fail(format!("format {} is not {FORMAT_VERSION}", report.format)));
        }
        if report.tiny != tiny {
            return Err(fail("one check has --tiny and the other has not".to_owned()));
        }
        Ok(report)
    }

    /// Writes the report of the GPU check to a JSON file, whose previous content is replaced
    /// atomically.
    pub(super) fn write(&self, path: &Path) -> diagnostic::Result<()> {
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        bytes.push(b'\n');
        replace_file_atomically(path, &bytes).map_err(|error| {
            let message = format!("cannot write {}: {error}", path.display());
            Diagnostic::error(codes::command::OUTPUT_FAILED, message).with_subject(path.display().to_string())
        })
    }
}

/// Reads the JSON report of an earlier GPU check, and fails if it is larger than
/// [`MAX_FILE_BYTES`].
fn read_report_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("the file has more than {} MiB", MAX_FILE_BYTES >> 20)));
    }
    Ok(bytes)
}

/// Writes `bytes` to a new file and renames it to `path`, so that the file at `path` has its old or
/// its new content after a crash or power loss. A device or a pipe, such as `/dev/stdout`, is
/// written to, and not replaced by a file. Links of this user or of root are followed to the file.
/// Links of other users are replaced.
fn replace_file_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let path = match resolve_output_file(path)? {
        OutputFile::Replaced(path) => path,
        OutputFile::WrittenInPlace(path) => {
            return OpenOptions::new().write(true).truncate(true).open(path)?.write_all(bytes);
        }
    };
    let mut name = path.file_name().map(OsString::from).unwrap_or_default();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    let written = File::create(&new)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&new, &path));
    if written.is_err() {
        // The error of writing is more important than that of removing.
        let _ = fs::remove_file(&new);
    }
    written?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a report with a part that passed and one that failed.
    fn create_report() -> GpuCheckReport {
        let mut report = GpuCheckReport::new(true);
        let passed = ResultRow { result: RowResult::Ok, ..ResultRow::measured("add", "", Value::Null) };
        for (name, row) in [("ops/a", passed), ("ops/b", ResultRow::failed("add", "a reason"))] {
            report.parts.push(PartRecord::new(name, 0.5, 1.0, vec![row], Map::new()));
        }
        report.parts.push(PartRecord::new_skipped("ops/c", 2.0, ResultRow::skipped("all", "no time")));
        report
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("report.json");
        for _ in 0..2 {
            create_report().write(&path).expect("written");
        }
        let report = GpuCheckReport::read(&path, true).expect("a report");
        assert_eq!(report.find_passed_part("ops/a").map(|part| part.seconds), Some(1.0));
        // neither failed nor skipped parts count as passed
        assert!(["ops/b", "ops/c", "ops/d"].iter().all(|name| report.find_passed_part(name).is_none()));
        let files = fs::read_dir(directory.path()).expect("a directory").count();
        assert_eq!(files, 1, "no temporary file remains");
        let error = create_report().write(&directory.path().join("no/report.json"));
        assert_eq!(error.err().map(|error| error.code()), Some(codes::command::OUTPUT_FAILED));
    }

    #[test]
    fn only_links_of_this_user_are_followed() {
        use std::os::unix::fs::{lchown, symlink};
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        symlink("target", path("link")).expect("a link");
        create_report().write(&path("link")).expect("written");
        GpuCheckReport::read(&path("target"), true).expect("the target of the link");
        assert!(fs::symlink_metadata(path("link")).expect("a link").is_symlink());
        // Only root can give a link to another user.
        if nix::unistd::geteuid().is_root() {
            fs::write(path("target"), "other content").expect("written");
            lchown(path("link"), Some(65_534), None).expect("given away");
            create_report().write(&path("link")).expect("written");
            assert_eq!(fs::read_to_string(path("target")).expect("a file"), "other content");
            assert!(fs::symlink_metadata(path("link")).expect("a file").is_file());
        }
    }

    #[test]
    fn invalid_reports_are_rejected() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("report.json");
        assert!(GpuCheckReport::read(&path, true).is_err(), "no file");
        create_report().write(&path).expect("written");
        assert!(GpuCheckReport::read(&path, false).is_err(), "another size of models");
        let text = fs::read_to_string(&path).expect("a report");
        for wrong in [
            text.replace("\"format\": 1", "\"format\": 2"),
            text.replace("\"ok\"", "\"good\""),
            text[..50].to_owned(),
        ] {
            fs::write(&path, wrong).expect("written");
            let error = GpuCheckReport::read(&path, true).err().map(|error| error.code());
            assert_eq!(error, Some(codes::command::USAGE));
        }
    }
}
