//! `train.data`: the text, the tokenizer, and the division of tokens into samples.
use super::{
    data_sources::{DataSource, decode_sources},
    decode::{JobDecoder, JobSection},
    readers::{int32_reader, number_reader, read_boolean, read_text},
    sections::read_path,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// `train.data`: the text, the tokenizer, and the division of tokens into samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSpec {
    /// The data sources, at least one. The source that `data.files` defines has no name.
    pub sources: Vec<DataSource>,
    /// The file of a Jinja template for chats, relative to the workdir; `None` for the template of
    /// the tokenizer.
    pub chat_template: Option<PathBuf>,
    /// The tokenizer that converts the text to tokens.
    pub tokenizer: TokenizerSpec,
    /// The number of target tokens per sample.
    pub seq_len: u32,
    /// Whether a sample may hold several documents, which do not attend to each other. Otherwise a
    /// sample holds one document or a part of one.
    pub pack: bool,
    /// Whether samples are read in a random order, which `seed` determines.
    pub shuffle: bool,
    /// The share of the documents that are excluded from training, from 0 to below 1. If
    /// `train.eval` names no files, evaluations use these documents.
    pub held_out: f64,
    /// The directory in which token caches are stored.
    pub cache: PathBuf,
}

/// `train.data.tokenizer`: the tokenizer of the training text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenizerSpec {
    /// The built-in byte tokenizer. Tokens are byte values, and token 256 is the end of a document.
    Bytes,
    /// The tokenizer.json of Hugging Face at this path.
    File(PathBuf),
}

/// Decodes the section `train.data`. `from` is the directory of the pretrained model, whose
/// tokenizer is the default.
pub(super) fn decode_data(d: &mut JobDecoder, train: &JobSection<'_>, from: Option<&Path>) -> DataSpec {
    let t = d.open_section(train, "train.data");
    DataSpec {
        sources: decode_sources(d, &t),
        chat_template: d.decode_optional(&t, "train.data.chat_template", read_path),
        tokenizer: decode_tokenizer(d, &t, from),
        seq_len: d.decode_value(&t, "train.data.seq_len", int32_reader(1..=1 << 20)),
        pack: d.decode_value(&t, "train.data.pack", read_boolean),
        shuffle: d.decode_value(&t, "train.data.shuffle", read_boolean),
        held_out: d.decode_value(
            &t,
            "train.data.held_out",
            number_reader("a number from 0 to below 1", |x| (0.0..1.0).contains(&x)),
        ),
        cache: d.decode_value(&t, "train.data.cache", read_path),
    }
}

/// Decodes `train.data.tokenizer`. The default is tokenizer.json in the directory `from`. Without
/// `from`, the default is the byte tokenizer.
fn decode_tokenizer(d: &mut JobDecoder, data: &JobSection<'_>, from: Option<&Path>) -> TokenizerSpec {
    let given = d.decode_optional(data, "train.data.tokenizer", |node| {
        Ok(match read_text(node)?.as_str() {
            "bytes" => TokenizerSpec::Bytes,
            path => TokenizerSpec::File(path.into()),
        })
    });
    let default = || {
        from.map_or(TokenizerSpec::Bytes, |directory| TokenizerSpec::File(directory.join("tokenizer.json")))
    };
    given.unwrap_or_else(default)
}
