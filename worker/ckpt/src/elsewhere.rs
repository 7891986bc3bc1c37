//! Shards that lie on other hosts.
use crate::disk;
use crate::host::Host;
use crate::manifest::Manifest;
use std::path::Path;

/// Which shards of a checkpoint may be absent from its folder: those of other hosts.
pub(crate) struct Elsewhere<'m> {
    manifest: &'m Manifest,
    own: Option<String>,
}

impl<'m> Elsewhere<'m> {
    /// For the checkpoint in `path`; its parent says which host this is. Without that every shard may be elsewhere.
    pub(crate) fn of(path: &Path, manifest: &'m Manifest) -> Self {
        let own = match manifest.hosts.is_empty() {
            true => None,
            false => Host::id_of(&disk::parent_of(path)).unwrap_or(None),
        };
        Elsewhere { manifest, own }
    }

    /// The other host on which this shard lies.
    pub(crate) fn host_of(&self, file: usize) -> Option<&'m Host> {
        self.manifest.host_of(file).filter(|host| Some(&host.id) != self.own.as_ref())
    }
}
