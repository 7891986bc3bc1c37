//! Accepts previous names of keys and values. [`rewrite_deprecated_names`] replaces them by the
//! present names and warns.
//!
//! A deprecated name is not an alias. Aliases such as `nproc_per_node` are permanent, are listed in
//! the table of keys, and cause no warning.
use super::{
    decode::JobDecoder,
    keys, scalar,
    source_map::join_key_path,
    yaml::{YamlEntry, YamlNode, YamlValue},
};
use diagnostic::{Diagnostic, codes::job as codes};

/// A previous name of a key, of some of its values, or of both.
#[derive(Debug)]
pub struct DeprecatedName {
    /// The section of the key, e.g. `cluster.ssh`.
    pub section: &'static str,
    /// The previous last part of the key's path, e.g. `parallel`.
    pub old: &'static str,
    /// The present last part of the key's path. It equals `old` if only values were renamed.
    pub new: &'static str,
    /// The renamed values of the key, as pairs of the previous and the present name.
    pub values: &'static [(&'static str, &'static str)],
}

impl DeprecatedName {
    /// Returns the previous path of the key, e.g. `run.grace`.
    pub fn old_path(&self) -> String {
        join_key_path(self.section, self.old)
    }

    /// Returns the present path of the key, e.g. `run.grace_period`.
    pub fn new_path(&self) -> String {
        join_key_path(self.section, self.new)
    }
}

/// Creates the entry of a key whose name was changed, but whose values were not.
const fn renamed_key(section: &'static str, old: &'static str, new: &'static str) -> DeprecatedName {
    DeprecatedName { section, old, new, values: &[] }
}

/// All deprecated names, in the order of the table of keys.
pub static DEPRECATED: &[DeprecatedName] = &[
    renamed_key("cluster", "collectives", "comm_backend"),
    renamed_key("cluster", "cuda_libs", "cuda_library_paths"),
    DeprecatedName { section: "cluster.ssh", old: "config", new: "config", values: &[("usual", "default")] },
    renamed_key("cluster.ssh", "parallel", "fanout"),
    renamed_key("run", "bind", "cpu_bind"),
    renamed_key("run", "grace", "grace_period"),
    renamed_key("run", "progress", "progress_pattern"),
    renamed_key("train.experts", "parallel", "expert_parallel_size"),
    DeprecatedName {
        section: "train",
        old: "numerics",
        new: "deterministic",
        values: &[("reproducible", "true"), ("fast", "false")],
    },
    renamed_key("slurm", "notice", "signal_time"),
];

/// Returns the present name of the key `name` of `section`; `None` if `name` is not deprecated.
/// Both names are last parts of a path.
pub(super) fn find_present_name(section: &str, name: &str) -> Option<&'static str> {
    let renamed = |d: &&DeprecatedName| d.section == section && d.old == name && d.new != name;
    DEPRECATED.iter().find(renamed).map(|d| d.new)
}

/// Replaces deprecated names in the YAML tree by the present names. Adds a warning for each use.
/// Adds an error for a key that is given by both of its names.
pub(super) fn rewrite_deprecated_names(decoder: &mut JobDecoder, root: &mut YamlNode) {
    for name in DEPRECATED {
        if let Some(entries) = find_section_entries(root, name.section) {
            rewrite_name(decoder, entries, name);
        }
    }
}

/// Returns the entries of the section with the path `section`; `None` if the job does not contain
/// the section.
fn find_section_entries<'n>(root: &'n mut YamlNode, section: &str) -> Option<&'n mut Vec<YamlEntry>> {
    let mut node = root;
    for name in section.split('.') {
        let YamlValue::Map(entries) = &mut node.value else { return None };
        node = &mut entries.iter_mut().find(|entry| entry.key == name)?.value;
    }
    if let YamlValue::Map(entries) = &mut node.value { Some(entries) } else { None }
}

/// Replaces the deprecated name `name` in `entries`, the entries of its section, by the present
/// name, and adds a warning to `decoder`. If the present name is given, too, adds an error and
/// removes the entry with the deprecated name. Does nothing if no entry has the deprecated name.
fn rewrite_name(decoder: &mut JobDecoder, entries: &mut Vec<YamlEntry>, name: &DeprecatedName) {
    let Some(at) = entries.iter().position(|entry| entry.key == name.old) else { return };
    let (old, new) = (name.old_path(), name.new_path());
    let renamed_key = name.old != name.new;
    if renamed_key
        && entries.iter().any(|entry| {
            keys::canonicalize_key_path(&join_key_path(name.section, &entry.key)) == new
                && entry.key != name.old
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
        entry.value.value = scalar::resolve_scalar(after);
        (*after).clone_into(&mut entry.value.raw);
    }
    if renamed_key {
        name.new.clone_into(&mut entry.key);
        decoder.deprecated.push((old, new));
    }
}
