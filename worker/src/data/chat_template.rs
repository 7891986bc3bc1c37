//! The chat template (Jinja) of a data source ([`ChatTemplate`]), with which a sandbox process
//! converts the chats of this source to text.
use super::{
    error::{ChatTemplateProblem, DataError, InterpretationStep},
    interpreter::{SandboxInterpreter, TemplateSource},
    tokenizer::{TextTokenizer, read_text_file, to_interpretation_error},
};
use jobspec::LossTargets;
use std::path::{Path, PathBuf};

/// Largest accepted size of a chat template, in bytes.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// The chat template (Jinja) of a data source, compiled in a sandbox process, and the setting that
/// determines which tokens of a chat count for the loss.
pub(crate) struct ChatTemplate {
    /// The file with the template.
    path: PathBuf,
    loss_on: LossTargets,
    digest: [u8; 32],
}

impl ChatTemplate {
    /// Reads and compiles the chat template in the file `path`, which the job names, or the chat
    /// template of `tokenizer` if `path` is `None`. A relative path starts at `workdir`.
    pub(crate) fn load(
        path: Option<&Path>,
        tokenizer: &TextTokenizer,
        loss_on: LossTargets,
        workdir: &Path,
    ) -> Result<Self, DataError> {
        let found = match path.map(|path| workdir.join(path)) {
            Some(path) => read_template_file(&path).map(|source| (path, source)),
            None => match tokenizer.find_chat_template() {
                Ok(Some(found)) => Ok(found),
                Ok(None) => Err(ChatTemplateProblem::TokenizerHasNone),
                Err(problem) => Err(problem),
            },
        };
        let invalid = |problem| DataError::InvalidChatTemplate { problem };
        let (path, source) = found.map_err(invalid)?;
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(invalid(ChatTemplateProblem::TooLarge { limit: MAX_TEMPLATE_BYTES }));
        }
        let template = TemplateSource { source, special_tokens: tokenizer.list_special_tokens() };
        Self::compile(path, template, loss_on, tokenizer.interpreter())
    }

    /// Sends the text of a chat template to the sandbox process, which compiles it, and returns a
    /// handle to the compiled template.
    fn compile(
        path: PathBuf,
        template: TemplateSource,
        loss_on: LossTargets,
        interpreter: &SandboxInterpreter,
    ) -> Result<Self, DataError> {
        let digest = compute_digest(&template, loss_on);
        match interpreter.compile_template(template) {
            Ok(Ok(())) => Ok(ChatTemplate { path, loss_on, digest }),
            Ok(Err(failure)) => {
                Err(DataError::InvalidChatTemplate { problem: ChatTemplateProblem::Syntax(failure) })
            }
            Err(failure) => {
                Err(to_interpretation_error(failure, InterpretationStep::CompileTemplate, &path, None, None))
            }
        }
    }

    /// Returns the path of the file from which this chat template was read.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns which tokens of a chat count for the loss.
    pub(crate) fn loss_on(&self) -> LossTargets {
        self.loss_on
    }

    /// Returns the BLAKE3 digest of the chat template, which changes if the template's text, its
    /// special tokens or its loss setting change. Templates with equal digests render equal chats
    /// equally.
    pub(crate) fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// Returns whether only some tokens of a chat count for the loss.
    pub(crate) fn has_loss_mask(&self) -> bool {
        self.loss_on == LossTargets::Assistant
    }
}

/// Computes the BLAKE3 digest of a chat template: its text, its special tokens, and whether only
/// the assistant's tokens count for the loss.
fn compute_digest(template: &TemplateSource, loss_on: LossTargets) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("launch 2026 chat template v1");
    let tokens = template.special_tokens.iter().flat_map(|(name, text)| [name, text]);
    for text in [&template.source].into_iter().chain(tokens) {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    hasher.update(&[u8::from(loss_on == LossTargets::Assistant)]);
    *hasher.finalize().as_bytes()
}

/// Reads the file of a chat template that the job names.
fn read_template_file(path: &Path) -> Result<String, ChatTemplateProblem> {
    match read_text_file(path, MAX_TEMPLATE_BYTES as u64) {
        Ok(Some(source)) => Ok(source),
        Ok(None) => Err(ChatTemplateProblem::FileMissing { path: path.to_path_buf() }),
        Err(problem) => Err(ChatTemplateProblem::FileUnreadable { path: path.to_path_buf(), problem }),
    }
}
