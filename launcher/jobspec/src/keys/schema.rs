//! Builds JSON Schemas from the declarations of keys of job.yaml.
use super::key_info::{Condition, KeyDefault, KeyInfo, list_section_keys};
use diagnostic::Severity;
use serde_json::{Map, Value, json};

/// Builds the JSON Schema of a section of job.yaml with all its keys and inner sections, including
/// the aliases and deprecated names of keys. Other keys are not allowed.
pub(crate) fn build_section_schema(table: &[KeyInfo], section: &str) -> Value {
    let mut properties = Map::new();
    for key in list_section_keys(table, section) {
        let schema = build_key_schema(table, key);
        for alias in key.aliases {
            properties.insert((*alias).to_owned(), schema.clone());
        }
        if let Some(deprecated) = key.deprecated {
            properties.insert(deprecated.to_owned(), build_deprecated_key_schema(key, &schema));
        }
        properties.insert(key.name().to_owned(), schema);
    }
    let required: Vec<&str> = list_section_keys(table, section)
        .filter(|key| key.default == KeyDefault::Required)
        .map(KeyInfo::name)
        .collect();
    let mut object = json!({"type": "object", "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        object["required"] = json!(required);
    }
    if section.is_empty() {
        let rules = build_rule_schemas(table);
        if !rules.is_empty() {
            object["allOf"] = Value::Array(rules);
        }
    }
    object
}

/// Builds the JSON Schema of the value of one key of job.yaml, with the meaning and default of the
/// key.
fn build_key_schema(table: &[KeyInfo], key: &KeyInfo) -> Value {
    let mut schema = key.schema.clone();
    if key.default == KeyDefault::Section {
        let section_type = schema["type"].clone();
        schema = build_section_schema(table, &key.path);
        schema["type"] = section_type;
    }
    let renamed = key.deprecated_values.iter().filter(|_| key.deprecated.is_none());
    let renamed: Vec<&str> = renamed.map(|(old, _)| *old).collect();
    if !renamed.is_empty() {
        schema = json!({"anyOf": [schema, {"enum": renamed, "deprecated": true}]});
    }
    let default = match key.default {
        KeyDefault::Yaml(text) => format!(" Default: `{text}`."),
        KeyDefault::Computed(words) => format!(" Default: {words}."),
        KeyDefault::Required | KeyDefault::Section => String::new(),
    };
    schema["description"] = json!(format!("{}.{default}", key.meaning));
    schema
}

/// Builds the JSON Schema of the deprecated name of a key from `schema`, the schema of the key
/// under its present name.
fn build_deprecated_key_schema(key: &KeyInfo, schema: &Value) -> Value {
    let values: Vec<&str> = key.deprecated_values.iter().map(|(old, _)| *old).collect();
    let mut schema =
        if values.is_empty() { schema.clone() } else { json!({"anyOf": [schema, {"enum": values}]}) };
    schema["description"] = json!(format!("Deprecated name of `{}`.", key.name()));
    schema["deprecated"] = json!(true);
    schema
}

/// Builds the JSON Schemas that forbid keys in jobs in which rules reject them, such as `momentum`
/// in a job with AdamW.
fn build_rule_schemas(table: &[KeyInfo]) -> Vec<Value> {
    let mut rules: Vec<(Vec<Value>, Value)> = Vec::new();
    for key in table {
        for rule in key.rules.iter().filter(|rule| rule.severity == Severity::Error) {
            let when: Vec<Value> =
                rule.when.iter().map(|condition| build_condition_schema(table, condition)).collect();
            let forbidden = build_forbidden_key_schema(key);
            match rules.iter_mut().find(|(of, _)| *of == when) {
                Some((_, all)) => merge_schema_properties(all, forbidden),
                None => rules.push((when, forbidden)),
            }
        }
    }
    rules.into_iter().map(|(when, then)| json!({"if": {"allOf": when}, "then": then})).collect()
}

/// Builds the JSON Schema that accepts a job if and only if the job meets `condition`, which
/// concerns one key.
fn build_condition_schema(table: &[KeyInfo], condition: &Condition) -> Value {
    let key = condition.key_path();
    let default = table.iter().find(|of| of.path == key).map(|of| of.default);
    let is_default =
        |values: &[&str]| matches!(default, Some(KeyDefault::Yaml(text)) if values.contains(&text));
    let one_of = |values: &[&str]| {
        let values: Vec<Value> = values.iter().map(|text| convert_scalar_to_json(text)).collect();
        build_schema_at_path(key, json!({"enum": values}))
    };
    match condition {
        Condition::Given(_) => build_schema_at_path(key, json!({})),
        Condition::NotGiven(_) => json!({"not": build_schema_at_path(key, json!({}))}),
        // A key that the job does not contain has its default.
        Condition::OneOf(_, values) if is_default(values) => {
            json!({"anyOf": [one_of(values), {"not": build_schema_at_path(key, json!({}))}]})
        }
        Condition::OneOf(_, values) => one_of(values),
        Condition::NoneOf(_, values) if is_default(values) => {
            json!({"not": {"anyOf": [one_of(values), {"not": build_schema_at_path(key, json!({}))}]}})
        }
        Condition::NoneOf(_, values) => json!({"not": one_of(values)}),
    }
}

/// Builds the JSON Schema that accepts only jobs without the key `key`, also under its aliases and
/// its deprecated name.
fn build_forbidden_key_schema(key: &KeyInfo) -> Value {
    let (section, name) = key.split_path();
    let names = std::iter::once(name).chain(key.aliases.iter().copied()).chain(key.deprecated);
    let properties: Map<String, Value> = names.map(|name| (name.to_owned(), Value::Bool(false))).collect();
    let mut schema = json!({"properties": properties});
    for part in section.rsplit('.').filter(|part| !part.is_empty()) {
        schema = json!({"properties": {part: schema}});
    }
    schema
}

/// Adds the contents of the JSON Schema `other` to `schema`: merges objects with the same name, and
/// overwrites other values.
fn merge_schema_properties(schema: &mut Value, other: Value) {
    match (schema, other) {
        (Value::Object(schema), Value::Object(other)) => {
            for (name, value) in other {
                match schema.get_mut(&name) {
                    Some(of) => merge_schema_properties(of, value),
                    None => _ = schema.insert(name, value),
                }
            }
        }
        (schema, other) => *schema = other,
    }
}

/// Builds the JSON Schema that requires a job to set the key `path` to a value that is valid under
/// `schema`.
pub(crate) fn build_schema_at_path(path: &str, schema: Value) -> Value {
    path.rsplit('.').fold(
        schema,
        |schema, name| json!({"type": "object", "properties": {name: schema}, "required": [name]}),
    )
}

/// Converts a scalar that is written in YAML to the JSON value: a boolean, a number or a text.
fn convert_scalar_to_json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!(text))
}
