//! Divides long texts before they are tokenized, because the crate `tokenizers` needs up to 170
//! bytes of memory per byte of the text that it tokenizes at once.
//!
//! The parts have the tokens of the whole text. A text is only divided between two ASCII characters
//! at which [`ends_piece`], and only for tokenizers of which every component treats the text before
//! and after such a place independently.
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

/// The regular expressions of the pre-tokenizer `Split` for which texts are divided: those of
/// Llama 3, of Qwen 2, and of o200k, which gpt-oss uses. In all of them, a piece ends where
/// [`ends_piece`], and what is in the piece does not depend on the text after it.
const DIVIDING_PATTERNS: [&str; 3] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Returns whether all pre-tokenizers for which texts are divided end a piece between these two
/// characters. An apostrophe may belong to the piece of the letters before it (`it's`).
fn ends_piece(before: u8, after: u8) -> bool {
    match after {
        b'\'' => false,
        b'0'..=b'9' => before.is_ascii_alphabetic(),
        _ => before.is_ascii_alphanumeric() && after.is_ascii() && !after.is_ascii_alphabetic(),
    }
}

/// The places at which the texts for a tokenizer may be divided.
pub(super) struct DivisionPlaces {
    /// By ASCII character: whether texts may be divided before it, where [`ends_piece`].
    may_begin_part: [bool; 128],
}

impl DivisionPlaces {
    /// Returns the places at which texts may be divided so that the parts have the tokens of the
    /// whole text, or `None` if there are none.
    pub(super) fn find(tokenizer: &Tokenizer) -> Option<DivisionPlaces> {
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let post_processor = serde_json::to_value(tokenizer.get_post_processor()).ok()?;
        // NFC composes no ASCII character with an ASCII character before it.
        let keeps_places = normalizer.is_null() || normalizer["type"] == "NFC";
        if !keeps_places
            || trims_offsets(&post_processor)
            || classify_pre_tokenizer(&pre_tokenizer) != PreTokenizerClass::Divides
        {
            return None;
        }
        let mut places = DivisionPlaces { may_begin_part: [true; 128] };
        tokenizer.get_added_tokens_decoder().values().for_each(|token| places.exclude_added_token(token));
        Some(places)
    }

    /// Excludes the places at which dividing a text may change where an added token is found.
    fn exclude_added_token(&mut self, token: &AddedToken) {
        let content = token.content.as_bytes();
        let inner = content.windows(2).filter(|pair| ends_piece(pair[0], pair[1])).map(|pair| pair[1]);
        inner.for_each(|byte| self.may_begin_part[usize::from(byte)] = false);
        // Such a token takes the white space after it.
        let takes_white_space = token.rstrip && content.last().is_some_and(u8::is_ascii_alphanumeric);
        for byte in 0..128_u8 {
            let is_taken = takes_white_space && char::from(byte).is_whitespace();
            // Such a token must not be a part of a word.
            let is_of_word = token.single_word && (byte == b'_' || byte.is_ascii_digit());
            self.may_begin_part[usize::from(byte)] &= !is_taken && !is_of_word;
        }
    }

    /// Returns whether a text may be divided before its byte `at`, which is not the first one.
    fn contains(&self, text: &[u8], at: usize) -> bool {
        ends_piece(text[at - 1], text[at]) && self.may_begin_part[usize::from(text[at])]
    }

    /// Divides a text into parts of at most `part_bytes` bytes. A part is longer if it contains no
    /// place to divide it.
    pub(super) fn divide<'a>(&self, text: &'a str, part_bytes: usize) -> Vec<&'a str> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let (part, following) = rest.split_at(self.find_part_length(rest.as_bytes(), part_bytes));
            parts.push(part);
            rest = following;
        }
        parts
    }

    /// Returns the length of the first part of a text: the last place to divide within `part_bytes`
    /// bytes, or otherwise the next one, or the whole text.
    fn find_part_length(&self, text: &[u8], part_bytes: usize) -> usize {
        if text.len() <= part_bytes {
            return text.len();
        }
        let before = (1..=part_bytes).rev().find(|&at| self.contains(text, at));
        let mut after = part_bytes + 1..text.len();
        before.or_else(|| after.find(|&at| self.contains(text, at))).unwrap_or(text.len())
    }
}

/// Returns whether a post-processor in the form of tokenizer.json changes the byte ranges of
/// tokens. Such a change may depend on whether a token is the first one.
fn trims_offsets(json: &Value) -> bool {
    let processors = json["processors"].as_array().into_iter().flatten();
    json["trim_offsets"] == true || processors.into_iter().any(trims_offsets)
}

/// What a pre-tokenizer does at the places where [`ends_piece`].
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    /// Returns a tokenizer whose pieces are merged from bytes. Some merges would join a letter with
    /// what follows, if both were in one piece.
    fn build_tokenizer(normalizer: &Value, pre_tokenizer: &Value, added: &[Value]) -> Tokenizer {
        let post_processor = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false});
        build_tokenizer_with_post_processor(normalizer, pre_tokenizer, &post_processor, added)
    }

    fn build_tokenizer_with_post_processor(
        normalizer: &Value,
        pre_tokenizer: &Value,
        post_processor: &Value,
        added: &[Value],
    ) -> Tokenizer {
        let mut alphabet: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
        alphabet.sort();
        let merges = ["o o", "f oo", "Ġ f", "Ġf oo", "o Ġ", "o .", "o 1", "Ċ Ċ", "Ġ Ġ", "1 2"];
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
            "version": "1.0", "truncation": null, "padding": null, "post_processor": post_processor, "decoder": null,
            "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false},
        });
        Tokenizer::from_bytes(text.to_string()).expect("a tokenizer")
    }

    /// Returns an added token in the form of tokenizer.json that is only found as a whole word.
    fn added_word(content: &str) -> Value {
        let mut token = added_token(content, false, false);
        token["single_word"] = json!(true);
        token
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

    fn list_added_tokens() -> Vec<Value> {
        vec![
            added_token("<s>", true, true),
            added_token("</s>", false, false),
            added_token("9f", true, false),
            added_token("<|foo_1|>", false, false),
            added_token("foo foo", false, false),
            added_token("foo", false, true),
            added_word("o"),
            added_word("9"),
        ]
    }

    fn list_dividing_pre_tokenizers() -> Vec<Value> {
        let digits = json!({"type": "Digits", "individual_digits": true});
        let digits_first = json!({"type": "Sequence", "pretokenizers": [digits, byte_level(false, true)]});
        let splits = DIVIDING_PATTERNS.iter().map(|pattern| split(pattern));
        splits.chain([byte_level(false, true), digits_first]).collect()
    }

    /// Returns the ids of a text's tokens, and their byte ranges if the text begins at `begin`.
    fn encode(tokenizer: &Tokenizer, text: &str, begin: usize) -> Vec<(u32, usize, usize)> {
        let encoding = tokenizer.encode(text, false).expect("tokens");
        assert_eq!(tokenizer.encode_fast(text, false).expect("tokens").get_ids(), encoding.get_ids());
        let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
        spans.map(|(&id, &(from, to))| (id, begin + from, begin + to)).collect()
    }

    proptest! {
        #[test]
        fn parts_have_the_tokens_and_byte_ranges_of_the_whole_text(
            words in prop::collection::vec(prop::sample::select(vec![
                "foo", "f", "o", "'s", "'", " ", "  ", "\n", "\r\n", "\t", "\u{b}", "\0", "9", "12345", ".", "!?", "/", "=",
                "\u{338}", "_", "<s>", "</s>", "<|foo_1|>", "foo foo", "é", "e\u{301}", "\u{301}", "中", "\u{903}", "ſ", "F",
                "\u{a0}",
            ]), 0..40),
            part_bytes in 1_usize..20,
            is_composed in any::<bool>(),
            added in prop::sample::subsequence(list_added_tokens(), 0..=8),
        ) {
            let normalizer = if is_composed { json!({"type": "NFC"}) } else { Value::Null };
            let text = words.concat();
            for pre_tokenizer in list_dividing_pre_tokenizers() {
                let tokenizer = build_tokenizer(&normalizer, &pre_tokenizer, &added);
                let parts = DivisionPlaces::find(&tokenizer).expect("places").divide(&text, part_bytes);
                prop_assert_eq!(parts.concat(), text.clone());
                let mut begin = 0;
                let mut tokens = Vec::new();
                for part in &parts {
                    tokens.extend(encode(&tokenizer, part, begin));
                    begin += part.len();
                }
                prop_assert_eq!(tokens, encode(&tokenizer, &text, 0), "{:?} with {}", parts, pre_tokenizer);
            }
        }
    }

    /// Divides a text for a tokenizer with these added tokens.
    fn divide<'a>(text: &'a str, part_bytes: usize, added: &[Value]) -> Vec<&'a str> {
        let tokenizer = build_tokenizer(&Value::Null, &byte_level(false, true), added);
        DivisionPlaces::find(&tokenizer).expect("places").divide(text, part_bytes)
    }

    #[test]
    fn texts_are_divided_at_the_last_place_that_fits() {
        assert_eq!(divide("one two three. four\nfive", 9, &[]), ["one two", " three", ". four", "\nfive"]);
        assert_eq!(divide("it's_x12", 2, &[]), ["it's", "_x", "12"]);
        assert_eq!(divide("unbroken", 4, &[]), ["unbroken"]);
        assert!(divide("", 4, &[]).is_empty());
    }

    #[test]
    fn texts_are_not_divided_where_an_added_token_may_be() {
        let words = [added_token("foo foo", false, false), added_token("<|x|>", false, false)];
        assert_eq!(divide("one foo.two|three\nfour", 1, &words), ["one foo", ".two|three", "\nfour"]);
        assert_eq!(divide("one two.three", 1, &[added_token("one", false, true)]), ["one two", ".three"]);
        assert_eq!(divide("x_y1.z", 1, &[added_word("y")]), ["x_y1", ".z"]);
    }

    #[test]
    fn texts_are_not_divided_for_tokenizers_that_may_depend_on_both_sides() {
        let divides = byte_level(false, true);
        let prepend = json!({"type": "Prepend", "prepend": "_"});
        let metaspace =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        let removed = json!({"type": "Split", "pattern": {"Regex": DIVIDING_PATTERNS[0]}, "behavior": "Removed", "invert": false});
        let cases = [
            (prepend, divides),
            (Value::Null, Value::Null),
            (Value::Null, metaspace),
            (Value::Null, byte_level(true, true)),
            (Value::Null, byte_level(false, false)),
            (Value::Null, split(r"\w+\s\w+")),
            (Value::Null, removed),
        ];
        for (normalizer, pre_tokenizer) in cases {
            let tokenizer = build_tokenizer(&normalizer, &pre_tokenizer, &[]);
            assert!(DivisionPlaces::find(&tokenizer).is_none(), "{normalizer} {pre_tokenizer}");
        }
        let trims = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
        let trims = json!({"type": "Sequence", "processors": [trims]});
        let (normalizer, pre_tokenizer) = (Value::Null, byte_level(false, true));
        let tokenizer = build_tokenizer_with_post_processor(&normalizer, &pre_tokenizer, &trims, &[]);
        assert!(DivisionPlaces::find(&tokenizer).is_none());
    }
}
