//! [`TextTokenizer`]: converts text to token ids and back.
//!
//! Documents are encoded without the post-processing of tokenizer.json, so without a BOS token. One
//! end-of-document token follows each document in the token stream. The texts of special tokens are
//! encoded as special tokens, which is the default of `transformers` and necessary for rendered
//! chats. Document boundaries do not depend on special tokens.
use super::{
    byte_tokenizer::{self, TOKENIZER_CONFIG_FILE},
    error::{ChatTemplateProblem, DataError, TextFileError, TokenizerProblem},
    loss_masked_text::LossMaskedText,
    token_cache::NO_LOSS_BIT,
};
use jobspec::TokenizerSpec;
use serde_json::Value;
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Largest tokenizer.json, bytes.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Largest companion file, bytes. Companion files may contain chat templates.
const MAX_COMPANION_BYTES: u64 = 16 << 20;
/// Largest vocabulary size.
const MAX_VOCAB_SIZE: u32 = 1 << 24;
/// The companion file with the chat template.
const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";
/// Names of the companion files, which are in the directory of the tokenizer.json.
const COMPANION_FILES: [&str; 3] = [TOKENIZER_CONFIG_FILE, "special_tokens_map.json", CHAT_TEMPLATE_FILE];
/// Texts of special tokens that usually end a document, in order of preference. The first one that
/// the tokenizer has is used if no companion file names an end-of-sequence token.
const KNOWN_EOD_TOKENS: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
];

/// The tokenizer of a job: embedded or from a file.
pub enum TextTokenizer {
    /// The embedded tokenizer: 256 byte values and one end-of-document token.
    Bytes,
    /// A Hugging Face tokenizer.json.
    File(Box<FileTokenizer>),
}

/// A tokenizer that was loaded from a Hugging Face tokenizer.json and its companion files.
pub struct FileTokenizer {
    inner: tokenizers::Tokenizer,
    /// The id of the end-of-document token.
    eod: u32,
    /// The text of the end-of-document token.
    eod_text: String,
    vocab_size: u32,
    /// Name and content of tokenizer.json and of the companion files that exist, in this order.
    files: Vec<(String, String)>,
}

impl TextTokenizer {
    /// Loads the tokenizer of a job. A relative path starts at `workdir`.
    ///
    /// The end-of-document token is the `eos_token` of tokenizer_config.json in the same directory,
    /// otherwise the `eos_token` of special_tokens_map.json. If neither file names one, the first
    /// of a list of well-known tokens is used that is a special token of the tokenizer.
    pub fn open(spec: &TokenizerSpec, workdir: &Path) -> Result<Self, DataError> {
        let TokenizerSpec::File(path) = spec else { return Ok(TextTokenizer::Bytes) };
        let path = workdir.join(path);
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path };
        FileTokenizer::open(&path).map(|t| TextTokenizer::File(Box::new(t)))
    }

    /// Returns the vocabulary size. Every token id is less than this size.
    pub fn vocab_size(&self) -> u32 {
        match self {
            TextTokenizer::Bytes => byte_tokenizer::VOCAB_SIZE,
            TextTokenizer::File(t) => t.vocab_size,
        }
    }

    /// Returns the id of the end-of-document token.
    pub fn eod(&self) -> u32 {
        match self {
            TextTokenizer::Bytes => byte_tokenizer::EOD_TOKEN,
            TextTokenizer::File(t) => t.eod,
        }
    }

    /// Appends the tokens of a text to `out`, without an end-of-document token.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), DataError> {
        match self {
            TextTokenizer::Bytes => out.extend(text.bytes().map(u32::from)),
            TextTokenizer::File(t) => {
                let encoding = t.inner.encode_fast(text, false).map_err(tokenizer_failed_error)?;
                out.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(())
    }

    /// Converts tokens to text. Omits special and unknown tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        match self {
            TextTokenizer::Bytes => {
                let bytes: Vec<u8> = tokens.iter().filter_map(|t| u8::try_from(*t).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            // A model may have more token ids than its tokenizer.
            TextTokenizer::File(t) => {
                let known: Vec<u32> =
                    tokens.iter().copied().filter(|id| t.inner.id_to_token(*id).is_some()).collect();
                t.inner.decode(&known, true).map_err(tokenizer_failed_error)
            }
        }
    }

    /// Appends the tokens of a text to `out`. Sets the bit [`NO_LOSS_BIT`] in tokens that no loss
    /// range overlaps.
    pub(crate) fn encode_masked(&self, masked: &LossMaskedText, out: &mut Vec<u32>) -> Result<(), DataError> {
        let mut loss_ranges = masked.loss_ranges.iter().peekable();
        let mut mask = |token: u32, from: usize, to: usize| {
            while loss_ranges.next_if(|r| r.end <= from).is_some() {}
            let is_target = loss_ranges.peek().is_some_and(|r| r.start < to && from < r.end);
            if is_target { token } else { token | NO_LOSS_BIT }
        };
        match self {
            TextTokenizer::Bytes => {
                out.extend(masked.text.bytes().enumerate().map(|(i, b)| mask(b.into(), i, i + 1)));
            }
            TextTokenizer::File(t) => {
                let encoding = t.inner.encode(masked.text.as_str(), false).map_err(tokenizer_failed_error)?;
                let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
                out.extend(spans.map(|(&token, &(from, to))| mask(token, from, to)));
            }
        }
        Ok(())
    }

    /// Returns the source of the chat template in the tokenizer's directory or configuration, or
    /// `None` if there is no template.
    pub(crate) fn find_chat_template(&self) -> Result<Option<String>, ChatTemplateProblem> {
        let TextTokenizer::File(t) = self else { return Ok(None) };
        if let Some((_, text)) = t.files.iter().find(|(name, _)| name == CHAT_TEMPLATE_FILE) {
            return Ok(Some(text.clone()));
        }
        let Some(config) = t.parse_config() else { return Ok(None) };
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            // Several templates with names, of which the one named `default` is for chats.
            Some(Value::Array(named)) => {
                let default = named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
                let text = default.and_then(|t| t.get("template")).and_then(Value::as_str);
                text.map(|t| Some(t.to_owned()))
                    .ok_or(ChatTemplateProblem::NoDefault { config_file: TOKENIZER_CONFIG_FILE })
            }
            Some(_) => Err(ChatTemplateProblem::NotAString { config_file: TOKENIZER_CONFIG_FILE }),
        }
    }

    /// Returns name and text of each special token in the tokenizer's configuration. Chat templates
    /// use these names, such as `eos_token`.
    pub(crate) fn list_special_tokens(&self) -> Vec<(String, String)> {
        const NAMES: [&str; 5] = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token"];
        let TextTokenizer::File(t) = self else {
            return vec![("eos_token".into(), byte_tokenizer::EOD_TOKEN_TEXT.into())];
        };
        let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
        let config = t.parse_config().unwrap_or_default();
        let configured = NAMES.iter().filter_map(|&n| Some((n.to_owned(), text(config.get(n)?)?)));
        let mut tokens: Vec<(String, String)> = configured.collect();
        if !tokens.iter().any(|(n, _)| n == "eos_token") {
            tokens.push(("eos_token".into(), t.eod_text.clone()));
        }
        tokens
    }

    /// Computes the digest of the tokenizer. Tokenizers with equal digests encode equal texts
    /// equally.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 tokenizer v1");
        match self {
            TextTokenizer::Bytes => hasher.update(b"bytes"),
            TextTokenizer::File(t) => {
                hasher.update(b"file").update(&t.eod.to_le_bytes()).update(t.files[0].1.as_bytes())
            }
        };
        *hasher.finalize().as_bytes()
    }

    /// Returns name and content of the files with which
    /// `transformers.AutoTokenizer.from_pretrained` loads this tokenizer from a model directory.
    pub fn build_hf_files(&self) -> Vec<(String, String)> {
        match self {
            TextTokenizer::Bytes => byte_tokenizer::build_hf_tokenizer_files(),
            TextTokenizer::File(t) => {
                let mut files = t.files.clone();
                if !files.iter().any(|(name, _)| name == TOKENIZER_CONFIG_FILE) {
                    files.push((
                        TOKENIZER_CONFIG_FILE.into(),
                        byte_tokenizer::build_minimal_tokenizer_config(&t.eod_text),
                    ));
                }
                files
            }
        }
    }
}

/// Builds the error of the `tokenizers` library that failed on a text or on token ids.
fn tokenizer_failed_error(source: tokenizers::Error) -> DataError {
    DataError::TokenizerFailed { source }
}

/// Builds the error of the tokenizer's file at `path`, which cannot be used.
fn invalid_tokenizer_error(path: &Path, problem: TokenizerProblem) -> DataError {
    DataError::InvalidTokenizer { path: path.to_path_buf(), problem }
}

impl FileTokenizer {
    /// Parses the content of tokenizer_config.json. Returns `None` if the file does not exist.
    fn parse_config(&self) -> Option<Value> {
        let (_, text) = self.files.iter().find(|(name, _)| name == TOKENIZER_CONFIG_FILE)?;
        serde_json::from_str(text).ok()
    }

    /// Loads a tokenizer.json and its companion files.
    fn open(path: &Path) -> Result<Self, DataError> {
        let invalid = |problem| invalid_tokenizer_error(path, problem);
        let text = read_tokenizer_file(path, MAX_TOKENIZER_BYTES)?
            .ok_or_else(|| invalid(TokenizerProblem::FileMissing))?;
        let parse_error = |e| invalid(TokenizerProblem::InvalidTokenizerJson(e));
        let mut inner = tokenizers::Tokenizer::from_bytes(&text).map_err(parse_error)?;
        // Documents are encoded completely, whatever truncation the file sets.
        inner.with_truncation(None).map_err(parse_error)?;
        inner.with_padding(None);
        let mut files = vec![("tokenizer.json".to_string(), text)];
        for name in COMPANION_FILES {
            if let Some(text) = read_tokenizer_file(&path.with_file_name(name), MAX_COMPANION_BYTES)? {
                files.push((name.into(), text));
            }
        }
        let (eod_text, eod) = find_eod_token(&inner, path, &files[1..])?;
        // Ids may have gaps. The vocabulary size is what an embedding needs, not the number of
        // entries.
        let last = inner.get_vocab(true).into_values().max().unwrap_or(0);
        let vocab_size = last.checked_add(1).filter(|&n| n <= MAX_VOCAB_SIZE);
        let vocab_size = vocab_size
            .ok_or_else(|| invalid(TokenizerProblem::TokenIdTooLarge { id: last, limit: MAX_VOCAB_SIZE }))?;
        Ok(FileTokenizer { inner, eod, eod_text, vocab_size, files })
    }
}

/// Reads a file of a tokenizer. Returns `None` if the file does not exist. Fails if the file has
/// more than `limit` bytes.
fn read_tokenizer_file(path: &Path, limit: u64) -> Result<Option<String>, DataError> {
    read_text_file(path, limit)
        .map_err(|problem| invalid_tokenizer_error(path, TokenizerProblem::FileUnreadable(problem)))
}

/// Reads a UTF-8 file. Returns `None` if the file does not exist. Fails if the file has more than
/// `limit` bytes.
pub(crate) fn read_text_file(path: &Path, limit: u64) -> Result<Option<String>, TextFileError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(TextFileError::Io(e)),
    };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(TextFileError::Io)?;
    if bytes.len() as u64 > limit {
        return Err(TextFileError::TooLarge { limit });
    }
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|e| TextFileError::NotUtf8 { offset: e.utf8_error().valid_up_to() })
}

/// Finds the text and the id of the end-of-document token. `path` is the path of tokenizer.json,
/// and `companions` are name and content of the companion files.
fn find_eod_token(
    tokenizer: &tokenizers::Tokenizer,
    path: &Path,
    companions: &[(String, String)],
) -> Result<(String, u32), DataError> {
    for (name, text) in companions.iter().filter(|(name, _)| name.ends_with(".json")) {
        let companion: PathBuf = path.with_file_name(name);
        let value: Value = serde_json::from_str(text)
            .map_err(|e| invalid_tokenizer_error(&companion, TokenizerProblem::InvalidCompanionJson(e)))?;
        // The value is a string, or the object of an added token.
        let eos = value.get("eos_token").and_then(|e| e.as_str().or_else(|| e.get("content")?.as_str()));
        if let Some(eos) = eos {
            let unknown = || TokenizerProblem::EosTokenUnknown {
                eos_token: eos.to_string(),
                tokenizer: path.to_path_buf(),
            };
            let id =
                tokenizer.token_to_id(eos).ok_or_else(|| invalid_tokenizer_error(&companion, unknown()))?;
            return Ok((eos.to_string(), id));
        }
    }
    let added = tokenizer.get_added_tokens_decoder();
    let special = |name: &str| {
        let id = tokenizer.token_to_id(name)?;
        added.get(&id).filter(|t| t.special).map(|_| (name.to_string(), id))
    };
    KNOWN_EOD_TOKENS.iter().find_map(|name| special(name)).ok_or_else(|| {
        let problem = TokenizerProblem::NoEndOfDocument {
            known: &KNOWN_EOD_TOKENS,
            config_file: TOKENIZER_CONFIG_FILE,
        };
        invalid_tokenizer_error(path, problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns a tokenizer.json with the words a, b, c (ids 0, 1, 2), followed by these special
    /// tokens.
    fn build_tokenizer_json(specials: &[&str]) -> String {
        build_tokenizer_json_with_vocab(specials, serde_json::json!({"a": 0, "b": 1, "c": 2}))
    }

    /// Returns a tokenizer.json with these words and special tokens. The special tokens have the
    /// ids from 3. The file also has truncation, padding and post-processing that must be ignored.
    fn build_tokenizer_json_with_vocab(specials: &[&str], vocab: Value) -> String {
        let special = |(i, t)| {
            serde_json::json!({"id": i + 3, "content": t, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let added: Vec<Value> = specials.iter().enumerate().map(special).collect();
        serde_json::json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
            "added_tokens": added, "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}},
            "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "c"}
        })
        .to_string()
    }

    /// Opens the tokenizer in a directory with files of these names and contents.
    fn open_tokenizer_files(files: &[(&str, &str)]) -> Result<TextTokenizer, DataError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        TextTokenizer::open(&TokenizerSpec::File("tokenizer.json".into()), dir.path())
    }

    /// Opens an invalid tokenizer of these files. Returns the name of the invalid file and the
    /// problem. Panics if the tokenizer is valid.
    fn expect_tokenizer_problem(files: &[(&str, &str)]) -> (String, TokenizerProblem) {
        match open_tokenizer_files(files) {
            Err(DataError::InvalidTokenizer { path, problem }) => {
                (path.file_name().unwrap().to_str().unwrap().to_owned(), problem)
            }
            Err(e) => panic!("{e}"),
            Ok(_) => panic!("the tokenizer was opened"),
        }
    }

    #[test]
    fn the_byte_tokenizer_encodes_bytes() {
        let t = TextTokenizer::open(&TokenizerSpec::Bytes, Path::new("/")).unwrap();
        let mut out = vec![7];
        t.encode("aé", &mut out).unwrap();
        assert_eq!(out, [7, 97, 0xc3, 0xa9]);
        assert_eq!((t.vocab_size(), t.eod()), (257, 256));
    }

    #[test]
    fn a_tokenizer_file_encodes_complete_documents_without_post_processing() {
        let json = build_tokenizer_json(&["<eos>", "</s>"]);
        let t = open_tokenizer_files(&[("tokenizer.json", &json)]).unwrap();
        let mut out = Vec::new();
        t.encode("b a b z </s> b", &mut out).unwrap();
        assert_eq!(out, [1, 0, 1, 2, 4, 1]);
        // `</s>` precedes `<eos>` in the list.
        assert_eq!((t.eod(), t.vocab_size()), (4, 5));
        let gaps = build_tokenizer_json_with_vocab(&["</s>"], serde_json::json!({"a": 0, "b": 1, "c": 70}));
        assert_eq!(open_tokenizer_files(&[("tokenizer.json", &gaps)]).unwrap().vocab_size(), 71);
    }

    #[test]
    fn the_eos_token_of_companion_files_has_precedence() {
        let json = build_tokenizer_json(&["<eos>", "</s>", "<end>"]);
        let config = r#"{"eos_token": {"content": "<end>", "special": true}, "model_max_length": 7}"#;
        let map = r#"{"eos_token": "<eos>"}"#;
        let json = ("tokenizer.json", &json[..]);
        let eod = |files: &[(&str, &str)]| open_tokenizer_files(files).unwrap().eod();
        assert_eq!(eod(&[json]), 4);
        assert_eq!(eod(&[json, ("special_tokens_map.json", map)]), 3);
        assert_eq!(eod(&[json, ("special_tokens_map.json", map), (TOKENIZER_CONFIG_FILE, config)]), 5);
        assert_eq!(eod(&[json, (TOKENIZER_CONFIG_FILE, r#"{"eos_token": null}"#)]), 4);
        let with = open_tokenizer_files(&[json, (TOKENIZER_CONFIG_FILE, config)]).unwrap();
        assert_ne!(with.digest(), open_tokenizer_files(&[json]).unwrap().digest());
        assert_eq!(with.build_hf_files()[1], (TOKENIZER_CONFIG_FILE.to_string(), config.to_string()));
        let generated = open_tokenizer_files(&[json]).unwrap().build_hf_files();
        assert!(generated.len() == 2 && generated[1].1.contains("\"eos_token\": \"</s>\""), "{generated:?}");
    }

    #[test]
    fn invalid_tokenizers_are_errors_with_their_problem() {
        let (file, missing) = expect_tokenizer_problem(&[]);
        assert!(matches!(missing, TokenizerProblem::FileMissing), "{missing}");
        assert_eq!(file, "tokenizer.json");
        let (_, invalid) = expect_tokenizer_problem(&[("tokenizer.json", "{}")]);
        assert!(matches!(invalid, TokenizerProblem::InvalidTokenizerJson(_)), "{invalid}");
        let (_, no_eod) = expect_tokenizer_problem(&[("tokenizer.json", &build_tokenizer_json(&["<pad>"]))]);
        assert!(matches!(no_eod, TokenizerProblem::NoEndOfDocument { .. }), "{no_eod}");
        let json = build_tokenizer_json(&["</s>"]);
        let json = ("tokenizer.json", &json[..]);
        let (file, invalid) = expect_tokenizer_problem(&[json, (TOKENIZER_CONFIG_FILE, "{")]);
        assert!(matches!(invalid, TokenizerProblem::InvalidCompanionJson(_)), "{invalid}");
        assert_eq!(file, TOKENIZER_CONFIG_FILE);
        let (file, unknown) =
            expect_tokenizer_problem(&[json, (TOKENIZER_CONFIG_FILE, r#"{"eos_token": "<x>"}"#)]);
        assert!(
            matches!(&unknown, TokenizerProblem::EosTokenUnknown { eos_token, .. } if eos_token == "<x>"),
            "{unknown}"
        );
        assert_eq!(file, TOKENIZER_CONFIG_FILE);
        let far = build_tokenizer_json_with_vocab(
            &["</s>"],
            serde_json::json!({"a": 0, "b": 1, "c": 4_000_000_000u32}),
        );
        let (_, too_large) = expect_tokenizer_problem(&[("tokenizer.json", &far)]);
        assert!(
            matches!(too_large, TokenizerProblem::TokenIdTooLarge { id: 4_000_000_000, .. }),
            "{too_large}"
        );
    }

    #[test]
    fn a_file_that_is_too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let problem = read_text_file(&path, 1000).unwrap_err();
        assert!(matches!(problem, TextFileError::TooLarge { limit: 1000 }), "{problem}");
    }
}
