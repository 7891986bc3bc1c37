//! [`EnvironmentChanges`]: how activating environments (`run.activate`) changes the environment
//! variables of workers.
use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
};

/// The environment variables that the activation of environments (`run.activate`) adds, changes and
/// removes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EnvironmentChanges {
    /// The variables that were not set before, with their values.
    pub(crate) added: BTreeMap<OsString, OsString>,
    /// The variables that have other values than before, with the new values.
    pub(crate) changed: BTreeMap<OsString, OsString>,
    /// The variables that are no longer set.
    pub(crate) removed: Vec<OsString>,
}

impl EnvironmentChanges {
    /// Returns which environment variables were added, changed and removed when environments were
    /// activated (`run.activate`), given all variables before and after the activation.
    pub(super) fn compare_environments(
        before: &BTreeMap<OsString, OsString>,
        after: BTreeMap<OsString, OsString>,
    ) -> Self {
        let removed = before.keys().filter(|name| !after.contains_key(*name)).cloned().collect();
        let is_new = |name: &OsString| !before.contains_key(name);
        let differing = after.into_iter().filter(|(name, value)| before.get(name) != Some(value));
        let (added, changed) = differing.partition(|(name, _)| is_new(name));
        EnvironmentChanges { added, changed, removed }
    }

    /// Returns the name and new value of each variable that activating environments
    /// (`run.activate`) has added or changed, and `None` as value of each removed one.
    pub(crate) fn assignments(&self) -> impl Iterator<Item = (&OsStr, Option<&OsStr>)> {
        let set = self.added.iter().chain(&self.changed);
        let set = set.map(|(name, value)| (name.as_os_str(), Some(value.as_os_str())));
        set.chain(self.removed.iter().map(|name| (name.as_os_str(), None)))
    }

    /// Returns whether the activation of environments (`run.activate`) has added the variable
    /// `name` or changed its value.
    pub(crate) fn changes_variable(&self, name: &str) -> bool {
        self.added.contains_key(OsStr::new(name)) || self.changed.contains_key(OsStr::new(name))
    }
}
