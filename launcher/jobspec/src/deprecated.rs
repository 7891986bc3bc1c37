//! Accepts deprecated names (names of earlier releases) of keys and values in job.yaml.
//! [`rewrite_deprecated_names`] replaces them by the present names and warns.
//!
//! A deprecated name is not an alias. Aliases such as `nproc_per_node` are permanent, are listed in
//! the table of keys, and cause no warning.
use crate::{
    key_table::{DEPRECATED_NAMES, DeprecatedName, canonicalize_key_path},
    keys::decoder::JobDecoder,
    yaml::{
        scalar::resolve_scalar,
        source_map::join_key_path,
        tree::{YamlEntry, YamlNode, YamlValue},
    },
};
use diagnostic::{Diagnostic, codes::job as codes};

/// Replaces the deprecated names of keys and values in the YAML tree of a job by the present names.
/// Adds a warning for each use. Adds an error for a key that is given by both of its names.
pub(crate) fn rewrite_deprecated_names(decoder: &mut JobDecoder, root: &mut YamlNode) {
    for name in DEPRECATED_NAMES.iter() {
        if let Some(entries) = find_section_entries(root, name.section) {
            rewrite_deprecated_name(decoder, entries, name);
        }
    }
}

/// Returns the entries of the section `section` (a path such as `train.batch`) in the YAML tree of
/// a job; `None` if the job does not contain the section.
fn find_section_entries<'n>(root: &'n mut YamlNode, section: &str) -> Option<&'n mut Vec<YamlEntry>> {
    let mut node = root;
    for name in section.split('.') {
        let YamlValue::Map(entries) = &mut node.value else { return None };
        node = &mut entries.iter_mut().find(|entry| entry.key == name)?.value;
    }
    if let YamlValue::Map(entries) = &mut node.value { Some(entries) } else { None }
}

/// Renames one deprecated key or value to its present name in `entries`, the keys and values of one
/// section of the job, and reports a warning. If the present name is given, too, adds an error and
/// removes the entry with the deprecated name. Does nothing if no entry has the deprecated name.
fn rewrite_deprecated_name(decoder: &mut JobDecoder, entries: &mut Vec<YamlEntry>, name: &DeprecatedName) {
    let Some(at) = entries.iter().position(|entry| entry.key == name.old) else { return };
    let (old, new) = (name.old_path(), name.new_path());
    let renamed_key = name.old != name.new;
    if renamed_key
        && entries.iter().any(|entry| {
            canonicalize_key_path(&join_key_path(name.section, &entry.key)) == new && entry.key != name.old
        })
    {
        let error =
            Diagnostic::error(codes::JOB_KEYS_CONFLICT, format!("`{old}` and `{new}` are both given"))
                .with_subject(&new)
                .with_location(decoder.sources.locate_span(entries[at].key_span))
                .with_help(format!("`{old}` is the deprecated name of `{new}`: keep `{new}`"));
        decoder.push_error(error);
        entries.remove(at);
        return;
    }
    let entry = &mut entries[at];
    let value = name.values.iter().find(|(old, _)| entry.value.raw == *old);
    if value.is_none() && !renamed_key {
        return;
    }
    let message = match value {
        Some((before, after)) => format!("`{old}: {before}` is deprecated; use `{new}: {after}`"),
        None => format!("`{old}` is deprecated; use `{new}`"),
    };
    let warning = Diagnostic::warning(codes::JOB_KEY_DEPRECATED, message)
        .with_subject(&new)
        .with_location(decoder.sources.locate_span(entry.key_span))
        .with_field("deprecated", old.as_str())
        .with_field("replacement", new.as_str());
    decoder.warnings.push(warning);
    if let Some((_, after)) = value {
        entry.value.value = resolve_scalar(after);
        (*after).clone_into(&mut entry.value.raw);
    }
    if renamed_key {
        name.new.clone_into(&mut entry.key);
        decoder.deprecated.push((old, new));
    }
}
