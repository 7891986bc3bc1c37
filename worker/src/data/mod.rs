//! Training data: files are read as documents, documents are tokenized into a cached token stream,
//! and the stream is cut into samples of `seq_len` inputs with labels.
//!
//! All of these conversions are pure functions of the job and the contents of the files, so every
//! process that opens a [`Dataset`] gets equal samples. [`SampleOrder`] assigns a sample to each
//! position of the run. The number of consumed samples is therefore the whole data cursor of a
//! checkpoint.
mod byte_tokenizer;
mod chat_template;
mod content_digests;
mod dataset;
mod document_reader;
mod epoch_permutation;
mod error;
mod file_patterns;
mod json_lines;
mod loss_masked_text;
mod mixture;
mod packer;
mod parquet_reader;
mod preflight;
mod record;
mod split;
mod token_cache;
mod token_cache_builder;
mod tokenizer;

pub use dataset::Dataset;
pub use error::{
    CacheDamage, CacheOperation, ChatProblem, ChatTemplateProblem, DataError, ParquetProblem, PatternProblem,
    RecordPosition, RecordProblem, TemplateFailure, TextFileError, TokenizerProblem,
};
pub use mixture::SampleOrder;
pub use packer::IGNORE_INDEX;
pub use preflight::{DataEstimate, check_and_estimate_data, check_eval_files};
pub use split::Split;
pub use tokenizer::TextTokenizer;

#[cfg(test)]
mod chat_and_parquet_golden_tests;
#[cfg(test)]
mod dataset_tests;
