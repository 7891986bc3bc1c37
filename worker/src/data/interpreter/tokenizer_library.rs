//! [`LibraryTokenizer`]: a Hugging Face tokenizer that the crate `tokenizers` loads from
//! tokenizer.json and its companion files.
use super::message::{LoadTokenizerReply, TokenizerInfo};
use super::text_division::DivisionPlaces;
use crate::data::{
    error::{ChatTemplateProblem, TokenizerProblem},
    loss_masked_text::LossMaskedText,
    tokenizer_files::{CHAT_TEMPLATE_FILE, KNOWN_EOD_TOKENS, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE},
};
use serde_json::Value;

/// The largest accepted vocabulary of a tokenizer, in tokens.
const MAX_VOCAB_SIZE: u32 = 1 << 24;

/// Largest size in bytes of the text that the library tokenizes at once, if the text can be divided
/// without effect on its tokens. The texts of the tests are short.
const MAX_PART_BYTES: usize = if cfg!(test) { 16 } else { 256 << 10 };

/// A Hugging Face tokenizer that the crate `tokenizers` has loaded.
pub(super) struct LibraryTokenizer {
    inner: tokenizers::Tokenizer,
    /// Where long texts are divided; `None` if they must not be divided.
    places: Option<DivisionPlaces>,
}

impl LibraryTokenizer {
    /// Loads a Hugging Face tokenizer from the texts of its files, and also returns the reply to
    /// the client of the sandbox process: the tokenizer's properties or an error. The first file
    /// must be tokenizer.json.
    pub(super) fn load(files: &[(&str, &str)]) -> (Option<Self>, LoadTokenizerReply) {
        match Self::try_load(files) {
            Ok((tokenizer, info)) => (Some(tokenizer), Ok(info)),
            Err((file, problem)) => (None, Err((file.to_owned(), problem))),
        }
    }

    /// Loads a tokenizer from `files` (names and contents), and returns the tokenizer with its
    /// vocabulary size, special tokens and other properties. An error contains the name of the
    /// invalid file.
    fn try_load<'a>(files: &[(&'a str, &str)]) -> Result<(Self, TokenizerInfo), (&'a str, TokenizerProblem)> {
        let Some(((name, text), companions)) = files.split_first() else {
            return Err((TOKENIZER_FILE, TokenizerProblem::FileMissing));
        };
        let invalid = |e: tokenizers::Error| (*name, TokenizerProblem::InvalidTokenizerJson(e.to_string()));
        let mut inner = tokenizers::Tokenizer::from_bytes(text).map_err(invalid)?;
        // Documents are encoded completely, whatever truncation the file sets.
        inner.with_truncation(None).map_err(invalid)?;
        inner.with_padding(None);
        let parsed = parse_companions(companions)?;
        let (eod_text, eod) = find_eod_token(&inner, name, &parsed)?;
        // Ids may have gaps. The vocabulary size is what an embedding needs, not the number of
        // entries.
        let last = inner.get_vocab(true).into_values().max().unwrap_or(0);
        let vocab_size = last.checked_add(1).filter(|&n| n <= MAX_VOCAB_SIZE);
        let vocab_size = vocab_size
            .ok_or((*name, TokenizerProblem::TokenIdTooLarge { id: last, limit: MAX_VOCAB_SIZE }))?;
        let config = parsed.iter().find(|(name, _)| *name == TOKENIZER_CONFIG_FILE).map(|(_, config)| config);
        let info = TokenizerInfo {
            vocab_size,
            eod,
            special_tokens: list_special_tokens(config, &eod_text),
            eod_text,
            chat_template: find_chat_template(companions, config),
        };
        let places = DivisionPlaces::find(&inner);
        Ok((LibraryTokenizer { inner, places }, info))
    }

    /// Divides a long text into parts that can be tokenized one by one.
    fn divide<'a>(&self, text: &'a str) -> Vec<&'a str> {
        self.places.as_ref().map_or_else(|| vec![text], |places| places.divide(text, MAX_PART_BYTES))
    }

    /// Converts `text` to token ids.
    pub(super) fn encode(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for part in self.divide(text) {
            tokens.extend_from_slice(self.inner.encode_fast(part, false)?.get_ids());
        }
        Ok(tokens)
    }

    /// Converts a text to token ids, and passes each id with the byte range of the token to the
    /// function `mask`, whose result replaces the id.
    pub(super) fn encode_masked(
        &self,
        masked: &LossMaskedText,
        mut mask: impl FnMut(u32, usize, usize) -> u32,
    ) -> tokenizers::Result<Vec<u32>> {
        let (mut tokens, mut begin) = (Vec::new(), 0);
        for part in self.divide(&masked.text) {
            let encoding = self.inner.encode(part, false)?;
            let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
            tokens.extend(spans.map(|(&token, &(from, to))| mask(token, begin + from, begin + to)));
            begin += part.len();
        }
        Ok(tokens)
    }

    /// Converts token ids to text. Omits special tokens, and tokens that the tokenizer does not
    /// have, because a model may have more token ids than its tokenizer.
    pub(super) fn decode(&self, tokens: &[u32]) -> tokenizers::Result<String> {
        let is_known = |id: &u32| self.inner.id_to_token(*id).is_some();
        let known: Vec<u32> = tokens.iter().copied().filter(is_known).collect();
        self.inner.decode(&known, true)
    }
}

/// Parses those companion files of a tokenizer, such as tokenizer_config.json, whose names end in
/// `.json`, and returns their names and JSON values. An error contains the name of the file.
fn parse_companions<'a>(
    companions: &[(&'a str, &str)],
) -> Result<Vec<(&'a str, Value)>, (&'a str, TokenizerProblem)> {
    let parse = |(name, text): &(&'a str, &str)| {
        let problem = |e: serde_json::Error| (*name, TokenizerProblem::InvalidCompanionJson(e.to_string()));
        Ok((*name, serde_json::from_str(text).map_err(problem)?))
    };
    companions.iter().filter(|(name, _)| name.ends_with(".json")).map(parse).collect()
}

/// Parses an untrusted tokenizer_config.json, and reads the special tokens and the chat template
/// from it. Fails if the text is not JSON. Returns whether the chat template is valid.
pub(super) fn check_companion(text: &str) -> Result<Result<(), ChatTemplateProblem>, TokenizerProblem> {
    let companions = [(TOKENIZER_CONFIG_FILE, text)];
    let parsed = parse_companions(&companions).map_err(|(_, problem)| problem)?;
    let config = parsed.first().map(|(_, config)| config);
    drop(list_special_tokens(config, ""));
    Ok(find_chat_template(&companions, config).map(drop))
}

/// Finds the tokenizer's token that ends a document, and returns its text and id. `companions` are
/// name and content of the companion files, and `tokenizer_file` is the name of tokenizer.json.
fn find_eod_token<'a>(
    tokenizer: &tokenizers::Tokenizer,
    tokenizer_file: &'a str,
    companions: &[(&'a str, Value)],
) -> Result<(String, u32), (&'a str, TokenizerProblem)> {
    for (name, value) in companions {
        if let Some(eos) = value.get("eos_token").and_then(read_token_text) {
            let unknown = || (*name, TokenizerProblem::EosTokenUnknown { eos_token: eos.to_owned() });
            return Ok((eos.to_owned(), tokenizer.token_to_id(eos).ok_or_else(unknown)?));
        }
    }
    let added = tokenizer.get_added_tokens_decoder();
    let special = |name: &str| {
        let id = tokenizer.token_to_id(name)?;
        added.get(&id).filter(|t| t.special).map(|_| (name.to_string(), id))
    };
    let known = KNOWN_EOD_TOKENS.iter().find_map(|name| special(name));
    known.ok_or((tokenizer_file, TokenizerProblem::NoEndOfDocument))
}

/// Returns the text of a special token, which tokenizer_config.json states as a string or as an
/// object.
fn read_token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Returns the names and texts of the special tokens, such as `bos_token`, in the tokenizer's
/// configuration. Chat templates use these names.
fn list_special_tokens(config: Option<&Value>, eod_text: &str) -> Vec<(String, String)> {
    const SPECIAL_TOKEN_NAMES: [&str; 5] = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token"];
    let text = |name: &str| config?.get(name).and_then(read_token_text);
    let configured =
        SPECIAL_TOKEN_NAMES.iter().filter_map(|&name| Some((name.to_owned(), text(name)?.to_owned())));
    let mut tokens: Vec<(String, String)> = configured.collect();
    if !tokens.iter().any(|(name, _)| name == "eos_token") {
        tokens.push(("eos_token".to_owned(), eod_text.to_owned()));
    }
    tokens
}

/// Returns a tokenizer's chat template: the name of the file that contains it, and its Jinja text;
/// `None` if the tokenizer has none.
fn find_chat_template(
    companions: &[(&str, &str)],
    config: Option<&Value>,
) -> Result<Option<(String, String)>, ChatTemplateProblem> {
    if let Some((name, text)) = companions.iter().find(|(name, _)| *name == CHAT_TEMPLATE_FILE) {
        return Ok(Some(((*name).to_owned(), (*text).to_owned())));
    }
    let in_config = |text: &str| Some((TOKENIZER_CONFIG_FILE.to_owned(), text.to_owned()));
    match config.and_then(|config| config.get("chat_template")) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(in_config(text)),
        // Several templates with names, of which the one named `default` is for chats.
        Some(Value::Array(named)) => {
            let default = named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            let text = default.and_then(|t| t.get("template")).and_then(Value::as_str);
            text.map(in_config).ok_or(ChatTemplateProblem::NoDefault)
        }
        Some(_) => Err(ChatTemplateProblem::NotAString),
    }
}
