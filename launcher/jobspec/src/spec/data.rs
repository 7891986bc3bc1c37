//! `train.data`: the text, the tokenizer, and the division of tokens into samples.
use super::data_source::{DataSource, declare_data_sources};
use crate::keys::{
    job_values::JobValues,
    key::Key,
    numbers::{boolean_type, fraction_type, integer_type},
    section::section,
    text::path_type,
    value_type::{ValueType, in_variant},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

section! {
    /// The training text, the tokenizer, and the division of tokens into samples.
    pub struct DataSpec at "train.data";
    /// The data sources, at least one. The source that `data.files` defines has no name.
    pub sources: Vec<DataSource> = declare_data_sources();
    /// The file with the Jinja template for chats.
    ///
    /// The path is relative to the workdir.
    pub chat_template: Option<PathBuf> = Key::optional(path_type(), "the template of the tokenizer");
    /// The tokenizer; `bytes` has 256 byte values and an end-of-document token.
    pub tokenizer: TokenizerSpec =
        Key::computed(tokenizer_type(), "`bytes`; with `model.from` its tokenizer.json", default_tokenizer);
    /// The number of target tokens of a sample.
    pub seq_len: u32 = Key::new(integer_type(1..=1 << 20), "256");
    /// Fill samples with several documents.
    ///
    /// The documents do not attend to each other. Otherwise a sample holds one document or a part
    /// of one.
    pub pack: bool = Key::new(boolean_type(), "true");
    /// Read samples in random order, which differs in each epoch.
    ///
    /// `seed` determines the order.
    pub shuffle: bool = Key::new(boolean_type(), "true");
    /// The share of the text that is held out for `eval`.
    pub held_out: f64 = Key::new(fraction_type(), "0");
    /// The directory of the token caches; it can be deleted at any time.
    pub cache: PathBuf = Key::new(path_type(), ".launch-cache");
}

/// `train.data.tokenizer`: the tokenizer of the training text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenizerSpec {
    /// The built-in byte tokenizer. Tokens are byte values, and token 256 is the end of a document.
    #[default]
    Bytes,
    /// The tokenizer.json of Hugging Face at this path.
    File(PathBuf),
}

/// Returns the parser and printer ([`ValueType`]) for `train.data.tokenizer`: `bytes` or the path
/// of a tokenizer.json file.
fn tokenizer_type() -> ValueType<TokenizerSpec> {
    in_variant!(path_type().documented_as("path of a tokenizer.json"), TokenizerSpec::File)
        .or_keywords(&[("bytes", TokenizerSpec::Bytes)])
}

/// Returns the default of `train.data.tokenizer`: tokenizer.json of the pretrained model, or the
/// byte tokenizer for a new model.
fn default_tokenizer(_: &DataSpec, values: &JobValues) -> TokenizerSpec {
    match values.get_text("train.model.from") {
        Some(directory) => TokenizerSpec::File(Path::new(&directory).join("tokenizer.json")),
        None => TokenizerSpec::Bytes,
    }
}
