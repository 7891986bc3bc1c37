//! [`RemoteShards`]: which shards of a checkpoint are on other hosts.
use crate::disk;
use crate::host::StorageHost;
use crate::manifest::Manifest;
use std::path::Path;

/// Which shards may be absent from a checkpoint directory because other hosts store them.
pub(crate) struct RemoteShards<'m> {
    manifest: &'m Manifest,
    /// Id of this host's checkpoint directory.
    local_id: Option<String>,
}

impl<'m> RemoteShards<'m> {
    /// For the checkpoint at `path`, whose parent directory has the id of this host. Without an id
    /// every shard may be remote.
    pub(crate) fn new(path: &Path, manifest: &'m Manifest) -> Self {
        let local_id = match manifest.hosts.is_empty() {
            true => None,
            false => StorageHost::read_id(&disk::parent_of(path)).unwrap_or(None),
        };
        RemoteShards { manifest, local_id }
    }

    /// The other host that stores this shard; `None` for a local shard.
    pub(crate) fn remote_host(&self, file: usize) -> Option<&'m StorageHost> {
        self.manifest.shard_host(file).filter(|host| Some(&host.id) != self.local_id.as_ref())
    }
}
