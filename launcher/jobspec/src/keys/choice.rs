//! Creates the parsers and printers ([`ValueType`]) for job.yaml keys whose values are keywords.
use super::{
    nearest_name::find_nearest_name,
    value_type::{ValueType, choose_text_error_code},
};
use crate::yaml::{
    tree::{YamlNode, YamlValue},
    value_error::ValueError,
};
use diagnostic::codes::job as codes;
use serde_json::json;

/// An enum whose values are keywords in job.yaml.
pub(crate) trait Choice: Copy + PartialEq + 'static {
    /// All values of the enum, each with its keyword in job.yaml and with its documentation.
    const CHOICES: &'static [(&'static str, Self, &'static str)];
}

/// Declares an enum whose values are keywords in job.yaml: each variant with its keyword and
/// documentation. `is default` marks the variant of `Default`.
macro_rules! choices {
    (
        $(#[$meta:meta])*
        pub enum $name:ident {
            $( $(#[doc = $doc:literal])+ $variant:ident = $keyword:literal $(is $default:ident)?, )+
        }
    ) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        $(#[$meta])*
        pub enum $name {
            $( $(#[doc = $doc])+ $(#[$default])? $variant, )+
        }

        impl crate::keys::choice::Choice for $name {
            const CHOICES: &'static [(&'static str, Self, &'static str)] =
                &[$( ($keyword, $name::$variant, concat!($($doc, "\n"),+)) ),+];
        }

        impl $name {
            /// Returns the keyword of the value in job.yaml.
            pub fn name(self) -> &'static str {
                match self {
                    $( $name::$variant => $keyword, )+
                }
            }
        }
    };
}
pub(crate) use choices;

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept the keywords of the
/// enum `T`.
pub(crate) fn choice_type<T: Choice>() -> ValueType<T> {
    let docs: Vec<String> =
        T::CHOICES.iter().map(|(.., doc)| doc.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let names: Vec<&str> = T::CHOICES.iter().map(|(name, ..)| *name).collect();
    let mut values = keywords_type(T::CHOICES.iter().map(|(name, value, _)| (*name, *value)).collect());
    values.schema = json!({"enum": names, "enumDescriptions": docs});
    values
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept one of several
/// keywords, each with the Rust value that it is read as. The error for any other text suggests the
/// most similar keyword.
pub(crate) fn keywords_type<T: Clone + PartialEq + 'static>(values: Vec<(&'static str, T)>) -> ValueType<T> {
    let names: Vec<&'static str> = values.iter().map(|(name, _)| *name).collect();
    let (accepts, schema) = (format_choices(&names), json!({"enum": names}));
    let (expected, printed) = (accepts.clone(), values.clone());
    let read = move |node: &YamlNode| {
        if let YamlValue::Text = node.value
            && let Some((_, value)) = values.iter().find(|(name, _)| *name == node.raw)
        {
            return Ok(value.clone());
        }
        let code = choose_text_error_code(node, codes::JOB_VALUE_UNKNOWN);
        let error = ValueError::unexpected(code, expected.as_str(), node);
        Err(match find_nearest_name(&node.raw, names.iter().copied()) {
            Some(name) => error.with_help(format!("did you mean `{name}`?")),
            None => error,
        })
    };
    let print = move |value: &T| {
        let keyword = printed.iter().find(|(_, of_keyword)| of_keyword == value);
        keyword.map(|(name, _)| crate::yaml::format::YamlText::Line((*name).to_owned()))
    };
    ValueType::new(accepts, schema, read, print)
}

/// Formats a list of keywords for a message, such as "`a`, `b` or `c`".
fn format_choices(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}
