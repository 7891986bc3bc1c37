//! The messages between a process that prepares data and its sandbox process.
use crate::data::{
    error::{ChatTemplateProblem, ParquetProblem, RecordProblem, TemplateFailure, TokenizerProblem},
    split::SplitFilter,
};
use jobspec::LossTargets;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Visitor};
use std::fmt;

/// Name and content of one of the files of a tokenizer, such as tokenizer.json.
pub(crate) type TokenizerFile = (String, String);

/// A request to the sandbox process: load a tokenizer, compile a chat template, or interpret
/// documents or rows.
#[derive(Serialize, Deserialize)]
pub(crate) enum Request<'a> {
    /// Load the tokenizer with these files, of which the first is tokenizer.json. The reply is a
    /// [`TokenizerInfo`], or the name of a file and its problem.
    LoadTokenizer {
        /// Name and content of each file.
        #[serde(borrow)]
        files: Vec<(&'a str, &'a str)>,
    },
    /// Compile a chat template. The reply is `Result<(), TemplateFailure>`.
    CompileTemplate {
        /// The source of the template.
        source: &'a str,
        /// Name and text of the special tokens.
        #[serde(borrow)]
        special_tokens: Vec<(&'a str, &'a str)>,
    },
    /// Interpret documents. The reply has a [`DocumentResult`] for each.
    Documents {
        /// The documents.
        #[serde(borrow)]
        documents: Vec<Document<'a>>,
        /// The options of all documents.
        #[serde(borrow)]
        options: DocumentOptions<'a>,
    },
    /// Open the Parquet file that comes with the request. The reply is `Result<(),
    /// ParquetProblem>`.
    OpenParquet {
        /// The column with the text or the messages.
        field: &'a str,
        /// Whether the rows are chats.
        is_chat: bool,
    },
    /// Read and interpret the next rows of the open Parquet file. The reply is a [`RowsReply`].
    ReadRows {
        /// Largest number of rows to read.
        rows: u64,
        /// The size in bytes of the long row, reported in an earlier reply, that this request has
        /// limits for. Zero if there is none.
        long_row_bytes: usize,
        /// The options of all rows.
        #[serde(borrow)]
        options: DocumentOptions<'a>,
    },
    /// Convert tokens to text. The reply is a [`DecodeTokensReply`].
    DecodeTokens {
        /// The tokens.
        tokens: TokenList,
    },
}

/// A document that the sandbox process is asked to interpret: a text or a chat.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Document<'a> {
    /// Text, which is only tokenized.
    Text(&'a str),
    /// A line of a JSON lines file with a chat.
    ChatLine(&'a str),
}

impl<'a> Document<'a> {
    /// Returns the text of the document, or the line of JSON that contains its chat.
    pub(crate) fn as_str(&self) -> &'a str {
        match self {
            Document::Text(text) | Document::ChatLine(text) => text,
        }
    }
}

/// Options of a request to interpret documents: the field with the text, the tokens that count for
/// the loss, and whether to tokenize or only check.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct DocumentOptions<'a> {
    /// The field or column with the text or the messages.
    pub(crate) field: &'a str,
    /// Which tokens of a chat count for the loss.
    pub(crate) loss_on: LossTargets,
    /// Selects whether chats and rows of the training data, of the held-out data or of both are
    /// accepted.
    pub(crate) filter: SplitFilter,
    /// Whether the texts are tokenized. Otherwise the documents are only checked.
    pub(crate) tokenize: bool,
}

/// The result for one document in a reply of the sandbox process: its tokens, or that it is valid,
/// skipped or invalid, or a tokenizer error.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum DocumentResult {
    /// The tokens of the document, with the bit
    /// [`NO_LOSS_BIT`](crate::data::token_cache::NO_LOSS_BIT) if not all tokens count for the loss.
    Tokens(TokenList),
    /// The document is valid, and tokens were not requested.
    Valid,
    /// The document has no text, or belongs to the other side of the held-out split.
    Skipped,
    /// The document cannot be used.
    Invalid(RecordProblem),
    /// The tokenizer failed, with the message of the library.
    TokenizerFailed(String),
}

/// The reply of the sandbox process to a request for rows of a Parquet file, with one result per
/// row.
#[derive(Serialize, Deserialize)]
pub(crate) struct RowsReply {
    /// The result of each row. A row that cannot be used is the last one.
    pub(crate) rows: Vec<DocumentResult>,
    /// Whether the file has no further rows, or cannot be read any further.
    pub(crate) at_end: bool,
    /// The size in bytes of the next row if the row is so long that it needs a request with limits
    /// for its size.
    pub(crate) long_row_bytes: Option<usize>,
}

/// The reply of the sandbox process to a request to open a Parquet file: success, or why the file
/// cannot be used.
pub(crate) type OpenParquetReply = Result<(), ParquetProblem>;
/// The reply of the sandbox process to a request to load a tokenizer: facts about the tokenizer, or
/// the problem of an invalid file.
pub(crate) type LoadTokenizerReply = Result<TokenizerInfo, (String, TokenizerProblem)>;
/// The reply of the sandbox process to a request to compile a chat template: success, or why the
/// template is invalid.
pub(crate) type CompileTemplateReply = Result<(), TemplateFailure>;

/// The reply of the sandbox process to a request to convert tokens to text: the text, or the
/// tokenizer's error message.
#[derive(Serialize, Deserialize)]
pub(crate) enum DecodeTokensReply {
    /// The text of the tokens.
    Text(String),
    /// The tokenizer failed, with the message of the library.
    Failed(String),
}

/// What the sandbox process reports about a tokenizer that it loaded: vocabulary size, special
/// tokens and chat template.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TokenizerInfo {
    /// The vocabulary size. Every token id is less than this size.
    pub(crate) vocab_size: u32,
    /// The id of the end-of-document token.
    pub(crate) eod: u32,
    /// The text of the end-of-document token.
    pub(crate) eod_text: String,
    /// Name and text of each special token that chat templates may use, such as `eos_token`.
    pub(crate) special_tokens: Vec<(String, String)>,
    /// The chat template of the tokenizer as the name of its file and its source.
    pub(crate) chat_template: Result<Option<(String, String)>, ChatTemplateProblem>,
}

/// A list of token ids that is serialized as one string of bytes (four per token), not as a list of
/// numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenList(pub(crate) Vec<u32>);

impl Serialize for TokenList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Both processes run on the same machine.
        serializer.serialize_bytes(bytemuck::cast_slice(&self.0))
    }
}

impl<'de> Deserialize<'de> for TokenList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(TokenListVisitor)
    }
}

/// A serde visitor that deserializes a byte string as a list of tokens.
struct TokenListVisitor;

impl Visitor<'_> for TokenListVisitor {
    type Value = TokenList;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("tokens of 4 bytes each")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<TokenList, E> {
        let (tokens, []) = bytes.as_chunks::<4>() else {
            return Err(E::custom("the last token is incomplete"));
        };
        Ok(TokenList(tokens.iter().map(|token| u32::from_ne_bytes(*token)).collect()))
    }
}
