//! The embedded tokenizer of 256 byte values and one end-of-document token, written as a Hugging Face tokenizer.
//!
//! GPT-2's byte-level scheme shows each byte as one printable character. With a vocabulary that gives each of these characters its byte's value and
//! no merges, every `tokenizers` implementation encodes UTF-8 text to its bytes and decodes it back without loss.
use super::tokenize::CONFIG_FILE;
use serde_json::json;

/// Tokens: 256 bytes and [`EOD`].
pub(crate) const VOCAB_SIZE: u32 = 257;
/// Ends every document.
pub(crate) const EOD: u32 = 256;
/// How the end-of-document token is written.
pub(crate) const EOD_TEXT: &str = "<|endoftext|>";

/// GPT-2's character for a byte: itself where it is printable, else the next free one from U+0100 on.
fn character(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// `tokenizer.json` and `tokenizer_config.json`.
pub(crate) fn hf_files() -> Vec<(String, String)> {
    let vocab: serde_json::Map<String, serde_json::Value> =
        (0..=255u8).map(|b| (character(b).to_string(), json!(b))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": EOD, "content": EOD_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
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
        ("tokenizer.json".into(), format!("{tokenizer:#}\n")),
        (CONFIG_FILE.into(), minimal_config(EOD_TEXT)),
    ]
}

/// The `tokenizer_config.json` that lets `transformers` load a tokenizer.json as it is.
pub(crate) fn minimal_config(eos: &str) -> String {
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

    fn load() -> Tokenizer {
        let files = hf_files();
        assert_eq!(files[0].0, "tokenizer.json");
        Tokenizer::from_bytes(&files[0].1).unwrap()
    }

    #[test]
    fn vocabulary() {
        let t = load();
        assert_eq!(t.get_vocab_size(true), VOCAB_SIZE as usize);
        assert_eq!(t.token_to_id(EOD_TEXT), Some(EOD));
        for b in 0..=255u8 {
            assert_eq!(t.token_to_id(&character(b).to_string()), Some(u32::from(b)));
        }
        // GPT-2's table: space is Ġ, newline Ċ, NUL Ā, soft hyphen (the last unprintable) Ń
        assert_eq!([32, 10, 0, 173].map(character), ['Ġ', 'Ċ', 'Ā', 'Ń']);
    }

    #[test]
    fn awkward_texts() {
        let t = load();
        for text in
            [" a  b\n\n\tc ", "'s 's", "Ġ\u{100}\u{143}", "日本語 🦀\u{0}\u{7f}\u{ad}\u{a0}", "don't . , ! ?"]
        {
            check(&t, text);
        }
        let ids = t.encode_fast(format!("a{EOD_TEXT}b"), true).unwrap().get_ids().to_vec();
        assert_eq!(ids, [97, 256, 98]);
    }

    fn check(t: &Tokenizer, text: &str) {
        let encoded = t.encode_fast(text, true).unwrap();
        let want: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(encoded.get_ids(), want);
        assert_eq!(t.decode(&want, true).unwrap(), text);
    }

    proptest! {
        #[test]
        fn any_text_is_its_bytes(text in any::<String>()) {
            check(&load(), &text);
        }
    }
}
