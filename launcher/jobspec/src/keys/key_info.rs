//! [`KeyInfo`]: the declaration of a job.yaml key without its Rust type, and [`Rule`]: a check of a
//! key against the values of other keys.
use diagnostic::{Code, Severity, codes::job as codes};
use serde_json::Value;
use std::collections::BTreeSet;

/// The paths of those keys that the job does not set, and whose defaults must be computed from
/// other keys after decoding.
pub(crate) type UnsetKeys = BTreeSet<String>;

/// One key of job.yaml: the values that it accepts, its default, its names and its documentation.
#[derive(Debug)]
pub struct KeyInfo {
    /// The whole path of the key, e.g. `train.batch.global`.
    pub path: String,
    /// The values that the key accepts, in the words of docs/job.md.
    pub accepts: String,
    /// The value that the key has if the job does not contain it.
    pub default: KeyDefault,
    /// Other permanent names of the last part of the path. Most of them are DeepSpeed's names.
    pub aliases: &'static [&'static str],
    /// The meaning of the key, in the words of docs/job.md.
    pub meaning: String,
    /// Whether a new value takes effect while the job runs.
    pub reloadable: bool,
    /// A previous name of the last part of the path.
    pub deprecated: Option<&'static str>,
    /// Previous names of values, each with the present name.
    pub deprecated_values: &'static [(&'static str, &'static str)],
    /// The combinations with other keys in which the key is wrong or has no effect.
    pub rules: Vec<Rule>,
    /// The JSON Schema of the value. The schema of a section does not contain the section's keys.
    pub schema: Value,
}

/// The default of a key: the value that applies if the job does not contain the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyDefault {
    /// A fixed value, which is written in YAML.
    Yaml(&'static str),
    /// A value that is computed from other keys or files. The text describes the computation.
    Computed(&'static str),
    /// No value. A job that contains the section of the key must contain the key.
    Required,
    /// No value. The key is a section, and its keys have their own defaults.
    Section,
}

impl KeyInfo {
    /// Splits the path of the key into the path of its section and the last name:
    /// `train.batch.global` into `train.batch` and `global`. The section `""` is the top level of
    /// the job.
    pub fn split_path(&self) -> (&str, &str) {
        self.path.rsplit_once('.').unwrap_or(("", &self.path))
    }

    /// Returns the last part of the key's path: `global` for `train.batch.global`.
    pub fn name(&self) -> &str {
        self.split_path().1
    }

    /// Returns whether `name` is the last part of the key's path, or one of its aliases.
    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.name() == name || self.aliases.contains(&name)
    }
}

/// Returns those keys in `table`, the table of all keys, that are directly in the section
/// `section`, not in an inner section.
pub(crate) fn list_section_keys<'t>(
    table: &'t [KeyInfo],
    section: &str,
) -> impl Iterator<Item = &'t KeyInfo> {
    table.iter().filter(move |key| key.split_path().0 == section)
}

/// A condition on one key of a job: that the job sets the key or not, or that its value is or is
/// not among listed ones. The [`Rule`] that contains it applies only to jobs that meet it.
#[derive(Clone, Copy, Debug)]
pub enum Condition {
    /// The key has a value. A key with a default always has one.
    Given(&'static str),
    /// The key has no value.
    NotGiven(&'static str),
    /// The key has one of these values, which are written in YAML.
    OneOf(&'static str, &'static [&'static str]),
    /// The key has a value other than these, or no value.
    NoneOf(&'static str, &'static [&'static str]),
}

impl Condition {
    /// Returns the path of the key whose value the condition examines.
    pub(crate) fn key_path(&self) -> &'static str {
        match *self {
            Condition::Given(key)
            | Condition::NotGiven(key)
            | Condition::OneOf(key, _)
            | Condition::NoneOf(key, _) => key,
        }
    }

    /// Returns whether the condition is true for a job in which its key has the value `value`,
    /// written as YAML. `None` stands for a job without the key.
    pub(crate) fn holds(&self, value: Option<&str>) -> bool {
        match self {
            Condition::Given(_) => value.is_some(),
            Condition::NotGiven(_) => value.is_none(),
            Condition::OneOf(_, values) => value.is_some_and(|value| values.contains(&value)),
            Condition::NoneOf(_, values) => !value.is_some_and(|value| values.contains(&value)),
        }
    }
}

/// A rule that rejects a key of job.yaml, or warns about it, in jobs in which certain keys have
/// certain values.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The conditions under which the rule applies. All of them must hold.
    pub when: &'static [Condition],
    /// The severity of the diagnostic. An error rejects the job, and a warning does not.
    pub severity: Severity,
    /// The code of the error or warning.
    pub code: Code,
    /// The message, in which `{key}` stands for the key's path. If this is `None`, the message
    /// describes the last condition.
    text: Option<&'static str>,
    /// The advice for the user, in which `{name}` stands for the last part of the key's path.
    help: &'static str,
}

impl Rule {
    /// Creates a rule that rejects a job.yaml key, because it has no effect, in jobs that meet all
    /// conditions in `when`.
    pub(crate) const fn no_effect(when: &'static [Condition]) -> Rule {
        let code = codes::JOB_KEY_HAS_NO_EFFECT;
        Rule { when, severity: Severity::Error, code, text: None, help: "remove it" }
    }

    /// Creates the rule that a key of job.yaml contradicts other keys in jobs that meet all
    /// conditions in `when`. A job to which the rule applies is rejected.
    pub(crate) const fn conflict(when: &'static [Condition]) -> Rule {
        Rule { code: codes::JOB_KEYS_CONFLICT, ..Rule::no_effect(when) }
    }

    /// Changes the rule to cause a warning instead of an error.
    pub(crate) const fn into_warning(self) -> Rule {
        Rule { severity: Severity::Warning, ..self }
    }

    /// Sets the message of the rule's error or warning. In the message, `{key}` stands for the
    /// key's path.
    pub(crate) const fn with_message(self, text: &'static str) -> Rule {
        Rule { text: Some(text), ..self }
    }

    /// Sets the diagnostic code of the error or warning that the rule causes.
    pub(crate) const fn with_code(self, code: Code) -> Rule {
        Rule { code, ..self }
    }

    /// Sets the advice that the error or warning of the rule gives the user.
    pub(crate) const fn with_help(self, help: &'static str) -> Rule {
        Rule { help, ..self }
    }

    /// Returns whether the conditions of the rule examine only keys other than `path`, so that the
    /// value of `path` does not matter. If such a rule applies, the printed job omits the key.
    pub(crate) fn ignores_value_of(&self, path: &str) -> bool {
        self.when.iter().all(|condition| condition.key_path() != path)
    }

    /// Returns the advice that the rule gives the user, after inserting the last part of the key's
    /// path, `name`, for `{name}`.
    pub(crate) fn format_help(&self, name: &str) -> String {
        self.help.replace("{name}", name)
    }

    /// Formats the error message or warning for a job in which the key `path` violates this rule.
    /// `value` is the value of the key that the last condition names.
    pub(crate) fn format_message(&self, path: &str, value: Option<&str>) -> String {
        let is_conflict = self.code == codes::JOB_KEYS_CONFLICT;
        let effect = if is_conflict { "does not apply to" } else { "has no effect with" };
        let value = value.unwrap_or_default();
        let reason = match (self.text, self.when.last()) {
            (Some(text), _) => return text.replace("{key}", path),
            (_, Some(Condition::Given(key))) if is_conflict && !path.contains('.') => {
                return format!("has both `{key}` and `{path}`");
            }
            (_, Some(Condition::Given(key))) if is_conflict => format!("and `{key}` are both given"),
            (_, Some(Condition::Given(key))) => format!("has no effect in a job with `{key}`"),
            (_, Some(Condition::NotGiven(key))) => format!("has no effect without `{key}`"),
            (_, Some(Condition::NoneOf(key, [only]))) => format!("has no effect without `{key}: {only}`"),
            (_, Some(Condition::OneOf(key, _) | Condition::NoneOf(key, _))) => {
                format!("{effect} `{key}: {value}`")
            }
            (None, None) => "has no effect".to_owned(),
        };
        format!("`{path}` {reason}")
    }
}
