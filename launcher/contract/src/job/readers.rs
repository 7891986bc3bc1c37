//! Readers: functions that convert a YAML node to a value of one type. For a wrong value they
//! return an error that describes the expected value.
use super::{
    scalar,
    value_error::ValueError,
    yaml::{YamlNode, YamlValue, make_excerpt},
};
use diagnostic::{Code, codes::job as codes};
use std::ops::RangeInclusive;

/// The result of a reader: the value, or why the YAML node is not such a value.
pub(crate) type ReadResult<T> = Result<T, ValueError>;

/// Creates the error of a value of the wrong type. The message is "must be `expected`, found …".
pub(crate) fn wrong_type_error(expected: impl Into<String>, node: &YamlNode) -> ValueError {
    ValueError::unexpected(codes::JOB_VALUE_TYPE, expected, node)
}

/// Creates the error of a value that has the right type, but is outside of the allowed range.
/// `expected` describes the range.
pub(crate) fn out_of_range_error(expected: impl Into<String>, node: &YamlNode) -> ValueError {
    ValueError::unexpected(codes::JOB_VALUE_OUT_OF_RANGE, expected, node)
}

/// Creates the error of a value that must be text in the format `expected`. Text in another format
/// and values that are not text get different codes.
pub(crate) fn wrong_format_error(expected: impl Into<String>, node: &YamlNode) -> ValueError {
    ValueError::unexpected(choose_text_code(node, codes::JOB_VALUE_FORMAT), expected, node)
}

/// Returns `code` if the node is text. Otherwise returns the code of a value of the wrong type.
fn choose_text_code(node: &YamlNode, code: Code) -> Code {
    if matches!(node.value, YamlValue::Text) { code } else { codes::JOB_VALUE_TYPE }
}

/// Returns a reader of integers in `range`.
pub(crate) fn int_reader(range: RangeInclusive<u64>) -> impl Fn(&YamlNode) -> ReadResult<u64> {
    move |node| {
        let code = match node.value {
            YamlValue::Int(_) => codes::JOB_VALUE_OUT_OF_RANGE,
            _ => codes::JOB_VALUE_TYPE,
        };
        let error = || {
            let error = ValueError::unexpected(code, describe_range(&range), node);
            match guess_intended_integer(node) {
                Some(n) => error.with_help(format!("write `{n}`")),
                None => error,
            }
        };
        match node.value {
            YamlValue::Int(n) => u64::try_from(n).ok().filter(|n| range.contains(n)).ok_or_else(error),
            _ => Err(error()),
        }
    }
}

/// Returns a reader of 32-bit integers in `range`.
pub(crate) fn int32_reader(range: RangeInclusive<u32>) -> impl Fn(&YamlNode) -> ReadResult<u32> {
    let read = int_reader(u64::from(*range.start())..=u64::from(*range.end()));
    move |node| read(node).map(|n| n as u32)
}

/// Describes a range of integers for a message, as "an integer from 1 to 8".
fn describe_range(range: &RangeInclusive<u64>) -> String {
    match (*range.start(), *range.end()) {
        (low, u64::MAX) => format!("an integer of {low} or more"),
        (low, high) => format!("an integer from {low} to {high}"),
    }
}

/// Returns the integer that the user most likely meant by `1e3`, `1_000`, `"8"` or `4.0`; `None`
/// for other values.
fn guess_intended_integer(node: &YamlNode) -> Option<u64> {
    match node.value {
        YamlValue::Float(x) if x.fract() == 0.0 && (0.0..1e15).contains(&x) => Some(x as u64),
        YamlValue::Text => node.raw.replace(['_', ',', ' '], "").parse().ok(),
        _ => None,
    }
}

/// Returns a reader of finite numbers for which `accepts` returns true. `expected` describes these
/// numbers in messages.
pub(crate) fn number_reader(
    expected: &'static str,
    accepts: fn(f64) -> bool,
) -> impl Fn(&YamlNode) -> ReadResult<f64> {
    move |node| {
        let x = match node.value {
            YamlValue::Int(n) => n as f64,
            YamlValue::Float(x) => x,
            _ => return Err(wrong_type_error(expected, node)),
        };
        if x.is_finite() && accepts(x) { Ok(x) } else { Err(out_of_range_error(expected, node)) }
    }
}

/// Reads a number that is positive and finite as f32, because kernels compute with f32.
pub(super) fn read_positive(node: &YamlNode) -> ReadResult<f64> {
    number_reader("a number above 0", |x| x as f32 > 0.0 && (x as f32).is_finite())(node)
}

/// Reads `true` or `false`. For another spelling, such as `yes` or `0`, the error suggests the
/// right one.
pub(crate) fn read_boolean(node: &YamlNode) -> ReadResult<bool> {
    match node.value {
        YamlValue::Bool(b) => Ok(b),
        _ => {
            let error = wrong_type_error("`true` or `false`", node);
            Err(match node.raw.to_ascii_lowercase().as_str() {
                "yes" | "on" | "y" | "1" | "true" => error.with_help("write `true`"),
                "no" | "off" | "n" | "0" | "false" => error.with_help("write `false`"),
                _ => error,
            })
        }
    }
}

/// Reads text that is not empty. Rejects control characters, including line breaks and tabs.
pub(crate) fn read_text(node: &YamlNode) -> ReadResult<String> {
    match node.value {
        YamlValue::Text if node.raw.is_empty() => Err(out_of_range_error("text", node)),
        YamlValue::Text => read_printable_text(node),
        YamlValue::Bool(_) | YamlValue::Int(_) | YamlValue::Float(_) => Err(wrong_type_error("text", node)
            .with_help(format!("put it in quotes: \"{}\"", make_excerpt(&node.raw)))),
        _ => Err(wrong_type_error("text", node)),
    }
}

/// Reads any scalar as the text that the file contains, because arguments and values of variables
/// may look like numbers. Line breaks are allowed. NUL is an error.
pub(crate) fn read_verbatim(node: &YamlNode) -> ReadResult<String> {
    match node.value {
        YamlValue::List(_) | YamlValue::Map(_) => Err(wrong_type_error("text", node)),
        YamlValue::Null => Err(wrong_type_error("text", node).with_help("write \"\" for an empty text")),
        _ if node.raw.contains('\0') => {
            Err(ValueError::new(codes::JOB_CONTROL_CHARACTER, node.span, "contains a NUL character"))
        }
        _ => Ok(node.raw.clone()),
    }
}

/// Reads text. Fails if the text contains control characters.
fn read_printable_text(node: &YamlNode) -> ReadResult<String> {
    match node.raw.chars().find(|c| c.is_control()) {
        Some(c) => {
            let message = format!("contains the control character {}", c.escape_default());
            Err(ValueError::new(codes::JOB_CONTROL_CHARACTER, node.span, message))
        }
        None => Ok(node.raw.clone()),
    }
}

/// Returns a reader of lists whose items `read_item` reads. The error contains the mistakes of all
/// items. `expected` describes the list in messages.
pub(crate) fn list_reader<T>(
    expected: &'static str,
    read_item: impl Fn(&YamlNode) -> ReadResult<T>,
) -> impl Fn(&YamlNode) -> ReadResult<Vec<T>> {
    move |node| match &node.value {
        YamlValue::List(items) => {
            let (mut values, mut errors) = (Vec::new(), Vec::new());
            for (i, item) in items.iter().enumerate() {
                match read_item(item) {
                    Ok(value) => values.push(value),
                    Err(error) => errors.push(error.in_part(&format!("item {}", i + 1))),
                }
            }
            ValueError::merge(errors).map_or(Ok(values), Err)
        }
        YamlValue::Text => Err(wrong_type_error(expected, node)
            .with_help(format!("write a list of one item as [\"{}\"]", make_excerpt(&node.raw)))),
        YamlValue::Int(_) | YamlValue::Float(_) => Err(wrong_type_error(expected, node)
            .with_help(format!("write a list of one item as [{}]", make_excerpt(&node.raw)))),
        _ => Err(wrong_type_error(expected, node)),
    }
}

/// Returns a reader of the keywords in `names`, each of which stands for a value. The error for
/// another text suggests the most similar keyword.
pub(crate) fn choice_reader<T: Clone>(
    names: &'static [(&'static str, T)],
) -> impl Fn(&YamlNode) -> ReadResult<T> {
    move |node| {
        if let YamlValue::Text = node.value
            && let Some((_, value)) = names.iter().find(|(name, _)| *name == node.raw)
        {
            return Ok(value.clone());
        }
        let code = choose_text_code(node, codes::JOB_VALUE_UNKNOWN);
        let error = ValueError::unexpected(code, format_choices(names), node);
        Err(match find_nearest_name(&node.raw, names.iter().map(|(name, _)| *name)) {
            Some(name) => error.with_help(format!("did you mean `{name}`?")),
            None => error,
        })
    }
}

/// Lists the keywords for a message, as "`a`, `b` or `c`".
fn format_choices<T>(names: &[(&str, T)]) -> String {
    let quoted: Vec<String> = names.iter().map(|(n, _)| format!("`{n}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// Returns a reader that returns `value` for the text `keyword`, and reads any other value by
/// `read`.
pub(crate) fn keyword_or_reader<T: Clone>(
    keyword: &'static str,
    value: T,
    read: impl Fn(&YamlNode) -> ReadResult<T>,
) -> impl Fn(&YamlNode) -> ReadResult<T> {
    move |node| {
        if matches!(node.value, YamlValue::Text) && node.raw == keyword {
            return Ok(value.clone());
        }
        read(node).map_err(|error| error.with_keyword(keyword))
    }
}

/// Reads a duration such as `10s`. Returns the duration in milliseconds.
pub(crate) fn read_duration(node: &YamlNode) -> ReadResult<u64> {
    let error = || wrong_format_error("a duration such as `500ms`, `10s`, `5m`, `2h`", node);
    match node.value {
        YamlValue::Text => scalar::parse_duration(&node.raw).ok_or_else(error),
        YamlValue::Int(_) | YamlValue::Float(_) => {
            Err(error().with_help(format!("write the unit: `{}s`", make_excerpt(&node.raw))))
        }
        _ => Err(error()),
    }
}

/// Reads a size such as `1GiB`. Returns the size in bytes.
pub(crate) fn read_size(node: &YamlNode) -> ReadResult<u64> {
    let error = || wrong_format_error("a size such as `512KiB`, `100MB`, `1GiB`", node);
    match node.value {
        YamlValue::Text => scalar::parse_size(&node.raw).ok_or_else(error),
        YamlValue::Int(_) | YamlValue::Float(_) => {
            Err(error().with_help(format!("write the unit: `{}B`", make_excerpt(&node.raw))))
        }
        _ => Err(error()),
    }
}

/// Returns the name that is most similar to `word`. Returns `None` if `word` is not likely to be a
/// misspelling of any of the names.
pub(crate) fn find_nearest_name<'n>(word: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    const MAX_WORD: usize = 80;
    if word.len() > MAX_WORD {
        return None;
    }
    let word = word.to_lowercase();
    names
        .map(|name| (strsim::damerau_levenshtein(&word, &name.to_lowercase()), name))
        .min()
        .filter(|(distance, name)| *distance <= name.len().max(word.len()) / 3)
        .map(|(_, name)| name)
}
