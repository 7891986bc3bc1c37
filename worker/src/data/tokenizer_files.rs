//! The file names of Hugging Face tokenizers, and the tokens that usually end a document.

/// The name of the main file of a Hugging Face tokenizer.
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// The name of the file next to tokenizer.json that names the end-of-sequence token.
pub(crate) const TOKENIZER_CONFIG_FILE: &str = "tokenizer_config.json";
/// The name of the file next to tokenizer.json that contains the chat template.
pub(crate) const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";
/// The names of the optional files that are loaded from the directory of tokenizer.json:
/// configuration, special tokens and chat template.
pub(crate) const COMPANION_FILES: [&str; 3] =
    [TOKENIZER_CONFIG_FILE, "special_tokens_map.json", CHAT_TEMPLATE_FILE];
/// Texts of special tokens that usually end a document, in order of preference. The first one that
/// the tokenizer has is used if no companion file names an end-of-sequence token.
pub(crate) const KNOWN_EOD_TOKENS: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
];
