//! [`Section`]: the trait of structs whose fields are the keys of one section of job.yaml, and the
//! macro that declares such structs.
use super::{
    decoder::{JobDecoder, JobSection},
    job_values::JobValues,
    key_info::{KeyDefault, KeyInfo, Rule, UnsetKeys},
};
use crate::yaml::source_map::{SourceMap, join_key_path};
use serde_json::json;
use std::marker::PhantomData;

/// A struct whose fields are the keys of one section of job.yaml, such as `train.batch`.
/// [`section!`](crate::keys::section::section) implements the trait.
pub(crate) trait Section: Sized {
    /// The path of the section, such as `train.batch`; empty for the whole job.
    const PATH: &'static str;
    /// The text of the section's documentation comment, which describes the section in docs/job.md.
    const DOC: &'static str;

    /// Appends the declarations of the section's keys to `table`, the list of all keys of job.yaml,
    /// from which docs and messages are made.
    fn declare(table: &mut Vec<KeyInfo>);

    /// Reads the values of the section's keys from the YAML of the job. Keys whose defaults are
    /// computed get a placeholder.
    fn decode(d: &mut JobDecoder, section: &JobSection<'_>) -> Self;

    /// Sets those keys of the section that the job omits, and whose paths are in `unset`, to
    /// defaults that are computed from other keys. `values` has the values of the other keys.
    fn fill_defaults(&mut self, unset: &UnsetKeys, values: &JobValues);

    /// Appends the section's keys and their values as YAML text to `values`.
    fn print(&self, values: &mut JobValues);
}

/// The section, the name and the documentation comment of a struct field, from which a key of
/// job.yaml gets its path and its description.
#[derive(Clone, Copy)]
pub(crate) struct FieldContext {
    pub(crate) section: &'static str,
    pub(crate) name: &'static str,
    pub(crate) doc: &'static str,
    pub(crate) section_rules: &'static [Rule],
}

impl FieldContext {
    /// Creates the description of the struct field `field`, from which the key of job.yaml gets its
    /// name and its documentation. The name of its key is that of the field without the unit of
    /// milliseconds.
    pub(crate) fn new(
        section: &'static str,
        field: &'static str,
        doc: &'static str,
        section_rules: &'static [Rule],
    ) -> FieldContext {
        let name = field.strip_prefix("r#").unwrap_or(field);
        let name = name.strip_suffix("_ms").unwrap_or(name);
        FieldContext { section, name, doc, section_rules }
    }

    /// Returns the path in job.yaml of the field's key, such as `run.grace_period`.
    pub(crate) fn path(&self) -> String {
        join_key_path(self.section, self.name)
    }
}

/// Returns the first paragraph of a documentation comment, without the final full stop.
pub(crate) fn extract_first_paragraph(doc: &str) -> String {
    let lines = doc.lines().map(str::trim).take_while(|line| !line.is_empty());
    let text = lines.collect::<Vec<_>>().join(" ");
    text.strip_suffix('.').unwrap_or(&text).to_owned()
}

/// How one field of a section struct is read from job.yaml, printed and documented: as a key, or as
/// an inner section.
pub(crate) trait FieldDeclaration<S> {
    /// The Rust type of the declared field.
    type Value;

    /// Appends the declaration of the field's key, or of the keys of its inner section, to `table`,
    /// the list of all keys of job.yaml.
    fn declare(&self, context: FieldContext, table: &mut Vec<KeyInfo>);

    /// Reads the value of the field from the YAML of its section.
    fn decode(&self, context: FieldContext, d: &mut JobDecoder, section: &JobSection<'_>) -> Self::Value;

    /// Returns the default that is computed for the field's key if the job omits the key; `None` if
    /// the job sets it or the default is fixed.
    fn compute_default(
        &self,
        _context: FieldContext,
        _owner: &S,
        _unset: &UnsetKeys,
        _values: &JobValues,
    ) -> Option<Self::Value> {
        None
    }

    /// Sets the keys of an inner section that the job omits to their defaults, as far as these are
    /// computed from other keys.
    fn fill_inner_defaults(&self, _value: &mut Self::Value, _unset: &UnsetKeys, _values: &JobValues) {}

    /// Appends the field's job.yaml keys, with their values as YAML text, to `values`. `owner` is
    /// the section.
    fn print(&self, context: FieldContext, owner: &S, value: &Self::Value, values: &mut JobValues);
}

/// Returns the field declaration `entry` unchanged, and lets the compiler check that it fits the
/// section struct and the field's type.
pub(crate) fn check_entry_type<S, V, E: FieldDeclaration<S, Value = V>>(entry: E) -> E {
    entry
}

/// Declares a section of job.yaml: a struct, and for each field how its key is decoded, printed and
/// documented.
///
/// The documentation comment of a field is the documentation of its key. Its first paragraph is the
/// meaning in docs/job.md. The name of the key is that of the field, without `_ms`.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])+
        $(#[derive $derive:tt])?
        pub struct $name:ident at $path:literal $(, rules $rules:expr)? ;
        $( $(#[doc = $doc:literal])+ $(#[serde $serde:tt])? pub $field:ident: $type:ty = $entry:expr; )+
    ) => {
        $(#[doc = $section_doc])+
        $(#[derive $derive])?
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            $( $(#[doc = $doc])+ $(#[serde $serde])? pub $field: $type, )+
        }

        impl crate::keys::section::Section for $name {
            const PATH: &'static str = $path;
            const DOC: &'static str = concat!($($section_doc, "\n"),+);

            fn declare(table: &mut Vec<crate::keys::key_info::KeyInfo>) {
                use crate::keys::section::{FieldDeclaration, FieldContext, check_entry_type};
                let rules: &[&'static [crate::keys::key_info::Rule]] = &[$($rules)?];
                let rules = rules.first().copied().unwrap_or_default();
                $(
                    let context = FieldContext::new($path, stringify!($field), concat!($($doc, "\n"),+), rules);
                    FieldDeclaration::<Self>::declare(&check_entry_type::<Self, $type, _>($entry), context, table);
                )+
            }

            fn decode(
                d: &mut crate::keys::decoder::JobDecoder,
                section: &crate::keys::decoder::JobSection<'_>,
            ) -> Self {
                use crate::keys::section::{FieldDeclaration, FieldContext, check_entry_type};
                $(
                    let context = FieldContext::new($path, stringify!($field), "", &[]);
                    let entry = check_entry_type::<Self, $type, _>($entry);
                    let $field = FieldDeclaration::<Self>::decode(&entry, context, d, section);
                )+
                $name { $($field),+ }
            }

            fn fill_defaults(
                &mut self,
                unset: &crate::keys::key_info::UnsetKeys,
                values: &crate::keys::job_values::JobValues,
            ) {
                use crate::keys::section::{FieldDeclaration, FieldContext, check_entry_type};
                $(
                    let context = FieldContext::new($path, stringify!($field), "", &[]);
                    let entry = check_entry_type::<Self, $type, _>($entry);
                    if let Some(value) = FieldDeclaration::<Self>::compute_default(&entry, context, self, unset, values) {
                        self.$field = value;
                    }
                    FieldDeclaration::<Self>::fill_inner_defaults(&entry, &mut self.$field, unset, values);
                )+
            }

            fn print(&self, values: &mut crate::keys::job_values::JobValues) {
                use crate::keys::section::{FieldDeclaration, FieldContext, check_entry_type};
                $(
                    let context = FieldContext::new($path, stringify!($field), "", &[]);
                    let entry = check_entry_type::<Self, $type, _>($entry);
                    FieldDeclaration::<Self>::print(&entry, context, self, &self.$field, values);
                )+
            }
        }
    };
}
pub(crate) use section;

/// The declaration of a struct field without a key in job.yaml, which the code sets after the job
/// was decoded.
pub(crate) struct FieldWithoutKey<T>(PhantomData<T>);

/// Declares a struct field that has no key in job.yaml, because the code sets the field after the
/// job was decoded. Decoding leaves the field at the default of its type.
pub(crate) fn field_without_key<T>() -> FieldWithoutKey<T> {
    FieldWithoutKey(PhantomData)
}

impl<S, T: Default> FieldDeclaration<S> for FieldWithoutKey<T> {
    type Value = T;

    fn declare(&self, _context: FieldContext, _table: &mut Vec<KeyInfo>) {}

    fn decode(&self, _context: FieldContext, _d: &mut JobDecoder, _section: &JobSection<'_>) -> T {
        T::default()
    }

    fn print(&self, _context: FieldContext, _owner: &S, _value: &T, _values: &mut JobValues) {}
}

/// The declaration of a field that is a section within another section of job.yaml, such as
/// `train.batch`.
pub(crate) struct InnerSection<T> {
    is_printed: fn(&T) -> bool,
}

/// Declares a field that is a section within another section of job.yaml, such as `train.batch`
/// within `train`.
pub(crate) fn inner_section<T: Section>() -> InnerSection<T> {
    InnerSection { is_printed: |_| true }
}

impl<T> InnerSection<T> {
    /// Makes `--dry-run` print the section only if the function `is_printed` returns true for the
    /// value of the section.
    pub(crate) fn printed_if(self, is_printed: fn(&T) -> bool) -> InnerSection<T> {
        InnerSection { is_printed }
    }
}

impl<S, T: Section> FieldDeclaration<S> for InnerSection<T> {
    type Value = T;

    fn declare(&self, _context: FieldContext, table: &mut Vec<KeyInfo>) {
        table.push(build_section_key_info::<T>(&["object"]));
        T::declare(table);
    }

    fn decode(&self, _context: FieldContext, d: &mut JobDecoder, section: &JobSection<'_>) -> T {
        let inner = d.open_section(section, T::PATH);
        T::decode(d, &inner)
    }

    fn fill_inner_defaults(&self, value: &mut T, unset: &UnsetKeys, values: &JobValues) {
        value.fill_defaults(unset, values);
    }

    fn print(&self, _context: FieldContext, _owner: &S, value: &T, values: &mut JobValues) {
        if (self.is_printed)(value) {
            value.print(values);
        }
    }
}

/// The declaration of an optional inner section of job.yaml, such as `train.eval`, as a field of
/// type `Option`.
pub(crate) struct OptionalInnerSection<T> {
    accepts_null: bool,
    section: PhantomData<T>,
}

/// Declares an optional inner section of job.yaml, such as `train.eval` within `train`, as a field
/// of type `Option`. The value `null` stands for an absent section.
pub(crate) fn optional_inner_section<T: Section>() -> OptionalInnerSection<T> {
    OptionalInnerSection { accepts_null: true, section: PhantomData }
}

impl<T> OptionalInnerSection<T> {
    /// Makes `null` as the value of this section an error, instead of a way to omit the section.
    pub(crate) fn rejecting_null(self) -> OptionalInnerSection<T> {
        OptionalInnerSection { accepts_null: false, ..self }
    }
}

impl<S, T: Section> FieldDeclaration<S> for OptionalInnerSection<T> {
    type Value = Option<T>;

    fn declare(&self, _context: FieldContext, table: &mut Vec<KeyInfo>) {
        let types: &[&str] = if self.accepts_null { &["object", "null"] } else { &["object"] };
        table.push(build_section_key_info::<T>(types));
        T::declare(table);
    }

    fn decode(&self, _context: FieldContext, d: &mut JobDecoder, section: &JobSection<'_>) -> Option<T> {
        if self.accepts_null && d.is_null_or_absent(section, T::PATH) {
            return None;
        }
        let inner = d.open_section(section, T::PATH);
        inner.is_given().then(|| T::decode(d, &inner))
    }

    fn fill_inner_defaults(&self, value: &mut Option<T>, unset: &UnsetKeys, values: &JobValues) {
        if let Some(value) = value {
            value.fill_defaults(unset, values);
        }
    }

    fn print(&self, _context: FieldContext, _owner: &S, value: &Option<T>, values: &mut JobValues) {
        if let Some(value) = value {
            value.print(values);
        }
    }
}

/// Describes the section `T` for the table of all keys of job.yaml: its path, its documentation and
/// its JSON Schema. `types` are the types of the section's value in JSON Schema.
fn build_section_key_info<T: Section>(types: &[&str]) -> KeyInfo {
    KeyInfo {
        path: T::PATH.to_owned(),
        accepts: "mapping".to_owned(),
        default: KeyDefault::Section,
        aliases: &[],
        meaning: extract_first_paragraph(T::DOC),
        reloadable: false,
        deprecated: None,
        deprecated_values: &[],
        rules: Vec::new(),
        schema: json!({"type": if types.len() == 1 { json!(types[0]) } else { json!(types) }}),
    }
}

/// Returns the value of the section `T` in a job that does not contain the section, with every key
/// at its default.
pub(crate) fn default_section<T: Section>() -> T {
    let mut decoder = JobDecoder::new(SourceMap::new("", ""), &[]);
    let mut section = T::decode(&mut decoder, &JobSection::absent(T::PATH));
    section.fill_defaults(&decoder.unset, &JobValues::default());
    section
}
