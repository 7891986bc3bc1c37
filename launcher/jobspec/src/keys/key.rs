//! [`Key`]: the declaration of one key of job.yaml, from which its value is decoded, printed and
//! documented.
use super::{
    decoder::{JobDecoder, JobSection},
    job_values::JobValues,
    key_info::{KeyDefault, KeyInfo, Rule, UnsetKeys},
    section::{FieldContext, FieldDeclaration, extract_first_paragraph},
    value_type::ValueType,
};
use crate::yaml::parse::parse_default_value;

/// The declaration of a key of job.yaml: the values that it accepts, its default, its names, and
/// the rules about other keys.
pub(crate) struct Key<S, T> {
    values: ValueType<T>,
    default: DefaultValue<S, T>,
    aliases: &'static [&'static str],
    deprecated: Option<&'static str>,
    deprecated_values: &'static [(&'static str, &'static str)],
    reloadable: bool,
    ignores_section_rules: bool,
    rules: &'static [Rule],
}

/// A function that computes the default of a key from its section and from the values of other
/// keys.
type ComputeDefaultFn<S, T> = fn(&S, &JobValues) -> T;

/// The default of a key: a fixed value, or a function that computes the value.
enum DefaultValue<S, T> {
    /// A fixed value in YAML.
    Yaml(&'static str),
    /// A computed default, and the words that describe the computation in docs/job.md. While the
    /// section is decoded, the field has the placeholder.
    Computed { words: KeyDefault, placeholder: fn() -> T, compute: ComputeDefaultFn<S, T> },
}

impl<S, T: 'static> Key<S, T> {
    /// Declares a key of job.yaml with a fixed default. `default` is the default as YAML text.
    pub(crate) fn new(values: ValueType<T>, default: &'static str) -> Self {
        Self::from_default(values, DefaultValue::Yaml(default))
    }

    /// Declares a key of job.yaml whose default the function `compute` derives from other keys of
    /// the job. `words` describes the computation.
    pub(crate) fn computed(values: ValueType<T>, words: &'static str, compute: ComputeDefaultFn<S, T>) -> Self
    where
        T: Default,
    {
        let words = KeyDefault::Computed(words);
        Self::from_default(values, DefaultValue::Computed { words, placeholder: T::default, compute })
    }

    /// Declares a key of job.yaml that has no default. A job that contains the key's section must
    /// contain the key.
    pub(crate) fn required(values: ValueType<T>) -> Self
    where
        T: Default,
    {
        let compute: ComputeDefaultFn<S, T> = |_, _| T::default();
        let default =
            DefaultValue::Computed { words: KeyDefault::Required, placeholder: T::default, compute };
        Self::from_default(values, default)
    }

    /// Creates the declaration of a key with the default `default`, and without aliases, deprecated
    /// names and rules.
    fn from_default(values: ValueType<T>, default: DefaultValue<S, T>) -> Self {
        Key {
            values,
            default,
            aliases: &[],
            deprecated: None,
            deprecated_values: &[],
            reloadable: false,
            ignores_section_rules: false,
            rules: &[],
        }
    }

    /// Adds aliases of the key: other names that are permanently accepted.
    pub(crate) fn with_aliases(self, aliases: &'static [&'static str]) -> Self {
        Key { aliases, ..self }
    }

    /// Adds a deprecated name: a previous name of the key, which is still accepted with a warning.
    pub(crate) fn with_deprecated_name(self, name: &'static str) -> Self {
        Key { deprecated: Some(name), ..self }
    }

    /// Adds previous names of the key's values, each with the present name of the value.
    pub(crate) fn with_deprecated_values(self, values: &'static [(&'static str, &'static str)]) -> Self {
        Key { deprecated_values: values, ..self }
    }

    /// Marks the key as reloadable, so that an edited value takes effect while the job runs.
    pub(crate) fn into_reloadable(self) -> Self {
        Key { reloadable: true, ..self }
    }

    /// Declares that the rules of the key's section, such as a conflict of all keys with
    /// `run.command`, do not apply to this key.
    pub(crate) fn ignoring_section_rules(self) -> Self {
        Key { ignores_section_rules: true, ..self }
    }

    /// Adds rules by which the key is an error or has no effect if other keys have certain values.
    pub(crate) fn with_rules(self, rules: &'static [Rule]) -> Self {
        Key { rules, ..self }
    }
}

impl<S, T: Clone + 'static> Key<S, Option<T>> {
    /// Declares a key of job.yaml that has no default and that a job may omit. `words` describes in
    /// docs/job.md what then applies.
    pub(crate) fn optional(values: ValueType<T>, words: &'static str) -> Self {
        Key::computed(values.optional(), words, |_, _| None)
    }
}

impl<S, T: 'static> FieldDeclaration<S> for Key<S, T> {
    type Value = T;

    fn declare(&self, context: FieldContext, table: &mut Vec<KeyInfo>) {
        let section_rules = if self.ignores_section_rules { &[] } else { context.section_rules };
        table.push(KeyInfo {
            path: context.path(),
            accepts: self.values.accepts.clone(),
            default: match &self.default {
                DefaultValue::Yaml(text) => KeyDefault::Yaml(text),
                DefaultValue::Computed { words, .. } => *words,
            },
            aliases: self.aliases,
            meaning: extract_first_paragraph(context.doc),
            reloadable: self.reloadable,
            deprecated: self.deprecated,
            deprecated_values: self.deprecated_values,
            rules: section_rules.iter().chain(self.rules).copied().collect(),
            schema: self.values.schema.clone(),
        });
    }

    fn decode(&self, context: FieldContext, d: &mut JobDecoder, section: &JobSection<'_>) -> T {
        if let Some(value) = d.read_key(section, context.name, self.aliases, &self.values) {
            return value;
        }
        match &self.default {
            DefaultValue::Yaml(text) => parse_default_value(text)
                .and_then(|node| self.values.read(&node).ok())
                .unwrap_or_else(|| unreachable!("the default of {} is valid", context.path())),
            DefaultValue::Computed { placeholder, .. } => {
                d.unset.insert(context.path());
                placeholder()
            }
        }
    }

    fn compute_default(
        &self,
        context: FieldContext,
        owner: &S,
        unset: &UnsetKeys,
        values: &JobValues,
    ) -> Option<T> {
        match &self.default {
            DefaultValue::Computed { compute, .. } if unset.contains(&context.path()) => {
                Some(compute(owner, values))
            }
            _ => None,
        }
    }

    fn print(&self, context: FieldContext, _owner: &S, value: &T, values: &mut JobValues) {
        if let Some(printed) = self.values.print(value) {
            values.add(context.path(), printed);
        }
    }
}
