//! What can be known of the data without reading it: for the plan.
use super::{error::DataError, files, tokenize::TextTokenizer};
use contract::job::{DataSpec, Tokenizer};
use std::path::Path;

/// Bytes of English text per token of a usual vocabulary, about.
const BYTES_PER_TOKEN: u64 = 4;

/// What the named files and tokenizer promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFacts {
    pub files: u64,
    pub bytes: u64,
    /// Roughly: from sizes alone, held-out share included.
    pub tokens: u64,
    /// Exactly.
    pub vocab_size: u32,
}

/// Looks at names and sizes of the sources' files and loads the tokenizer and the chat template; writes nothing. Errors are those that opening the data would meet first.
pub fn estimate(spec: &DataSpec, workdir: &Path) -> Result<DataFacts, DataError> {
    super::check_settings(spec)?;
    let tokenizer = TextTokenizer::open(&spec.tokenizer, workdir)?;
    let (mut files, mut bytes) = (0, 0);
    for source in &spec.sources {
        let counted = count_files(&source.files, workdir);
        let (f, b) = counted.map_err(|e| e.of_source(&source.name))?;
        super::chat_template(spec, source, &tokenizer, workdir).map_err(|e| e.of_source(&source.name))?;
        (files, bytes) = (files + f, bytes + b);
    }
    let tokens = match spec.tokenizer {
        Tokenizer::Bytes => bytes + files,
        Tokenizer::File(_) => bytes / BYTES_PER_TOKEN + files,
    };
    Ok(DataFacts { files, bytes, tokens, vocab_size: tokenizer.vocab_size() })
}

/// Number and bytes of the files that patterns match; for `eval.files`.
pub fn count_files(patterns: &[String], workdir: &Path) -> Result<(u64, u64), DataError> {
    let files = files::expand(patterns, workdir)?;
    Ok((files.len() as u64, files.iter().map(|f| f.bytes).sum()))
}
