//! Training data: files are read as documents, documents are tokenized into a cached token stream,
//! and the stream is cut into samples of `seq_len` inputs with labels.
//!
//! All of these conversions are pure functions of the job and the contents of the files, so every
//! process that opens a [`Dataset`] gets equal samples. [`SampleOrder`] assigns a sample to each
//! position of the run. The number of consumed samples is therefore the whole data cursor of a
//! checkpoint.
//!
//! Tokenizers, chat templates and Parquet files are interpreted by libraries, in a sandbox process.
mod byte_tokenizer;
mod chat_record;
mod chat_template;
mod content_digests;
mod dataset;
mod document_reader;
mod document_tokenizer;
mod epoch_permutation;
mod error;
mod file_patterns;
mod first_record;
mod interpreter;
mod json_lines;
mod loss_masked_text;
mod mixture;
mod packer;
mod preflight;
mod split;
mod token_cache;
mod token_cache_builder;
mod tokenizer;
mod tokenizer_files;

pub(crate) use file_patterns::parse_untrusted_pattern;
pub(crate) use interpreter::untrusted::{
    interpret_chat_template, interpret_parquet, interpret_tokenizer, parse_companion,
};
pub(crate) use json_lines::{parse_chat_record, parse_text_record};

pub use dataset::Dataset;
pub use error::{
    ChatProblem, ChatTemplateProblem, DataError, FailedRecord, FilePatternProblem, InterpretationError,
    InterpretationStep, ParquetProblem, RecordPosition, RecordProblem, TemplateFailure, TokenCacheDamage,
    TokenCacheOperation, TokenizerProblem, TokenizerTextFileError,
};
pub use file_patterns::FilePatternCache;
pub use interpreter::SANDBOX_ARGUMENT;
pub use mixture::SampleOrder;
pub use packer::IGNORE_INDEX;
pub use preflight::{DataCheckReport, DataEstimate, check_data};
pub use split::Split;
pub use tokenizer::TextTokenizer;

/// Runs the sandbox process, which interprets tokenizers, chat templates and Parquet files. Returns
/// the exit code of the process.
pub fn run_sandbox() -> u8 {
    sandbox::serve(interpreter::create_request_handler)
}

#[cfg(test)]
mod chat_and_parquet_golden_tests;
#[cfg(test)]
mod dataset_tests;
