//! Checks the data section of a job without reading all data, and estimates the size of the data.
use super::{
    dataset, document_reader::has_record, error::DataError, file_patterns, record::RecordReadOptions,
    tokenizer::TextTokenizer,
};
use jobspec::{DataSource, DataSpec, RecordFormat, TokenizerSpec};
use std::path::Path;

/// Average number of bytes of English text per token, roughly.
const BYTES_PER_TOKEN: u64 = 4;
/// Largest number of files per source of which the first record is checked. A job may have millions
/// of files.
const FILES_CHECKED: usize = 1000;
/// Largest number of invalid files per source that are reported.
const FILES_REPORTED: usize = 4;

/// The size of the training data, estimated from the sizes of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataEstimate {
    /// Number of files.
    pub files: u64,
    /// Size of all files, bytes.
    pub bytes: u64,
    /// Estimated number of tokens, held-out share included.
    pub tokens: u64,
    /// Exact vocabulary size of the tokenizer.
    pub vocab_size: u32,
}

/// Checks the tokenizer, the chat template, and the names, sizes and first records of the files of
/// every source. Then estimates the size of the data. Writes no file. Returns all errors that are
/// found without reading all records.
pub fn check_and_estimate_data(spec: &DataSpec, workdir: &Path) -> Result<DataEstimate, Vec<DataError>> {
    dataset::validate_data_settings(spec).map_err(|e| vec![e])?;
    let mut errors = Vec::new();
    let tokenizer = TextTokenizer::open(&spec.tokenizer, workdir);
    let tokenizer = tokenizer.map_err(|e| errors.push(e)).ok();
    let (mut files, mut bytes) = (0, 0);
    for source in &spec.sources {
        match check_source_files(spec, source, tokenizer.as_ref(), workdir) {
            Ok((f, b)) => (files, bytes) = (files + f, bytes + b),
            Err(found) => errors.extend(found.into_iter().map(|e| e.with_source_name(&source.name))),
        }
    }
    let Some(tokenizer) = tokenizer.filter(|_| errors.is_empty()) else { return Err(errors) };
    let tokens = match spec.tokenizer {
        TokenizerSpec::Bytes => bytes + files,
        TokenizerSpec::File(_) => bytes / BYTES_PER_TOKEN + files,
    };
    Ok(DataEstimate { files, bytes, tokens, vocab_size: tokenizer.vocab_size() })
}

/// Checks the names, sizes and first records of the files of `train.eval.files`. Returns all errors
/// that are about these files.
pub fn check_eval_files(spec: &DataSpec, files: &[String], workdir: &Path) -> Vec<DataError> {
    let source = match dataset::create_eval_source(spec, files) {
        Ok(source) => source,
        Err(e) => return vec![e],
    };
    let tokenizer = match source.format {
        RecordFormat::Text => None,
        RecordFormat::Chat => TextTokenizer::open(&spec.tokenizer, workdir).ok(),
    };
    let mut errors = check_source_files(spec, &source, tokenizer.as_ref(), workdir).err().unwrap_or_default();
    // The check of the training sources reports errors of the tokenizer and of its template.
    errors.retain(|e| e.job_key() == "train.data.files");
    errors
}

/// Checks the files of one source, and returns their number and size in bytes. Chats are only
/// checked if a tokenizer is given.
fn check_source_files(
    spec: &DataSpec,
    source: &DataSource,
    tokenizer: Option<&TextTokenizer>,
    workdir: &Path,
) -> Result<(u64, u64), Vec<DataError>> {
    let files = file_patterns::expand_patterns(&source.files, workdir).map_err(|e| vec![e])?;
    let size = (files.len() as u64, files.iter().map(|f| f.bytes).sum());
    let chat_template = match (source.format, tokenizer) {
        (RecordFormat::Text, _) => None,
        (RecordFormat::Chat, None) => return Ok(size),
        (RecordFormat::Chat, Some(tokenizer)) => {
            dataset::open_chat_template(spec, source, tokenizer, workdir).map_err(|e| vec![e])?
        }
    };
    let format = RecordReadOptions { field: &source.field, chat_template: chat_template.as_ref() };
    let (mut errors, mut is_empty) = (Vec::new(), true);
    for file in files.iter().filter(|f| f.bytes > 0).take(FILES_CHECKED) {
        match has_record(&file.path, format) {
            Ok(found) => is_empty &= !found,
            Err(e) => errors.push(e),
        }
        if errors.len() == FILES_REPORTED {
            break;
        }
    }
    if errors.is_empty() && is_empty && files.len() <= FILES_CHECKED {
        let path = files[0].path.clone();
        errors.push(DataError::Empty { path, other_files: files.len() - 1 });
    }
    if errors.is_empty() { Ok(size) } else { Err(errors) }
}
