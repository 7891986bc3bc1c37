//! [`TextTokenizer`]: converts text to token ids and back.
//!
//! Documents are encoded without the tokenizer's own post-processing, that is, without a BOS token.
//! One end-of-document token follows each document in the token stream. Special tokens in a text
//! are encoded as special tokens, which is the default of `transformers`, so that rendered chats
//! keep their meaning. Document boundaries do not depend on them.
use super::{
    byte_tokenizer,
    chat_template::MaskedText,
    error::{ChatTemplateProblem, DataError, TextFileProblem, TokenizerProblem},
    token_cache::NO_LOSS,
};
use contract::job::Tokenizer as TokenizerSpec;
use serde_json::Value;
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Largest tokenizer.json, bytes.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Largest companion file, bytes; it may contain a chat template.
const MAX_COMPANION_BYTES: u64 = 16 << 20;
/// Largest vocabulary size.
const MAX_VOCAB_SIZE: u32 = 1 << 24;
/// The companion file that names the end-of-sequence token.
pub(crate) const CONFIG_FILE: &str = "tokenizer_config.json";
/// The companion file with the chat template.
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Files in the directory of a tokenizer.json that belong to it.
const COMPANION_FILES: [&str; 3] = [CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE];
/// Special tokens that end a document, in order of preference. They are used if no companion file
/// names one.
const EOD_TOKENS: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
];

/// The tokenizer of a job.
pub enum TextTokenizer {
    /// The embedded tokenizer: 256 byte values and one end-of-document token.
    Bytes,
    /// A Hugging Face tokenizer.json.
    File(Box<FileTokenizer>),
}

/// A Hugging Face tokenizer.json with its companion files.
pub struct FileTokenizer {
    inner: tokenizers::Tokenizer,
    /// The end-of-document token.
    eod: u32,
    eod_text: String,
    vocab_size: u32,
    /// Name and content of tokenizer.json, followed by the companion files that exist.
    files: Vec<(String, String)>,
}

impl TextTokenizer {
    /// Loads the tokenizer of a job; a relative path starts at `workdir`.
    ///
    /// The end-of-document token is the `eos_token` of the tokenizer_config.json in the same
    /// directory, otherwise that of special_tokens_map.json, otherwise the first of a list of
    /// well-known tokens that is a special token of the tokenizer.
    pub fn open(spec: &TokenizerSpec, workdir: &Path) -> Result<Self, DataError> {
        let TokenizerSpec::File(path) = spec else { return Ok(TextTokenizer::Bytes) };
        let path = workdir.join(path);
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path };
        FileTokenizer::open(&path).map(|t| TextTokenizer::File(Box::new(t)))
    }

    /// The vocabulary size. Every token id is less than this.
    pub fn vocab_size(&self) -> u32 {
        match self {
            TextTokenizer::Bytes => byte_tokenizer::VOCAB_SIZE,
            TextTokenizer::File(t) => t.vocab_size,
        }
    }

    /// The end-of-document token.
    pub fn eod(&self) -> u32 {
        match self {
            TextTokenizer::Bytes => byte_tokenizer::EOD,
            TextTokenizer::File(t) => t.eod,
        }
    }

    /// Appends the tokens of a text, without an end-of-document token.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), DataError> {
        match self {
            TextTokenizer::Bytes => out.extend(text.bytes().map(u32::from)),
            TextTokenizer::File(t) => {
                let encoding = t.inner.encode_fast(text, false).map_err(tokenizer_failed)?;
                out.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(())
    }

    /// Converts tokens to text. Tokens that stand for no text are left out.
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
                t.inner.decode(&known, true).map_err(tokenizer_failed)
            }
        }
    }

    /// Appends the tokens of a text. Tokens that no loss range overlaps carry [`NO_LOSS`].
    pub(crate) fn encode_masked(&self, masked: &MaskedText, out: &mut Vec<u32>) -> Result<(), DataError> {
        let mut loss_ranges = masked.loss_ranges.iter().peekable();
        let mut mask = |token: u32, from: usize, to: usize| {
            while loss_ranges.next_if(|r| r.end <= from).is_some() {}
            let is_target = loss_ranges.peek().is_some_and(|r| r.start < to && from < r.end);
            if is_target { token } else { token | NO_LOSS }
        };
        match self {
            TextTokenizer::Bytes => {
                out.extend(masked.text.bytes().enumerate().map(|(i, b)| mask(b.into(), i, i + 1)));
            }
            TextTokenizer::File(t) => {
                let encoding = t.inner.encode(masked.text.as_str(), false).map_err(tokenizer_failed)?;
                let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
                out.extend(spans.map(|(&token, &(from, to))| mask(token, from, to)));
            }
        }
        Ok(())
    }

    /// The chat template in the tokenizer's directory or in its configuration, if there is one.
    pub(crate) fn chat_template(&self) -> Result<Option<String>, ChatTemplateProblem> {
        let TextTokenizer::File(t) = self else { return Ok(None) };
        if let Some((_, text)) = t.files.iter().find(|(name, _)| name == TEMPLATE_FILE) {
            return Ok(Some(text.clone()));
        }
        let Some(config) = t.config() else { return Ok(None) };
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            // Several templates with names, of which the one named `default` is for chats.
            Some(Value::Array(named)) => {
                let default = named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
                let text = default.and_then(|t| t.get("template")).and_then(Value::as_str);
                text.map(|t| Some(t.to_owned()))
                    .ok_or(ChatTemplateProblem::NoDefault { config_file: CONFIG_FILE })
            }
            Some(_) => Err(ChatTemplateProblem::NotAString { config_file: CONFIG_FILE }),
        }
    }

    /// Names and texts of the special tokens in the tokenizer's configuration, for chat templates.
    pub(crate) fn special_tokens(&self) -> Vec<(String, String)> {
        const NAMES: [&str; 5] = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token"];
        let TextTokenizer::File(t) = self else {
            return vec![("eos_token".into(), byte_tokenizer::EOD_TEXT.into())];
        };
        let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
        let config = t.config().unwrap_or_default();
        let configured = NAMES.iter().filter_map(|&n| Some((n.to_owned(), text(config.get(n)?)?)));
        let mut tokens: Vec<(String, String)> = configured.collect();
        if !tokens.iter().any(|(n, _)| n == "eos_token") {
            tokens.push(("eos_token".into(), t.eod_text.clone()));
        }
        tokens
    }

    /// The identity of the tokenizer. Tokenizers with equal digests encode equal texts equally.
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

    /// Names and contents of the files with which `transformers.AutoTokenizer.from_pretrained`
    /// loads this tokenizer from a model directory.
    pub fn hf_files(&self) -> Vec<(String, String)> {
        match self {
            TextTokenizer::Bytes => byte_tokenizer::hf_files(),
            TextTokenizer::File(t) => {
                let mut files = t.files.clone();
                if !files.iter().any(|(name, _)| name == CONFIG_FILE) {
                    files.push((CONFIG_FILE.into(), byte_tokenizer::minimal_config(&t.eod_text)));
                }
                files
            }
        }
    }
}

fn tokenizer_failed(source: tokenizers::Error) -> DataError {
    DataError::TokenizerFailed { source }
}

fn invalid_tokenizer(path: &Path, problem: TokenizerProblem) -> DataError {
    DataError::InvalidTokenizer { path: path.to_path_buf(), problem }
}

impl FileTokenizer {
    /// The content of tokenizer_config.json, if the file exists. It was valid JSON when the
    /// tokenizer was opened.
    fn config(&self) -> Option<Value> {
        let (_, text) = self.files.iter().find(|(name, _)| name == CONFIG_FILE)?;
        serde_json::from_str(text).ok()
    }

    fn open(path: &Path) -> Result<Self, DataError> {
        let invalid = |problem| invalid_tokenizer(path, problem);
        let text = read_tokenizer_file(path, MAX_TOKENIZER_BYTES)?
            .ok_or_else(|| invalid(TokenizerProblem::FileMissing))?;
        let parse_error = |e| invalid(TokenizerProblem::InvalidTokenizerJson(e));
        let mut inner = tokenizers::Tokenizer::from_bytes(&text).map_err(parse_error)?;
        // Documents are encoded completely, whatever the file sets for batches.
        inner.with_truncation(None).map_err(parse_error)?;
        inner.with_padding(None);
        let mut files = vec![("tokenizer.json".to_string(), text)];
        for name in COMPANION_FILES {
            if let Some(text) = read_tokenizer_file(&path.with_file_name(name), MAX_COMPANION_BYTES)? {
                files.push((name.into(), text));
            }
        }
        let (eod_text, eod) = find_eod(&inner, path, &files[1..])?;
        // Ids may have gaps. The vocabulary size is what an embedding needs, not the number of
        // entries.
        let last = inner.get_vocab(true).into_values().max().unwrap_or(0);
        let vocab_size = last.checked_add(1).filter(|&n| n <= MAX_VOCAB_SIZE);
        let vocab_size = vocab_size
            .ok_or_else(|| invalid(TokenizerProblem::TokenIdTooLarge { id: last, limit: MAX_VOCAB_SIZE }))?;
        Ok(FileTokenizer { inner, eod, eod_text, vocab_size, files })
    }
}

/// The content of a tokenizer's file; `None` if it does not exist.
fn read_tokenizer_file(path: &Path, limit: u64) -> Result<Option<String>, DataError> {
    read_text_file(path, limit)
        .map_err(|problem| invalid_tokenizer(path, TokenizerProblem::FileUnreadable(problem)))
}

/// The content of a UTF-8 file of at most `limit` bytes; `None` if it does not exist.
pub(crate) fn read_text_file(path: &Path, limit: u64) -> Result<Option<String>, TextFileProblem> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(TextFileProblem::Io(e)),
    };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(TextFileProblem::Io)?;
    if bytes.len() as u64 > limit {
        return Err(TextFileProblem::TooLarge { limit });
    }
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|e| TextFileProblem::NotUtf8 { offset: e.utf8_error().valid_up_to() })
}

/// The text and id of the end-of-document token. `path` is that of tokenizer.json.
fn find_eod(
    tokenizer: &tokenizers::Tokenizer,
    path: &Path,
    companions: &[(String, String)],
) -> Result<(String, u32), DataError> {
    for (name, text) in companions.iter().filter(|(name, _)| name.ends_with(".json")) {
        let companion: PathBuf = path.with_file_name(name);
        let value: Value = serde_json::from_str(text)
            .map_err(|e| invalid_tokenizer(&companion, TokenizerProblem::InvalidCompanionJson(e)))?;
        // The value is a string, or the object of an added token.
        let eos = value.get("eos_token").and_then(|e| e.as_str().or_else(|| e.get("content")?.as_str()));
        if let Some(eos) = eos {
            let unknown = || TokenizerProblem::EosTokenUnknown {
                eos_token: eos.to_string(),
                tokenizer: path.to_path_buf(),
            };
            let id = tokenizer.token_to_id(eos).ok_or_else(|| invalid_tokenizer(&companion, unknown()))?;
            return Ok((eos.to_string(), id));
        }
    }
    let added = tokenizer.get_added_tokens_decoder();
    let special = |name: &str| {
        let id = tokenizer.token_to_id(name)?;
        added.get(&id).filter(|t| t.special).map(|_| (name.to_string(), id))
    };
    EOD_TOKENS.iter().find_map(|name| special(name)).ok_or_else(|| {
        let problem = TokenizerProblem::NoEndOfDocument { known: &EOD_TOKENS, config_file: CONFIG_FILE };
        invalid_tokenizer(path, problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A tokenizer.json of the words a, b, c (ids 0, 1, 2), followed by these special tokens.
    fn words(specials: &[&str]) -> String {
        words_with(specials, serde_json::json!({"a": 0, "b": 1, "c": 2}))
    }

    fn words_with(specials: &[&str], vocab: Value) -> String {
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

    fn open(files: &[(&str, &str)]) -> Result<TextTokenizer, DataError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        TextTokenizer::open(&TokenizerSpec::File("tokenizer.json".into()), dir.path())
    }

    /// The problem with a tokenizer of these files, and the name of the file that has it.
    fn problem(files: &[(&str, &str)]) -> (String, TokenizerProblem) {
        match open(files) {
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
        let json = words(&["<eos>", "</s>"]);
        let t = open(&[("tokenizer.json", &json)]).unwrap();
        let mut out = Vec::new();
        t.encode("b a b z </s> b", &mut out).unwrap();
        assert_eq!(out, [1, 0, 1, 2, 4, 1]);
        // `</s>` precedes `<eos>` in the list.
        assert_eq!((t.eod(), t.vocab_size()), (4, 5));
        let gaps = words_with(&["</s>"], serde_json::json!({"a": 0, "b": 1, "c": 70}));
        assert_eq!(open(&[("tokenizer.json", &gaps)]).unwrap().vocab_size(), 71);
    }

    #[test]
    fn the_eos_token_of_companion_files_has_precedence() {
        let json = words(&["<eos>", "</s>", "<end>"]);
        let config = r#"{"eos_token": {"content": "<end>", "special": true}, "model_max_length": 7}"#;
        let map = r#"{"eos_token": "<eos>"}"#;
        let json = ("tokenizer.json", &json[..]);
        let eod = |files: &[(&str, &str)]| open(files).unwrap().eod();
        assert_eq!(eod(&[json]), 4);
        assert_eq!(eod(&[json, ("special_tokens_map.json", map)]), 3);
        assert_eq!(eod(&[json, ("special_tokens_map.json", map), (CONFIG_FILE, config)]), 5);
        assert_eq!(eod(&[json, (CONFIG_FILE, r#"{"eos_token": null}"#)]), 4);
        let with = open(&[json, (CONFIG_FILE, config)]).unwrap();
        assert_ne!(with.digest(), open(&[json]).unwrap().digest());
        assert_eq!(with.hf_files()[1], (CONFIG_FILE.to_string(), config.to_string()));
        let generated = open(&[json]).unwrap().hf_files();
        assert!(generated.len() == 2 && generated[1].1.contains("\"eos_token\": \"</s>\""), "{generated:?}");
    }

    #[test]
    fn invalid_tokenizers_are_errors_with_their_problem() {
        let (file, missing) = problem(&[]);
        assert!(matches!(missing, TokenizerProblem::FileMissing), "{missing}");
        assert_eq!(file, "tokenizer.json");
        let (_, invalid) = problem(&[("tokenizer.json", "{}")]);
        assert!(matches!(invalid, TokenizerProblem::InvalidTokenizerJson(_)), "{invalid}");
        let (_, no_eod) = problem(&[("tokenizer.json", &words(&["<pad>"]))]);
        assert!(matches!(no_eod, TokenizerProblem::NoEndOfDocument { .. }), "{no_eod}");
        let json = words(&["</s>"]);
        let json = ("tokenizer.json", &json[..]);
        let (file, invalid) = problem(&[json, (CONFIG_FILE, "{")]);
        assert!(matches!(invalid, TokenizerProblem::InvalidCompanionJson(_)), "{invalid}");
        assert_eq!(file, CONFIG_FILE);
        let (file, unknown) = problem(&[json, (CONFIG_FILE, r#"{"eos_token": "<x>"}"#)]);
        assert!(
            matches!(&unknown, TokenizerProblem::EosTokenUnknown { eos_token, .. } if eos_token == "<x>"),
            "{unknown}"
        );
        assert_eq!(file, CONFIG_FILE);
        let far = words_with(&["</s>"], serde_json::json!({"a": 0, "b": 1, "c": 4_000_000_000u32}));
        let (_, too_large) = problem(&[("tokenizer.json", &far)]);
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
        assert!(matches!(problem, TextFileProblem::TooLarge { limit: 1000 }), "{problem}");
    }
}
