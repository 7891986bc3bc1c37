//! [`parse_plain_pickle`]: converts pickles without class instances to JSON, such as the dumps of
//! torch's flight recorder.
use super::{PickleView, parse_pickle};
use crate::error::PickleError;
use serde_json::Value as Json;

/// Maximum number of values of a pickle that are converted to JSON. The rest becomes null or is
/// left out.
const CONVERTED_VALUES_MAX: usize = 1 << 20;

/// Parses a pickle of plain values (numbers, texts, lists, dicts), and converts it to JSON. Of
/// longer lists, only the last `list_items_max` items are kept. Tuples become lists.
///
/// # Errors
/// Fails if the pickle is invalid, exceeds a limit of the pickle machine, or names a class or
/// function.
pub fn parse_plain_pickle(bytes: &[u8], list_items_max: usize) -> Result<Json, PickleError> {
    let tree = parse_pickle(bytes, &[])?;
    let mut left = CONVERTED_VALUES_MAX;
    Ok(convert(tree.root_value(), list_items_max, &mut left))
}

/// Converts a pickled value to JSON, up to `left` values, and subtracts the number of converted
/// values from `left`. The nesting is limited by the pickle machine.
fn convert(value: PickleView<'_>, list_items_max: usize, left: &mut usize) -> Json {
    if *left == 0 {
        return Json::Null;
    }
    if let Some(items) = value.as_items() {
        *left -= 1;
        let skipped = items.len().saturating_sub(list_items_max);
        return items.iter().skip(skipped).map(|item| convert(item, list_items_max, left)).collect();
    }
    let Some(pairs) = value.as_pairs() else { return value.to_json_limited(left) };
    *left -= 1;
    let pairs = pairs.map(|(key, value)| (key.to_json_key(), convert(value, list_items_max, left)));
    Json::Object(pairs.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn plain_values_become_json_with_the_ends_of_long_lists() {
        // {'n': [1, 2, 3], 't': ('a', None, True)}, as Python's protocol 2.
        let bytes = b"\x80\x02}(X\x01\x00\x00\x00n](K\x01K\x02K\x03eX\x01\x00\x00\x00t\
                      X\x01\x00\x00\x00aN\x88\x87u.";
        assert_eq!(parse_plain_pickle(bytes, 8).unwrap(), json!({"n": [1, 2, 3], "t": ["a", null, true]}));
        assert_eq!(parse_plain_pickle(bytes, 2).unwrap(), json!({"n": [2, 3], "t": [null, true]}));
    }

    #[test]
    fn classes_and_incomplete_pickles_are_rejected() {
        parse_plain_pickle(b"cos\nsystem\n.", 8).expect_err("a function");
        parse_plain_pickle(b"\x80\x02}(X\x01", 8).expect_err("incomplete");
        parse_plain_pickle(b"", 8).expect_err("empty");
    }
}
