//! Creates the parsers and printers ([`ValueType`]) for job.yaml keys whose values are lists.
use super::value_type::{ReadResult, ValueType, wrong_type_error};
use crate::yaml::{
    format::{YamlText, format_list},
    tree::{YamlNode, YamlValue, make_excerpt},
    value_error::ValueError,
};
use serde_json::json;

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept lists of items of
/// the type `item`. `accepts` describes the list, such as `list of paths`. The error of a list
/// contains the mistakes of all items.
pub(crate) fn list_type<T: 'static>(accepts: &'static str, item: ValueType<T>) -> ValueType<Vec<T>> {
    described_list_type(accepts, format!("a {accepts}"), item)
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept lists, described by
/// `expected` in messages and by `accepts` in docs/job.md.
pub(crate) fn described_list_type<T: 'static>(
    accepts: &'static str,
    expected: impl Into<String>,
    item: ValueType<T>,
) -> ValueType<Vec<T>> {
    let (expected, item) = (expected.into(), std::rc::Rc::new(item));
    let (message, printer) = (expected.clone(), item.clone());
    let schema = json!({"type": "array", "items": item.schema});
    let read = move |node: &YamlNode| read_list(&message, &item, node);
    let print = move |values: &Vec<T>| {
        Some(YamlText::Line(format_list(values.iter().map(|value| printer.print_line(value)))))
    };
    ValueType::new(accepts, schema, read, print).with_expected_phrase(expected)
}

/// Reads a YAML list whose items have the type `item`, and collects the mistakes of all items.
/// `expected` describes the list in messages.
fn read_list<T: 'static>(expected: &str, item: &ValueType<T>, node: &YamlNode) -> ReadResult<Vec<T>> {
    let one_item = |text: &str| format!("write a list of one item as [{text}]");
    match &node.value {
        YamlValue::List(items) => {
            let (mut values, mut errors) = (Vec::new(), Vec::new());
            for (i, node) in items.iter().enumerate() {
                match item.read(node) {
                    Ok(value) => values.push(value),
                    Err(error) => errors.push(error.with_part(&format!("item {}", i + 1))),
                }
            }
            ValueError::merge(errors).map_or(Ok(values), Err)
        }
        YamlValue::Text => {
            Err(wrong_type_error(expected, node)
                .with_help(one_item(&format!("\"{}\"", make_excerpt(&node.raw)))))
        }
        YamlValue::Int(_) | YamlValue::Float(_) => {
            Err(wrong_type_error(expected, node).with_help(one_item(&make_excerpt(&node.raw))))
        }
        _ => Err(wrong_type_error(expected, node)),
    }
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept lists of exactly
/// two items of the type `item`. `accepts` describes the pair in docs/job.md, and `expected` in
/// messages.
pub(crate) fn pair_type<T: Clone + 'static>(
    accepts: &'static str,
    expected: &'static str,
    item: ValueType<T>,
) -> ValueType<(T, T)> {
    let list = described_list_type(accepts, expected, item).restricted_to(
        expected,
        json!({"minItems": 2, "maxItems": 2}),
        |items| items.len() == 2,
    );
    // The check above ensures that there are two items.
    list.convert(|items| (items[0].clone(), items[1].clone()), |(a, b)| Some(vec![a.clone(), b.clone()]))
}
