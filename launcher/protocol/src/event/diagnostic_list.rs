//! Functions for `#[serde(with)]` that serialize lists of diagnostics as the JSON objects that
//! `--json` prints, and deserialize these objects.
use diagnostic::{Code, Diagnostic};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use serde_json::{Map, Value, json};

/// Serializes a list of diagnostics, each as the JSON object that `--json` prints for it.
pub(super) fn serialize<S: Serializer>(diagnostics: &[Diagnostic], serializer: S) -> Result<S::Ok, S::Error> {
    diagnostics.iter().map(Diagnostic::to_json).collect::<Vec<_>>().serialize(serializer)
}

/// Deserializes a list of diagnostics from the JSON objects that `--json` prints, and adds default
/// values of omitted fields.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Diagnostic>, D::Error> {
    let objects = Vec::<Map<String, Value>>::deserialize(deserializer)?;
    let diagnostic =
        |object| serde_json::from_value(restore_omitted_fields(object)).map_err(D::Error::custom);
    objects.into_iter().map(diagnostic).collect()
}

/// Completes the JSON object that `--json` prints for a diagnostic with defaults for omitted
/// fields, so that it can be deserialized. The source line of a location is lost.
fn restore_omitted_fields(mut object: Map<String, Value>) -> Value {
    let code = object.get("code").and_then(Value::as_str).and_then(Code::from_name);
    if let Some(code) = code {
        object.insert("category".into(), json!(code.category()));
    }
    if let Some(location) = object.get_mut("location") {
        let line = location.get("line").and_then(Value::as_u64).unwrap_or(0);
        *location = match (line, &location["file"], &location["column"]) {
            (0, file, _) => json!({ "File": { "file": file } }),
            (_, file, column) => {
                json!({ "Line": { "file": file, "line": line, "column": column, "width": 1, "text": "" } })
            }
        };
    }
    object.entry("fields").or_insert_with(|| json!({}));
    for list in ["help", "causes"] {
        object.entry(list).or_insert_with(|| json!([]));
    }
    let details = match object.remove("details") {
        Some(Value::Array(details)) => details,
        _ => Vec::new(),
    };
    let stored = details.into_iter().filter_map(|detail| match detail {
        Value::Object(detail) => Some(restore_omitted_fields(detail)),
        _ => None,
    });
    object.insert("details".into(), stored.collect());
    Value::Object(object)
}
