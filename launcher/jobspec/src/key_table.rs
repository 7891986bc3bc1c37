//! The table of all keys of job.yaml, which is built from their declarations.
use crate::{
    keys::{
        key_info::{KeyInfo, list_section_keys},
        section::Section as _,
    },
    spec::job::JobSpec,
    yaml::source_map::join_key_path,
};
use std::sync::LazyLock;

/// All keys of job.yaml in the order of their declarations. The keys of a section follow the
/// section.
pub static KEYS: LazyLock<Vec<KeyInfo>> = LazyLock::new(|| {
    let mut table = Vec::new();
    JobSpec::declare(&mut table);
    table
});

/// Returns the path of a job.yaml key under its present name, for a path that may end with an alias
/// or a deprecated name. An unknown path is returned unchanged.
pub(crate) fn canonicalize_key_path(path: &str) -> String {
    let (section, name) = path.rsplit_once('.').unwrap_or(("", path));
    let keys = || list_section_keys(&KEYS, section);
    let key =
        keys().find(|key| key.has_name(name)).or_else(|| keys().find(|key| key.deprecated == Some(name)));
    key.map_or_else(|| path.to_owned(), |key| key.path.clone())
}

/// A key of job.yaml that was renamed, or whose values were renamed, with the previous names that
/// launch still accepts.
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
    /// Returns the path that the key had before it was renamed, such as `run.grace`.
    pub fn old_path(&self) -> String {
        join_key_path(self.section, self.old)
    }

    /// Returns the present path of the key, such as `run.grace_period`.
    pub fn new_path(&self) -> String {
        join_key_path(self.section, self.new)
    }
}

/// All deprecated names of keys of job.yaml and their values, in the order of the table of keys.
pub static DEPRECATED_NAMES: LazyLock<Vec<DeprecatedName>> = LazyLock::new(|| {
    let is_renamed = |key: &&KeyInfo| key.deprecated.is_some() || !key.deprecated_values.is_empty();
    let name = |key: &'static KeyInfo| {
        let (section, new) = key.split_path();
        DeprecatedName { section, old: key.deprecated.unwrap_or(new), new, values: key.deprecated_values }
    };
    KEYS.iter().filter(is_renamed).map(name).collect()
});
