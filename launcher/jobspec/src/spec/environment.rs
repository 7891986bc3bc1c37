//! `run.env`: the variables that a job adds to the environment of its workers.
use crate::{
    env,
    keys::{
        decoder::{JobDecoder, JobSection},
        job_values::JobValues,
        key_info::{KeyDefault, KeyInfo},
        section::{FieldContext, FieldDeclaration, extract_first_paragraph},
        text::{path_type, text_type, verbatim_text_type},
        value_type::{ReadResult, ValueType, in_variant, wrong_type_error},
    },
    yaml::{
        format::{YamlText, format_map},
        tree::{YamlEntry, YamlNode, YamlValue, make_excerpt},
        value_error::ValueError,
    },
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;

/// The source from which the value of an environment variable in `run.env` is read: a file, or a
/// variable of launch's own environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvSource {
    /// The variable with this name in launch's environment.
    FromEnv(String),
    /// The file at this path. A final line break is not part of the value.
    FromFile(PathBuf),
}

/// The environment variables that launch sets for workers, and that `run.env` therefore cannot set.
/// Each has advice on what to use instead.
const RESERVED_VARIABLES: &[(&str, &str)] = &[
    (env::RANK, "the value differs between workers"),
    (env::LOCAL_RANK, "the value differs between workers"),
    (env::WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::LOCAL_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::MASTER_ADDR, "the value is the address of the first host"),
    (env::MASTER_PORT, "use `cluster.master_port`"),
    (env::GROUP_RANK, "the value is the number of the worker's host"),
    (env::NODE_RANK, "the value is the number of the worker's host"),
    (env::CROSS_RANK, "the value is the number of the worker's host"),
    (env::ROLE_RANK, "the value differs between workers"),
    (env::ROLE_NAME, "launch has a single role"),
    (env::LOCAL_SIZE, "use `cluster.workers_per_host`"),
    (env::ROLE_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::GROUP_WORLD_SIZE, "the value is the number of hosts"),
    (env::CROSS_SIZE, "the value is the number of hosts"),
    (env::TORCHELASTIC_RESTART_COUNT, "launch counts the restarts"),
    (env::TORCHELASTIC_MAX_RESTARTS, "use `run.restarts`"),
    (env::TORCHELASTIC_RUN_ID, "the value is the name of the run"),
    (env::TORCHELASTIC_USE_AGENT_STORE, "use `cluster.store`"),
    (env::TORCHELASTIC_ERROR_FILE, "the file is in the run directory"),
    (env::LAUNCH_CONTROL_FD, "the variable is internal to launch"),
    (env::LAUNCH_RESUME_FROM, "use `resume.from`"),
    (env::LAUNCH_SHM_FD, "the variable is internal to launch"),
    (env::LAUNCH_MEMORY_FD, "the variable is internal to launch"),
    (env::LAUNCH_ATTEMPT_FD, "the variable is internal to launch"),
    (env::LAUNCH_STATUS_FD, "the variable is internal to launch"),
];

/// Returns whether launch sets the environment variable `name` for workers, so that `run.env`
/// cannot set it.
pub fn is_reserved_variable(name: &str) -> bool {
    RESERVED_VARIABLES.iter().any(|(reserved, _)| *reserved == name)
}

/// The variables of `run.env` in two lists: name and value, or name and source (a file or a
/// variable of launch's environment).
type Environment = (Vec<(String, String)>, Vec<(String, EnvSource)>);

/// Declares the struct field for those `run.env` variables whose value job.yaml contains, as in
/// `NAME: value`.
pub(crate) struct EnvironmentValuesDeclaration;

/// Declares the struct field for those `run.env` variables whose value comes from elsewhere, as in
/// `NAME: {from_file: path}`.
pub(crate) struct EnvironmentSourcesDeclaration;

/// Declares the key `run.env` together with the struct field that stores the variables whose value
/// job.yaml contains.
pub(crate) fn declare_environment_values() -> EnvironmentValuesDeclaration {
    EnvironmentValuesDeclaration
}

/// Declares the struct field that stores those `run.env` variables whose values come from a file or
/// from launch's own environment.
pub(crate) fn declare_environment_sources() -> EnvironmentSourcesDeclaration {
    EnvironmentSourcesDeclaration
}

impl<S> FieldDeclaration<S> for EnvironmentValuesDeclaration {
    type Value = Vec<(String, String)>;

    fn declare(&self, context: FieldContext, table: &mut Vec<KeyInfo>) {
        let values = environment_type();
        table.push(KeyInfo {
            path: context.path(),
            accepts: values.accepts,
            default: KeyDefault::Yaml("{}"),
            aliases: &[],
            meaning: extract_first_paragraph(context.doc),
            reloadable: false,
            deprecated: None,
            deprecated_values: &[],
            rules: Vec::new(),
            schema: values.schema,
        });
    }

    fn decode(&self, context: FieldContext, d: &mut JobDecoder, section: &JobSection<'_>) -> Self::Value {
        d.read_key(section, context.name, &[], &environment_type()).unwrap_or_default().0
    }

    fn print(&self, context: FieldContext, _owner: &S, value: &Self::Value, values: &mut JobValues) {
        values.add(context.path(), format_environment_yaml(value, &[]));
    }
}

impl<S> FieldDeclaration<S> for EnvironmentSourcesDeclaration {
    type Value = Vec<(String, EnvSource)>;

    fn declare(&self, _context: FieldContext, _table: &mut Vec<KeyInfo>) {}

    fn decode(&self, _context: FieldContext, _d: &mut JobDecoder, section: &JobSection<'_>) -> Self::Value {
        // The entry of `env` reports errors.
        let node = section.find_value("env");
        node.and_then(|node| read_environment(node).ok()).unwrap_or_default().1
    }

    fn print(&self, context: FieldContext, _owner: &S, value: &Self::Value, values: &mut JobValues) {
        // The key is `env`, whose value the entry of `env` has already added.
        values.add_entries(&format!("{}.env", context.section), format_environment_yaml(&[], value));
    }
}

/// Returns the parser and printer ([`ValueType`]) for `run.env`, which maps names of environment
/// variables to values or to sources of values.
fn environment_type() -> ValueType<Environment> {
    let source = |key: &str, schema: Value| json!({"type": "object", "properties": {key: schema}, "required": [key], "additionalProperties": false});
    let value = json!({"anyOf": [
        verbatim_text_type().schema, source("from_env", text_type().schema), source("from_file", path_type().schema),
    ]});
    let schema = json!({
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": list_reserved_variables()}},
        "additionalProperties": value,
    });
    let accepts = "mapping of names to text, `{from_env: NAME}` or `{from_file: path}`";
    ValueType::new(accepts, schema, read_environment, |(env, env_from)| {
        Some(format_environment_yaml(env, env_from))
    })
}

/// Formats environment variables as the YAML value of `run.env`, one line for each.
fn format_environment_yaml(env: &[(String, String)], env_from: &[(String, EnvSource)]) -> YamlText {
    let from = |key: &str, value: String| format_map([(key.to_owned(), value)]);
    let sources = env_from.iter().map(|(name, source)| match source {
        EnvSource::FromEnv(of) => (name.clone(), from("from_env", text_type().print_line(of))),
        EnvSource::FromFile(file) => (name.clone(), from("from_file", path_type().print_line(file))),
    });
    let values = env.iter().map(|(name, value)| (name.clone(), verbatim_text_type().print_line(value)));
    let lines: Vec<_> = values.chain(sources).map(|(name, line)| (name, YamlText::Line(line))).collect();
    if lines.is_empty() { YamlText::Line("{}".to_owned()) } else { YamlText::Block(lines) }
}

/// Lists the environment variables that launch sets for workers, and that `run.env` therefore
/// cannot set.
fn list_reserved_variables() -> Vec<&'static str> {
    RESERVED_VARIABLES.iter().map(|(name, _)| *name).collect()
}

/// Reads the value of the key `run.env` from YAML. The error contains the mistakes of all its
/// entries.
fn read_environment(node: &YamlNode) -> ReadResult<Environment> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type_error("a mapping of names to text", node));
    };
    let (mut env, mut env_from) = (Vec::new(), Vec::new());
    let mut errors = Vec::new();
    for entry in entries {
        let name = entry.key.clone();
        if let Err(error) = check_variable_name(entry) {
            errors.push(error);
            continue;
        }
        let error = match &entry.value.value {
            YamlValue::Map(from) => {
                read_env_source(entry, from).map(|v| env_from.push((name.clone(), v))).err()
            }
            _ => verbatim_text_type().read(&entry.value).map(|v| env.push((name.clone(), v))).err(),
        };
        errors.extend(error.map(|error| error.with_part(&format!("entry `{name}`"))));
    }
    ValueError::merge(errors).map_or(Ok((env, env_from)), Err)
}

/// Reads the value of an entry of `run.env` that names a source: `{from_env: NAME}` or `{from_file:
/// path}`.
fn read_env_source(entry: &YamlEntry, from: &[YamlEntry]) -> ReadResult<EnvSource> {
    if entry.key == env::OMP_NUM_THREADS {
        let message = "must be a number, because the plan depends on it";
        return Err(ValueError::new(codes::JOB_VALUE_TYPE, entry.value.span, message)
            .with_help("remove it to use the worker's share of the cores"));
    }
    match from {
        [only] if only.key == "from_env" => in_variant!(text_type(), EnvSource::FromEnv).read(&only.value),
        [only] if only.key == "from_file" => in_variant!(path_type(), EnvSource::FromFile).read(&only.value),
        _ => Err(wrong_type_error("text, `{from_env: NAME}` or `{from_file: path}`", &entry.value)),
    }
}

/// Fails if the name of an entry of `run.env` is not a valid name of an environment variable, or if
/// launch sets the variable itself.
fn check_variable_name(entry: &YamlEntry) -> ReadResult<()> {
    let name = &entry.key;
    let error = |code, message: String, help: &str| {
        Err(ValueError::new(code, entry.key_span, message).with_help(help))
    };
    let first_fits = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !first_fits || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        let message =
            format!("contains `{}`, which is not a name of an environment variable", make_excerpt(name));
        let help = "names consist of letters, digits and `_`, and do not begin with a digit";
        return error(codes::JOB_ENV_NAME_INVALID, message, help);
    }
    if let Some((_, instead)) = RESERVED_VARIABLES.iter().find(|(reserved, _)| reserved == name) {
        let message = format!("cannot set `{name}`, which launch sets itself");
        return error(codes::JOB_ENV_NAME_RESERVED, message, instead);
    }
    Ok(())
}
