//! Training data: files are read as documents, documents are tokenized into a cached token stream,
//! and the stream is cut into samples of `seq_len` inputs with labels.
//!
//! Every step is a pure function of the job and the contents of the files. A [`Dataset`] is the
//! same in every process that opens it, and [`SampleOrder`] assigns a sample to each position of
//! the run. The number of consumed samples is therefore the whole data cursor of a checkpoint.
mod byte_tokenizer;
mod cache_builder;
mod chat_template;
mod content_digests;
mod dataset;
mod document_reader;
mod epoch_permutation;
mod error;
mod file_patterns;
mod json_lines;
mod mixture;
mod packer;
mod parquet_reader;
mod preflight;
mod record;
mod token_cache;
mod tokenizer;

pub use dataset::Dataset;
pub use document_reader::Split;
pub use error::{
    CacheDamage, CacheOperation, ChatProblem, ChatTemplateProblem, DataError, ParquetProblem, PatternProblem,
    RecordPosition, RecordProblem, TemplateFailure, TextFileProblem, TokenizerProblem,
};
pub use mixture::SampleOrder;
pub use packer::IGNORE_INDEX;
pub use preflight::{DataEstimate, check_eval_files, check_training_data};
pub use tokenizer::TextTokenizer;

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod tests;
