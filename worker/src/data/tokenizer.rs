//! [`TextTokenizer`]: converts text to token ids and back.
//!
//! Documents are encoded without the post-processing of tokenizer.json, so without a BOS token. One
//! end-of-document token follows each document in the token stream. The texts of special tokens are
//! encoded as special tokens, which is the default of `transformers` and necessary for rendered
//! chats. Document boundaries do not depend on special tokens.
use super::{
    byte_tokenizer,
    error::{
        ChatTemplateProblem, DataError, FailedRecord, InterpretationError, InterpretationStep,
        TokenizerProblem, TokenizerTextFileError,
    },
    interpreter::{
        DecodeTokensReply, Document, DocumentOptions, DocumentResult, InterpreterFailure, SandboxInterpreter,
        TokenizerFile, TokenizerInfo,
    },
    split::SplitFilter,
    tokenizer_files::{COMPANION_FILES, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE},
};
use jobspec::{LossTargets, TokenizerSpec};
use sandbox::SandboxError;
use std::{
    fs::File,
    io::Read,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Largest accepted size of a tokenizer.json, in bytes.
const MAX_TOKENIZER_BYTES: u64 = 64 << 20;
/// Largest accepted size of a tokenizer's companion file, in bytes. Companion files may contain
/// chat templates.
const MAX_COMPANION_BYTES: u64 = 16 << 20;
/// The name of the built-in byte tokenizer in error messages, in place of a path.
const BYTE_TOKENIZER_NAME: &str = "bytes";

/// The tokenizer of a job: the built-in byte tokenizer, or one from a file that the sandbox process
/// interprets.
pub struct TextTokenizer {
    /// The Hugging Face tokenizer. Absent for the embedded tokenizer, whose tokens are 256 byte
    /// values and one end-of-document token.
    file: Option<FileTokenizer>,
    interpreter: Arc<SandboxInterpreter>,
}

/// An open Hugging Face tokenizer: tokenizer.json with its companion files.
struct FileTokenizer {
    path: PathBuf,
    /// Name and content of tokenizer.json and of the companion files that exist, in this order.
    files: Arc<[TokenizerFile]>,
    info: TokenizerInfo,
}

impl TextTokenizer {
    /// Returns the built-in byte tokenizer.
    pub fn new_byte_tokenizer() -> Self {
        Self::new_byte_tokenizer_with_interpreter(SandboxInterpreter::new(rayon::current_num_threads()))
    }

    /// Returns the built-in byte tokenizer, which uses the client `interpreter` of a sandbox
    /// process to read chat templates and Parquet files.
    fn new_byte_tokenizer_with_interpreter(interpreter: Arc<SandboxInterpreter>) -> Self {
        TextTokenizer { file: None, interpreter }
    }

    /// Loads the tokenizer that the job file selects: the built-in byte tokenizer, or a
    /// tokenizer.json that a new sandbox process interprets. A relative path starts at `workdir`.
    ///
    /// The end-of-document token is the `eos_token` of tokenizer_config.json in the same directory,
    /// otherwise the `eos_token` of special_tokens_map.json. If neither file names one, the first
    /// of a list of well-known tokens is used that is a special token of the tokenizer.
    pub fn open(spec: &TokenizerSpec, workdir: &Path) -> Result<Self, DataError> {
        Self::open_with_interpreter(spec, workdir, SandboxInterpreter::new(rayon::current_num_threads()))
    }

    /// Loads the tokenizer that the job file selects: the built-in byte tokenizer, or a
    /// tokenizer.json that the sandbox process of `interpreter` interprets.
    pub(crate) fn open_with_interpreter(
        spec: &TokenizerSpec,
        workdir: &Path,
        interpreter: Arc<SandboxInterpreter>,
    ) -> Result<Self, DataError> {
        let TokenizerSpec::File(path) = spec else {
            return Ok(Self::new_byte_tokenizer_with_interpreter(interpreter));
        };
        let path = workdir.join(path);
        let path = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path };
        let file = Some(FileTokenizer::open(path, &interpreter)?);
        Ok(TextTokenizer { file, interpreter })
    }

    /// Returns whether this is the built-in byte tokenizer.
    pub(crate) fn is_byte_tokenizer(&self) -> bool {
        self.file.is_none()
    }

    /// Returns the client of the sandbox process that has loaded the tokenizer.
    pub(crate) fn interpreter(&self) -> &SandboxInterpreter {
        &self.interpreter
    }

    /// Ends the sandbox process of the tokenizer, which is started again when it is needed.
    pub fn end_sandbox_process(&self) {
        self.interpreter.end_process();
    }

    /// Returns the path of tokenizer.json, or `None` for the built-in byte tokenizer.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }

    /// Returns the vocabulary size of the tokenizer. Every token id is less than this size.
    pub fn vocab_size(&self) -> u32 {
        self.file.as_ref().map_or(byte_tokenizer::VOCAB_SIZE, |file| file.info.vocab_size)
    }

    /// Returns the id of the tokenizer's end-of-document token.
    pub fn eod_token(&self) -> u32 {
        self.file.as_ref().map_or(byte_tokenizer::EOD_TOKEN, |file| file.info.eod)
    }

    /// Appends the tokens of a text to `out`, without an end-of-document token.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), DataError> {
        if self.is_byte_tokenizer() {
            out.extend(byte_tokenizer::encode(text));
            return Ok(());
        }
        let options = DocumentOptions {
            field: "",
            loss_on: LossTargets::All,
            filter: SplitFilter::All,
            tokenize: true,
        };
        let result = self.interpreter.interpret_document(Document::Text(text), options);
        match result.map_err(|failure| self.to_tokenizer_error(failure, InterpretationStep::Tokenize))? {
            DocumentResult::Tokens(tokens) => out.extend(tokens.0),
            DocumentResult::TokenizerFailed(message) => return Err(DataError::TokenizerFailed { message }),
            _ => {
                return Err(
                    self.to_tokenizer_error(SandboxError::InvalidReply.into(), InterpretationStep::Tokenize)
                );
            }
        }
        Ok(())
    }

    /// Converts token ids to text with this tokenizer. Omits special and unknown tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        if self.is_byte_tokenizer() {
            return Ok(byte_tokenizer::decode(tokens));
        }
        let decoded = self.interpreter.decode_tokens(tokens);
        match decoded.map_err(|failure| self.to_tokenizer_error(failure, InterpretationStep::DecodeTokens))? {
            DecodeTokensReply::Text(text) => Ok(text),
            DecodeTokensReply::Failed(message) => Err(DataError::TokenizerFailed { message }),
        }
    }

    /// Converts a failure of the sandbox process to an error that names the tokenizer's file, used
    /// for work in which no data file is read.
    fn to_tokenizer_error(&self, failure: InterpreterFailure, step: InterpretationStep) -> DataError {
        let path = self.path().unwrap_or(Path::new(BYTE_TOKENIZER_NAME));
        to_interpretation_error(failure, step, path, None, None)
    }

    /// Returns the file and the source text of the chat template that belongs to the tokenizer, or
    /// `None` if there is no template.
    pub(crate) fn find_chat_template(&self) -> Result<Option<(PathBuf, String)>, ChatTemplateProblem> {
        let Some(file) = &self.file else { return Ok(None) };
        let template = file.info.chat_template.clone()?;
        Ok(template.map(|(name, source)| (file.path.with_file_name(name), source)))
    }

    /// Returns name and text of each special token in the tokenizer's configuration. Chat templates
    /// use these names, such as `eos_token`.
    pub(crate) fn list_special_tokens(&self) -> Vec<(String, String)> {
        match &self.file {
            None => vec![("eos_token".into(), byte_tokenizer::EOD_TOKEN_TEXT.into())],
            Some(file) => file.info.special_tokens.clone(),
        }
    }

    /// Returns a hash of everything that affects how the tokenizer converts text to token ids, by
    /// which token caches of different tokenizers are distinguished. Tokenizers with equal digests
    /// encode equal texts equally.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 tokenizer v1");
        match &self.file {
            None => hasher.update(b"bytes"),
            Some(file) => {
                hasher.update(b"file").update(&file.info.eod.to_le_bytes()).update(file.files[0].1.as_bytes())
            }
        };
        *hasher.finalize().as_bytes()
    }

    /// Returns the names and contents of files from which `transformers.AutoTokenizer` loads this
    /// tokenizer.
    pub fn build_hf_tokenizer_files(&self) -> Vec<(String, String)> {
        let Some(file) = &self.file else { return byte_tokenizer::build_hf_tokenizer_files() };
        let mut files = file.files.to_vec();
        if !files.iter().any(|(name, _)| name == TOKENIZER_CONFIG_FILE) {
            let config = byte_tokenizer::build_minimal_tokenizer_config(&file.info.eod_text);
            files.push((TOKENIZER_CONFIG_FILE.into(), config));
        }
        files
    }
}

impl FileTokenizer {
    /// Loads a tokenizer.json and the other files of the tokenizer in its directory.
    fn open(path: PathBuf, interpreter: &SandboxInterpreter) -> Result<Self, DataError> {
        let text = read_tokenizer_file(&path, MAX_TOKENIZER_BYTES)?
            .ok_or_else(|| build_invalid_tokenizer_error(&path, TokenizerProblem::FileMissing))?;
        let mut files = vec![(TOKENIZER_FILE.to_owned(), text)];
        for name in COMPANION_FILES {
            if let Some(text) = read_tokenizer_file(&path.with_file_name(name), MAX_COMPANION_BYTES)? {
                files.push((name.into(), text));
            }
        }
        let files = files.into();
        match interpreter.load_tokenizer(&files) {
            Ok(Ok(info)) => Ok(FileTokenizer { path, files, info }),
            Ok(Err((name, problem))) if name == TOKENIZER_FILE => {
                Err(build_invalid_tokenizer_error(&path, problem))
            }
            Ok(Err((name, problem))) => {
                Err(build_invalid_tokenizer_error(&path.with_file_name(name), problem))
            }
            Err(failure) => {
                Err(to_interpretation_error(failure, InterpretationStep::LoadTokenizer, &path, None, None))
            }
        }
    }
}

/// Converts a failure of the sandbox process, which interpreted the file at `path`, to an error
/// that names this file. `step` is the first work of the request. `rules` is the tokenizer or chat
/// template with which a record was interpreted.
pub(crate) fn to_interpretation_error(
    failure: InterpreterFailure,
    step: InterpretationStep,
    path: &Path,
    records: Option<FailedRecord>,
    rules: Option<&Path>,
) -> DataError {
    match failure.error {
        source @ SandboxError::NotStarted(_) => DataError::SandboxUnavailable { source },
        error => DataError::Uninterpretable(Box::new(InterpretationError {
            step: failure.step.unwrap_or(step),
            path: path.to_path_buf(),
            records,
            rules: rules.map(Path::to_path_buf),
            error,
        })),
    }
}

/// Builds the error which reports the path of an unusable tokenizer file and the reason `problem`.
fn build_invalid_tokenizer_error(path: &Path, problem: TokenizerProblem) -> DataError {
    DataError::InvalidTokenizer { path: path.to_path_buf(), problem }
}

/// Reads tokenizer.json or one of the other files of a tokenizer. Returns `None` if the file does
/// not exist. Fails if the file has more than `limit` bytes.
fn read_tokenizer_file(path: &Path, limit: u64) -> Result<Option<String>, DataError> {
    read_text_file(path, limit)
        .map_err(|problem| build_invalid_tokenizer_error(path, TokenizerProblem::FileUnreadable(problem)))
}

/// Reads the text of a regular UTF-8 file. Returns `None` if the file does not exist. Fails if the
/// file has more than `limit` bytes.
pub(crate) fn read_text_file(path: &Path, limit: u64) -> Result<Option<String>, TokenizerTextFileError> {
    let io_error = |e: std::io::Error| TokenizerTextFileError::Io(e.to_string());
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_error(e)),
    };
    if !file.metadata().map_err(io_error)?.is_file() {
        return Err(TokenizerTextFileError::NotRegular);
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io_error)?;
    if bytes.len() as u64 > limit {
        return Err(TokenizerTextFileError::TooLarge { limit });
    }
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|e| TokenizerTextFileError::NotUtf8 { offset: e.utf8_error().valid_up_to() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::fs;

    /// Returns the text of a tokenizer.json with the words a, b, c (ids 0, 1, 2) and the special
    /// tokens `specials`.
    fn build_tokenizer_json(specials: &[&str]) -> String {
        build_tokenizer_json_with_vocab(specials, serde_json::json!({"a": 0, "b": 1, "c": 2}))
    }

    /// Returns the text of a tokenizer.json with the words `vocab` and the special tokens
    /// `specials`, which have the ids from 3. The file also has truncation, padding and
    /// post-processing, which must be ignored.
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

    /// Opens a tokenizer in a temporary directory with the given files (names and contents).
    fn open_tokenizer_files(files: &[(&str, &str)]) -> Result<TextTokenizer, DataError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        TextTokenizer::open(&TokenizerSpec::File("tokenizer.json".into()), dir.path())
    }

    /// Opens an invalid tokenizer that consists of `files`. Returns the name of the invalid file
    /// and the problem. Panics if the tokenizer is valid.
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
        assert_eq!((t.vocab_size(), t.eod_token()), (257, 256));
    }

    #[test]
    fn a_tokenizer_file_encodes_complete_documents_without_post_processing() {
        let json = build_tokenizer_json(&["<eos>", "</s>"]);
        let t = open_tokenizer_files(&[("tokenizer.json", &json)]).unwrap();
        let mut out = Vec::new();
        t.encode("b a b z </s> b", &mut out).unwrap();
        assert_eq!(out, [1, 0, 1, 2, 4, 1]);
        // `</s>` precedes `<eos>` in the list.
        assert_eq!((t.eod_token(), t.vocab_size()), (4, 5));
        let gaps = build_tokenizer_json_with_vocab(&["</s>"], serde_json::json!({"a": 0, "b": 1, "c": 70}));
        assert_eq!(open_tokenizer_files(&[("tokenizer.json", &gaps)]).unwrap().vocab_size(), 71);
    }

    #[test]
    fn the_eos_token_of_companion_files_has_precedence() {
        let json = build_tokenizer_json(&["<eos>", "</s>", "<end>"]);
        let config = r#"{"eos_token": {"content": "<end>", "special": true}, "model_max_length": 7}"#;
        let map = r#"{"eos_token": "<eos>"}"#;
        let json = ("tokenizer.json", &json[..]);
        let eod = |files: &[(&str, &str)]| open_tokenizer_files(files).unwrap().eod_token();
        assert_eq!(eod(&[json]), 4);
        assert_eq!(eod(&[json, ("special_tokens_map.json", map)]), 3);
        assert_eq!(eod(&[json, ("special_tokens_map.json", map), (TOKENIZER_CONFIG_FILE, config)]), 5);
        assert_eq!(eod(&[json, (TOKENIZER_CONFIG_FILE, r#"{"eos_token": null}"#)]), 4);
        let with = open_tokenizer_files(&[json, (TOKENIZER_CONFIG_FILE, config)]).unwrap();
        assert_ne!(with.digest(), open_tokenizer_files(&[json]).unwrap().digest());
        assert_eq!(
            with.build_hf_tokenizer_files()[1],
            (TOKENIZER_CONFIG_FILE.to_string(), config.to_string())
        );
        let generated = open_tokenizer_files(&[json]).unwrap().build_hf_tokenizer_files();
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
        assert!(matches!(no_eod, TokenizerProblem::NoEndOfDocument), "{no_eod}");
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
        assert!(matches!(problem, TokenizerTextFileError::TooLarge { limit: 1000 }), "{problem}");
    }
}
