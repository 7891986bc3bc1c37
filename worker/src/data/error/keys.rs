//! Names of the keys of job.yaml to which errors about training data refer, such as
//! `train.data.files`.

/// The key of job.yaml that lists the data files, as shown in errors about data files and their
/// records.
pub(crate) const FILES_KEY: &str = "train.data.files";
/// The key of job.yaml that names the tokenizer, as shown in errors about tokenizer files.
pub(crate) const TOKENIZER_KEY: &str = "train.data.tokenizer";
/// The key of job.yaml that names the chat template, as shown in errors about chat templates.
pub(crate) const CHAT_TEMPLATE_KEY: &str = "train.data.chat_template";
/// The key of job.yaml for the length of a sample, in tokens.
pub(crate) const SEQUENCE_LENGTH_KEY: &str = "train.data.seq_len";
/// The key of job.yaml for the share of the data that is held out for evaluation.
pub(crate) const HELD_OUT_KEY: &str = "train.data.held_out";
/// The key of job.yaml for the directory of the token cache.
pub(crate) const CACHE_KEY: &str = "train.data.cache";
