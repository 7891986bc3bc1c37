//! The JSON Schema of job.yaml, with which editors complete and check jobs.
use crate::{
    key_table::KEYS,
    keys::schema::{build_schema_at_path, build_section_schema},
};
use serde_json::{Value, json};

/// Builds the JSON Schema of job.yaml (draft 2020-12). Conditions that depend on files, hosts or
/// arithmetic are not part of it.
pub fn build_schema() -> Value {
    let mut schema = build_section_schema(&KEYS, "");
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("job.yaml of launch");
    // A job contains exactly one of a program and the built-in training.
    schema["oneOf"] =
        json!([build_schema_at_path("run.command", json!({})), build_schema_at_path("train", json!({}))]);
    let data = &mut schema["properties"]["train"]["properties"]["data"];
    data["anyOf"] = json!([{"required": ["files"]}, {"required": ["mixture"]}]);
    schema["properties"]["train"]["required"] = json!(["data"]);
    schema
}
