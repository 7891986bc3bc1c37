//! Text to token ids.
//!
//! Documents are encoded without the tokenizer's own template (no BOS, no post-processed specials); each is followed by one end-of-document
//! token when it is packed. Special tokens written in a text are encoded as such, as everywhere in that ecosystem, so that texts with chat
//! templates keep their meaning; document boundaries do not depend on them.
use super::{byte_tokenizer, cache::NO_LOSS, chat::Marked, error::DataError};
use contract::job::Tokenizer as TokenizerSpec;
use serde_json::Value;
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Largest tokenizer.json that is read, bytes.
const MAX_TOKENIZER: u64 = 256 << 20;
/// Largest companion file (a chat template may be in it), bytes.
const MAX_SIBLING: u64 = 16 << 20;
/// The companion that names the end-of-sequence token.
pub(crate) const CONFIG_FILE: &str = "tokenizer_config.json";
/// Files beside a tokenizer.json that belong to it.
const SIBLINGS: [&str; 3] = [CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE];
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// Special tokens that mean the end of a document, in order of preference; used when no companion file names one.
const EOD_NAMES: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
];

/// How this job's text becomes tokens.
pub enum TextTokenizer {
    /// 256 byte values and one end-of-document token.
    Bytes,
    /// A Hugging Face tokenizer.json.
    File(Box<FileTokenizer>),
}

/// A Hugging Face tokenizer with what lies beside it.
pub struct FileTokenizer {
    inner: tokenizers::Tokenizer,
    eod: u32,
    eod_text: String,
    vocab_size: u32,
    /// Name and content of tokenizer.json and of the companions that are there.
    files: Vec<(String, String)>,
}

impl TextTokenizer {
    /// Loads the job's tokenizer; a relative path is relative to `workdir`.
    ///
    /// The end-of-document token is, in this order: the `eos_token` of a `tokenizer_config.json` beside the file, that of a
    /// `special_tokens_map.json` beside it, or the first of a list of well-known names that is among the file's special tokens.
    pub fn open(spec: &TokenizerSpec, workdir: &Path) -> Result<Self, DataError> {
        let TokenizerSpec::File(path) = spec else { return Ok(TextTokenizer::Bytes) };
        let path = workdir.join(path);
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path };
        FileTokenizer::open(&path).map(|t| TextTokenizer::File(Box::new(t)))
    }

    /// Number of token ids: every id is below it.
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

    /// Appends the tokens of a text (without an end-of-document token).
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), DataError> {
        match self {
            TextTokenizer::Bytes => out.extend(text.bytes().map(u32::from)),
            TextTokenizer::File(t) => {
                let encoding =
                    t.inner.encode_fast(text, false).map_err(|e| DataError::Encode { why: e.to_string() })?;
                out.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(())
    }

    /// The text of some tokens; those that are no text are left out.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        match self {
            TextTokenizer::Bytes => {
                let bytes: Vec<u8> = tokens.iter().filter_map(|t| u8::try_from(*t).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            // a model may know more tokens than its tokenizer
            TextTokenizer::File(t) => {
                let known: Vec<u32> =
                    tokens.iter().copied().filter(|id| t.inner.id_to_token(*id).is_some()).collect();
                t.inner.decode(&known, true).map_err(|e| DataError::Encode { why: e.to_string() })
            }
        }
    }

    /// Appends the tokens of a text; those that no target range touches carry [`NO_LOSS`].
    pub(crate) fn encode_marked(&self, marked: &Marked, out: &mut Vec<u32>) -> Result<(), DataError> {
        let mut targets = marked.targets.iter().peekable();
        let mut mark = |token: u32, from: usize, to: usize| {
            while targets.next_if(|r| r.end <= from).is_some() {}
            let is_target = targets.peek().is_some_and(|r| r.start < to && from < r.end);
            if is_target { token } else { token | NO_LOSS }
        };
        match self {
            TextTokenizer::Bytes => {
                out.extend(marked.text.bytes().enumerate().map(|(i, b)| mark(b.into(), i, i + 1)));
            }
            TextTokenizer::File(t) => {
                let encoding = t.inner.encode(marked.text.as_str(), false);
                let encoding = encoding.map_err(|e| DataError::Encode { why: e.to_string() })?;
                let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
                out.extend(spans.map(|(&token, &(from, to))| mark(token, from, to)));
            }
        }
        Ok(())
    }

    /// The chat template that lies beside the tokenizer, or is in its configuration.
    pub(crate) fn chat_template(&self) -> Result<Option<String>, String> {
        let TextTokenizer::File(t) = self else { return Ok(None) };
        if let Some((_, text)) = t.files.iter().find(|(name, _)| name == TEMPLATE_FILE) {
            return Ok(Some(text.clone()));
        }
        let Some(config) = t.config() else { return Ok(None) };
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            // several by name, of which the default one is for chats
            Some(Value::Array(named)) => {
                let default = named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
                let text = default.and_then(|t| t.get("template")).and_then(Value::as_str);
                text.map(|t| Some(t.to_owned())).ok_or_else(|| {
                    format!(
                        "{CONFIG_FILE} names several chat templates and none is the `default`; name a file"
                    )
                })
            }
            Some(_) => Err(format!("the chat_template of {CONFIG_FILE} is no text")),
        }
    }

    /// Names and texts of the special tokens that the tokenizer's configuration names, for chat templates.
    pub(crate) fn special_tokens(&self) -> Vec<(String, String)> {
        const NAMES: [&str; 5] = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token"];
        let TextTokenizer::File(t) = self else {
            return vec![("eos_token".into(), byte_tokenizer::EOD_TEXT.into())];
        };
        let text = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
        let config = t.config().unwrap_or_default();
        let given = NAMES.iter().filter_map(|&n| Some((n.to_owned(), text(config.get(n)?)?)));
        let mut tokens: Vec<(String, String)> = given.collect();
        if !tokens.iter().any(|(n, _)| n == "eos_token") {
            tokens.push(("eos_token".into(), t.eod_text.clone()));
        }
        tokens
    }

    /// Identity of the tokenizer: equal digests encode equal texts equally.
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

    /// The files, name and content, that let `transformers.AutoTokenizer.from_pretrained` load this tokenizer from a folder of weights.
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

impl FileTokenizer {
    /// tokenizer_config.json, when there is one; it was read as JSON when the tokenizer was opened.
    fn config(&self) -> Option<Value> {
        let (_, text) = self.files.iter().find(|(name, _)| name == CONFIG_FILE)?;
        serde_json::from_str(text).ok()
    }

    fn open(path: &Path) -> Result<Self, DataError> {
        let bad = |why: String| DataError::Tokenizer { path: path.to_path_buf(), why };
        let text = read_capped(path, MAX_TOKENIZER)?
            .ok_or_else(|| bad("there is no such file (it is relative to the workdir)".into()))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&text)
            .map_err(|e| bad(format!("not a tokenizer.json: {e}")))?;
        // a document is encoded whole, whatever the file says of batches
        inner.with_truncation(None).map_err(|e| bad(e.to_string()))?;
        inner.with_padding(None);
        let mut files = vec![("tokenizer.json".to_string(), text)];
        for name in SIBLINGS {
            if let Some(text) = read_capped(&path.with_file_name(name), MAX_SIBLING)? {
                files.push((name.into(), text));
            }
        }
        let (eod_text, eod) = find_eod(&inner, path, &files[1..])?;
        // ids may have gaps: the size is what an embedding needs, not the number of entries
        let last = inner.get_vocab(true).into_values().max().unwrap_or(0);
        let vocab_size = last.checked_add(1).filter(|&n| n <= 1 << 24);
        let vocab_size = vocab_size.ok_or_else(|| bad(format!("it has a token with id {last}")))?;
        Ok(FileTokenizer { inner, eod, eod_text, vocab_size, files })
    }
}

/// The whole of a UTF-8 file, `None` if there is none.
pub(crate) fn read_capped(path: &Path, cap: u64) -> Result<Option<String>, DataError> {
    let bad = |why: String| DataError::Tokenizer { path: path.to_path_buf(), why };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(bad(e.to_string())),
    };
    let mut bytes = Vec::new();
    file.take(cap + 1).read_to_end(&mut bytes).map_err(|e| bad(e.to_string()))?;
    if bytes.len() as u64 > cap {
        return Err(bad(format!("it is larger than {} MiB", cap >> 20)));
    }
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|e| bad(format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// The end-of-document token's text and id.
fn find_eod(
    tokenizer: &tokenizers::Tokenizer,
    path: &Path,
    siblings: &[(String, String)],
) -> Result<(String, u32), DataError> {
    for (name, text) in siblings.iter().filter(|(name, _)| name.ends_with(".json")) {
        let beside: PathBuf = path.with_file_name(name);
        let value: Value = serde_json::from_str(text)
            .map_err(|e| DataError::Tokenizer { path: beside.clone(), why: format!("not JSON: {e}") })?;
        // a string, or an added token's object
        let eos = value.get("eos_token").and_then(|e| e.as_str().or_else(|| e.get("content")?.as_str()));
        if let Some(eos) = eos {
            let id = tokenizer.token_to_id(eos).ok_or_else(|| DataError::Tokenizer {
                path: beside,
                why: format!("its eos_token `{eos}` is not a token of {}", path.display()),
            })?;
            return Ok((eos.to_string(), id));
        }
    }
    let added = tokenizer.get_added_tokens_decoder();
    let special = |name: &str| {
        let id = tokenizer.token_to_id(name)?;
        added.get(&id).filter(|t| t.special).map(|_| (name.to_string(), id))
    };
    EOD_NAMES.iter().find_map(|name| special(name)).ok_or_else(|| DataError::Tokenizer {
        path: path.to_path_buf(),
        why: format!(
            "no token ends a document: none of its special tokens is {}; name one as \"eos_token\" in a {CONFIG_FILE} beside it",
            EOD_NAMES.join(", ")
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A tokenizer.json of the words a, b, c (0, 1, 2), with these special tokens after them (3, 4, …).
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

    fn why(files: &[(&str, &str)]) -> String {
        match open(files) {
            Err(e @ DataError::Tokenizer { .. }) => e.to_string(),
            Err(e) => panic!("{e}"),
            Ok(_) => panic!("opened"),
        }
    }

    #[test]
    fn bytes() {
        let t = TextTokenizer::open(&TokenizerSpec::Bytes, Path::new("/")).unwrap();
        let mut out = vec![7];
        t.encode("aé", &mut out).unwrap();
        assert_eq!(out, [7, 97, 0xc3, 0xa9]);
        assert_eq!((t.vocab_size(), t.eod()), (257, 256));
    }

    #[test]
    fn file_encodes_whole_documents_without_template() {
        let json = words(&["<eos>", "</s>"]);
        let t = open(&[("tokenizer.json", &json)]).unwrap();
        let mut out = Vec::new();
        t.encode("b a b z </s> b", &mut out).unwrap();
        assert_eq!(out, [1, 0, 1, 2, 4, 1]);
        // `</s>` comes before `<eos>` in the list
        assert_eq!((t.eod(), t.vocab_size()), (4, 5));
        let gaps = words_with(&["</s>"], serde_json::json!({"a": 0, "b": 1, "c": 70}));
        assert_eq!(open(&[("tokenizer.json", &gaps)]).unwrap().vocab_size(), 71);
    }

    #[test]
    fn eod_of_the_companion_files_wins() {
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
        let made = open(&[json]).unwrap().hf_files();
        assert!(made.len() == 2 && made[1].1.contains("\"eos_token\": \"</s>\""), "{made:?}");
    }

    #[test]
    fn bad_tokenizers() {
        assert!(why(&[]).contains("tokenizer.json can't be used: there is no such file"));
        assert!(why(&[("tokenizer.json", "{}")]).contains("not a tokenizer.json"));
        let none = words(&["<pad>"]);
        let said = why(&[("tokenizer.json", &none)]);
        assert!(said.contains("no token ends a document") && said.contains("<|endoftext|>, "), "{said}");
        let json = words(&["</s>"]);
        let json = ("tokenizer.json", &json[..]);
        assert!(why(&[json, (CONFIG_FILE, "{")]).contains("tokenizer_config.json can't be used: not JSON"));
        let said = why(&[json, (CONFIG_FILE, r#"{"eos_token": "<x>"}"#)]);
        assert!(said.contains("its eos_token `<x>` is not a token of"), "{said}");
        let far = words_with(&["</s>"], serde_json::json!({"a": 0, "b": 1, "c": 4_000_000_000u32}));
        assert!(why(&[("tokenizer.json", &far)]).contains("id 4000000000"));
    }

    #[test]
    fn too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let error = read_capped(&path, 1000).unwrap_err();
        assert!(error.to_string().contains("larger than"), "{error}");
    }
}
