//! The keys of job.yaml that errors in the data are about.

/// The key of the data files: the subject of errors in records and files.
pub(crate) const FILES_KEY: &str = "train.data.files";
/// The key of the tokenizer.
pub(crate) const TOKENIZER_KEY: &str = "train.data.tokenizer";
/// The key of the chat template.
pub(crate) const CHAT_TEMPLATE_KEY: &str = "train.data.chat_template";
/// The key of the length of a sample, in tokens.
pub(crate) const SEQUENCE_LENGTH_KEY: &str = "train.data.seq_len";
/// The key of the held-out share.
pub(crate) const HELD_OUT_KEY: &str = "train.data.held_out";
/// The key of the directory of the token cache.
pub(crate) const CACHE_KEY: &str = "train.data.cache";
