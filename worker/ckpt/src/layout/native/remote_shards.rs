//! [`RemoteShards`]: determines which shards of a checkpoint are stored on other hosts, if the
//! hosts do not share a checkpoint directory.
use super::manifest::Manifest;
use super::storage_host::StorageHost;
use crate::codec::disk;
use std::path::Path;

/// Determines for each shard of a checkpoint whether another host stores it in a directory that
/// this host does not see.
pub(crate) struct RemoteShards<'m> {
    manifest: &'m Manifest,
    /// Id of this host, or `None` if the checkpoint is not host-local or this host has no id.
    local_id: Option<String>,
}

impl<'m> RemoteShards<'m> {
    /// Reads the id of this host from the directory that contains the checkpoint `path`, with which
    /// shards on other hosts are recognized in the manifest. Without an id, every shard for which
    /// the manifest records a host counts as remote.
    pub(crate) fn new(path: &Path, manifest: &'m Manifest) -> Self {
        let local_id = match manifest.hosts.is_empty() {
            true => None,
            false => StorageHost::read_id(&disk::parent_dir(path)).unwrap_or(None),
        };
        RemoteShards { manifest, local_id }
    }

    /// Returns the host, other than this one, that stores the shard with the index `file`. Returns
    /// `None` if this host stores it, or the manifest records no hosts.
    pub(crate) fn remote_host(&self, file: usize) -> Option<&'m StorageHost> {
        self.manifest.shard_host(file).filter(|host| Some(&host.id) != self.local_id.as_ref())
    }
}
