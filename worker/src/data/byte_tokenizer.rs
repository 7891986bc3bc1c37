//! The built-in byte tokenizer, whose vocabulary consists of the 256 byte values and an
//! end-of-document token. Also the files that describe it to Hugging Face libraries.
//!
//! GPT-2's byte-level scheme represents each byte by one printable character. The vocabulary maps
//! each of these characters to the value of its byte and has no merges. Every implementation of
//! `tokenizers` therefore encodes UTF-8 text to its bytes and decodes it without loss.
use super::tokenizer_files::{TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use serde_json::json;

/// The number of tokens of the byte tokenizer: 256 byte values and [`EOD_TOKEN`].
pub(crate) const VOCAB_SIZE: u32 = 257;
/// The id of the byte tokenizer's end-of-document token.
pub(crate) const EOD_TOKEN: u32 = 256;
/// The text that represents the byte tokenizer's end-of-document token.
pub(crate) const EOD_TOKEN_TEXT: &str = "<|endoftext|>";

/// Converts a text to tokens of the byte tokenizer, which are the bytes of the text.
pub(crate) fn encode(text: &str) -> impl Iterator<Item = u32> {
    text.bytes().map(u32::from)
}

/// Converts tokens of the byte tokenizer to text. Omits tokens that are not bytes.
pub(crate) fn decode(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the printable character that stands for the byte `byte` in the vocabularies of GPT-2 and
/// other byte-level tokenizers.
fn map_byte_to_character(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the names and contents of tokenizer.json and tokenizer_config.json, by which Hugging
/// Face libraries can load the byte tokenizer.
pub(crate) fn build_hf_tokenizer_files() -> Vec<(String, String)> {
    let vocab: serde_json::Map<String, serde_json::Value> =
        (0..=255u8).map(|b| (map_byte_to_character(b).to_string(), json!(b))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": EOD_TOKEN, "content": EOD_TOKEN_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    vec![
        (TOKENIZER_FILE.into(), format!("{tokenizer:#}\n")),
        (TOKENIZER_CONFIG_FILE.into(), build_minimal_tokenizer_config(EOD_TOKEN_TEXT)),
    ]
}

/// Returns the content of a minimal tokenizer_config.json that makes `transformers` use the
/// tokenizer.json next to it without changes. `eos` is the text of the end-of-document token.
pub(crate) fn build_minimal_tokenizer_config(eos: &str) -> String {
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": eos,
        "clean_up_tokenization_spaces": false,
    });
    format!("{config:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenizers::Tokenizer;

    /// Loads the generated tokenizer.json with the `tokenizers` library.
    fn load_byte_tokenizer() -> Tokenizer {
        let files = build_hf_tokenizer_files();
        assert_eq!(files[0].0, "tokenizer.json");
        Tokenizer::from_bytes(&files[0].1).unwrap()
    }

    #[test]
    fn the_vocabulary_maps_characters_to_bytes() {
        let t = load_byte_tokenizer();
        assert_eq!(t.get_vocab_size(true), VOCAB_SIZE as usize);
        assert_eq!(t.token_to_id(EOD_TOKEN_TEXT), Some(EOD_TOKEN));
        for b in 0..=255u8 {
            assert_eq!(t.token_to_id(&map_byte_to_character(b).to_string()), Some(u32::from(b)));
        }
        // GPT-2's table maps space to Ġ, newline to Ċ, NUL to Ā, and the soft hyphen, the last
        // unprintable byte, to Ń.
        assert_eq!([32, 10, 0, 173].map(map_byte_to_character), ['Ġ', 'Ċ', 'Ā', 'Ń']);
    }

    #[test]
    fn control_characters_and_multibyte_texts_round_trip() {
        let t = load_byte_tokenizer();
        for text in
            [" a  b\n\n\tc ", "'s 's", "Ġ\u{100}\u{143}", "日本語 🦀\u{0}\u{7f}\u{ad}\u{a0}", "don't . , ! ?"]
        {
            assert_round_trip(&t, text);
        }
        let ids = t.encode_fast(format!("a{EOD_TOKEN_TEXT}b"), true).unwrap().get_ids().to_vec();
        assert_eq!(ids, [97, 256, 98]);
    }

    /// Checks that the tokenizer `t` encodes `text` as its bytes and decodes them without loss.
    fn assert_round_trip(t: &Tokenizer, text: &str) {
        let encoded = t.encode_fast(text, true).unwrap();
        let want: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(encoded.get_ids(), want);
        assert_eq!(t.decode(&want, true).unwrap(), text);
    }

    proptest! {
        #[test]
        fn any_text_is_encoded_as_its_bytes(text in any::<String>()) {
            assert_round_trip(&load_byte_tokenizer(), &text);
        }
    }
}
