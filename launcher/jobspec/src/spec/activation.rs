//! `run.activate`: the virtual environments, Conda environments, modules or scripts that launch
//! activates on each host before it starts workers.
use crate::{
    keys::{
        collections::list_type,
        text::{formatted_text_type, path_type},
        value_type::{ReadResult, ValueType, out_of_range_error, wrong_type_error},
    },
    yaml::{
        format::{YamlText, format_list, format_map},
        tree::{YamlNode, YamlValue, make_excerpt},
        value_error::ValueError,
    },
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;

/// The largest number of items of `run.activate` (environments that are activated on each host).
const MAX_ACTIVATION_STEPS: usize = 16;

/// An item of `run.activate`: an environment that is activated on each host of the job, such as a
/// virtual environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationStep {
    /// The Python virtual environment in this directory.
    Venv(PathBuf),
    /// The Conda environment with this name or in this directory.
    Conda(String),
    /// The environment modules with these names, in this order.
    Modules(Vec<String>),
    /// The script at this path, which the login shell sources.
    Script(PathBuf),
}

impl ActivationStep {
    /// Returns the key and the YAML value that stand for the activation step in job.yaml, such as
    /// `venv` and the path of an environment.
    fn to_key_and_value(&self) -> (String, String) {
        let (key, value) = match self {
            ActivationStep::Venv(directory) => ("venv", path_type().print_line(directory)),
            ActivationStep::Conda(name) => ("conda", environment_name_type().print_line(name)),
            ActivationStep::Modules(names) => ("modules", modules_type().print_line(names)),
            ActivationStep::Script(file) => ("script", path_type().print_line(file)),
        };
        (key.to_owned(), value)
    }

    /// Formats the activation step as a mapping on one line of YAML, such as `{venv: env}`.
    pub fn to_yaml(&self) -> String {
        format_map([self.to_key_and_value()])
    }
}

/// Returns the parser and printer ([`ValueType`]) for `run.activate`: one environment to activate,
/// such as `{venv: path}`, or a list of them.
pub(crate) fn activation_type() -> ValueType<Vec<ActivationStep>> {
    let object = |key: &str, value: serde_json::Value| json!({"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": false});
    let step = json!({"anyOf": [
        object("venv", path_type().schema),
        object("conda", environment_name_type().schema),
        object("modules", modules_type().schema),
        object("script", path_type().schema),
    ]});
    let schema = json!({"anyOf": [step, {"type": "array", "items": step, "minItems": 1, "maxItems": MAX_ACTIVATION_STEPS}]});
    let print = |steps: &Vec<ActivationStep>| match &steps[..] {
        [] => None,
        [only] => Some(YamlText::Line(only.to_yaml())),
        several => Some(YamlText::Line(format_list(several.iter().map(ActivationStep::to_yaml)))),
    };
    ValueType::new(DOCUMENTED_VALUES, schema, read_activation, print).with_expected_phrase(EXPECTED_VALUES)
}

/// The text in docs/job.md that describes which values `run.activate` accepts.
const DOCUMENTED_VALUES: &str =
    "`{venv: path}`, `{conda: name}`, `{modules: [name]}`, `{script: path}`, or a list of these";
/// The phrase by which messages describe the values of `run.activate`.
const EXPECTED_VALUES: &str =
    "`{venv: path}`, `{conda: name}`, `{modules: [name]}`, `{script: path}`, or a list of these";

/// Returns the parser and printer ([`ValueType`]) for names of Conda environments and modules,
/// which reject special characters because the names become arguments of commands.
fn environment_name_type() -> ValueType<String> {
    let expected = "a name of letters, digits and `_-.,:/@+~`";
    formatted_text_type("name", expected, "^[A-Za-z0-9_.,:/@+~][A-Za-z0-9_.,:/@+~-]{0,254}$", |name| {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.,:/@+~".contains(c);
        name.chars().all(fits) && !name.starts_with('-') && name.len() <= 255
    })
}

/// Returns the parser and printer ([`ValueType`]) for lists of names of environment modules in
/// `run.activate`.
fn modules_type() -> ValueType<Vec<String>> {
    list_type("list of names", environment_name_type()).not_empty()
}

/// Reads a value of `run.activate` from YAML.
fn read_activation(node: &YamlNode) -> ReadResult<Vec<ActivationStep>> {
    match &node.value {
        YamlValue::Map(_) => Ok(vec![read_activation_step(node)?]),
        YamlValue::List(items) if items.is_empty() || items.len() > MAX_ACTIVATION_STEPS => {
            Err(out_of_range_error(format!("a list of 1 to {MAX_ACTIVATION_STEPS} items"), node))
        }
        YamlValue::List(items) => {
            let read = |(i, item): (usize, &YamlNode)| {
                read_activation_step(item).map_err(|error| error.with_part(&format!("item {}", i + 1)))
            };
            items.iter().enumerate().map(read).collect()
        }
        _ => Err(wrong_type_error(EXPECTED_VALUES, node)),
    }
}

/// Reads one item of `run.activate`, which is a mapping with one key such as `{venv: path}`.
fn read_activation_step(node: &YamlNode) -> ReadResult<ActivationStep> {
    const EXPECTED_STEP: &str = "a mapping with one of the keys `venv`, `conda`, `modules` and `script`";
    let YamlValue::Map(entries) = &node.value else { return Err(wrong_type_error(EXPECTED_STEP, node)) };
    let [entry] = &entries[..] else {
        return Err(ValueError::new(codes::JOB_VALUE_FORMAT, node.span, format!("must be {EXPECTED_STEP}"))
            .with_help("write a list to activate several: [{modules: [cuda]}, {venv: env}]"));
    };
    let value = &entry.value;
    let step = match entry.key.as_str() {
        "venv" => path_type().read(value).map(ActivationStep::Venv),
        "conda" => environment_name_type().read(value).map(ActivationStep::Conda),
        "modules" => modules_type().read(value).map(ActivationStep::Modules),
        "script" => path_type().read(value).map(ActivationStep::Script),
        other => {
            let message = format!("has the unknown key `{}`", make_excerpt(other));
            let error = ValueError::new(codes::JOB_KEY_UNKNOWN, entry.key_span, message);
            return Err(error.with_help("the keys here are venv, conda, modules, script"));
        }
    };
    step.map_err(|error| error.with_part(&entry.key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JobSource, load_job};

    /// Loads a job with this value of `run.activate`. Returns the steps, and the value as printed.
    fn load_activation(value: &str) -> Result<(Vec<ActivationStep>, String), diagnostic::Code> {
        let text = format!("run: {{command: [a], activate: {value}}}");
        let loaded = load_job(JobSource::Text { name: "a.yaml".to_owned(), text }, &[]);
        let job = loaded.map_err(|errors| errors[0].code())?.0;
        let values = crate::list_key_values(&job);
        Ok((job.run.activate, values.get("run.activate").cloned().unwrap_or_default()))
    }

    #[test]
    fn each_step_is_read_and_printed() {
        for (value, steps) in [
            ("{venv: envs/a}", vec![ActivationStep::Venv("envs/a".into())]),
            ("{conda: /opt/envs/a}", vec![ActivationStep::Conda("/opt/envs/a".into())]),
            (
                "[{modules: [gcc/12, cuda]}, {script: ~/env.sh}]",
                vec![
                    ActivationStep::Modules(vec!["gcc/12".into(), "cuda".into()]),
                    ActivationStep::Script("~/env.sh".into()),
                ],
            ),
        ] {
            let (read, printed) = load_activation(value).expect(value);
            assert_eq!(read, steps);
            assert_eq!(load_activation(&printed), Ok((steps, printed.clone())), "{printed}");
        }
    }

    #[test]
    fn wrong_steps_are_rejected() {
        for (value, code) in [
            ("[]", codes::JOB_VALUE_OUT_OF_RANGE),
            ("env", codes::JOB_VALUE_TYPE),
            ("[env]", codes::JOB_VALUE_TYPE),
            ("{}", codes::JOB_VALUE_FORMAT),
            ("{venv: a, conda: b}", codes::JOB_VALUE_FORMAT),
            ("{virtualenv: a}", codes::JOB_KEY_UNKNOWN),
            ("{conda: -n}", codes::JOB_VALUE_FORMAT),
            ("{conda: 'a; rm'}", codes::JOB_VALUE_FORMAT),
            ("{modules: gcc}", codes::JOB_VALUE_TYPE),
            ("{modules: []}", codes::JOB_VALUE_OUT_OF_RANGE),
        ] {
            assert_eq!(load_activation(value), Err(code), "{value}");
        }
    }
}
