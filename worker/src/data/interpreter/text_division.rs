//! Divides long texts before they are tokenized, because the crate `tokenizers` needs up to 170
//! bytes of memory per byte of the text that it tokenizes at once.
//!
//! The parts have the tokens of the whole text. A text is only divided between an ASCII letter or
//! digit and the ASCII white space that follows it, and only for tokenizers of which every
//! component treats the text before and after such a place independently.
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

/// The regular expressions of the pre-tokenizer `Split` for which texts are divided: those of Llama
/// 3, of Qwen 2, and of o200k, which gpt-oss uses. In all of them, white space can only be at the
/// beginning of a piece that contains letters or digits. So a piece that ends before white space
/// does not depend on the text after it.
const DIVIDING_PATTERNS: [&str; 3] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Returns whether the parts of a text that [`divide_text`] returns have the tokens of the whole
/// text.
pub(super) fn can_divide_texts(tokenizer: &Tokenizer) -> bool {
    // A component that cannot be converted is unknown.
    let normalizer = serde_json::to_value(tokenizer.get_normalizer()).unwrap_or(Value::Bool(false));
    let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).unwrap_or(Value::Null);
    // NFC composes no character with white space before or after it.
    let keeps_places = normalizer.is_null() || normalizer["type"] == "NFC";
    keeps_places
        && classify_pre_tokenizer(&pre_tokenizer) == PreTokenizerClass::Divides
        && !tokenizer.get_added_tokens_decoder().values().any(extends_over_white_space)
}

/// What a pre-tokenizer does between a letter or digit and white space.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PreTokenizerClass {
    /// It begins another piece there.
    Divides,
    /// It treats the text before and after the place independently.
    Keeps,
    /// It may depend on the text on both sides.
    Unknown,
}

/// Classifies a pre-tokenizer in the form of tokenizer.json.
fn classify_pre_tokenizer(json: &Value) -> PreTokenizerClass {
    match json["type"].as_str() {
        Some("ByteLevel") if json["add_prefix_space"] == false => match json["use_regex"] == false {
            true => PreTokenizerClass::Keeps,
            false => PreTokenizerClass::Divides,
        },
        Some("Digits") => PreTokenizerClass::Keeps,
        Some("Split") if json["behavior"] == "Isolated" && json["invert"] == false => {
            match json["pattern"]["Regex"].as_str() {
                Some(pattern) if DIVIDING_PATTERNS.contains(&pattern) => PreTokenizerClass::Divides,
                _ => PreTokenizerClass::Unknown,
            }
        }
        Some("Sequence") => {
            let parts = json["pretokenizers"].as_array().into_iter().flatten();
            parts.map(classify_pre_tokenizer).fold(PreTokenizerClass::Keeps, combine_classes)
        }
        _ => PreTokenizerClass::Unknown,
    }
}

/// Returns the class of two pre-tokenizers of which the second gets the pieces of the first.
fn combine_classes(first: PreTokenizerClass, second: PreTokenizerClass) -> PreTokenizerClass {
    match (first, second) {
        (PreTokenizerClass::Unknown, _) | (_, PreTokenizerClass::Unknown) => PreTokenizerClass::Unknown,
        (PreTokenizerClass::Divides, _) | (_, PreTokenizerClass::Divides) => PreTokenizerClass::Divides,
        _ => PreTokenizerClass::Keeps,
    }
}

/// Returns whether an added token can match text on both sides of a place between a letter or digit
/// and white space.
fn extends_over_white_space(token: &AddedToken) -> bool {
    let content = token.content.as_bytes();
    let takes_following_space = token.rstrip && content.last().is_some_and(u8::is_ascii_alphanumeric);
    takes_following_space || (1..content.len()).any(|at| is_place_to_divide(content, at))
}

/// Returns whether a text may be divided before its byte `at`, which is not the first one.
fn is_place_to_divide(text: &[u8], at: usize) -> bool {
    text[at - 1].is_ascii_alphanumeric() && text[at].is_ascii_whitespace()
}

/// Divides a text into parts of at most `part_bytes` bytes. A part is longer if it has no place to
/// divide.
pub(super) fn divide_text(text: &str, part_bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (part, following) = rest.split_at(find_part_length(rest.as_bytes(), part_bytes));
        rest = following;
        Some(part)
    })
}

/// Returns the length of the first part of a text: the last place to divide within `part_bytes`
/// bytes, or otherwise the next one, or the whole text.
fn find_part_length(text: &[u8], part_bytes: usize) -> usize {
    if text.len() <= part_bytes {
        return text.len();
    }
    let before = (1..=part_bytes).rev().find(|&at| is_place_to_divide(text, at));
    let mut after = part_bytes + 1..text.len();
    before.or_else(|| after.find(|&at| is_place_to_divide(text, at))).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    /// Returns a tokenizer whose pieces are merged from bytes. One merge could join a letter with
    /// following white space, if both were in one piece.
    fn build_tokenizer(normalizer: &Value, pre_tokenizer: &Value, added: &[Value]) -> Tokenizer {
        let mut alphabet: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
        alphabet.sort();
        let merges = ["o o", "f oo", "Ġ f", "Ġf oo", "o Ġ", "Ċ Ċ", "Ġ Ġ", "1 2"];
        let merged = merges.iter().map(|merge| merge.replace(' ', ""));
        let words = alphabet.into_iter().chain(merged).enumerate();
        let vocab: serde_json::Map<String, Value> = words.map(|(id, word)| (word, id.into())).collect();
        let added: Vec<Value> = (400..)
            .zip(added)
            .map(|(id, token)| {
                let mut token = token.clone();
                token["id"] = json!(id);
                token
            })
            .collect();
        let text = json!({
            "version": "1.0", "truncation": null, "padding": null, "post_processor": null, "decoder": null,
            "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false},
        });
        Tokenizer::from_bytes(text.to_string()).expect("a tokenizer")
    }

    /// Returns an added token in the form of tokenizer.json.
    fn added_token(content: &str, lstrip: bool, rstrip: bool) -> Value {
        json!({"content": content, "single_word": false, "lstrip": lstrip, "rstrip": rstrip,
            "normalized": false, "special": true})
    }

    /// The pre-tokenizer `ByteLevel`, which divides words by itself if `use_regex` is set.
    fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true,
            "use_regex": use_regex})
    }

    /// A `Split` with this pattern, and then `ByteLevel`, which only converts bytes to characters.
    fn split(pattern: &str) -> Value {
        let split =
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        json!({"type": "Sequence", "pretokenizers": [split, byte_level(false, false)]})
    }

    fn list_dividing_pre_tokenizers() -> Vec<Value> {
        let digits = json!({"type": "Digits", "individual_digits": true});
        let digits_first = json!({"type": "Sequence", "pretokenizers": [digits, byte_level(false, true)]});
        let splits = DIVIDING_PATTERNS.iter().map(|pattern| split(pattern));
        splits.chain([byte_level(false, true), digits_first]).collect()
    }

    proptest! {
        #[test]
        fn parts_have_the_tokens_of_the_whole_text(
            words in prop::collection::vec(prop::sample::select(vec![
                "foo", "f", "o", "'s", "'", " ", "  ", "\n", "\r\n", "\t", "\u{b}", "9", "12345", ".", "!?", "/", "<s>",
                "</s>", "é", "e\u{301}", "\u{301}", "中", "\u{903}", "ſ", "F", "\u{a0}",
            ]), 0..40),
            part_bytes in 1_usize..20,
            is_composed in any::<bool>(),
        ) {
            let normalizer = if is_composed { json!({"type": "NFC"}) } else { Value::Null };
            let added = [added_token("<s>", true, true), added_token("</s>", false, false), added_token("9f", true, false)];
            let text = words.concat();
            for pre_tokenizer in list_dividing_pre_tokenizers() {
                let tokenizer = build_tokenizer(&normalizer, &pre_tokenizer, &added);
                prop_assert!(can_divide_texts(&tokenizer), "{}", pre_tokenizer);
                let encode = |text: &str| tokenizer.encode_fast(text, false).expect("tokens").get_ids().to_vec();
                let parts: Vec<&str> = divide_text(&text, part_bytes).collect();
                prop_assert_eq!(parts.concat(), text.clone());
                let tokens: Vec<u32> = parts.iter().flat_map(|part| encode(part)).collect();
                prop_assert_eq!(tokens, encode(&text), "{:?} with {}", parts, pre_tokenizer);
            }
        }
    }

    #[test]
    fn texts_are_divided_at_the_last_place_that_fits() {
        let parts: Vec<&str> = divide_text("one two three. four\nfive", 9).collect();
        assert_eq!(parts, ["one two", " three. four", "\nfive"]);
        assert_eq!(divide_text("unbroken.text", 4).collect::<Vec<_>>(), ["unbroken.text"]);
        assert_eq!(divide_text("", 4).count(), 0);
    }

    #[test]
    fn texts_are_not_divided_for_tokenizers_that_may_depend_on_both_sides() {
        let divides = byte_level(false, true);
        let prepend = json!({"type": "Prepend", "prepend": "_"});
        let metaspace =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        let removed = json!({"type": "Split", "pattern": {"Regex": DIVIDING_PATTERNS[0]}, "behavior": "Removed", "invert": false});
        let cases = [
            (prepend, divides.clone(), vec![]),
            (Value::Null, Value::Null, vec![]),
            (Value::Null, metaspace, vec![]),
            (Value::Null, byte_level(true, true), vec![]),
            (Value::Null, byte_level(false, false), vec![]),
            (Value::Null, split(r"\w+\s\w+"), vec![]),
            (Value::Null, removed, vec![]),
            (Value::Null, divides.clone(), vec![added_token("foo foo", false, false)]),
            (Value::Null, divides, vec![added_token("foo", false, true)]),
        ];
        for (normalizer, pre_tokenizer, added) in cases {
            let tokenizer = build_tokenizer(&normalizer, &pre_tokenizer, &added);
            assert!(!can_divide_texts(&tokenizer), "{normalizer} {pre_tokenizer} {added:?}");
        }
    }
}
