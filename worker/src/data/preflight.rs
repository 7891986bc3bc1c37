//! Checks the `train.data` section of a job without reading all data, and estimates the size of the
//! data.
use super::{
    dataset, document_reader::RecordReadOptions, error::DataError, file_patterns, first_record::has_record,
    interpreter::SandboxInterpreter, tokenizer::TextTokenizer,
};
use jobspec::{DataSource, DataSpec, RecordFormat, TokenizerSpec};
use sandbox::Confinement;
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Rough number of bytes of English text per token, for estimates.
const BYTES_PER_TOKEN: u64 = 4;
/// The largest number of files per data source whose first record is read before the job starts, to
/// check the data. A job may have millions of files.
const MAX_CHECKED_FILES: usize = 1000;
/// The largest number of invalid files per data source that the check before the start of a job
/// reports.
const MAX_REPORTED_FILES: usize = 4;
/// The time limit for reading the first records of a job's data files before the job starts. A job
/// checks all records when it reads them.
const MAX_CHECK_TIME: Duration = Duration::from_secs(5);

/// The size of the training data, estimated from the sizes of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataEstimate {
    /// Number of files.
    pub files: u64,
    /// Size of all files, in bytes.
    pub bytes: u64,
    /// Estimated number of tokens, held-out share included.
    pub tokens: u64,
    /// Exact vocabulary size of the tokenizer.
    pub vocab_size: u32,
}

/// The result of checking the `train.data` section of a job: the estimated size of the data, and
/// all errors.
#[derive(Debug)]
pub struct DataCheckReport {
    /// The size of the training data. Absent if there are errors in it.
    pub estimate: Option<DataEstimate>,
    /// The errors in the settings, the tokenizer and the training data.
    pub errors: Vec<DataError>,
    /// The errors in the eval files.
    pub eval_errors: Vec<DataError>,
    /// The facilities of the kernel that confine the sandbox process. Absent if the data need no
    /// such process.
    pub confinement: Option<Confinement>,
}

/// Checks the `train.data` section of a job without writing a file, and estimates the size of the
/// training data. Checks the tokenizer, the chat template, and the names, sizes and first records
/// of all files. Reports all errors that are found in this way. Relative paths start at `workdir`.
pub fn check_data(spec: &DataSpec, eval_files: &[String], workdir: &Path) -> DataCheckReport {
    let mut report =
        DataCheckReport { estimate: None, errors: Vec::new(), eval_errors: Vec::new(), confinement: None };
    if let Err(error) = dataset::validate_data_settings(spec) {
        report.errors.push(error);
        return report;
    }
    let interpreter = SandboxInterpreter::new(1);
    let tokenizer = TextTokenizer::open_with_interpreter(&spec.tokenizer, workdir, Arc::clone(&interpreter));
    let tokenizer = tokenizer.map_err(|e| report.errors.push(e)).ok();
    let mut checker = SourceChecker {
        spec,
        workdir,
        interpreter: &interpreter,
        tokenizer: tokenizer.as_ref(),
        deadline: Instant::now() + MAX_CHECK_TIME,
        has_sandbox_failed: false,
    };
    let (mut files, mut bytes) = (0, 0);
    for source in &spec.sources {
        match checker.check_files(source) {
            Ok((f, b)) => (files, bytes) = (files + f, bytes + b),
            Err(errors) => {
                report.errors.extend(errors.into_iter().map(|e| e.with_source_name(&source.name)));
            }
        }
    }
    if !eval_files.is_empty() {
        report.eval_errors = checker.check_eval_files(eval_files);
    }
    report.confinement = interpreter.confinement();
    if let Some(tokenizer) = tokenizer.filter(|_| report.errors.is_empty()) {
        let tokens = match spec.tokenizer {
            TokenizerSpec::Bytes => bytes + files,
            TokenizerSpec::File(_) => bytes / BYTES_PER_TOKEN + files,
        };
        report.estimate = Some(DataEstimate { files, bytes, tokens, vocab_size: tokenizer.vocab_size() });
    }
    report
}

/// Checks the training and evaluation files of a job before it starts, until a time limit after
/// which no further records are read.
struct SourceChecker<'a> {
    spec: &'a DataSpec,
    workdir: &'a Path,
    interpreter: &'a SandboxInterpreter,
    /// The tokenizer. Without one, chats are not checked.
    tokenizer: Option<&'a TextTokenizer>,
    /// The time after which no further records are checked.
    deadline: Instant,
    /// Whether the sandbox process failed. No further records are then checked, because each
    /// failure may take seconds.
    has_sandbox_failed: bool,
}

impl SourceChecker<'_> {
    /// Checks the names, sizes and first records of `files`, the job's separate files for
    /// evaluation (`train.eval.files`), and returns all errors.
    fn check_eval_files(&mut self, files: &[String]) -> Vec<DataError> {
        let source = match dataset::create_eval_source(self.spec, files) {
            Ok(source) => source,
            Err(e) => return vec![e],
        };
        let mut errors = self.check_files(&source).err().unwrap_or_default();
        // The check of the training sources reports errors of the tokenizer and of its template.
        errors.retain(DataError::is_about_data_files);
        errors
    }

    /// Checks the names, sizes and first records of the files of one data source, and returns their
    /// number and total size in bytes.
    fn check_files(&mut self, source: &DataSource) -> Result<(u64, u64), Vec<DataError>> {
        let files = file_patterns::expand_patterns(&source.files, self.workdir).map_err(|e| vec![e])?;
        let size = (files.len() as u64, files.iter().map(|f| f.bytes).sum());
        let chat_template = match (source.format, self.tokenizer) {
            _ if self.has_sandbox_failed => return Ok(size),
            (RecordFormat::Text, _) => None,
            (RecordFormat::Chat, None) => return Ok(size),
            (RecordFormat::Chat, Some(tokenizer)) => {
                let template = dataset::open_chat_template(self.spec, source, tokenizer, self.workdir);
                template.map_err(|e| {
                    self.has_sandbox_failed |= e.is_sandbox_failure();
                    vec![e]
                })?
            }
        };
        let options = RecordReadOptions { field: &source.field, chat_template: chat_template.as_ref() };
        let (mut errors, mut is_empty) = (Vec::new(), files.len() <= MAX_CHECKED_FILES);
        for file in files.iter().filter(|f| f.bytes > 0).take(MAX_CHECKED_FILES) {
            if Instant::now() > self.deadline {
                is_empty = false;
                break;
            }
            match has_record(&file.path, options, self.interpreter) {
                Ok(found) => is_empty &= !found,
                Err(e) => {
                    self.has_sandbox_failed |= e.is_sandbox_failure();
                    errors.push(e);
                }
            }
            if errors.len() == MAX_REPORTED_FILES || self.has_sandbox_failed {
                break;
            }
        }
        if errors.is_empty() && is_empty {
            let path = files[0].path.clone();
            errors.push(DataError::Empty { path, other_files: files.len() - 1 });
        }
        if errors.is_empty() { Ok(size) } else { Err(errors) }
    }
}
