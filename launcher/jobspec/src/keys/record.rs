//! Creates the parsers and printers ([`ValueType`]) for job.yaml keys whose values are mappings
//! with declared keys, such as the items of `train.optimizer.groups`.
use super::{
    decoder::JobDecoder,
    job_values::JobValues,
    key_info::{KeyDefault, KeyInfo},
    nearest_name::find_nearest_name,
    schema::build_section_schema,
    section::Section,
    value_type::{ReadResult, ValueType, add_article, wrong_type_error},
};
use crate::yaml::{
    format::{YamlText, format_map},
    tree::{YamlEntry, YamlNode, YamlValue, make_excerpt},
    value_error::ValueError,
};
use diagnostic::codes::job as codes;

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept mappings with the
/// keys that the struct `T` declares. `accepts` describes them in docs/job.md, and `expected` in
/// messages. The error of a mapping contains the mistakes of all keys.
pub(crate) fn record_type<T: Section + 'static>(
    accepts: &'static str,
    expected: &'static str,
) -> ValueType<T> {
    let mut table = Vec::new();
    T::declare(&mut table);
    let schema = build_section_schema(&table, "");
    let read = move |node: &YamlNode| match &node.value {
        YamlValue::Map(entries) => read_record(&table, node, entries),
        _ => Err(wrong_type_error(expected, node)),
    };
    let print = |value: &T| {
        let mut values = JobValues::default();
        value.print(&mut values);
        Some(YamlText::Line(format_map(values.list_paths_and_values())))
    };
    ValueType::new(accepts, schema, read, print).with_expected_phrase(expected)
}

/// Reads a YAML mapping into the struct `T`, whose fields are the mapping's keys, and checks the
/// rules about these keys.
fn read_record<T: Section>(table: &[KeyInfo], node: &YamlNode, entries: &[YamlEntry]) -> ReadResult<T> {
    let (mut value, unset, mut errors) = JobDecoder::decode_record(entries, T::decode);
    let is_known = |entry: &&YamlEntry| table.iter().any(|key| key.has_name(&entry.key));
    errors
        .extend(entries.iter().filter(|entry| !is_known(entry)).map(|entry| unknown_key_error(table, entry)));
    for key in table.iter().filter(|key| key.default == KeyDefault::Required) {
        if !entries.iter().any(|entry| key.has_name(&entry.key)) {
            let message = format!("has no `{}`", key.path);
            let error = ValueError::new(codes::JOB_KEY_REQUIRED, node.span, message);
            errors.push(error.with_help(format!(
                "add the key `{}`, {}",
                key.path,
                add_article(&key.accepts)
            )));
        }
    }
    value.fill_defaults(&unset, &JobValues::default());
    let mut values = JobValues::default();
    value.print(&mut values);
    if errors.is_empty() {
        let is_given = |key: &&KeyInfo| entries.iter().any(|entry| key.has_name(&entry.key));
        let rules =
            table.iter().filter(is_given).flat_map(|key| key.rules.iter().map(move |rule| (key, rule)));
        errors.extend(rules.filter(|(_, rule)| values.meets_rule_conditions(rule)).map(|(key, rule)| {
            let message = values.format_rule_message(rule, &key.path);
            ValueError::new(rule.code, node.span, message).with_help(rule.format_help(&key.path))
        }));
    }
    ValueError::merge(errors).map_or(Ok(value), Err)
}

/// Creates the error for an unknown key in a YAML mapping, with the most similar known key, or else
/// the list of known keys.
fn unknown_key_error(table: &[KeyInfo], entry: &YamlEntry) -> ValueError {
    let message = format!("has the unknown key `{}`", make_excerpt(&entry.key));
    let error = ValueError::new(codes::JOB_KEY_UNKNOWN, entry.key_span, message);
    let names: Vec<&str> = table.iter().map(KeyInfo::name).collect();
    match find_nearest_name(&entry.key, names.iter().copied()) {
        Some(near) => error.with_help(format!("did you mean `{near}`?")),
        None => error.with_help(format!("the keys here are {}", names.join(", "))),
    }
}
