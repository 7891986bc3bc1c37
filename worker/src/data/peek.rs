//! What can be known of the data without reading all of it: for the plan.
use super::{
    documents::{Reading, has_record},
    error::DataError,
    files,
    tokenize::TextTokenizer,
};
use contract::job::{DataSource, DataSpec, Format, Tokenizer};
use std::path::Path;

/// Bytes of English text per token of a usual vocabulary, about.
const BYTES_PER_TOKEN: u64 = 4;
/// Files of a source whose first records are looked at; a job may have millions.
const LOOKED_AT: usize = 1000;
/// Faults of one source's files that are told.
const TOLD: usize = 4;

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

/// Looks at names, sizes and first records of the sources' files and loads the tokenizer and the chat template; writes nothing. Errors are
/// those that opening the data would meet, all that can be seen so.
pub fn estimate(spec: &DataSpec, workdir: &Path) -> Result<DataFacts, Vec<DataError>> {
    super::check_settings(spec).map_err(|e| vec![e])?;
    let mut faults = Vec::new();
    let tokenizer = TextTokenizer::open(&spec.tokenizer, workdir);
    let tokenizer = tokenizer.map_err(|e| faults.push(e)).ok();
    let (mut files, mut bytes) = (0, 0);
    for source in &spec.sources {
        match look(spec, source, tokenizer.as_ref(), workdir) {
            Ok((f, b)) => (files, bytes) = (files + f, bytes + b),
            Err(of) => faults.extend(of.into_iter().map(|e| e.of_source(&source.name))),
        }
    }
    let Some(tokenizer) = tokenizer.filter(|_| faults.is_empty()) else { return Err(faults) };
    let tokens = match spec.tokenizer {
        Tokenizer::Bytes => bytes + files,
        Tokenizer::File(_) => bytes / BYTES_PER_TOKEN + files,
    };
    Ok(DataFacts { files, bytes, tokens, vocab_size: tokenizer.vocab_size() })
}

/// The same of `eval.files`: what is wrong with them.
pub fn look_at_held_out(spec: &DataSpec, files: &[String], workdir: &Path) -> Vec<DataError> {
    let source = match super::eval_source(spec, files) {
        Ok(source) => source,
        Err(e) => return vec![e],
    };
    let tokenizer = match source.format {
        Format::Text => None,
        Format::Chat => TextTokenizer::open(&spec.tokenizer, workdir).ok(),
    };
    let mut faults = look(spec, &source, tokenizer.as_ref(), workdir).err().unwrap_or_default();
    // What is wrong with the tokenizer or its template is said of the sources.
    faults.retain(|e| e.key() == "train.data.files");
    faults
}

/// Number and bytes of a source's files. Without a tokenizer chats are not looked at.
fn look(
    spec: &DataSpec,
    source: &DataSource,
    tokenizer: Option<&TextTokenizer>,
    workdir: &Path,
) -> Result<(u64, u64), Vec<DataError>> {
    let files = files::expand(&source.files, workdir).map_err(|e| vec![e])?;
    let counted = (files.len() as u64, files.iter().map(|f| f.bytes).sum());
    let chat = match (source.format, tokenizer) {
        (Format::Text, _) => None,
        (Format::Chat, None) => return Ok(counted),
        (Format::Chat, Some(t)) => super::chat_template(spec, source, t, workdir).map_err(|e| vec![e])?,
    };
    let reading = Reading { field: &source.field, chat: chat.as_ref() };
    let (mut faults, mut empty) = (Vec::new(), true);
    for file in files.iter().filter(|f| f.bytes > 0).take(LOOKED_AT) {
        match has_record(&file.path, reading) {
            Ok(found) => empty &= !found,
            Err(e) => faults.push(e),
        }
        if faults.len() == TOLD {
            break;
        }
    }
    if faults.is_empty() && empty && files.len() <= LOOKED_AT {
        let path = files[0].path.clone();
        faults.push(DataError::Empty { path, more: files.len() - 1 });
    }
    if faults.is_empty() { Ok(counted) } else { Err(faults) }
}
