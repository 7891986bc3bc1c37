//! Previous names of keys and values, which a job may still use: [`rewrite`] replaces them by the
//! present names and warns.
//!
//! A deprecated name is not an alias. Aliases such as `nproc_per_node` are permanent and listed in
//! the table of keys; deprecated names cause a warning each.
use super::{
    decode::Decoder,
    keys, scalar,
    source::join,
    yaml::{YamlEntry, YamlNode, YamlValue},
};
use diagnostic::{Diagnostic, codes::job as codes};

/// A previous name of a key, of some of its values, or of both.
#[derive(Debug)]
pub struct DeprecatedName {
    /// The section of the key, e.g. `cluster.ssh`.
    pub section: &'static str,
    /// Previous last name of the key.
    pub old: &'static str,
    /// Present last name of the key; equal to `old` when only values were renamed.
    pub new: &'static str,
    /// Previous and present names of values.
    pub values: &'static [(&'static str, &'static str)],
}

impl DeprecatedName {
    /// The previous path of the key, e.g. `run.grace`.
    pub fn old_path(&self) -> String {
        join(self.section, self.old)
    }

    /// The present path of the key, e.g. `run.grace_period`.
    pub fn new_path(&self) -> String {
        join(self.section, self.new)
    }
}

const fn renamed_key(section: &'static str, old: &'static str, new: &'static str) -> DeprecatedName {
    DeprecatedName { section, old, new, values: &[] }
}

/// Every deprecated name, in the order of the table of keys.
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

/// The present last name of a key of `section`, when `name` is a deprecated one.
pub(super) fn present_name(section: &str, name: &str) -> Option<&'static str> {
    let renamed = |d: &&DeprecatedName| d.section == section && d.old == name && d.new != name;
    DEPRECATED.iter().find(renamed).map(|d| d.new)
}

/// Replaces deprecated names in the tree. Each adds a warning; a key that is given by both of its
/// names is an error.
pub(super) fn rewrite(decoder: &mut Decoder, root: &mut YamlNode) {
    for name in DEPRECATED {
        if let Some(entries) = section_entries(root, name.section) {
            rewrite_name(decoder, entries, name);
        }
    }
}

/// The entries of a section, when the job has it.
fn section_entries<'n>(root: &'n mut YamlNode, section: &str) -> Option<&'n mut Vec<YamlEntry>> {
    let mut node = root;
    for name in section.split('.') {
        let YamlValue::Map(entries) = &mut node.value else { return None };
        node = &mut entries.iter_mut().find(|entry| entry.key == name)?.value;
    }
    if let YamlValue::Map(entries) = &mut node.value { Some(entries) } else { None }
}

fn rewrite_name(decoder: &mut Decoder, entries: &mut Vec<YamlEntry>, name: &DeprecatedName) {
    let Some(at) = entries.iter().position(|entry| entry.key == name.old) else { return };
    let (old, new) = (name.old_path(), name.new_path());
    let renamed_key = name.old != name.new;
    if renamed_key
        && entries
            .iter()
            .any(|entry| keys::canonical(&join(name.section, &entry.key)) == new && entry.key != name.old)
    {
        let error =
            Diagnostic::error(codes::JOB_KEYS_CONFLICT, format!("`{old}` and `{new}` are both given"))
                .with_subject(&new)
                .with_location(decoder.sources.span_location(entries[at].key_span))
                .with_help(format!("`{old}` is the deprecated name of `{new}`: keep `{new}`"));
        decoder.push(error);
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
        .with_location(decoder.sources.span_location(entry.key_span))
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
